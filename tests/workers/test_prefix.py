"""What a worker holds is proved by the digest of every round, and two sessions of one id share nothing."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from draft_service.drafters.ngram import NgramDrafter
from draft_service.session_texts import CHUNK_TOKENS
from specdec.drafting.request import DraftRequest
from specdec.errors import InvalidArgumentError
from specdec.exact import prefix
from specdec.exact.prefix import MARK_TOKENS, PrefixChain, chain
from specdec.serving.session_stream import MAX_INCARNATION_CHARACTERS, WorkerSession, check_open, open_session
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, target_pb2
from tests.support.worker_streams import (
    PLAIN,
    PROMPT,
    DraftStream,
    TargetStream,
    connected_draft,
    connected_target,
    propose_request,
    score_request,
)

in_module_loop = pytest.mark.asyncio(loop_scope="module")
OTHER = [*PROMPT[:2], PROMPT[2] + 1, *PROMPT[3:]]
MORE = [21, 22]


# ---- the chain

texts = st.lists(st.integers(0, 2**32 - 1), max_size=3 * MARK_TOKENS)


@given(st.lists(st.tuples(st.integers(0, 6 * MARK_TOKENS), texts, st.integers(0, 9 * MARK_TOKENS)), max_size=6))
def test_digests_are_those_of_the_text(edits: list[tuple[int, list[int], int]]) -> None:
    """After any truncations and appends, at any length."""
    held, tokens = PrefixChain(), list[int]()
    for kept, appended, asked in edits:
        held.truncate(min(kept, len(tokens)))
        tokens = [*tokens[:kept], *appended]
        for length in (min(asked, len(tokens)), len(tokens)):
            assert held.digest(tokens, length) == chain(b"", tokens[:length])


def test_each_token_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_hashed = 0

    def counting(digest: bytes, tokens: Sequence[int]) -> bytes:
        nonlocal num_hashed
        num_hashed += len(tokens)
        return chain(digest, tokens)

    monkeypatch.setattr(prefix, "chain", counting)
    held, tokens = PrefixChain(), list(range(50_000))
    for length in range(0, len(tokens) + 1, 5):
        held.digest(tokens, length)
    assert num_hashed == len(tokens)


# ---- the workers


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with connected_target(model_folder) as connected:
        yield connected


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def draft(model_folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with connected_draft(model_folder, drafters="model,ngram,suffix,recycle") as connected:
        yield connected


async def scored(stream: TargetStream, start: int, tokens: Sequence[int], digest: bytes) -> target_pb2.ScoreResponse:
    return await stream.ask(score_request(start=start, tokens=tokens, prefix_digest=digest))


async def proposed(stream: DraftStream, start: int, tokens: Sequence[int], digest: bytes) -> draft_pb2.ProposeResponse:
    return await stream.ask(propose_request(start=start, tokens=tokens, num_draft_tokens=2, prefix_digest=digest))


@in_module_loop
async def test_target_with_other_tokens_holds_nothing(target: grpc.aio.Channel, names: Iterator[str]) -> None:
    stream, alone = TargetStream(target, next(names)), TargetStream(target, next(names))
    await stream.score(0, OTHER)
    assert (await scored(stream, len(PROMPT), MORE, chain(b"", PROMPT))).cached_len == 0
    answer = await stream.score(0, [*PROMPT, *MORE])
    assert answer.tail_tokens == (await alone.score(0, [*PROMPT, *MORE])).tail_tokens
    assert answer.cached_len == len(PROMPT) + len(MORE)


@pytest.mark.parametrize("drafter", ["model", "ngram", "suffix", "recycle"])
@in_module_loop
async def test_drafter_with_other_tokens_holds_nothing(
    drafter: str, draft: grpc.aio.Channel, names: Iterator[str]
) -> None:
    stream, alone = (DraftStream(draft, next(names), drafter=drafter) for _ in range(2))
    await stream.propose(0, OTHER, 2)
    refused = await proposed(stream, len(PROMPT), MORE, chain(b"", PROMPT))
    assert (refused.cached_len, len(refused.tokens)) == (0, 0)
    answer = await stream.propose(0, [*PROMPT, *MORE], 2)
    assert answer.tokens == (await alone.propose(0, [*PROMPT, *MORE], 2)).tokens
    assert (await stream.propose(len(PROMPT), MORE, 2)).cached_len >= len(PROMPT), "the same text is proved"


@in_module_loop
async def test_round_without_a_digest_is_not_trusted(
    target: grpc.aio.Channel, draft: grpc.aio.Channel, names: Iterator[str]
) -> None:
    scoring, drafting = TargetStream(target, next(names)), DraftStream(draft, next(names))
    await scoring.score(0, PROMPT)
    await drafting.propose(0, PROMPT, 2)
    scoring.text = drafting.text = []  # as a coordinator that sends none
    assert (await scoring.score(len(PROMPT), MORE)).cached_len == 0
    assert (await drafting.propose(len(PROMPT), MORE, 2)).cached_len == 0


async def test_long_texts_are_hashed_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round does not stop the event loop for the whole text that its predecessor sent."""
    longest = 0

    def noting(digest: bytes, tokens: Sequence[int]) -> bytes:
        nonlocal longest
        longest = max(longest, len(tokens))
        return chain(digest, tokens)

    drafter, session = NgramDrafter(1, 2), WorkerSession("s", 1, SamplingParams(seed=1), 0)
    tokens = list(range(5 * CHUNK_TOKENS + 7))
    await drafter.propose(session, DraftRequest(0, tokens, 1), match=False)
    monkeypatch.setattr(prefix, "chain", noting)
    request = DraftRequest(len(tokens), [1], 1, prefix_digest=chain(b"", tokens))
    assert (await drafter.propose(session, request, match=False)).cached_len == len(tokens) + 1
    assert 0 < longest <= MARK_TOKENS


# ---- incarnations


@in_module_loop
async def test_sessions_of_one_id_share_nothing(target: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Neither cached tokens nor epochs: two stores may have given the same id."""
    name = next(names)
    first = TargetStream(target, name, epoch=7, incarnation="first")
    second = TargetStream(target, name, epoch=1, incarnation="second")
    await first.score(0, PROMPT)
    second.text = list(PROMPT)
    assert (await second.score(len(PROMPT), MORE)).cached_len == 0
    assert (await first.score(len(PROMPT), MORE)).cached_len == len(PROMPT) + len(MORE)
    await second.close()
    assert (await first.score(len(first.text), [23])).cached_len == len(PROMPT) + len(MORE) + 1


def test_long_incarnation_is_refused() -> None:
    check_open(open_session("s", 1, PLAIN, 1, "a" * MAX_INCARNATION_CHARACTERS), None)
    with pytest.raises(InvalidArgumentError, match="incarnation"):
        check_open(open_session("s", 1, PLAIN, 1, "a" * (MAX_INCARNATION_CHARACTERS + 1)), None)
