"""A target worker over gRPC: its scores are the model's own, whatever its cache holds."""

import asyncio
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from specdec.v1 import target_pb2_grpc
from tests.support.architectures import CONTEXT_LENGTH
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, connected_target
from tests.workers.conftest import Forwards, Reference
from tests.workers.target_service.streams import DRAFT, SUPPORTS, assert_scores, decoded, in_module_loop, values

# ---- scores


@in_module_loop
async def test_scores_equal_transformers(channel: grpc.aio.Channel, names: Iterator[str], reference: Reference) -> None:
    stream = TargetStream(channel, next(names))
    answer = await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    distributions = reference(PROMPT + DRAFT).softmax(-1)[-4:]
    assert_scores(decoded(answer), distributions, len(PROMPT))
    assert answer.cached_len == len(PROMPT)
    assert answer.timing.forward_s > 0
    assert answer.timing.total_s >= answer.timing.forward_s
    again = await stream.score(len(PROMPT), [DRAFT[0]], DRAFT[1:], SUPPORTS[1:])
    assert again.timing.num_forward_tokens == len(DRAFT), "those of the round alone, as nobody else is here"
    assert 0 < answer.load.kv_cache_usage <= 1


@in_module_loop
async def test_plain_decoding_is_a_round_without_drafts(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    answer = await TargetStream(channel, next(names)).score(0, PROMPT)
    assert_scores(decoded(answer, []), reference(PROMPT).softmax(-1)[-1:], len(PROMPT))


@in_module_loop
async def test_greedy_distributions_are_one_hot(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    best = int(reference(PROMPT).argmax(-1)[-1])
    supports = [[best, 3], [13]]
    answer = await TargetStream(channel, next(names), SamplingParams(temperature=0, seed=1)).score(
        0, PROMPT, [3, 13], supports
    )
    first, second, last = decoded(answer, supports).positions
    assert (list(first.support_probs), first.tail_mass) == ([1.0, 0.0], 0.0)
    expected = reference([*PROMPT, 3, 13]).argmax(-1)[-2:].tolist()
    assert 13 not in expected, "the case is meant to reject"
    assert [(position.tail_mass, position.tail_token) for position in (second, last)] == [
        (1.0, token) for token in expected
    ]


@in_module_loop
async def test_penalties_see_the_history_of_each_position(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Position i counts the committed tokens and the first i draft tokens, also over several rounds."""
    sampling = SamplingParams(seed=7, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.3)
    stream = TargetStream(channel, next(names), sampling)
    await stream.score(0, PROMPT, [9, 9], [[9], [9]])
    answer = await stream.score(len(PROMPT), [20, 20], DRAFT, SUPPORTS)
    text = [*PROMPT, 20, 20, *DRAFT]
    logits = reference(text)[-4:]
    for index in range(4):
        completion = [20, 20, *DRAFT[:index]]
        seen = list({*PROMPT, *completion})
        logits[index, seen] = torch.where(logits[index, seen] > 0, logits[index, seen] / 1.3, logits[index, seen] * 1.3)
        for token in set(completion):
            logits[index, token] -= 1.5 + 0.5 * completion.count(token)
    assert_scores(decoded(answer), logits.softmax(-1), len(PROMPT) + 2)


@in_module_loop
async def test_log_probabilities_are_the_models_own(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    sampling = SamplingParams(seed=7, temperature=0.3, top_k=2, num_logprobs=3)
    answer = await TargetStream(channel, next(names), sampling).score(0, PROMPT, DRAFT, SUPPORTS)
    scores = decoded(answer)
    expected = reference(PROMPT + DRAFT).log_softmax(-1)[-4:]
    for logprobs, distribution, position, support in zip(
        scores.logprobs, expected, scores.positions, [*SUPPORTS, []], strict=True
    ):
        assert set(logprobs.by_token) == {*support, position.tail_token}
        assert all(distribution[token] == pytest.approx(value, abs=1e-4) for token, value in logprobs.by_token.items())
        best = distribution.topk(3)
        assert [token for token, _ in logprobs.top] == best.indices.tolist()
        assert [value for _, value in logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-4)


# ---- state


@in_module_loop
async def test_truncated_and_appended_text_scores_as_new(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Rejected draft tokens, deltas and prefixes: only the text matters."""
    stream = TargetStream(channel, next(names))
    await stream.score(0, PROMPT, DRAFT, SUPPORTS)
    text = PROMPT
    for start, tokens in ((len(PROMPT), [12, 77]), (3, [1, 2, 3]), (6, [4]), (0, [9]), (1, list(range(40, 90)))):
        text = [*text[:start], *tokens]
        answer = await stream.score(start, tokens, DRAFT, SUPPORTS)
        assert_scores(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
        assert answer.cached_len == len(text)


@in_module_loop
async def test_repeated_messages_get_bitwise_equal_answers(
    channel: grpc.aio.Channel, names: Iterator[str], forwards: Forwards
) -> None:
    stream = TargetStream(channel, next(names), SamplingParams(seed=3, num_logprobs=2, frequency_penalty=0.1))
    answers = [await stream.score(0, PROMPT, DRAFT, SUPPORTS) for _ in range(3)]
    assert values(answers[0]) == values(answers[1]) == values(answers[2])
    deltas = [await stream.score(6, [12, 50], DRAFT, SUPPORTS) for _ in range(3)]
    assert values(deltas[0]) == values(deltas[1]) == values(deltas[2])
    # 12 was accepted: it is cached already, each time
    assert forwards.sizes == [9, 9, 9, 4, 4, 4], "the same forward: another shape would change the last bits"


@in_module_loop
async def test_different_seeds_draw_different_tail_tokens(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    answers = [
        await TargetStream(channel, next(names), SamplingParams(seed=seed)).score(0, PROMPT) for seed in range(20)
    ]
    assert len({answer.tail_tokens for answer in answers}) > 5


@in_module_loop
async def test_an_evicted_session_reports_its_cached_length(
    model_folder: Path, names: Iterator[str], reference: Reference
) -> None:
    """A cache of one long text: a second session evicts the first, which repeats from the beginning."""
    long = [token % 290 for token in range(100)]
    async with connected_target(model_folder, kv_cache_bytes=1 << 18) as channel:
        info = (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(pb.GetTargetRequest())).model
        assert info.context_length == CONTEXT_LENGTH
        first = TargetStream(channel, next(names))
        await first.score(0, long)
        for _ in range(3):
            await TargetStream(channel, next(names)).score(0, long)
        answer = await first.score(100, [3], DRAFT, SUPPORTS)
        assert answer.cached_len == 0
        assert (answer.support_probs, answer.tail_tokens, answer.tail_mass) == (b"", b"", b"")
        again = await first.score(0, [*long, 3], DRAFT, SUPPORTS)
        assert_scores(decoded(again), reference([*long, 3, *DRAFT]).softmax(-1)[-4:], 101)


@in_module_loop
async def test_abandoned_streams_keep_the_cache_until_close(
    model_folder: Path, names: Iterator[str], reference: Reference
) -> None:
    async with connected_target(model_folder) as channel:
        name = next(names)
        first = TargetStream(channel, name)
        await first.score(0, PROMPT, DRAFT, SUPPORTS)
        await first.abandon()
        taken_over = TargetStream(channel, name, epoch=2)
        taken_over.text = list(PROMPT)
        answer = await taken_over.score(len(PROMPT), [12, 77], DRAFT, SUPPORTS)
        assert_scores(decoded(answer), reference([*PROMPT, 12, 77, *DRAFT]).softmax(-1)[-4:], 8)
        assert answer.load.kv_cache_usage > 0
        await taken_over.close()
        other = await TargetStream(channel, name, epoch=3).score(1, [3])
        assert (other.cached_len, other.load.kv_cache_usage) == (0, 0)


@in_module_loop
async def test_a_takeover_computes_only_new_tokens(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, forwards: Forwards
) -> None:
    """A new stream sends the whole text; what the cache holds of it is kept, rejected draft tokens are not."""
    name = next(names)
    first = TargetStream(channel, name)
    await first.score(0, [*PROMPT, *range(100, 160)], DRAFT, SUPPORTS)
    await first.abandon()
    text = [*PROMPT, *range(100, 160), 12, 99]
    forwards.sizes.clear()
    answer = await TargetStream(channel, name, epoch=2).score(0, text, DRAFT, SUPPORTS)
    assert_scores(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
    assert sum(forwards.sizes) == 1 + len(DRAFT), "12 was held as a draft token, 99 is new"


@in_module_loop
async def test_batched_sessions_score_as_they_do_alone(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference
) -> None:
    """Different lengths, parameters and numbers of drafts in the same forwards."""
    params = [
        PLAIN,
        SamplingParams(seed=8, temperature=0),
        SamplingParams(seed=9, top_k=5, num_logprobs=1),
        SamplingParams(seed=10, top_p=0.7, presence_penalty=1.0),
    ]
    texts = [[(3 * place + length) % 290 for place in range(length)] for length in (1, 9, 30, 70)]

    def rounds() -> list[Coroutine[Any, Any, pb.ScoreResponse]]:
        return [
            TargetStream(channel, next(names), sampling, num_prompt=1).score(0, text, DRAFT[:count], SUPPORTS[:count])
            for sampling, text in zip(params, texts, strict=True)
            for count in range(4)
        ]

    alone = [await each for each in rounds()]
    together = await asyncio.gather(*rounds())
    for one, other in zip(alone, together, strict=True):
        assert one.tail_tokens == other.tail_tokens
        assert np.frombuffer(one.support_probs, "<f4") == pytest.approx(
            np.frombuffer(other.support_probs, "<f4"), abs=1e-5
        )
        assert np.frombuffer(one.tail_mass, "<f4") == pytest.approx(np.frombuffer(other.tail_mass, "<f4"), abs=1e-5)
