"""One interface to docker, podman and buildah: build an image, and run its program on this machine's network."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from deploy.image_check.processes import CheckFailed, read, run

NOTHING_BUILDS = "no docker or podman engine answers and buildah is not on PATH; install podman or buildah"


@dataclass(frozen=True, slots=True)
class Container:
    """An image's program with these variables, or another command instead."""

    name: str
    image: str
    environment: Mapping[str, str] = field(default_factory=dict)
    words: Sequence[str] = ()


class Engine(Protocol):
    """A program that builds and runs images."""

    name: str
    mounts_folders: bool  # while it builds

    def version(self) -> str:
        """Return the program's name and version."""

    def build(self, arguments: Sequence[str], log: Path) -> None:
        """Build an image. Raises CheckFailed."""

    def has(self, image: str) -> bool:
        """Return whether an image was built or fetched before."""

    def size(self, image: str) -> str:
        """Return an image's size, with its unit."""

    def command(self, container: Container) -> list[str]:
        """Return the command that runs a container in the foreground. Raises CheckFailed."""

    def remove(self, container: Container) -> None:
        """Remove a container, also one that still runs or never started."""

    def close(self) -> None:
        """Remove what a build left that was cut off."""


class Docker:
    """docker, or podman, which takes the same arguments. Images stay in the engine's own store."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mounts_folders = name == "podman"

    def version(self) -> str:
        return read([self.name, "--version"]) or self.name

    def build(self, arguments: Sequence[str], log: Path) -> None:
        run([self.name, "build", *arguments], log, {**os.environ, "DOCKER_BUILDKIT": "1"})

    def has(self, image: str) -> bool:
        return read([self.name, "image", "inspect", image]) is not None

    def size(self, image: str) -> str:
        return read([self.name, "images", "--format", "{{.Size}}", image]) or "?"

    def command(self, container: Container) -> list[str]:
        variables = [word for name, value in container.environment.items() for word in ("--env", f"{name}={value}")]
        entrypoint = ["--entrypoint", container.words[0]] if container.words else []
        options = ["--rm", "--network", "host", "--name", container.name, *variables, *entrypoint]
        return [self.name, "run", *options, container.image, *container.words[1:]]

    def remove(self, container: Container) -> None:
        read([self.name, "rm", "--force", container.name])

    def close(self) -> None:
        """The engine cleans up itself."""


class Buildah:
    """buildah, which needs no engine, with chroot instead of namespaces; images and containers are in `store`."""

    name = "buildah"
    mounts_folders = True

    def __init__(self, store: Path) -> None:
        self._words = ["buildah", "--root", f"{store}/images", "--runroot", f"{store}/run"]
        if "STORAGE_DRIVER" in os.environ:  # which buildah forgets where it is given a root
            self._words += ["--storage-driver", os.environ["STORAGE_DRIVER"]]

    def version(self) -> str:
        driver = read([*self._words, "info", "--format", "{{.store.GraphDriverName}}"])
        return f"{(read(['buildah', '--version']) or 'buildah').split(' (')[0]} (storage driver {driver})"

    def build(self, arguments: Sequence[str], log: Path) -> None:
        run([*self._words, "build", "--isolation", "chroot", "--layers", *arguments], log)

    def has(self, image: str) -> bool:
        return read([*self._words, "inspect", "--type", "image", image]) is not None

    def size(self, image: str) -> str:
        return read([*self._words, "images", "--format", "{{.Size}}", image]) or "?"

    def command(self, container: Container) -> list[str]:
        """`buildah run` ignores the image's entrypoint, so it is read from the image."""
        if read([*self._words, "from", "--pull-never", "--name", container.name, container.image]) is None:
            raise CheckFailed(f"buildah cannot make a container from {container.image}")
        variables = [word for name, value in container.environment.items() for word in ("--env", f"{name}={value}")]
        words = container.words or self._entrypoint(container.image)
        return [*self._words, "run", "--isolation", "chroot", *variables, container.name, "--", *words]

    def _entrypoint(self, image: str) -> list[str]:
        described: dict[str, Any] = json.loads(read([*self._words, "inspect", "--type", "image", image]) or "{}")
        words: list[str] = described["OCIv1"]["config"]["Entrypoint"]
        return words

    def remove(self, container: Container) -> None:
        read([*self._words, "rm", container.name])

    def close(self) -> None:
        read([*self._words, "rm", "--all"])


def choose_engine(name: str | None, store: Path) -> Engine:
    """Return the engine of that name, or else docker or podman if one answers, or else buildah. Raises CheckFailed."""
    for each in ("docker", "podman"):
        if name == each or (name is None and read([each, "info"]) is not None):
            return Docker(each)
    if shutil.which("buildah") is None:
        raise CheckFailed(NOTHING_BUILDS)
    return Buildah(store)
