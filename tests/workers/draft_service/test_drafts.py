"""A draft worker over gRPC: what a model drafts, whatever its cache holds, and when it stops."""

import asyncio
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from draft_service.model.forecasts import Forecast
from draft_service.model.tasks import ProposeTask
from specdec.drafting.request import DraftRequest
from specdec.engine import ContiguousPool, KvCache, LayerShape
from specdec.exact.race import Race, likely_winners
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import SamplingContext, draw, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from tests.support.architectures import CONTEXT_LENGTH
from tests.support.worker_streams import PLAIN, PROMPT, DraftStream
from tests.workers.conftest import NUM_TOKENS, Forwards, Reference
from tests.workers.draft_service.streams import (
    SUPPORT_MASS,
    SUPPORT_MAX,
    assert_same,
    decoded,
    expected,
    in_module_loop,
)

# ---- drafting with a model


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        SamplingParams(seed=1, temperature=0),
        SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(seed=3, frequency_penalty=2.0, presence_penalty=1.0, repetition_penalty=1.2),
        SamplingParams(seed=4, temperature=0, frequency_penalty=5.0),
    ],
    ids=["plain", "greedy", "truncated", "penalties", "greedy penalties"],
)
@in_module_loop
async def test_drafts_equal_a_plain_loop(
    sampling: SamplingParams, channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Over rounds with rejections, full acceptance and rollbacks; each round from what the worker should hold."""
    stream = DraftStream(channel, next(names), sampling)
    text: list[int] = []
    for start, tokens in ((0, PROMPT), (6, [11]), (7, [12, 13]), (4, [1, 2]), (6, list(range(50, 80)))):
        text = [*text[:start], *tokens]
        answer = await stream.propose(start, tokens, 5)
        assert_same(decoded(answer, 5), expected(reference, text, 5, sampling))
        assert answer.cached_len == len(text) + 4, "the last draft token is not fed"


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@in_module_loop
async def test_in_a_matched_session_drafts_are_who_most_likely_wins(
    temperature: float, channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Each by the race of its place, and chosen: no distribution is sent. At temperature 0 nothing is raced for."""
    sampling = SamplingParams(seed=5, temperature=temperature)
    stream, drawn = (DraftStream(channel, next(names), sampling, is_matched=each) for each in (True, False))
    proposal = decoded(await stream.propose(0, PROMPT, 5), 5)
    tokens = list[int]()
    for _ in range(5):
        dense = next_token_distributions(reference([*PROMPT, *tokens])[-1:], [SamplingContext(sampling)], NUM_TOKENS)
        (cut,) = sparse_distributions(dense, SUPPORT_MASS, SUPPORT_MAX)
        if temperature:
            races = [Race(5, len(PROMPT) + len(tokens))]
            (winners,), _ = likely_winners(np.array([cut.probs]), races, 1, np.array(cut.token_ids))
            tokens += winners
        else:
            tokens.append(cut.token_ids[0])
    assert proposal == Proposal(tuple(tokens), tuple(map(one_hot, tokens)))
    unmatched = decoded(await drawn.propose(0, PROMPT, 5), 5)
    assert unmatched.is_chosen == (temperature == 0)
    assert (unmatched.tokens == proposal.tokens) == (temperature == 0)


@in_module_loop
async def test_full_acceptance_feeds_the_last_draft_token(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    stream, text = DraftStream(channel, next(names)), list(PROMPT)
    held = 0
    for _ in range(4):
        stream.text = list(text)
        answer = await stream.propose(held, text[held:], 3)
        proposal = decoded(answer, 3)
        assert_same(proposal, expected(reference, text, 3))
        text += [*proposal.tokens, 17]
        held = min(answer.cached_len, len(text) - 1)


@in_module_loop
async def test_k_drafts_take_k_forwards(channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards) -> None:
    stream = DraftStream(channel, next(names))
    await stream.propose(0, PROMPT, 5)
    assert forwards.sizes == [6, 1, 1, 1, 1]
    await stream.propose(6, [1, 2], 1)
    assert forwards.sizes[5:] == [2]
    answer = await stream.propose(8, [3], 0)
    assert forwards.sizes[6:] == [1], "K = 0 brings the cache up to date"
    assert (answer.cached_len, list(answer.tokens), answer.distributions.sizes) == (9, [], b"")
    answer = await stream.propose(9, [], 0)
    assert (forwards.sizes[7:], answer.cached_len) == ([], 9)


@in_module_loop
async def test_no_new_tokens_feeds_the_last_again(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    stream = DraftStream(channel, next(names))
    await stream.propose(0, PROMPT, 0)
    answer = await stream.propose(6, [], 4)
    assert_same(decoded(answer, 4), expected(reference, PROMPT, 4))
    assert forwards.sizes == [6, 1, 1, 1, 1]


@in_module_loop
async def test_tokens_are_drawn_from_the_shipped_distributions(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Bit for bit: the decoded distribution and the same uniform give the token, for every draft of many rounds."""
    stream, text = DraftStream(channel, next(names), SamplingParams(seed=99, temperature=1.5)), list(PROMPT)
    for _ in range(10):
        proposal = decoded(await stream.propose(0, text, 8), 8)
        for index, (token, distribution) in enumerate(zip(proposal.tokens, proposal.distributions, strict=True)):
            assert draw(distribution, uniform(99, Key(len(text), index, Purpose.DRAFT))) == token
            assert len(distribution.token_ids) <= SUPPORT_MAX
        text += proposal.tokens[:3]


@in_module_loop
async def test_repeated_messages_get_bitwise_equal_answers(
    channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    stream = DraftStream(channel, next(names))
    for start, tokens in ((0, PROMPT), (6, [3, 4])):
        answers = [await stream.propose(start, tokens, 4) for _ in range(3)]
        assert (
            len({(bytes(answer.distributions.probs), tuple(answer.tokens), answer.cached_len) for answer in answers})
            == 1
        )
    assert forwards.sizes == 3 * [6, 1, 1, 1] + 3 * [2, 1, 1, 1], (
        "the same forwards: another shape would change the last bits"
    )


@in_module_loop
async def test_batched_sessions_draft_as_they_do_alone(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    params = [SamplingParams(seed=seed, temperature=(0, 0.8, 1)[seed % 3]) for seed in range(9)]
    counts = [1 + seed % 4 for seed in range(9)]
    texts = [[(5 * place + seed) % 290 for place in range(6 + seed)] for seed in range(9)]
    answers = await asyncio.gather(
        *(
            DraftStream(channel, next(names), sampling).propose(0, text, count)
            for sampling, text, count in zip(params, texts, counts, strict=True)
        )
    )
    for answer, sampling, text, count in zip(answers, params, texts, counts, strict=True):
        assert_same(decoded(answer, count), expected(reference, text, count, sampling))


@in_module_loop
async def test_drafts_end_with_the_context(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    text = [token % 290 for token in range(CONTEXT_LENGTH - 2)]
    answer = await DraftStream(channel, next(names)).propose(0, text, 8)
    assert len(answer.tokens) == 3, "the last one is never fed"
    assert answer.cached_len == CONTEXT_LENGTH
    answer = await DraftStream(channel, next(names)).propose(0, [*text, 1, 2], 8)
    assert len(answer.tokens) == 1


@in_module_loop
async def test_takeovers_reuse_the_cache_until_close(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """A new stream computes only what the cache does not hold; a closed session's cache is gone."""
    name = next(names)
    first = DraftStream(channel, name)
    drafted = decoded(await first.propose(0, [*PROMPT, *range(60, 90)], 3), 3).tokens
    await first.abandon()
    forwards.sizes.clear()
    text = [*PROMPT, *range(60, 90), drafted[0], 299]
    second = DraftStream(channel, name, epoch=2)
    assert_same(decoded(await second.propose(0, text, 3), 3), expected(reference, text, 3))
    assert forwards.sizes == [1, 1, 1]
    await second.close()
    assert (await DraftStream(channel, name, epoch=3).propose(3, [4], 3)).cached_len == 0


def test_a_restarted_task_discards_its_draft() -> None:
    """Its sequence was evicted in mid-draft: the engine prepares it again."""
    cache = KvCache(ContiguousPool([LayerShape(1, 1, 1)], num_bytes=1 << 12, block_tokens=8))
    task = ProposeTask(WorkerSession("s", 1, PLAIN, 2), DraftRequest(0, [1, 2], 3), match=False)
    task.sequence = cache.open("s")
    task.prepare()
    task.sequence.reserve(2)
    task.sequence.append([1, 2])
    task.draw_from(SparseDistribution((5,), (1.0,)), Forecast(1.0, (), 0.0))
    assert (task.drawn, task.tokens) == ([5], [5])
    task.sequence.close()
    task.tokens = [1, 2]
    task.prepare()
    assert (task.drawn, task.distributions, task.tokens) == ([], [], [1, 2])
