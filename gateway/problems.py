"""Errors in OpenAI's form: one table from specdec's errors to HTTP statuses, and the body that clients parse."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec import errors
from specdec.errors import InvalidArgumentError, SpecdecError

MAX_MESSAGE_CHARACTERS = 600  # a message may quote a value that was sent, which may have megabytes
INVALID, SERVER = "invalid_request_error", "server_error"


class HttpProblem(Exception):
    """An answer that is an error. `param` is the field that is wrong, `code` a word for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.kind, self.param, self.code = status, kind, param, code
        self.message = message if len(message) <= MAX_MESSAGE_CHARACTERS else f"{message[:MAX_MESSAGE_CHARACTERS]}..."
        self._retry_after_s, self._headers = retry_after_s, dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """Return what OpenAI's clients parse."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it: when to try again, in whole seconds and, for whom it knows, exactly."""
        if self._retry_after_s is None:
            return self._headers
        exact_ms = str(math.ceil(1000 * self._retry_after_s))
        return self._headers | {"retry-after": str(math.ceil(self._retry_after_s)), "retry-after-ms": exact_ms}


def encoded(content: Mapping[str, Any]) -> bytes:
    """Return JSON in UTF-8. Half of a surrogate pair, which a client may send, becomes the escape that JSON has."""
    return json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode(
        errors="backslashreplace"
    )


def refused(param: str, problem: str, code: str | None = None) -> HttpProblem:
    """Return the error of a field: `problem` goes on after its name."""
    return HttpProblem(400, f"{param} {problem}", param=param, code=code)


@dataclass(frozen=True, slots=True)
class _Row:
    status: int
    code: str | None
    kind: str = INVALID


_ROWS: dict[type[SpecdecError], _Row] = {
    errors.InvalidArgumentError: _Row(400, None),
    errors.ContextTooShortError: _Row(400, "context_length_exceeded"),
    errors.UnauthenticatedError: _Row(401, "invalid_api_key"),
    errors.PermissionDeniedError: _Row(403, "permission_denied"),
    errors.NotFoundError: _Row(404, "session_not_found"),
    errors.AlreadyExistsError: _Row(409, "request_id_reused"),
    errors.OverloadedError: _Row(429, "rate_limit_exceeded", "rate_limit_error"),
    errors.ModelMismatchError: _Row(500, "model_mismatch", SERVER),
    errors.NonFiniteLogitsError: _Row(500, "non_finite_logits", SERVER),
    errors.DataLossError: _Row(500, "data_loss", SERVER),
    errors.InternalError: _Row(500, "internal_error", SERVER),
    errors.FencedError: _Row(503, "session_fenced", SERVER),
    errors.UnavailableError: _Row(503, "unavailable", SERVER),
    errors.DeadlineExceededError: _Row(504, "timeout", SERVER),
}
DEFAULT_RETRY_AFTER_S = 1.0  # where nobody named a pause and the problem passes


def problem_of(error: SpecdecError, names: Mapping[str, str]) -> HttpProblem:
    """Return the answer that an error becomes; `names` are OpenAI's names of specdec's fields."""
    row = _ROWS[type(error)]
    message, param = error.message, None
    if isinstance(error, InvalidArgumentError) and error.violations:
        fields = {public_name(field, names): problem for field, problem in error.violations.items()}
        message = "; ".join(f"{field} {problem}" for field, problem in fields.items())
        param = next(iter(fields))
    headers = {"www-authenticate": "Bearer"} if row.status == 401 else {}
    pause_s = _retry_after_s(error, row)
    return HttpProblem(
        row.status, message, kind=row.kind, param=param, code=row.code, retry_after_s=pause_s, headers=headers
    )


def public_name(field: str, names: Mapping[str, str]) -> str:
    """Return the name that a client knows a field by."""
    group, _, name = field.partition(".")
    if group == "speculation":
        return f"specdec.{name}"
    return names.get(field) or (name if group == "sampling" else field)


def _retry_after_s(error: SpecdecError, row: _Row) -> float | None:
    if isinstance(error, errors.OverloadedError):
        return error.retry_after_s
    if row.status == 503:
        return getattr(error, "retry_after_s", None) or DEFAULT_RETRY_AFTER_S
    return None


def internal_problem() -> HttpProblem:
    """Return the answer to a bug of ours: what happened is in the log, not in the answer."""
    return HttpProblem(500, "an error inside the gateway; its log has the cause", kind=SERVER, code="internal_error")


# by their status: of the form of requests, before anybody reads what they ask for
PROBLEMS = {
    408: HttpProblem(408, "the head of the request did not arrive in time", code="request_timeout"),
    431: HttpProblem(
        431, "the head of the request is too large; send fewer or shorter headers", code="headers_too_large"
    ),
    501: HttpProblem(501, "the request's transfer encoding is not supported; send it chunked or with its length"),
    503: HttpProblem(
        503, "the gateway has too many connections; try again soon", kind=SERVER, code="overloaded", retry_after_s=1.0
    ),
}
