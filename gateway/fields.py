"""The fields of a request, each taken once and checked; what nobody has taken is refused, not ignored.

null is the same as absent, as OpenAI has it. Errors name the field, its value and the remedy.
"""

import json
from collections.abc import Mapping
from typing import Any

from gateway.problems import HttpProblem, refused
from specdec.parameters import WholeNumber, nearest_hint
from specdec.types import SAMPLING_PARAMETERS

MAX_SHOWN_CHARACTERS = 60


class Fields:
    """An object of a request's body; `path` is its own name."""

    def __init__(self, content: Any, path: str = "") -> None:
        self._path = path
        if not isinstance(content, Mapping):
            raise HttpProblem(400, f"{path or 'the body'} is {shown(content)}; give a JSON object", param=path or None)
        self._left = {name: value for name, value in content.items() if value is not None}
        self._known: list[str] = []

    def name(self, field: str) -> str:
        """Return a field's name with the object that it is in."""
        return f"{self._path}.{field}" if self._path else field

    def take(self, field: str) -> Any:
        """Return a value, unchecked; None where it is not given."""
        self._known.append(field)
        return self._left.pop(field, None)

    def text(self, field: str) -> str | None:
        """Return a text."""
        value = self.take(field)
        if value is not None and not isinstance(value, str):
            raise refused(self.name(field), f"is {shown(value)}; give a text")
        return value

    def required_text(self, field: str) -> str:
        """Return a text that is needed."""
        value = self.text(field)
        if not value:
            raise refused(self.name(field), "is missing or empty; give a text", "missing_required_parameter")
        return value

    def flag(self, field: str) -> bool:
        """Return true or false; false where it is not given."""
        value = self.take(field)
        if value is not None and not isinstance(value, bool):
            raise refused(self.name(field), f"is {shown(value)}; give true or false")
        return bool(value)

    def whole(self, field: str, low: int, high: int) -> int | None:
        """Return a whole number from `low` to `high`."""
        value: int | None = self.take(field)
        if value is not None and (problem := WholeNumber(low, high).problem(value)):
            raise refused(self.name(field), problem)
        return value

    def sampling(self, field: str, parameter: str | None = None) -> dict[str, Any]:
        """Return a sampling parameter by its own name, checked as the client and the services do; {}: not given."""
        parameter = parameter or field
        value = self.take(field)
        if value is None:
            return {}
        kind = SAMPLING_PARAMETERS[parameter].kind
        if isinstance(value, str) and kind.is_list:
            value = (value,)
        if problem := kind.problem(value):
            raise refused(self.name(field), problem)
        return {parameter: value}

    def neutral(self, field: str, *allowed: Any) -> None:
        """Refuse any value but those that change nothing."""
        value = self.take(field)
        if value is None or any(type(value) is type(other) and value == other for other in allowed):
            return
        remedy = f"leave it out{''.join(f', or give {json.dumps(other)}' for other in allowed)}"
        raise refused(self.name(field), f"is not supported by this service; {remedy}", "unsupported_parameter")

    def finish(self) -> None:
        """Refuse what is left: nobody knows it."""
        for field in self._left:
            hint = nearest_hint(field, self._known)
            raise refused(self.name(field), f"is unknown to this service{hint}", "unknown_parameter")


def shown(value: Any) -> str:
    """Return a value as JSON has it where it is short, else its kind."""
    if isinstance(value, Mapping) and value:
        return "an object"
    if isinstance(value, list) and value:
        return f"a list of length {len(value)}"
    text = json.dumps(value)
    return text if len(text) <= MAX_SHOWN_CHARACTERS else f"a {type(value).__name__} of {len(text)} characters"
