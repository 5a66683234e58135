"""Write deploy/requirements: the packages of the images, in the versions of constraints.txt, with their hashes.

`python -m deploy.lock`, after constraints.txt has changed. It asks pip's index for the wheels of every Python and
processor that images are built for, and installs nothing. An index that builds its own wheels has other hashes.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
FOLDER = REPOSITORY / "deploy/requirements"
PYTHONS = ("3.12", "3.11")  # of the default PYTHON_IMAGE, and of Debian 12
PROCESSORS = ("x86_64", "aarch64")
GLIBCS = ("2_17", "2_26", "2_27", "2_28", "2_31", "2_34")  # those that wheels name and Debian 12 has
# of Debian 12's Python, 3.11.2: pip reads conditions on the patch version for the Python that runs it
BEFORE_3_11_3 = ("async-timeout",)
# by itself: its index is an argument of the build. What it needs besides the libraries of a GPU
TORCH = "torch"
TORCH_NEEDS = ("filelock", "fsspec", "jinja2", "networkx", "setuptools", "sympy", "typing-extensions")

Hashes = dict[str, set[str]]
"""Of all wheels of a requirement, by `name==version`."""


def sets() -> dict[str, list[str]]:
    """Return what each step of the Dockerfile asks for, by the name of its file."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    project = settings["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    models = [each for each in extras["models"] if not each.startswith(("specdec", TORCH))]
    return {
        "build": settings["build-system"]["requires"],
        "services": [
            *(*project["dependencies"], *extras["server"], *extras["embedded"], *extras["tracing"]),
            *(each for each in extras["gateway"] if not each.startswith("specdec")),
            *BEFORE_3_11_3,
        ],
        "models": [*models, *TORCH_NEEDS],
    }


def resolved(requirements: Sequence[str], python: str, processor: str) -> Hashes:
    """Return the wheels that pip would install. Raises CalledProcessError, after pip has said why."""
    platforms = [f"--platform=manylinux_{version}_{processor}" for version in GLIBCS]
    platforms += [f"--platform=manylinux2014_{processor}", f"--platform=linux_{processor}"]
    with tempfile.TemporaryDirectory(prefix="specdec-lock-") as folder:
        words = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", f"--target={folder}/none"]
        words += [f"--python-version={python}", f"--report={folder}/report", *platforms]
        words += ["--constraint", str(REPOSITORY / "constraints.txt"), *requirements]
        subprocess.run([sys.executable, "-m", "pip", "install", *words], check=True)
        report = json.loads((Path(folder) / "report").read_text())
    return {
        f"{each['metadata']['name'].lower().replace('_', '-')}=={each['metadata']['version']}": {
            each["download_info"]["archive_info"]["hashes"]["sha256"]
        }
        for each in report["install"]
    }


def merged(found: Iterable[Hashes]) -> Hashes:
    """Return the hashes of all."""
    result: defaultdict[str, set[str]] = defaultdict(set)
    for hashes in found:
        for requirement, values in hashes.items():
            result[requirement] |= values
    return dict(result)


def written(hashes: Hashes) -> str:
    """Return a file of requirements."""
    entries = (
        " \\\n".join([requirement, *(f"    --hash=sha256:{value}" for value in sorted(values))])
        for requirement, values in sorted(hashes.items())
    )
    return "# Written by `python -m deploy.lock`.\n" + "\n".join(entries) + "\n"


def main() -> None:
    """Write all files."""
    for name, requirements in sets().items():
        targets = [(python, processor) for python in PYTHONS for processor in PROCESSORS]
        hashes = merged(resolved(requirements, *target) for target in targets)
        (FOLDER / f"{name}.txt").write_text(written(hashes))
        print(f"{name}: {len(hashes)} packages, {sum(map(len, hashes.values()))} wheels")


if __name__ == "__main__":
    main()
