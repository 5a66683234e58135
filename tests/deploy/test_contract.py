"""The contract does not change silently, and keeps to its own style.

tests/descriptors/specdec.v1.json says what is on the wire. A change that is meant is recorded by
`python tests/test_contract.py --update`; the diff of that file is then what reviewers see.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    MethodDescriptorProto,
)

ROOT = Path(__file__).parents[2]
PROTOS = sorted(path.relative_to(ROOT / "protos").as_posix() for path in (ROOT / "protos").rglob("*.proto"))
SNAPSHOT = Path(__file__).with_name("descriptors") / "specdec.v1.json"
UPDATE = "if the change is meant, and old clients can live with it: python tests/test_contract.py --update"

Contract = dict[str, dict[str, dict[str, Any]]]


def compile_protos(folder: Path, names: list[str], out: Path) -> list[FileDescriptorProto]:
    """Compile with comments; the folder is the root of imports."""
    command = [
        *(sys.executable, "-m", "grpc_tools.protoc", f"-I{folder}", f"-I{files('grpc_tools') / '_proto'}"),
        *("--include_source_info", f"--descriptor_set_out={out}", *names),
    ]
    subprocess.run(command, check=True, cwd=folder)
    return list(FileDescriptorSet.FromString(out.read_bytes()).file)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[FileDescriptorProto]:
    return compile_protos(ROOT / "protos", PROTOS, tmp_path_factory.mktemp("contract") / "set.bin")


# ---- the snapshot


def contract(compiled_files: list[FileDescriptorProto]) -> Contract:
    """What is on the wire: numbers, types, presence, streams."""
    return {
        "messages": {
            name: {field.name: _field(field, message) for field in message.field}
            for file in compiled_files
            for name, message in _messages(file)
        },
        "enums": {
            enum.name: {value.name: value.number for value in enum.value}
            for file in compiled_files
            for enum in file.enum_type
        },
        "services": {
            service.name: {method.name: _method(method) for method in service.method}
            for file in compiled_files
            for service in file.service
        },
    }


def _messages(file: FileDescriptorProto) -> Iterator[tuple[str, DescriptorProto]]:
    for message in file.message_type:
        yield message.name, message
        for nested in message.nested_type:
            yield f"{message.name}.{nested.name}", nested


def _field(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    kind = (
        field.type_name.rpartition(".")[2] or FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    words = [str(field.number), _presence(field, message), kind]
    return " ".join(word for word in words if word)


def _presence(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return "repeated"
    if field.proto3_optional:
        return "optional"
    return f"oneof {message.oneof_decl[field.oneof_index].name}" if field.HasField("oneof_index") else ""


def _method(method: MethodDescriptorProto) -> str:
    sides = ((method.client_streaming, method.input_type), (method.server_streaming, method.output_type))
    return " -> ".join(("stream " if stream else "") + name.rpartition(".")[2] for stream, name in sides)


def differences(old: Contract, new: Contract) -> list[str]:
    """Return one line for everything that is not the same."""
    lines = []
    for section in sorted(old | new):
        before, after = _flat(old.get(section, {})), _flat(new.get(section, {}))
        for name in sorted(before | after):
            if before.get(name) != after.get(name):
                lines.append(f"{section}: {name} was {before.get(name, 'absent')}, is {after.get(name, 'absent')}")
    return lines


def _flat(section: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    entries = {f"{name}.{part}": value for name, parts in section.items() for part, value in parts.items()}
    return {**{name: "present" for name in section}, **entries}


def test_the_wire_is_what_the_snapshot_says(compiled: list[FileDescriptorProto]) -> None:
    changed = differences(json.loads(SNAPSHOT.read_text()), contract(compiled))
    assert not changed, "\n".join(["the contract changed:", *changed, UPDATE])


MUTANTS = {
    "a field's number": ("messages", "GenerateResponse", "offset", "12 uint32"),
    "a field's type": ("messages", "GenerateResponse", "offset", "2 uint64"),
    "a field's presence": ("messages", "SamplingParams", "temperature", "1 float"),
    "a field that left its oneof": ("messages", "GenerateRequest", "text", "2 string"),
    "an enum's value": ("enums", "TokenOrigin", "TOKEN_ORIGIN_ACCEPTED", 2),
    "a stream": ("services", "GenerationService", "Generate", "GenerateRequest -> GenerateResponse"),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_a_changed_contract_is_noticed(compiled: list[FileDescriptorProto], mutant: tuple[str, str, str, Any]) -> None:
    section, name, part, value = mutant
    changed = contract(compiled)
    assert part in changed[section][name]
    changed[section][name][part] = value
    assert len(differences(json.loads(SNAPSHOT.read_text()), changed)) == 1


def test_what_is_gone_or_new_is_noticed(compiled: list[FileDescriptorProto]) -> None:
    changed = contract(compiled)
    del changed["messages"]["Usage"]["num_prompt_tokens"]
    del changed["services"]["DraftService"]
    changed["enums"]["Colour"] = {}
    lines = "\n".join(differences(json.loads(SNAPSHOT.read_text()), changed))
    for name in ("Usage.num_prompt_tokens", "DraftService", "Colour"):
        assert name in lines


@pytest.mark.parametrize("name", PROTOS)
def test_the_stubs_are_of_these_protos(compiled: list[FileDescriptorProto], name: str) -> None:
    module = import_module(name.removesuffix(".proto").replace("/", ".") + "_pb2")
    [source] = [file for file in compiled if file.name == name]
    stub = FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    assert contract([stub]) == contract([source]), "the stubs are older than the protos; run: make protos"


# ---- the style: buf's STANDARD rules, and comments everywhere

Rule = Iterator[str]


def violations(file: FileDescriptorProto) -> list[str]:
    """Return what a file does against the rules."""
    return [*_file_rules(file), *_service_rules(file), *_enum_rules(file), *_message_rules(file), *_comment_rules(file)]


def _file_rules(file: FileDescriptorProto) -> Rule:
    folder, _, name = file.name.rpartition("/")
    if file.package != folder.replace("/", "."):
        yield f"package {file.package} is not the folder {folder}"
    if not re.search(r"\.v\d+$", file.package):
        yield f"package {file.package} has no version"
    if file.syntax != "proto3":
        yield "syntax is not proto3"
    if not _is_snake(name.removesuffix(".proto")):
        yield f"file {name} is not lower_snake_case"


def _service_rules(file: FileDescriptorProto) -> Rule:
    for service in file.service:
        if not service.name.endswith("Service"):
            yield f"service {service.name} does not end in Service"
        for method in service.method:
            for side, kind in (("Request", method.input_type), ("Response", method.output_type)):
                if kind != f".{file.package}.{method.name}{side}":
                    yield f"rpc {method.name} has {kind}, not its own {method.name}{side}"


def _enum_rules(file: FileDescriptorProto) -> Rule:
    for enum in file.enum_type:
        prefix = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", enum.name).upper()
        if enum.value[0].name != f"{prefix}_UNSPECIFIED" or enum.value[0].number != 0:
            yield f"enum {enum.name} does not begin with {prefix}_UNSPECIFIED = 0"
        yield from (f"{value.name} does not begin with {prefix}_" for value in _unprefixed(enum, prefix))


def _unprefixed(enum: EnumDescriptorProto, prefix: str) -> list[Any]:
    return [value for value in enum.value if not value.name.startswith(f"{prefix}_")]


def _message_rules(file: FileDescriptorProto) -> Rule:
    numbers = (FieldDescriptorProto.TYPE_FLOAT, FieldDescriptorProto.TYPE_DOUBLE)
    for name, message in _messages(file):
        if not re.fullmatch(r"([A-Z][a-z0-9]*)+(\.\w+)?", name):
            yield f"message {name} is not PascalCase"
        for field in message.field:
            if not _is_snake(field.name):
                yield f"field {name}.{field.name} is not lower_snake_case"
            if field.label == FieldDescriptorProto.LABEL_REPEATED and field.type in numbers:
                yield f"field {name}.{field.name} is a tensor; send it as bytes, little-endian"


def _is_snake(name: str) -> bool:
    return bool(re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name))


def _comment_rules(file: FileDescriptorProto) -> Rule:
    """Fields, enum values and rpcs each say what they mean."""
    commented = {tuple(place.path) for place in file.source_code_info.location if place.leading_comments.strip()}
    for path, name in _places(file):
        if path not in commented:
            yield f"{name} has no comment"


def _places(file: FileDescriptorProto) -> Iterator[tuple[tuple[int, ...], str]]:
    groups = (
        (FileDescriptorProto.MESSAGE_TYPE_FIELD_NUMBER, DescriptorProto.FIELD_FIELD_NUMBER, file.message_type, "field"),
        (FileDescriptorProto.ENUM_TYPE_FIELD_NUMBER, EnumDescriptorProto.VALUE_FIELD_NUMBER, file.enum_type, "value"),
        (FileDescriptorProto.SERVICE_FIELD_NUMBER, 2, file.service, "method"),  # ServiceDescriptorProto.method
    )
    for outer, inner, owners, kind in groups:
        for index, owner in enumerate(owners):
            for place, part in enumerate(getattr(owner, kind)):
                yield (outer, index, inner, place), f"{owner.name}.{part.name}"


def test_the_protos_keep_to_their_style(compiled: list[FileDescriptorProto]) -> None:
    assert {file.name: violations(file) for file in compiled} == {file.name: [] for file in compiled}


BAD_PROTO = """
syntax = "proto3";
package other;
service Thing { rpc Do(DraftRequest) returns (DraftRequest); }
message DraftRequest {
  repeated float camelCase = 1;
}
message lower {
  // A comment.
  string fine = 1;
}
enum Colour { RED = 0; }
"""


def test_every_rule_of_style_can_fail(tmp_path: Path) -> None:
    (tmp_path / "v1").mkdir()
    (tmp_path / "v1" / "Bad.proto").write_text(BAD_PROTO)
    [bad] = compile_protos(tmp_path, ["v1/Bad.proto"], tmp_path / "set.bin")
    assert violations(bad) == [
        "package other is not the folder v1",
        "package other has no version",
        "file Bad.proto is not lower_snake_case",
        "service Thing does not end in Service",
        "rpc Do has .other.DraftRequest, not its own DoRequest",
        "rpc Do has .other.DraftRequest, not its own DoResponse",
        "enum Colour does not begin with COLOUR_UNSPECIFIED = 0",
        "RED does not begin with COLOUR_",
        "field DraftRequest.camelCase is not lower_snake_case",
        "field DraftRequest.camelCase is a tensor; send it as bytes, little-endian",
        "message lower is not PascalCase",
        "DraftRequest.camelCase has no comment",
        "Colour.RED has no comment",
        "Thing.Do has no comment",
    ]


if __name__ == "__main__":
    if sys.argv[1:] != ["--update"]:
        sys.exit(f"usage: python {sys.argv[0]} --update")
    now = contract(compile_protos(ROOT / "protos", PROTOS, SNAPSHOT.with_suffix(".bin")))
    SNAPSHOT.with_suffix(".bin").unlink()
    SNAPSHOT.write_text(json.dumps(now, indent=1) + "\n")
