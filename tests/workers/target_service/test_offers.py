"""What the target worker drafts itself: offered with an answer, scored ahead, and answered like any other draft."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import grpc
import pytest
import torch

from specdec.drafting.successors import NUM_SUCCESSORS
from specdec.engine.rows import largest_tokens
from specdec.exact import codec
from specdec.exact.race import Draw
from specdec.exact.values import Proposal, one_hot
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from target_service import scorer
from target_service.offering import SessionOffers
from target_service.scorer import ScoreTask
from tests.support.worker_streams import PROMPT, TargetStream, connected_target
from tests.workers.target_service.streams import Rounds, in_module_loop, values

MODELS = Path(__file__).parents[3] / "models"
ASKED = pb.NextRound(plain=True, num_offered=6)
# with small penalties for rare tokens the toy model repeats itself, so that what it has shown is of use
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, seed=1, frequency_penalty=-0.2),
    "drawn": SamplingParams(temperature=0.7, top_k=4, seed=2, frequency_penalty=-0.1),
    "log probabilities": SamplingParams(temperature=0.5, top_k=2, seed=2, frequency_penalty=-0.3, num_logprobs=2),
}


def session(
    channel: grpc.aio.Channel,
    name: str,
    sampling: SamplingParams,
    asked: pb.NextRound = ASKED,
) -> Rounds:
    return Rounds(TargetStream(channel, name, sampling), sampling, asked, list(PROMPT))


@in_module_loop
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("num_together", [1, 8])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_offers_are_scored_as_any_other_draft(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    name: str,
    num_together: int,
) -> None:
    offered = session(channel, next(names), SAMPLINGS[name])
    offered.num_together = num_together
    await offered.run(25)
    await offered.stream.close()
    num_begun = 25 + len(offered.answered)
    assert counted() == (num_begun, num_begun - 1), "only the last one was not asked for"
    assert (offered.num_messages == 25) == (num_together == 1)
    assert (offered.num_drafts_together > 0) == (num_together > 1)
    assert offered.num_accepted > 0
    assert any(not draft.is_chain for draft in offered.drafts)
    again, plain = session(without, next(names), SAMPLINGS[name]), session(without, next(names), SAMPLINGS[name])
    for draft in offered.drafts:
        await again.round(draft)
        assert not again.offer
    assert again.text == offered.text
    assert list(map(values, again.answers)) == list(map(values, offered.answers))
    await plain.decode(len(offered.text))
    assert plain.text == offered.text, "no draft changes a token"


@in_module_loop
async def test_the_tokens_of_an_offer_in_another_tree_are_scored_anew(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
) -> None:
    offered = session(channel, next(names), SAMPLINGS["greedy"])
    await offered.run(5)
    while offered.offer.is_chain:
        await offered.run(1)
    num_hits = counted()[1]
    chain = replace(offered.offer, parents=())
    await offered.round(chain)
    again = session(without, next(names), SAMPLINGS["greedy"])
    for draft in offered.drafts:
        await again.round(draft)
    assert values(again.answers[-1]) == values(offered.answers[-1])
    assert counted()[1] == num_hits


@in_module_loop
async def test_an_offer_is_as_large_as_was_asked_for_and_fits_into_the_text(
    channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    """An offer that is larger than asked for, or no tree, would have been refused by `offer_from_proto`."""
    greedy = SAMPLINGS["greedy"]
    sizes = {}
    for asked in (pb.NextRound(plain=True, learns=True), pb.NextRound(plain=True, num_offered=2), ASKED):
        offered = session(channel, next(names), greedy, asked=asked)
        await offered.run(20)
        sizes[asked.num_offered] = max(len(draft) for draft in offered.drafts)
    assert sizes == {0: 0, 2: 2, 6: 6}
    surer = session(channel, next(names), greedy, asked=pb.NextRound(plain=True, num_offered=6, stop_below=0.4))
    await surer.run(20)
    assert max(len(draft) for draft in surer.drafts) < 6
    ending = session(channel, next(names), greedy, asked=pb.NextRound(plain=True, num_offered=6, max_length=40))
    while len(ending.text) < 40:
        await ending.round(ending.offer)
    assert len(ending.text) == 40
    assert not ending.offer


@in_module_loop
async def test_nothing_is_offered_where_the_next_draft_is_looked_up(
    channel: grpc.aio.Channel, names: Iterator[str]
) -> None:
    asked = pb.NextRound(plain=True, num_offered=6, draft_lengths=[3] * 15)
    offered = session(channel, next(names), SamplingParams(temperature=0, seed=1, frequency_penalty=-2), asked=asked)
    await offered.run(20)
    assert len(set(offered.text[-8:])) == 1, "the same token again and again"
    assert not offered.offer


@in_module_loop
@pytest.mark.parametrize("why", ["not asked for", "an older coordinator", "a grammar"])
async def test_nothing_is_offered_otherwise(channel: grpc.aio.Channel, names: Iterator[str], why: str) -> None:
    greedy = SAMPLINGS["greedy"]
    if why == "a grammar":
        async with connected_target(MODELS / "target") as other:
            answer = await answered(TargetStream(other, next(names), SamplingParams(regex="[a-z]+", seed=1)), ASKED)
    elif why == "an older coordinator":
        stream = TargetStream(channel, next(names), greedy, matches_chosen=False)
        await answered(stream, ASKED)
        message = codec.score_to_proto(len(PROMPT), [1], Proposal((2, 3), (one_hot(2), one_hot(3))))
        message.next_round.CopyFrom(ASKED)
        answer = await stream.ask(pb.ScoreRequest(score=message))
    else:
        answer = await answered(TargetStream(channel, next(names), greedy), pb.NextRound(plain=True))
    assert not answer.HasField("offer")


async def answered(stream: TargetStream, asked: pb.NextRound) -> pb.ScoreResponse:
    """Run the first round."""
    message = codec.score_to_proto(0, PROMPT, Proposal())
    message.next_round.CopyFrom(asked)
    return await stream.ask(pb.ScoreRequest(score=message))


@in_module_loop
@pytest.mark.parametrize("shares", [True, False])
async def test_sessions_learn_from_each_other_unless_told_otherwise(
    model_folder: Path, names: Iterator[str], shares: bool
) -> None:
    """A second session with the same text has its first offer at once."""
    async with connected_target(model_folder, offers_shared=shares) as channel:
        first = session(channel, next(names), SAMPLINGS["greedy"])
        await first.run(6)
        second = session(channel, next(names), SAMPLINGS["greedy"])
        await second.run(1)
    assert bool(second.offer) == shares
    assert not first.drafts[0]


@in_module_loop
async def test_a_round_may_be_told_to_learn_while_it_is_scored(
    channel: grpc.aio.Channel, names: Iterator[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was scored ahead may run when the message comes that asks for offers."""
    draws = scorer._draws

    def told(tasks: Sequence[ScoreTask]) -> list[Draw]:
        for task in tasks:
            task.offers = task.reports_to = SessionOffers(task.session, None)
        return draws(tasks)

    monkeypatch.setattr(scorer, "_draws", told)
    answer = await answered(TargetStream(channel, next(names), SAMPLINGS["greedy"]), pb.NextRound(plain=True))
    assert answer.cached_len == len(PROMPT)


@pytest.mark.parametrize("told", [(True, True, True), (True, False, True), (False, True, False), (False, False, False)])
def test_sessions_that_learn_are_told_of_their_own_rows(told: tuple[bool, ...]) -> None:
    """To look at the rows of the others would take all sessions of the forward longer."""
    logits, spans = torch.randn(6, 100), [(0, 2), (2, 5), (5, 6)]
    offers = [cast(SessionOffers, object()) if each else None for each in told]
    reports = scorer._reports(logits, offers, spans)
    expected = [
        largest_tokens(logits[begin:end], NUM_SUCCESSORS) if each else ()
        for each, (begin, end) in zip(told, spans, strict=True)
    ]
    assert reports == expected
    assert [len(report) for report in reports] == [each * n for each, n in zip(told, (2, 3, 1), strict=True)]
