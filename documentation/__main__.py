"""Write the generated parts of docs/: the reference of settings, and the plots of docs/benchmarks.md."""

from documentation.generated import generated

for path, text in generated():
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
