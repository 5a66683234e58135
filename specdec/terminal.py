"""Output of the `specdec` command: text coloured by token origin, one line of statistics, JSON."""

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from enum import Enum
from typing import Any, TextIO

from specdec.completion import Chunk, Finish, ServedModel, Session
from specdec.types import TokenOrigin

_ANSI = {"red": 31, "green": 32, "yellow": 33, "magenta": 35, "cyan": 36}  # ECMA-48, SGR
COLOURS = {TokenOrigin.ACCEPTED: "green", TokenOrigin.RECOVERED: "yellow", TokenOrigin.BONUS: "cyan"}


def is_coloured(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether colours are welcome (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR")


def in_colour(text: str, colour: str) -> str:
    """Return text that a terminal shows in a colour."""
    return f"\x1b[{_ANSI[colour]}m{text}\x1b[0m"


def coloured(chunk: Chunk) -> str:
    """Return the chunk's text, each token's part in the colour of its origin."""
    pieces = [in_colour(piece, COLOURS[origin]) for piece, origin in zip(chunk.pieces, chunk.origins, strict=False)]
    return "".join([*pieces, chunk.pieces[-1]])


class TextOutput:
    """Prints chunks as text, in colours where they are welcome; knows whether the last line has ended."""

    def __init__(self, stream: TextIO, environment: Mapping[str, str]) -> None:
        self._stream = stream
        self._is_coloured = is_coloured(stream, environment)
        self._is_line_open = False

    def print(self, chunk: Chunk) -> None:
        """Print a chunk at once."""
        self._write(coloured(chunk) if self._is_coloured else chunk.text)
        self._is_line_open = not chunk.text.endswith("\n") if chunk.text else self._is_line_open

    def end_line(self) -> None:
        """End the last line, where the text did not."""
        if self._is_line_open:
            self._write("\n")
        self._is_line_open = False

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def chunk_as_json(chunk: Chunk) -> str:
    """Return a chunk as one line of JSON."""
    values = asdict(chunk)
    return json.dumps({name: value for name, value in values.items() if value not in ((), None)}, default=_plain)


def session_as_json(session: Session) -> str:
    """Return a session as one JSON object."""
    return json.dumps(asdict(session) | {"sampling": _sampling(session)}, default=_plain, indent=2)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.name.lower()
    if isinstance(value, bytes):
        return value.hex()
    raise TypeError(f"no JSON for {type(value).__name__}")


def _sampling(session: Session) -> dict[str, Any]:
    values = {entry.name: getattr(session.sampling, entry.name) for entry in fields(session.sampling)}
    return values | {"logit_bias": dict(session.sampling.logit_bias)}


def statistics_line(finish: Finish, session_id: str | None = None) -> str:
    """Return a session's statistics in one line, with its id where that is not known yet."""
    sums = finish.statistics
    name = [] if session_id is None else [f"session {session_id}"]
    return " · ".join(
        [
            f"{finish.usage.num_completion_tokens} tokens in {sums.total_s:.2f} s ({sums.tokens_per_s:.1f} tokens/s)",
            f"{sums.num_rounds} rounds of {sums.tokens_per_round:.2f} tokens",
            f"{sums.acceptance_rate:.0%} of {sums.num_draft_tokens} draft tokens accepted",
            f"draft {sums.draft_s:.2f} s, score {sums.score_s:.2f} s, commit {sums.commit_s:.2f} s",
            f"ended by {finish.reason.name.lower()}",
            *name,
        ]
    )


def session_lines(session: Session) -> list[str]:
    """Return a session as readable text."""
    lines = [
        f"session {session.session_id}: {session.status.name.lower()}, epoch {session.epoch}",
        f"tokens  {session.num_prompt_tokens} of the prompt, {len(session.tokens)} of the completion",
        f"digest  {session.digest.hex()}",
        f"seed    {session.sampling.seed}",
        f"text    {session.text!r}",
    ]
    return [*lines, statistics_line(session.finish)] if session.finish else lines


def model_lines(model: ServedModel) -> list[str]:
    """Return the models that a service runs, as readable text."""
    target = model.target
    return [
        f"target    {target.name} ({target.dtype} on {target.device})",
        f"tokens    {target.vocab_size} in the vocabulary, {model.context_length} in the context",
        f"drafters  {', '.join(model.drafters) or 'none: plain decoding'}",
    ]
