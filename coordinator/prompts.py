"""Prompts to tokens: no prompt may stall other sessions, or take more memory than its context justifies.

Short prompts are encoded at once. Long ones go to a few threads, within a budget of bytes; a text that is far longer
than the context is counted piece by piece, and refused as soon as it is known to be too long.
"""

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from tokenizers import Tokenizer

from coordinator.chat import ChatTemplate
from specdec import messages
from specdec.channel import MAX_PROMPT_BYTES
from specdec.errors import InvalidArgumentError, OverloadedError
from specdec.exact.prefix import chain
from specdec.types import ModelInfo
from specdec.v1 import generation_pb2

MAX_MESSAGES = 4096
MAX_ROLE_CHARACTERS = 64
INLINE_BYTES = 2048  # encoded in about a millisecond: too short for a thread to pay off
MAX_BYTES_IN_FLIGHT = 16 << 20  # of long prompts, waiting ones included
NUM_THREADS = 2
LARGE_BYTES = (
    256 << 10
)  # of these one is encoded at a time: it takes up to 90 bytes a character, and nobody waits behind
# a text of more characters a token than this is counted before it is encoded: an encoding takes 200 bytes a character
MAX_CHARACTERS_PER_TOKEN = 4
# no text that somebody would write has fewer tokens; one that long is refused, as encoding it may take a gigabyte
MAX_TEXT_CHARACTERS_PER_TOKEN = 16
PIECE_CHARACTERS = 1 << 16
PIECE_SLACK_TOKENS = 16  # that cutting a text can add
DIGEST_PIECE_TOKENS = 512  # after so many tokens the event loop may run
TOKEN_BYTES = 4

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt's tokens and the hash chain over them."""

    tokens: tuple[int, ...]
    digest: bytes


class Prompts:
    """Turns prompts into tokens of the target."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        max_bytes_in_flight: int = MAX_BYTES_IN_FLIGHT,
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_template = chat_template
        self._max_token_bytes = max_token_bytes(tokenizer)
        self._max_bytes_in_flight = max_bytes_in_flight
        self.bytes_in_flight = 0  # of long prompts, waiting ones included
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="prompt")
        self._large_thread = ThreadPoolExecutor(1, thread_name_prefix="large prompt")

    def close(self) -> None:
        """Drop the work that waits for a thread."""
        for threads in (self._threads, self._large_thread):
            threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, request: generation_pb2.GenerateRequest, model: ModelInfo) -> EncodedPrompt:
        """Return the prompt's tokens.

        Raises InvalidArgumentError if they do not fit, OverloadedError if many long prompts wait.
        """
        kind = request.WhichOneof("prompt")
        if kind == "tokens":
            self._check_tokens(request.tokens.ids, model)
            size = TOKEN_BYTES * len(request.tokens.ids)
            return await self._run(size, lambda: _with_digest(request.tokens.ids))
        if kind == "text":
            text = request.text  # a copy each time
            self._check_size("text", text, model)
            return await self._run(len(text.encode()), lambda: self._encoded(text, model, special=True))
        if kind == "chat":
            size = _chat_size(request.chat)
            self._check_contents(request.chat, model)
            return await self._run(size, lambda: self._encoded_chat(request.chat, model))
        raise InvalidArgumentError({"prompt": "is missing; set one of text, tokens, chat"})

    def _check_tokens(self, tokens: Sequence[int], model: ModelInfo) -> None:
        if not tokens:
            raise InvalidArgumentError({"tokens": "is empty; give at least one token to continue"})
        check_length(len(tokens), model)
        messages.check_tokens(tokens, model.vocab_size, "tokens.ids")

    def _check_size(self, field: str, text: str, model: ModelInfo) -> None:
        """Raise InvalidArgumentError for a text that no tokens of a context can hold, or that has too few for it."""
        self._check_characters(field, len(text), model)
        num_bytes = len(text.encode())
        maximum = min(MAX_PROMPT_BYTES, self._max_token_bytes * model.context_length)
        if num_bytes > maximum:
            problem = f"has {num_bytes} bytes; the maximum is {maximum}"
            raise InvalidArgumentError({field: f"{problem} (the model's context holds {model.context_length} tokens)"})

    def _check_contents(self, chat: generation_pb2.ChatPrompt, model: ModelInfo) -> None:
        """Raise InvalidArgumentError for messages that no rendering can make short enough."""
        num_characters = sum(len(message.content) for message in chat.messages)
        self._check_characters("chat", num_characters, model)

    def _check_characters(self, field: str, num_characters: int, model: ModelInfo) -> None:
        most = MAX_TEXT_CHARACTERS_PER_TOKEN * model.context_length
        if num_characters > max(most, INLINE_BYTES):
            problem = f"has {num_characters} characters; the maximum is {most}, {MAX_TEXT_CHARACTERS_PER_TOKEN}"
            raise InvalidArgumentError({field: f"{problem} for each token of the model's context"})

    async def _run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """Return the work's result: at once if it is small, else from a thread once the budget allows it."""
        if num_bytes <= INLINE_BYTES:
            return work()
        if self.bytes_in_flight + num_bytes > self._max_bytes_in_flight:
            problem = f"{self.bytes_in_flight} bytes of long prompts are being encoded already"
            raise OverloadedError(f"{problem}; try again soon", limit="prompts")
        self.bytes_in_flight += num_bytes
        future = (self._large_thread if num_bytes > LARGE_BYTES else self._threads).submit(work)
        loop = asyncio.get_running_loop()

        def release(_: "Future[T]") -> None:
            loop.call_soon_threadsafe(self._release, num_bytes)

        # not when the caller ends: a cancelled call does not stop the thread
        future.add_done_callback(release)
        return await asyncio.wrap_future(future)

    def _release(self, num_bytes: int) -> None:
        self.bytes_in_flight -= num_bytes

    def _encoded(self, text: str, model: ModelInfo, *, special: bool) -> EncodedPrompt:
        self._check_count(text, model)
        # `encode` would hold the GIL until it is done
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=special) if text else (None,)
        if encoding is None or not encoding.ids:
            raise InvalidArgumentError({"text": "is empty; give at least one token to continue"})
        check_length(len(encoding.ids), model)
        return _with_digest(encoding.ids)

    def _encoded_chat(self, chat: generation_pb2.ChatPrompt, model: ModelInfo) -> EncodedPrompt:
        text = self._render(chat)
        self._check_size("chat", text, model)
        return self._encoded(text, model, special=False)

    def _check_count(self, text: str, model: ModelInfo) -> None:
        """Raise InvalidArgumentError for a text that is known to be too long without encoding all of it."""
        if len(text) <= MAX_CHARACTERS_PER_TOKEN * model.context_length:
            return
        num_tokens = 0
        for begin in range(0, len(text), PIECE_CHARACTERS):
            (piece,) = self.tokenizer.encode_batch_fast([text[begin : begin + PIECE_CHARACTERS]])
            num_tokens += max(0, len(piece.ids) - PIECE_SLACK_TOKENS)
            check_length(num_tokens, model, at_least=True)

    def _render(self, chat: generation_pb2.ChatPrompt) -> str:
        if self._chat_template is None:
            raise InvalidArgumentError(
                {"chat": "cannot be rendered: this model has no chat template; send text or tokens"}
            )
        return self._chat_template.render([(message.role, message.content) for message in chat.messages])


