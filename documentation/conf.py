"""Sphinx builds docs/ as a site: `make docs`. The pages stay plain markdown, as GitHub shows them."""

import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

REPOSITORY = Path(__file__).parents[1]

project = "specdec"
version = release = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
extensions = ["myst_parser"]
myst_heading_anchors = 4  # GitHub's anchors, also checked
highlight_language = "none"  # indented blocks are commands, or drawings
pygments_style = "default"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_title = "specdec"
html_copy_source = html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"navigation_with_keys": True}

PAGES = {
    "Begin": ("start", "concepts", "drafters", "client"),
    "Run": ("deploy", "operate", "security", "configuration"),
    "Understand": ("architecture", "benchmarks", "gpu-check", "quantization"),
    "Take part": ("contributing", "changelog"),
}
PICTURE = re.compile(
    r"<picture>\s*<source media=\"\(prefers-color-scheme: dark\)\" srcset=\"(?P<dark>[^\"]+)\">\s*"
    r"<img src=\"(?P<light>[^\"]+)\" alt=\"(?P<words>[^\"]*)\">\s*</picture>"
)
OUTSIDE = re.compile(r"\]\((\.\./[^)#]+\.md)\)")  # markdown that is no page: to be downloaded


def contents() -> str:
    """Return the tables of contents, which index.md has as links for people."""
    trees = (
        "\n".join([f"```{{toctree}}\n:hidden:\n:caption: {caption}\n", *pages, "```"])
        for caption, pages in PAGES.items()
    )
    return "\n\n" + "\n\n".join(trees) + "\n"


def read(_: Sphinx, name: str, source: list[str]) -> None:
    """Give the site what GitHub does by itself: contents, and pictures that follow the page's own light and dark."""
    source[0] = PICTURE.sub(
        r'<img class="only-light" src="\g<light>" alt="\g<words>">'
        r'<img class="only-dark" src="\g<dark>" alt="\g<words>">',
        source[0],
    )
    source[0] = OUTSIDE.sub(r"](path:\g<1>)", source[0])
    if name == "index":
        source[0] += contents()


def copy_pictures(app: Sphinx, problem: Exception | None) -> None:
    """Copy the pictures, which Sphinx does not see in HTML."""
    if problem is None:
        shutil.copytree(REPOSITORY / "docs/images", Path(app.outdir) / "images", dirs_exist_ok=True)


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect both."""
    app.connect("source-read", read)
    app.connect("build-finished", copy_pictures)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
