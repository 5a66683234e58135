"""Choices in OpenAI's two forms: pieces of a stream, and the whole of which the pieces are parts.

Both forms turn a chunk into the same parts: text, log probabilities, and the extension with each token's origin.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Protocol

from gateway.problems import SERVER, HttpProblem
from gateway.token_texts import TokenTexts
from specdec.completion import Chunk, Finish
from specdec.types import FinishReason

Content = dict[str, Any]

MIN_LOGPROB = -9999.0  # JSON has no infinity; OpenAI gives this for what cannot come
FINISH_REASONS = {FinishReason.EOS: "stop", FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class Form(Protocol):
    """How one of the two calls writes a choice."""

    id_prefix: str
    whole_object: str
    piece_object: str

    def opening(self) -> Content | None:
        """Return what a stream of a choice begins with."""

    def piece(self, text: str) -> Content:
        """Return a part of a stream with a text."""

    def whole(self, text: str) -> Content:
        """Return the whole."""

    def logprobs(self, chunk: Chunk, texts: TokenTexts, begin: int) -> Mapping[str, list[Any]]:
        """Return a chunk's log probabilities; its text begins at the character `begin`."""


class ChatForm:
    """The form of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    whole_object, piece_object = "chat.completion", "chat.completion.chunk"

    def opening(self) -> Content | None:
        """Return the role."""
        return {"delta": {"role": "assistant", "content": ""}}

    def piece(self, text: str) -> Content:
        """Return a delta."""
        return {"delta": {"content": text} if text else {}}

    def whole(self, text: str) -> Content:
        """Return the message."""
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, chunk: Chunk, texts: TokenTexts, begin: int) -> Mapping[str, list[Any]]:
        """Return one entry a token."""
        entries = [
            _named(token, entry.logprob, texts) | {"top_logprobs": [_named(*top, texts) for top in entry.top]}
            for token, entry in zip(chunk.tokens, chunk.logprobs, strict=True)
        ]
        return {"content": entries}


class CompletionForm:
    """The form of /v1/completions."""

    id_prefix = "cmpl-"
    whole_object = piece_object = "text_completion"

    def opening(self) -> Content | None:
        """Return nothing: the text begins at once."""
        return None

    def piece(self, text: str) -> Content:
        """Return the text."""
        return {"text": text}

    def whole(self, text: str) -> Content:
        """Return the text."""
        return {"text": text}

    def logprobs(self, chunk: Chunk, texts: TokenTexts, begin: int) -> Mapping[str, list[Any]]:
        """Return four lists with an entry a token; offsets are characters of the completion's text."""
        return {
            "tokens": [texts.text(token) for token in chunk.tokens],
            "token_logprobs": [_finite(entry.logprob) for entry in chunk.logprobs],
            # of two tokens with one text the more probable one is last, and stays
            "top_logprobs": [
                {texts.text(token): _finite(logprob) for token, logprob in reversed(entry.top)}
                for entry in chunk.logprobs
            ],
            "text_offset": [begin + place for place in (0, *chunk.text_ends)[: len(chunk.tokens)]],
        }


def _named(token: int, logprob: float, texts: TokenTexts) -> Content:
    return {"token": texts.text(token), "bytes": list(texts.encoded(token)), "logprob": _finite(logprob)}


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


@dataclass(frozen=True, slots=True)
class Part:
    """What one chunk adds to a choice."""

    text: str
    logprobs: Mapping[str, list[Any]] | None
    tokens: list[Content] | None  # of the extension
    rounds: list[Content]  # those that end in it
    session_id: str
    finish: Finish | None