def check_length(num_tokens: int, model: ModelInfo, at_least: bool = False) -> None:
    """Raise InvalidArgumentError for a prompt that leaves no room in the context."""
    if num_tokens >= model.context_length:
        count = f"at least {num_tokens}" if at_least else str(num_tokens)
        problem = f"has {count} tokens; the model's context holds {model.context_length}, completion included"
        raise InvalidArgumentError({"prompt": problem})


def max_token_bytes(tokenizer: Tokenizer) -> int:
    """Return the maximum number of a text's bytes that one token can encode; a large number if unlimited.

    It is limited where every byte has a token and nothing is left out: byte-level BPE without a normalizer.
    """
    parts = json.loads(tokenizer.to_str())
    is_byte_level = parts["model"]["type"] == "BPE" and '"ByteLevel"' in json.dumps(parts["pre_tokenizer"])
    if not is_byte_level or parts["normalizer"]:
        return MAX_PROMPT_BYTES
    return max(len(token.encode()) for token in tokenizer.get_vocab(with_added_tokens=True))


def _chat_size(chat: generation_pb2.ChatPrompt) -> int:
    """Return the bytes of all messages. Raises InvalidArgumentError for too many, too long, or none."""
    if not 1 <= len(chat.messages) <= MAX_MESSAGES:
        raise InvalidArgumentError({"chat.messages": f"has {len(chat.messages)} messages; give 1 to {MAX_MESSAGES}"})
    longest = max(len(message.role) for message in chat.messages)
    if longest > MAX_ROLE_CHARACTERS:
        problem = f"has a role of {longest} characters; the maximum is {MAX_ROLE_CHARACTERS}"
        raise InvalidArgumentError({"chat.messages": problem})
    size = chat.ByteSize()
    if size > MAX_PROMPT_BYTES:
        raise InvalidArgumentError({"chat": f"has {size} bytes; the maximum is {MAX_PROMPT_BYTES}"})
    return size


def _with_digest(tokens: Sequence[int]) -> EncodedPrompt:
    """Return the prompt with its hash chain, computed in pieces in Python, so that other threads can run."""
    digest = b""
    for begin in range(0, len(tokens), DIGEST_PIECE_TOKENS):
        digest = chain(digest, tokens[begin : begin + DIGEST_PIECE_TOKENS])
        time.sleep(0)
    return EncodedPrompt(tuple(tokens), digest)
