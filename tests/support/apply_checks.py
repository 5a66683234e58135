"""What makes a second `kubectl apply` say "configured" although nothing has changed.

`kubectl apply` compares a manifest with what the API server stored, which has defaults written in. Maps are compared
field by field, and what the manifest leaves out is left alone. But lists without a merge key are replaced as a whole,
and a map with the strategy `retainKeys` loses every other field: in these a default that the manifest leaves out is a
difference, for ever. Which those are, and which fields have defaults, the published schemas say.
"""

import functools
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]  # it ships no types

from tests.support.manifests import Document, title

SCHEMAS = Path(kubernetes_validate.__file__).parent / "kubernetes-json-schema"
VERSION = "v1.35.0-local-strict"
HAS_DEFAULT = re.compile(
    r"\bdefaults? (?:to|is|value)\b|\bdefaulted to\b|\(default\b|\bis implied when not included\b", re.I
)
# their default is an empty list, which is not stored
EMPTY_BY_DEFAULT = {"matchLabelKeys", "mismatchLabelKeys"}
# what is stored of each entry besides, and no description says
STORED_OF_ENTRIES = {"volumeClaimTemplates": ("apiVersion", "kind", "status")}


def apply_problems(documents: Sequence[Document]) -> Iterator[str]:
    """Every default that would be compared is written out."""
    for document in documents:
        for problem in _unwritten(document, _schema_of(document), "", False):
            yield f"{title(document)} {problem} is left out, and has a default"


def always_patched(documents: Sequence[Document]) -> list[str]:
    """Return the documents with a map that kubectl always sends: nothing changes, and it says `configured`."""
    return [title(document) for document in documents if _is_sent(document, _schema_of(document))]


def _unwritten(value: Any, schema: Document, path: str, is_replaced: bool) -> Iterator[str]:
    """Yield the fields below `path` that are left out, have a default, and are compared."""
    schema = _resolved(schema)
    if isinstance(value, list):
        merges = "merge" in schema.get("x-kubernetes-patch-strategy", "")
        for number, entry in enumerate(value):
            place = f"{path}[{number}]"
            needed = STORED_OF_ENTRIES.get(path.rpartition(".")[2], ())
            yield from (f"{place}.{name}" for name in needed if name not in entry)
            yield from _unwritten(entry, schema.get("items", {}), place, is_replaced or not merges)
    elif isinstance(value, dict):
        fields = schema.get("properties", {})
        if is_replaced or "retainKeys" in schema.get("x-kubernetes-patch-strategy", ""):
            yield from (f"{path}.{name}" for name in _with_default(fields) - value.keys())
        for name in value.keys() & fields.keys():
            yield from _unwritten(value[name], fields[name], f"{path}.{name}".lstrip("."), is_replaced)


def _with_default(fields: Document) -> set[str]:
    described = {name for name, schema in fields.items() if HAS_DEFAULT.search(schema.get("description", ""))}
    return described - EMPTY_BY_DEFAULT


def _is_sent(value: Any, schema: Document) -> bool:
    schema = _resolved(schema)
    fields = schema.get("properties", {}) if isinstance(value, dict) else {}
    is_replaced = isinstance(value, dict) and schema.get("x-kubernetes-patch-strategy") == "replace"
    return is_replaced or any(_is_sent(value[name], fields[name]) for name in fields if name in value)


def _schema_of(document: Document) -> Document:
    """Return the published schema of a document; an empty one for kinds that Kubernetes itself does not have."""
    group, _, version = document["apiVersion"].rpartition("/")
    names = filter(None, (document["kind"].lower(), group.split(".")[0], version))
    file = SCHEMAS / VERSION / f"{'-'.join(names)}.json"
    schema: Document = json.loads(file.read_text()) if file.exists() else {}
    return schema


def _resolved(schema: Document) -> Document:
    """Return a schema with the one that it refers to."""
    if "$ref" not in schema:
        return schema
    found = _definitions()[schema["$ref"].rpartition("/")[2]]
    return {**_resolved(found), **schema}


@functools.cache
def _definitions() -> Document:
    definitions: Document = json.loads((SCHEMAS / VERSION / "_definitions.json").read_text())["$defs"]
    return definitions