class Choice:
    """One choice as it grows: gives the pieces of its stream, and remembers what its whole needs."""

    def __init__(self, index: int, form: Form, texts: TokenTexts | None, with_details: bool) -> None:
        """`texts` None: without log probabilities."""
        self._index, self._form, self._texts, self._with_details = index, form, texts, with_details
        self._parts: list[Part] = []
        self._num_characters = 0
        self.finish: Finish | None = None

    def opening(self) -> Content | None:
        """Return the first piece of the stream, None where the form has none."""
        opening = self._form.opening()
        return None if opening is None else self._written(opening, None, None)

    def take(self, chunk: Chunk) -> Part:
        """Return what a chunk adds. Raises HttpProblem for a session that somebody has ended."""
        if chunk.finish and chunk.finish.reason is FinishReason.CANCELLED:
            problem = f"the session {chunk.session_id} was cancelled; ask again"
            raise HttpProblem(409, problem, kind=SERVER, code="session_cancelled")
        logprobs = self._form.logprobs(chunk, self._texts, self._num_characters) if self._texts else None
        tokens = _tokens(chunk) if self._with_details else None
        self._num_characters += len(chunk.text)
        self.finish = chunk.finish
        return Part(chunk.text, logprobs, tokens, list(map(asdict, chunk.rounds)), chunk.session_id, chunk.finish)

    def keep(self, part: Part) -> None:
        """Remember a part for the whole."""
        self._parts.append(part)

    def pieces(self, part: Part) -> list[Content]:
        """Return the pieces of the stream that a part makes: what it says, and how the choice ended."""
        pieces = []
        if part.text or part.tokens or (part.logprobs and any(part.logprobs.values())):
            pieces.append(self._written(self._form.piece(part.text), None, part.logprobs, self._details(part)))
        if part.finish:
            details = self._ending(part.session_id, part.finish)
            pieces.append(self._written(self._form.piece(""), part.finish, None, details))
        return pieces

    def whole(self) -> Content:
        """Return the choice as a whole. It has finished."""
        assert self.finish is not None
        details = self._ending(self._parts[-1].session_id, self.finish)
        if details is not None:
            details["tokens"] = [token for part in self._parts for token in part.tokens or ()]
            details["rounds"] = [each for part in self._parts for each in part.rounds]
        logprobs = _joined([part.logprobs for part in self._parts if part.logprobs is not None])
        text = "".join(part.text for part in self._parts)
        return self._written(self._form.whole(text), self.finish, logprobs if self._texts else None, details)

    def _written(
        self,
        content: Content,
        finish: Finish | None,
        logprobs: Mapping[str, list[Any]] | None,
        details: Content | None = None,
    ) -> Content:
        reason = FINISH_REASONS[finish.reason] if finish else None
        choice = {"index": self._index, **content, "logprobs": logprobs, "finish_reason": reason}
        return choice if details is None else choice | {"specdec": details}

    def _details(self, part: Part) -> Content | None:
        if not self._with_details:
            return None
        return {"session_id": part.session_id, "tokens": part.tokens, "rounds": part.rounds}

    def _ending(self, session_id: str, finish: Finish) -> Content | None:
        """Return how the choice ended in specdec's own words."""
        if not self._with_details:
            return None
        statistics = finish.statistics
        rates = {name: getattr(statistics, name) for name in ("acceptance_rate", "tokens_per_round", "tokens_per_s")}
        return {
            "session_id": session_id,
            "finish_reason": finish.reason.name.lower(),
            "statistics": asdict(statistics) | rates,
        }


def _tokens(chunk: Chunk) -> list[Content]:
    """Return each token with its part of the text and its origin; the last one has what ends became certain with it."""
    ends = (*chunk.text_ends[:-1], len(chunk.text)) if chunk.tokens else ()
    return [
        {"id": token, "text": chunk.text[begin:end], "origin": origin.name.lower()}
        for token, origin, (begin, end) in zip(chunk.tokens, chunk.origins, pairwise((0, *ends)), strict=True)
    ]


def _joined(parts: Sequence[Mapping[str, list[Any]]]) -> Mapping[str, list[Any]]:
    """Return lists end to end."""
    names = parts[0] if parts else ()
    return {name: [entry for part in parts for entry in part[name]] for name in names}
