"""How the `specdec` command looks: text coloured by origin, one line of statistics, logs with the service's name."""

import json
import sys
from collections.abc import Mapping
from dataclasses import asdict
from enum import Enum
from typing import Any, TextIO

import typer

from specdec.client import Chunk, Finish, ServedModel, Session, TokenOrigin
from specdec.serving.child import LogLine, format_event

COLOURS = {TokenOrigin.ACCEPTED: "green", TokenOrigin.RECOVERED: "yellow", TokenOrigin.BONUS: "cyan"}
LOG_COLOURS = {"coordinator": "cyan", "target": "magenta", "draft": "green"}
NAME_WIDTH = len("target worker")


def is_coloured(stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Say whether colours are welcome (no-color.org)."""
    return stream.isatty() and not environment.get("NO_COLOR")


def coloured(chunk: Chunk) -> str:
    """Return the chunk's text, each token's part in the colour of its origin."""
    pieces = [
        typer.style(piece, fg=COLOURS[origin]) for piece, origin in zip(chunk.pieces, chunk.origins, strict=False)
    ]
    return "".join([*pieces, chunk.pieces[-1]])


def chunk_as_json(chunk: Chunk) -> str:
    """Return a chunk as one line of JSON."""
    fields = asdict(chunk)
    return json.dumps({name: value for name, value in fields.items() if value not in ((), None)}, default=_plain)


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
    fields = {name: getattr(session.sampling, name) for name in session.sampling.__dataclass_fields__}
    return fields | {"logit_bias": dict(session.sampling.logit_bias)}


def statistics_line(finish: Finish) -> str:
    """Return how a session went, in one line."""
    sums = finish.statistics
    return " · ".join(
        [
            f"{finish.usage.num_completion_tokens} tokens in {sums.total_s:.2f} s ({sums.tokens_per_s:.1f} tokens/s)",
            f"{sums.num_rounds} rounds of {sums.tokens_per_round:.2f} tokens",
            f"{sums.acceptance_rate:.0%} of {sums.num_draft_tokens} draft tokens accepted",
            f"draft {sums.draft_s:.2f} s, score {sums.score_s:.2f} s, commit {sums.commit_s:.2f} s",
            f"ended by {finish.reason.name.lower()}",
        ]
    )


def session_lines(session: Session) -> list[str]:
    """Return a session for people."""
    lines = [
        f"session {session.session_id}: {session.status.name.lower()}, epoch {session.epoch}",
        f"tokens  {session.num_prompt_tokens} of the prompt, {len(session.tokens)} of the completion",
        f"digest  {session.digest.hex()}",
        f"seed    {session.sampling.seed}",
        f"text    {session.text!r}",
    ]
    return [*lines, statistics_line(session.finish)] if session.finish else lines


def model_lines(model: ServedModel) -> list[str]:
    """Return the models behind a service, for people."""
    target = model.target
    return [
        f"target    {target.name} ({target.dtype} on {target.device})",
        f"tokens    {target.vocab_size} in the vocabulary, {model.context_length} in the context",
        f"drafters  {', '.join(model.drafters) or 'none: plain decoding'}",
    ]


class LogPrinter:
    """Prints the services' logs to standard error, each line after the name of its service."""

    def __init__(self, stream: TextIO | None = None, *, is_coloured: bool = False) -> None:
        self._stream = stream or sys.stderr
        self._is_coloured = is_coloured

    def __call__(self, name: str, entry: LogLine) -> None:
        """Print one line."""
        prefix = f"{name:<{NAME_WIDTH}} |"
        text = format_event(entry) if "event" in entry else entry["text"]
        level = "" if entry.get("level") in (None, "info", "debug") else f"{entry['level']}: "
        if self._is_coloured:
            prefix = typer.style(prefix, fg=LOG_COLOURS[name.split()[0]])
            level = typer.style(level, fg="red") if level else ""
        print(f"{prefix} {level}{text}", file=self._stream, flush=True)
