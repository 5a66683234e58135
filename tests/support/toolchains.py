"""The snippets in Go and Java, where this machine has what compiles them."""

import os
import shutil
import subprocess
from pathlib import Path

import google.rpc.error_details_pb2

CLIENTS = Path(__file__).parents[2] / "clients"
# what the snippets are compiled with, beside the programs on PATH: grpc, as Debian installs it
NEEDED = {
    "go": (
        ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
        ("/usr/share/gocode/src/google.golang.org/grpc", "/usr/share/gocode/src/github.com/golang/protobuf/ptypes/any"),
    ),
    "java": (
        ("javac", "protoc", "grpc_java_plugin"),
        ("/usr/share/java/grpc-netty.jar", "/usr/share/java/netty-all.jar", "/usr/share/java/perfmark-api.jar"),
    ),
}
# of the installed googleapis-common-protos
PROTOS = Path(google.rpc.error_details_pb2.__file__).parents[2]


def missing(language: str) -> str | None:
    """Return why a language's snippet cannot be compiled here, and the remedy; None if it can."""
    programs, paths = NEEDED[language]
    lacking = [each for each in programs if shutil.which(each) is None]
    lacking += [each for each in paths if not os.path.exists(each)]
    if not lacking:
        return None
    return f"no {', '.join(lacking)}; clients/{language}/build names Debian's packages that have them"


def compiled(language: str, folder: Path) -> Path:
    """Compile a language's snippet; return the program."""
    command = [CLIENTS / language / "build", folder, *([PROTOS] if language == "java" else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "resuming"
