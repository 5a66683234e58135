"""Prompts: encoded as the tokenizer does, refused early where too long, never blocking the event loop."""

import asyncio
import threading
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.models import WordLevel

from coordinator.chat import ChatTemplate
from coordinator.prompts import INLINE_BYTES, Prompts, max_token_bytes
from specdec.channel import MAX_PROMPT_BYTES
from specdec.errors import InvalidArgumentError, OverloadedError
from specdec.exact.prefix import chain
from specdec.types import ModelInfo
from specdec.v1 import generation_pb2 as pb

SENTENCE = "def main(argv):\n    return [word.strip() for word in argv if len(word) > 3]\n"
CONTEXT = 4096
CHATTY = ChatTemplate("{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}", {})


def byte_level(special: str = "<end>") -> Tokenizer:
    """A byte-level BPE as most models have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=alphabet, special_tokens=[special], show_progress=False
    )
    tokenizer.train_from_iterator([SENTENCE], trainer)
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return byte_level()


def model_of(tokenizer: Tokenizer, context_length: int = CONTEXT) -> ModelInfo:
    return ModelInfo("model", vocab_size=tokenizer.get_vocab_size(), context_length=context_length)


def text(content: str) -> pb.GenerateRequest:
    return pb.GenerateRequest(text=content)


@pytest.mark.parametrize("repeats", [1, 30, 100])
async def test_tokens_and_digest_are_the_whole_texts(tokenizer: Tokenizer, repeats: int) -> None:
    """Inline, on a thread, and counted first."""
    content = SENTENCE * repeats
    encoded = await Prompts(tokenizer, None).encode(text(content), model_of(tokenizer))
    assert list(encoded.tokens) == tokenizer.encode(content).ids
    assert encoded.digest == chain(b"", encoded.tokens)


async def test_the_longest_prompt_that_fits_is_taken(tokenizer: Tokenizer) -> None:
    content = SENTENCE * 2000
    num_tokens = len(tokenizer.encode(content).ids)
    prompts = Prompts(tokenizer, None)
    fitting = await prompts.encode(text(content), model_of(tokenizer, num_tokens + 1))
    assert len(fitting.tokens) == num_tokens
    with pytest.raises(InvalidArgumentError, match=f"has {num_tokens} tokens"):
        await prompts.encode(text(content), model_of(tokenizer, num_tokens))


@pytest.mark.parametrize("length", [50_000, 1_000_000, 7 << 20])
async def test_a_far_too_long_text_is_refused_early(tokenizer: Tokenizer, length: int) -> None:
    unlimited = Prompts(Tokenizer(WordLevel({"t0": 0}, unk_token="t0")), None)
    unlimited.tokenizer = tokenizer  # counted, not bounded by its bytes
    for prompts in (Prompts(tokenizer, None), unlimited):
        with pytest.raises(InvalidArgumentError, match=r"the maximum is|has (at least )?\d+ tokens"):
            await prompts.encode(text("a b\n" * (length // 4)), model_of(tokenizer, 1024))


async def test_no_prompt_may_pass_the_limit_in_bytes(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidArgumentError, match=f"maximum is {MAX_PROMPT_BYTES}"):
        await Prompts(tokenizer, None).encode(text("é" * MAX_PROMPT_BYTES), model_of(tokenizer, 1 << 30))


def test_token_bytes_are_bounded_for_byte_level_tokenizers(tokenizer: Tokenizer) -> None:
    assert max_token_bytes(tokenizer) < 100
    assert max_token_bytes(byte_level(special="x" * 200)) == 200
    assert max_token_bytes(Tokenizer(WordLevel({"t0": 0}, unk_token="t0"))) == MAX_PROMPT_BYTES


class Held:
    """A tokenizer whose encoding waits until the test lets it go."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.go = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode_batch_fast(self, *args: Any, **options: Any) -> Any:
        self.go.wait()
        return self._tokenizer.encode_batch_fast(*args, **options)


async def test_long_prompts_beyond_the_budget_are_refused(tokenizer: Tokenizer) -> None:
    """The event loop runs while they are encoded, and the budget is free again after them."""
    held: Any = Held(tokenizer)
    content = text("x " * INLINE_BYTES)
    prompts = Prompts(held, None, max_bytes_in_flight=3 * len(content.text))
    waiting = [asyncio.create_task(prompts.encode(content, model_of(tokenizer, 1 << 20))) for _ in range(3)]
    while not prompts.bytes_in_flight:  # noqa: ASYNC110  # other tasks must have begun
        await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="being encoded already"):
        await prompts.encode(content, model_of(tokenizer, 1 << 20))
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert prompts.bytes_in_flight == 3 * len(content.text), "a client that leaves does not stop the thread"
    held.go.set()
    first, second = await asyncio.gather(*waiting[1:])
    assert first == second
    while prompts.bytes_in_flight:  # noqa: ASYNC110  # a thread must have ended
        await asyncio.sleep(0)


async def test_encoding_a_prompt_leaves_the_loop_free(tokenizer: Tokenizer) -> None:
    """`Tokenizer.encode` would hold the interpreter's lock for all of it."""
    content = text("some words " * 100_000)
    prompts = Prompts(tokenizer, None)
    encoding = asyncio.create_task(prompts.encode(content, model_of(tokenizer, 1 << 20)))
    num_turns = 0
    while not encoding.done():
        await asyncio.sleep(0)
        num_turns += 1
    assert num_turns > 1000
    assert len((await encoding).tokens) > 100_000


@pytest.mark.parametrize(
    ("chat", "words"),
    [
        (pb.ChatPrompt(), "give 1 to"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user")] * 5000), "5000 messages"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="u" * 100_000)]), "role of 100000 characters"),
        (pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x" * MAX_PROMPT_BYTES)]), "maximum is"),
    ],
)
async def test_chats_have_limits(tokenizer: Tokenizer, chat: pb.ChatPrompt, words: str) -> None:
    with pytest.raises(InvalidArgumentError, match=words):
        await Prompts(tokenizer, CHATTY).encode(pb.GenerateRequest(chat=chat), model_of(tokenizer))


async def test_a_chat_is_rendered_and_encoded(tokenizer: Tokenizer) -> None:
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="main")])
    encoded = await Prompts(tokenizer, CHATTY).encode(pb.GenerateRequest(chat=chat), model_of(tokenizer))
    assert list(encoded.tokens) == tokenizer.encode("user: main\n").ids


async def test_too_many_token_ids_are_refused(tokenizer: Tokenizer) -> None:
    ids = pb.TokenSequence(ids=[2**31] * 100_000)
    with pytest.raises(InvalidArgumentError, match="has 100000 tokens"):
        await Prompts(tokenizer, None).encode(pb.GenerateRequest(tokens=ids), model_of(tokenizer))
