"""The snippets in Go and Java, compiled where that can be: `python -m tests.support.toolchains`."""

import os
import shutil
import subprocess
from pathlib import Path

import google.rpc.error_details_pb2

ROOT = Path(__file__).parents[2]
SOURCES = {"go": ROOT / "clients/go/main.go", "java": ROOT / "clients/java/Resuming.java"}
# what the snippets are compiled with: programs on PATH, and grpc as Debian installs it
NEEDED = {
    "go": (
        ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        ("/usr/share/gocode/src/google.golang.org/grpc", "/usr/share/gocode/src/github.com/golang/protobuf/ptypes/any"),
    ),
    "java": (
        ("javac", "protoc", "grpc_java_plugin"),
        tuple(
            f"/usr/share/java/{name}.jar"
            for name in ("grpc-netty", "netty-handler", "perfmark-api", "proto-google-common-protos", "protobuf")
        ),
    ),
}


def lacking(language: str) -> list[str]:
    """Return what this machine lacks to compile a language's snippet."""
    programs, paths = NEEDED[language]
    return [each for each in programs if shutil.which(each) is None] + [
        each for each in paths if not os.path.exists(each)
    ]


def program_of(language: str) -> Path:
    """Return where a language's compiled snippet is."""
    return ROOT / "build/clients" / language / "resuming"


def missing(language: str) -> str | None:
    """Return why a language's snippet cannot run here, and the remedy; None if it can."""
    program = program_of(language)
    if program.exists() and program.stat().st_mtime >= SOURCES[language].stat().st_mtime:
        return None
    if absent := lacking(language):
        return f"no {', '.join(absent)}; clients/{language}/build names Debian's packages that have them"
    return f"the snippet in {language} is not compiled, or changed since; `make clients` compiles it"


def main() -> None:
    """Compile; a sentence for each language that is left out."""
    for language in SOURCES:
        if absent := lacking(language):
            print(f"clients: {language} is left out: no {', '.join(absent)}; see clients/{language}/build")
            continue
        folder = program_of(language).parent
        protos = Path(google.rpc.error_details_pb2.__file__).parents[2]  # of googleapis-common-protos
        subprocess.run(
            [SOURCES[language].with_name("build"), folder, *([protos] if language == "java" else [])], check=True
        )


if __name__ == "__main__":
    main()
