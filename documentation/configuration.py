"""docs/configuration.md: every setting of every service, from the classes that read them."""

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from pydantic_settings import BaseSettings

from draft_service.registry import registered
from specdec.serving.settings import ENV_PREFIX, ModelSettings, ProcessSettings, ServiceSettings, settings_of

HEAD = """\
# Configuration

<!-- Generated from the settings of the services: python -m documentation -->

Every setting is a flag and an environment variable; the flag wins. A flag or variable that a service does not know
stops its start, with the nearest name that exists. A switch is turned on by `--x` and off by `--no-x`.
`python -m SERVICE --help` prints the same for one service. What to set on a machine or a cluster is in
[deploy.md](deploy.md), and in [security.md](security.md) who may call whom; `specdec up` starts all services and has
[options of its own](start.md#the-services).

A service reads the settings under its own name, those of all processes and, except for the gateway, those of all gRPC
services. Target workers and draft workers read those of what runs a model. A draft worker reads those of every drafter,
whichever it offers. Where two tables have the same flag, the more special one says what its default is.
"""
COLUMNS = "| flag, variable | type and unit | default | meaning |\n|---|---|---|---|\n"
UNITS = {
    "_s": "seconds",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_threads": "threads",
    "_rounds": "rounds",
    "_window": "tokens",
    "support_max": "tokens",
    "ngram_max": "tokens",
    "ngram_min": "tokens",
    "max_sessions": "sessions",
    "max_streams": "calls",
    "max_connections": "connections",
    "max_choices": "sessions",
}
BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
PLAIN = {str: "text", int: "whole number", float: "number", bool: "switch", Path: "path"}

SHARED = {ProcessSettings: "All processes", ServiceSettings: "All gRPC services", ModelSettings: "What runs a model"}
SERVICES = {
    "coordinator": "The coordinator",
    "target_service": "The target worker",
    "draft_service": "The draft worker",
    "gateway": "The gateway",
}


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Return the settings by heading. A class that only one service has belongs to that service."""
    found = {heading: own_fields(kind) for kind, heading in SHARED.items()}
    for module, heading in SERVICES.items():
        found[heading] = {}
        for kind in reversed(settings_of(module).__mro__):
            if issubclass(kind, BaseModel) and kind not in (*SHARED, BaseModel, BaseSettings):
                title = drafters_of(kind) or heading
                found[title] = found.get(title, {}) | own_fields(kind)
    return found


def drafters_of(kind: type[BaseModel]) -> str:
    """Return the heading of settings that some drafters have; empty for others."""
    names = [f"`{name}`" for name, each in registered().items() if issubclass(each.settings, kind)]
    return f"Drafters: {', '.join(names)}" if 0 < len(names) < len(registered()) else ""


def own_fields(kind: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the settings that a class itself declares."""
    return {name: field for name, field in kind.model_fields.items() if name in kind.__annotations__}


def type_of(annotation: Any) -> str:
    """Return a type in words."""
    arguments = [each for each in get_args(annotation) if each is not type(None)]
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{each}`" for each in arguments)
    if annotation in PLAIN:
        return PLAIN[annotation]
    return type_of(arguments[0])


def bounds_of(field: FieldInfo) -> str:
    """Return the limits of a number."""
    annotations = [field.annotation, *get_args(field.annotation)]
    metadata = [*field.metadata, *(each for a in annotations for each in getattr(a, "__metadata__", ()))]
    found = [*metadata, *(inner for each in metadata for inner in getattr(each, "metadata", ()))]
    limits = [
        f"{words} {number(getattr(each, name))}"
        for name, words in BOUNDS.items()
        for each in found
        if hasattr(each, name)
    ]
    return "".join(f", {limit}" for limit in dict.fromkeys(limits))


def kind_of(name: str, field: FieldInfo) -> str:
    """Return the type of a setting with its unit, which its name ends with."""
    kind = type_of(field.annotation)
    unit = next((unit for ending, unit in UNITS.items() if f"_{name}".endswith(ending)), "")
    return f"{kind} of {unit}" if unit and kind.endswith("number") else kind


def number(value: float) -> str:
    """Return a number with its thousands apart."""
    return f"{value:,.0f}" if value == int(value) else f"{value}"


def default_of(field: FieldInfo) -> str:
    """Return the default as one would type it."""
    if field.default is PydanticUndefined:
        return "required"
    if field.default is None or field.default == "":
        return "unset"
    if isinstance(field.default, bool):
        return "on" if field.default else "off"
    return f"`{field.default:g}`" if isinstance(field.default, float) else f"`{field.default}`"


def row(name: str, field: FieldInfo) -> str:
    """Return a setting's row."""
    meaning = re.sub(r"(?<![\w`])(--[a-z][\w-]*|\$[A-Z_]+|~/\S+\w)", r"`\1`", field.description or "")
    cells = [
        f"`--{name.replace('_', '-')}`<br>`{ENV_PREFIX}{name.upper()}`",
        kind_of(name, field) + bounds_of(field),
        default_of(field),
        meaning.replace("|", "\\|"),
    ]
    return f"| {' | '.join(cells)} |\n"


def text() -> str:
    """Return the page."""
    parts = [HEAD]
    for heading, fields in sections().items():
        rows = "".join(row(name, field) for name, field in fields.items())
        parts.append(f"\n## {heading}\n\n{COLUMNS}{rows}")
    return "".join(parts)
