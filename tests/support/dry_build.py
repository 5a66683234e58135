"""Execute deploy/Dockerfile without a container engine: real COPY lines, RUN lines with fake programs.

Every stage is a folder that serves as the image's root. The base has fakes at the paths of the real programs of
python:slim and Debian (`build_programs.py`); they record their calls. A real shell executes the RUN lines with the
stage's PATH: a program that is not on it is not found, as in a build.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from string import Template

from tests.support.manifests import Dockerfile

BASE_PATH = "/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
REAL = {"/usr/bin/grep": "grep", "/usr/bin/cat": "cat"}
FAKE = Path(__file__).with_name("build_programs.py")
FAKES = ("/usr/local/bin/python3", "/usr/sbin/useradd", "/usr/bin/apt-get", "/usr/bin/rm")


class BuildFailed(Exception):
    """An instruction that a build could not execute."""


@dataclass(frozen=True, slots=True)
class Call:
    """A program that a RUN line started."""

    stage: str
    program: str
    words: tuple[str, ...]


class DryBuild:
    """The stages of one Dockerfile below `folder`, each built once."""

    def __init__(self, file: Dockerfile, context: Path, folder: Path, **arguments: str) -> None:
        self._file = file
        self._arguments = arguments
        self._context = context
        self._ignored = (context / ".dockerignore").read_text().splitlines()
        self._folder = folder
        self._calls = folder / "calls"
        self._variables: dict[str, dict[str, str]] = {}
        self._make_base()

    @property
    def calls(self) -> list[Call]:
        """Return the programs that ran so far."""
        lines = map(json.loads, self._calls.read_text().splitlines())
        return [Call(stage, program, tuple(words)) for stage, program, *words in lines]

    def build(self, stage: str) -> Path:
        """Return the folder that serves as a stage's root. Raises BuildFailed."""
        root = self._folder / stage
        if stage not in self._variables:
            base = self._file.stages[stage].base
            source = self.build(base) if base in self._file.stages else self._folder / "base"
            shutil.copytree(source, root, symlinks=True)
            self._variables[stage] = dict(self._variables.get(base, {"PATH": BASE_PATH, "WORKDIR": "/"}))
            for keyword, rest in self._file.stages[stage].instructions:
                self._execute(stage, keyword, rest)
        return root

    def _make_base(self) -> None:
        fake = self._folder / "fake"
        fake.write_text(f"#!{sys.executable} -IS\n{FAKE.read_text()}")
        fake.chmod(0o755)
        programs = {name: fake for name in FAKES} | {name: shutil.which(real) for name, real in REAL.items()}
        for name, real in programs.items():
            path = self._folder / "base" / name[1:]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(str(real))
        for name in ("bin", "sbin"):
            (self._folder / "base" / name).symlink_to(f"usr/{name}")
        self._calls.touch()

    def _execute(self, stage: str, keyword: str, rest: str) -> None:
        variables = self._variables[stage]
        if keyword == "ENV":
            words = shlex.split(Template(rest).safe_substitute(variables))
            variables |= dict(word.split("=", 1) for word in words)
        elif keyword == "ARG":
            name, _, default = rest.partition("=")
            variables[name] = self._arguments.get(name, default)
        elif keyword == "WORKDIR":
            variables["WORKDIR"] = rest
            (self._folder / stage / rest[1:]).mkdir(parents=True, exist_ok=True)
        elif keyword == "COPY":
            self._copy(stage, rest)
        elif keyword == "RUN":
            self._run(stage, re.sub(r"--mount=\S+", "", rest))

    def _run(self, stage: str, command: str) -> None:
        """Run a line with every absolute path, and so the PATH, mapped into the stage's folder."""
        root, variables = self._folder / stage, self._variables[stage]
        below = {"PATH": ":".join(f"{root}{part}" for part in variables["PATH"].split(":"))}
        for_fakes = {"STAGE": stage, "ROOT": str(root), "CALLS": str(self._calls)}
        line = re.sub(r"(?<![\w.:/}*])/(?=\w)", f"{root}/", command)
        result = subprocess.run(
            [os.path.realpath("/bin/sh"), "-c", line],
            cwd=root / variables["WORKDIR"][1:],
            env=variables | below | for_fakes,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            raise BuildFailed(f"{stage}: RUN {command.strip()}: exit {result.returncode}: {result.stderr.strip()}")

    def _copy(self, stage: str, rest: str) -> None:
        *sources, destination = [word for word in rest.split() if not word.startswith("--")]
        other = re.search(r"--from=(\S+)", rest)
        origin = self.build(other[1]) if other else self._context
        place = self._folder / stage / os.path.join(self._variables[stage]["WORKDIR"], destination)[1:]
        for source in sources:
            found = [path for path in origin.glob(source.lstrip("/")) if other or self.is_sent(path)]
            if not found:
                raise BuildFailed(f"{stage}: COPY {source}: there is no such file, or .dockerignore keeps it out")
            for path in found:
                self._copy_one(path, place / path.name if destination.endswith("/") else place)

    def _copy_one(self, source: Path, destination: Path) -> None:
        destination.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, destination, symlinks=True, ignore=self._unsent, dirs_exist_ok=True)
        else:
            shutil.copy(source, destination)

    def _unsent(self, folder: str, names: list[str]) -> Iterator[str]:
        within = Path(folder).is_relative_to(self._context)
        return (name for name in names if within and not self.is_sent(Path(folder, name)))

    def is_sent(self, path: Path) -> bool:
        """Return whether .dockerignore lets a file of the context through: the last line that names it decides."""
        relative = path.relative_to(self._context)
        candidates = [str(part) for part in (relative, *relative.parents)]
        sent = True
        for line in (line for line in self._ignored if line and not line.startswith("#")):
            pattern = line.removeprefix("!").removeprefix("**/")
            if any(_matches(each, pattern, anywhere="**/" in line) for each in candidates):
                sent = line.startswith("!")
        return sent


def _matches(name: str, pattern: str, anywhere: bool) -> bool:
    """As Go's filepath.Match, where a star ends at a slash; `**/` before a pattern means at any depth."""
    if anywhere:
        return fnmatchcase(name.rsplit("/", 1)[-1], pattern)
    return name.count("/") == pattern.count("/") and fnmatchcase(name, pattern)
