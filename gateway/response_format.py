"""OpenAI's `response_format`: text, any JSON object, or JSON of a schema."""

import json
from collections.abc import Mapping
from typing import Any

from gateway.fields import Fields, shown
from gateway.problems import refused

FORMATS = ("text", "json_object", "json_schema")
FIELD = "response_format"
SCHEMA_FIELD = f"{FIELD}.json_schema"
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


def form_of_answer(given: Any) -> dict[str, Any]:
    """Return the sampling parameters of a `response_format`; {} for text. Raises HttpProblem."""
    if given is None:
        return {}
    fields = Fields(given, FIELD)
    kind = fields.required_text("type")
    if kind not in FORMATS:
        raise refused(f"{FIELD}.type", f"is {shown(kind)}; give one of {', '.join(FORMATS)}")
    described = fields.take("json_schema")
    fields.finish()
    if kind == "json_schema":
        return {"json_schema": json.dumps(_schema(described))}
    if described is not None:
        raise refused(SCHEMA_FIELD, f"needs the type json_schema, and the type is {kind}")
    return {"json_schema": json.dumps(ANY_OBJECT)} if kind == "json_object" else {}


def _schema(described: Any) -> Mapping[str, Any]:
    """Return a described schema. It is always kept to, whatever `strict` says."""
    if described is None:
        raise refused(SCHEMA_FIELD, "is missing; give an object with a name and a schema", "missing_required_parameter")
    fields = Fields(described, SCHEMA_FIELD)
    fields.required_text("name")
    fields.text("description")
    fields.flag("strict")
    schema = fields.take("schema")
    fields.finish()
    if not isinstance(schema, Mapping):
        raise refused(f"{SCHEMA_FIELD}.schema", f"is {shown(schema)}; give a JSON schema, which is an object")
    return schema
