"""The programs of a dry build's base image: each records its call, and creates the files that later lines need.

`dry_build.py` puts this file at the path of each of them; the name it is called by says which one it is.
"""

import json
import os
import sys
import zipfile
from itertools import pairwise
from pathlib import Path

COMPILER = ("gcc", "libc6-dev")
KERNEL_SOURCES = (
    *(f"{name}_kernel.c" for name in ("attention", "layers", "linear")),
    *(f"{name}.h" for name in ("kernels", "lanes", "attention_lanes", "layers_lanes", "linear_int8", "linear_lanes")),
)


def run(name: str, words: list[str], root: Path) -> None:
    """Do what later lines of a Dockerfile need. Raises OSError for a file that a real program would miss."""
    for option, value in pairwise(words):
        if option in ("--constraint", "--requirement"):
            Path(value).read_text()
    if words[:2] == ["-m", "venv"]:
        _make_environment(Path(words[2]))
    elif words[:3] == ["-m", "zipfile", "--list"]:
        with zipfile.ZipFile(words[3]) as wheel:
            wheel.printdir()
    elif (name, words[0]) == ("pip", "wheel"):
        _make_wheel(Path(words[words.index("--wheel-dir") + 1]), root)
    elif name == "apt-get":
        _get_packages(words, root)


def _make_environment(folder: Path) -> None:
    for program in ("python", "python3", "pip"):
        path = folder / "bin" / program
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(os.path.realpath(sys.argv[0]))


def _make_wheel(folder: Path, root: Path) -> None:
    """Write a wheel; as setup.py does, without the compiled kernel where the compiler or a source is not there."""
    needed = [Path("specdec/engine", name) for name in KERNEL_SOURCES] + [_record(root, name) for name in COMPILER]
    folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / "specdec-0-cp312-cp312-linux_x86_64.whl", "w") as wheel:
        wheel.writestr("specdec/engine/compiled.py", "")
        if all(path.exists() for path in needed):
            wheel.writestr("specdec/engine/_kernels.cpython-312-x86_64-linux-gnu.so", "")


def _record(root: Path, package: str) -> Path:
    """Return the file with which dpkg records an installed package."""
    return root / "var/lib/dpkg/info" / f"{package}.list"


def _get_packages(words: list[str], root: Path) -> None:
    """Install, once there are lists of packages; the base image has none."""
    lists = root / "var/lib/apt/lists/packages"
    if words[0] == "update":
        lists.parent.mkdir(parents=True, exist_ok=True)
        lists.touch()
        return
    for package in (word for word in words[1:] if not word.startswith("-")):
        if not lists.exists():
            sys.exit(f"E: Unable to locate package {package}")
        _record(root, package).parent.mkdir(parents=True, exist_ok=True)
        _record(root, package).touch()


if __name__ == "__main__":
    with open(os.environ["CALLS"], "a") as calls:
        print(json.dumps([os.environ["STAGE"], os.path.basename(sys.argv[0]), *sys.argv[1:]]), file=calls)
    run(os.path.basename(sys.argv[0]), sys.argv[1:], Path(os.environ["ROOT"]))
