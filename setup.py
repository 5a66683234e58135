"""Generate the protobuf stubs while building, so that no wheel, sdist or editable install lacks them.

Everything else about the build is in pyproject.toml. `make protos` runs `python setup.py build_protos`.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import Any, ClassVar

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
PROTOS = sorted(path.relative_to(ROOT) for path in (ROOT / "protos").rglob("*.proto"))


class BuildProtos(Command):
    """protoc over protos/: folder = package = import path, so the stubs land beside the sources unpatched."""

    description = "generate the protobuf stubs"
    user_options: ClassVar[list[tuple[str, str | None, str]]] = []
    editable_mode = False

    def initialize_options(self) -> None:
        """Nothing to set up."""

    def finalize_options(self) -> None:
        """Nothing to finalise."""

    def run(self) -> None:
        """Write modules, service stubs and their types into the source tree. Raises CalledProcessError."""
        outputs = [f"--{kind}_out=." for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        includes = ["-Iprotos", f"-I{files('grpc_tools') / '_proto'}"]
        command = [sys.executable, "-m", "grpc_tools.protoc", *includes, *outputs, *map(str, PROTOS)]
        # protoc's "Writing ..." lines are noise; its errors come on standard error
        subprocess.run(command, check=True, cwd=ROOT, env=_with_plugins(os.environ), stdout=subprocess.DEVNULL)

    def get_source_files(self) -> list[str]:
        """Return what an sdist must contain."""
        return [str(path) for path in PROTOS]

    def get_outputs(self) -> list[str]:
        """Return nothing: build_py packs the stubs with the modules around them."""
        return []

    def get_output_mapping(self) -> dict[str, str]:
        """Return nothing, as get_outputs."""
        return {}


def _with_plugins(environment: Mapping[str, str]) -> dict[str, str]:
    """Let protoc find mypy-protobuf's plugins beside this interpreter, also where its environment is not activated."""
    if not shutil.which("protoc-gen-mypy", path=sysconfig.get_path("scripts")):
        return dict(environment)
    return {**environment, "PATH": f"{sysconfig.get_path('scripts')}{os.pathsep}{environment.get('PATH', '')}"}


class BuildKernels(build_ext):
    """One file on each processor: setuptools compiles an extension's files one after the other."""

    def build_extensions(self) -> None:
        """Compile and link. Raises CompileError."""
        compile_in_turn = self.compiler.compile

        def compile_at_once(sources: list[str], **options: Any) -> list[str]:
            with ThreadPoolExecutor(os.cpu_count()) as threads:
                objects = threads.map(lambda source: compile_in_turn([source], **options), sources)
                return [path for paths in objects for path in paths]

        self.compiler.compile = compile_at_once
        super().build_extensions()


# in CFLAGS another one may be named: -O0 compiles in a tenth of the time
OPTIMISATION = [] if "-O" in os.environ.get("CFLAGS", "") else ["-O2"]
# optional: without a C compiler, specdec is installed without it, and computes by torch's own kernels
KERNELS = Extension(
    "specdec.engine._kernels",
    sources=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("specdec/engine/*.c")),
    depends=sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("specdec/engine/*.h")),
    libraries=["m"],
    extra_compile_args=["-std=gnu11", "-pthread", *OPTIMISATION, "-g0"],
    extra_link_args=["-pthread"],
    optional=True,
)

build.sub_commands = [("build_protos", None), *build.sub_commands]
setup(cmdclass={"build_protos": BuildProtos, "build_ext": BuildKernels}, ext_modules=[KERNELS])
