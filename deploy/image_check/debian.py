"""A base image where no registry can be reached: this machine's Debian with Python, made by debootstrap."""

import os
import platform
import shutil
from pathlib import Path

from deploy.image_check.engine import Engine
from deploy.image_check.processes import CheckFailed, read, run

IMAGE = "localhost/specdec-python-base"
PACKAGES = "python3,python3-venv"
DOCKERFILE = """\
FROM scratch
ADD rootfs.tar /
ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
CMD ["python3"]
"""


def make_base(engine: Engine, folder: Path) -> str:
    """Return the name of the base image, made unless the engine has it. Raises CheckFailed."""
    if not engine.has(IMAGE):
        context = folder / "base"
        context.mkdir()
        _pack(folder, context / "rootfs.tar")
        (context / "Dockerfile").write_text(DOCKERFILE)
        engine.build(["--tag", IMAGE, str(context)], folder / "build of the base image.log")
        shutil.rmtree(context)
    return IMAGE


def _pack(folder: Path, archive: Path) -> None:
    """Write a root file system; debootstrap's mounts are in a private namespace and end with it."""
    if os.geteuid() != 0 or shutil.which("debootstrap") is None:
        raise CheckFailed("--base debootstrap needs root and the package debootstrap; apt-get install debootstrap")
    root, (suite, mirror) = folder / "rootfs", _suite_and_mirror()
    options = ["--variant=minbase", f"--include={PACKAGES}"]
    run(["unshare", "--mount", "debootstrap", *options, suite, str(root), mirror], folder / "debootstrap.log")
    unpacked = ["./dev/*", "./proc/*", "./sys/*", "./var/cache/apt/*", "./var/lib/apt/lists/*"]
    excluded = [f"--exclude={pattern}" for pattern in unpacked]
    run(["tar", "--create", "--file", str(archive), "--directory", str(root), *excluded, "."], folder / "tar.log")
    shutil.rmtree(root)


def _suite_and_mirror() -> tuple[str, str]:
    """Return this machine's release and where its apt gets the release's packages."""
    suite = platform.freedesktop_os_release().get("VERSION_CODENAME", "")
    targets = read(
        ["apt-get", "indextargets", "--format", "$(CODENAME) $(COMPONENT) $(REPO_URI)", "Created-By: Packages"]
    )
    for line in (targets or "").splitlines():
        codename, component, mirror = line.split(maxsplit=2)
        if (codename, component) == (suite, "main"):
            return suite, mirror
    raise CheckFailed(
        f"apt knows no mirror of {suite or 'this system'}; --base debootstrap needs a Debian, after apt-get update"
    )
