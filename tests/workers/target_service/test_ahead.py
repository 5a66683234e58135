"""Rounds that are scored before they are asked for: the same answers, used for exactly the round that they are of."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import grpc
import pytest

from specdec.engine import EngineLoop
from specdec.exact.lookup import NUM_LENGTHS, TextLookup, continued
from specdec.exact.prefix import chain
from specdec.exact.values import ObservationRequest, Proposal, SparseDistribution, one_hot
from specdec.types import SamplingParams
from specdec.v1 import target_pb2 as pb
from target_service import ahead
from target_service.ahead import AheadTask
from target_service.scorer import ScoreTask
from tests.support.worker_streams import PLAIN, PROMPT, TargetStream, connected_target, packed_supports, score_request
from tests.workers.conftest import Reference
from tests.workers.target_service.streams import DRAFT, SUPPORTS, Rounds, assert_scores, decoded, in_module_loop, values

MODELS = Path(__file__).parents[3] / "models"
NUM_ROUNDS = 12
PLAIN_ROUND = pb.NextRound(plain=True)
SAMPLINGS = {
    "plain": PLAIN,
    "greedy": SamplingParams(temperature=0, seed=1),
    "penalties": SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4, seed=2),
    "log probabilities": SamplingParams(top_p=0.9, seed=3, num_logprobs=2),
}


async def begun(stream: TargetStream, start: int, tokens: list[int]) -> pb.ScoreResponse:
    """Run a plain round that says that another one follows."""
    return await stream.ask(score_request(start=start, tokens=tokens, next_round=PLAIN_ROUND))


def drawn(answer: pb.ScoreResponse) -> int:
    return int.from_bytes(answer.tail_tokens[:4], "little")


async def decode(stream: TargetStream, *, num_rounds: int = NUM_ROUNDS) -> list[pb.ScoreResponse]:
    """Decode plainly."""
    text = list(PROMPT)
    answers = [await begun(stream, 0, text)]
    while len(answers) < num_rounds:
        text.append(drawn(answers[-1]))
        answers.append(await begun(stream, len(text) - 1, text[-1:]))
    return answers


@in_module_loop
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_answers_are_those_of_a_worker_that_scores_nothing_ahead(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    name: str,
) -> None:
    expected = await decode(TargetStream(without, next(names), SAMPLINGS[name]))
    assert counted() == (0, 0)
    stream = TargetStream(channel, next(names), SAMPLINGS[name])
    assert list(map(values, await decode(stream))) == list(map(values, expected))
    await stream.close()
    assert counted() == (NUM_ROUNDS, NUM_ROUNDS - 1), "only the last one was not asked for"


@in_module_loop
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_rounds_that_are_answered_together_are_those_one_by_one(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    name: str,
) -> None:
    expected = await decode(TargetStream(without, next(names), SAMPLINGS[name]))
    answers, num_messages = await decode_together(TargetStream(channel, next(names), SAMPLINGS[name]))
    assert list(map(values, answers)) == list(map(values, expected))
    assert num_messages < NUM_ROUNDS
    assert counted() == (NUM_ROUNDS, NUM_ROUNDS - 1), "only the last one was not asked for"


async def decode_together(stream: TargetStream) -> tuple[list[pb.ScoreResponse], int]:
    """Decode plainly, with as many rounds in an answer as the worker gives; return how many messages that took too."""
    text, answers, num_messages = list(PROMPT), list[pb.ScoreResponse](), 0
    while len(answers) < NUM_ROUNDS:
        start = len(text) - 1 if answers else 0
        num_left = NUM_ROUNDS - len(answers)
        asked = score_request(start=start, tokens=text[start:], next_round=PLAIN_ROUND, num_rounds=num_left)
        answer = await stream.ask(asked)
        num_messages += 1
        assert len(answer.following) < num_left
        assert answer.cached_len == len(text)
        for each in (answer, *answer.following):
            assert each is answer or each.prefix_digest == chain(b"", text)
            text.append(drawn(each))
            answers.append(each)
        stream.text[:] = text[:-1]  # what the worker holds
    await stream.close()
    return answers, num_messages


@in_module_loop
async def test_no_round_is_scored_twice_where_time_is_up(
    channel: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whenever that is: also between the end of a round in the engine and its arrival."""
    num_turns = 40
    for turn in range(num_turns):
        time_s = 0.004 + turn / num_turns * 0.03
        monkeypatch.setattr(ahead, "together_s", lambda _, time_s=time_s: time_s)
        await decode_together(TargetStream(channel, next(names)))
    assert counted() == (num_turns * NUM_ROUNDS, num_turns * (NUM_ROUNDS - 1))


@in_module_loop
@pytest.mark.parametrize(
    "fields",
    [
        {"num_rounds": 1},
        {"num_rounds": 9, "next_round": pb.NextRound(max_length=99)},
        {"num_rounds": 9, "next_round": pb.NextRound(plain=True, max_length=len(PROMPT) + 1)},
    ],
    ids=["one is asked for", "nobody knows what follows", "nothing follows"],
)
async def test_one_round_is_answered_alone_where(
    channel: grpc.aio.Channel, names: Iterator[str], fields: dict[str, object]
) -> None:
    stream = TargetStream(channel, next(names))
    answer = await stream.ask(score_request(**{"start": 0, "tokens": PROMPT, "next_round": PLAIN_ROUND} | fields))
    assert not answer.following
    await stream.close()


@in_module_loop
async def test_no_round_follows_the_texts_end(channel: grpc.aio.Channel, names: Iterator[str]) -> None:
    """Nor is the last token waited with."""
    request = {"start": 0, "tokens": PROMPT, "next_round": PLAIN_ROUND, "num_rounds": 9}
    stream, other = (TargetStream(channel, next(names)) for _ in range(2))
    answer = await stream.ask(score_request(**request))
    tokens = [drawn(each) for each in (answer, *answer.following)]
    end = tokens[1]
    answer = await other.ask(score_request(**request, ending_tokens=[end]))
    assert [drawn(each) for each in (answer, *answer.following)] == tokens[: tokens.index(end) + 1]
    await stream.close()
    await other.close()


@in_module_loop
@pytest.mark.parametrize("at_work", [0, 3])
async def test_rounds_are_not_answered_together_for_long(
    channel: grpc.aio.Channel, names: Iterator[str], monkeypatch: pytest.MonkeyPatch, at_work: int
) -> None:
    """How long goes by all sessions at work, those of other forwards too; what waits for a place is not at work."""
    load = vars(EngineLoop)["load"].fget
    beside = {"num_running": at_work, "num_waiting": 4 * at_work, "num_without_place": 2 * at_work}
    monkeypatch.setattr(EngineLoop, "load", property(lambda engine: replace(load(engine), **beside)))
    asked: list[int] = []

    def no_time(num_sessions: int) -> float:
        asked.append(num_sessions)
        return 1e-9

    monkeypatch.setattr(ahead, "together_s", no_time)
    stream = TargetStream(channel, next(names))
    answer = await stream.ask(score_request(start=0, tokens=PROMPT, next_round=PLAIN_ROUND, num_rounds=9))
    assert not answer.following
    assert asked == [max(1, 3 * at_work)]
    await stream.close()


def test_the_more_sessions_are_at_work_the_longer_are_rounds_answered_together() -> None:
    """So that the coordinator has the same time for each of them; but a reader does not wait for long."""
    times_s = list(map(ahead.together_s, [1, 4, 8, 16, 20, 1000]))
    assert times_s == [0.05, 0.05, 0.1, 0.2, 0.25, 0.25]


@in_module_loop
async def test_drafts_can_follow_instead(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, counted: Callable[[], tuple[float, float]]
) -> None:
    """What the worker knows of the text then is what was committed: the token that it drew is still there."""
    stream = TargetStream(channel, next(names))
    text = [*PROMPT, drawn((await decode(stream, num_rounds=2))[-1])]
    text.insert(len(PROMPT), stream.text[len(PROMPT)])
    answer = await stream.score(len(text) - 1, text[-1:], DRAFT, SUPPORTS)
    assert_scores(decoded(answer), reference(text + DRAFT).softmax(-1)[-4:], len(text))
    assert counted() == (2, 1)
    answer = await stream.score(len(text), [12, 13], DRAFT, SUPPORTS)
    assert answer.cached_len == len(text) + 2
    assert_scores(decoded(answer), reference([*text, 12, 13, *DRAFT]).softmax(-1)[-4:], len(text) + 2)


@dataclass
class Looking(Rounds):
    """A session whose rounds draft what is looked up in its text."""

    lookup: TextLookup = field(default_factory=TextLookup)

    def draft(self) -> Proposal:
        """Return what is looked up: up to three tokens of a match of three."""
        match = self.lookup.find(self.text)
        return continued(self.text, match, min(3, 127 - len(self.text)) if match.num_tokens > 2 else 0)


def looking(
    channel: grpc.aio.Channel,
    name: str,
    sampling: SamplingParams,
    prompt: Sequence[int] = (5, 6, 7, 5, 6, 7, 5, 6),
    matches_chosen: bool = True,
    **next_round: object,
) -> Looking:
    """Return a session that drafts up to three tokens of each match, and nothing where there is none."""
    said = {"draft_lengths": [0, *[3] * (NUM_LENGTHS - 1)], "plain": True, "max_length": 128} | next_round
    stream = TargetStream(channel, name, sampling, num_prompt=len(prompt), matches_chosen=matches_chosen)
    return Looking(stream, sampling, pb.NextRound(**said), list(prompt))  # type: ignore[arg-type]


LOOKED_UP = {
    "greedy": SamplingParams(temperature=0, seed=1),
    "loop": SamplingParams(temperature=0, frequency_penalty=-2, seed=1),
    "nearly greedy": SamplingParams(temperature=0.05, seed=3),
    "few tokens": SamplingParams(temperature=1, top_k=2, seed=3),
    "penalties": SamplingParams(temperature=0, presence_penalty=1e-3, frequency_penalty=1e-5, seed=2),
    "log probabilities": SamplingParams(temperature=0.05, seed=3, num_logprobs=2),
}


@in_module_loop
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("num_together", [1, 8])
@pytest.mark.parametrize("name", LOOKED_UP)
async def test_what_is_looked_up_is_scored_ahead(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    name: str,
    num_together: int,
) -> None:
    """Whatever each round commits: nothing, a part or all of its draft."""
    expected, plain = (looking(without, next(names), LOOKED_UP[name]) for _ in range(2))
    await expected.run(30)
    assert counted() == (0, 0)
    session = looking(channel, next(names), LOOKED_UP[name])
    session.num_together = num_together
    await session.run(30)
    await session.stream.close()
    assert session.text == expected.text
    assert list(map(values, session.answers)) == list(map(values, expected.answers))
    num_begun = 30 + len(session.answered)
    assert counted() == (num_begun, num_begun - 1), "only the last one was not asked for"
    assert session.num_accepted > 0
    assert (session.num_messages == 30) == (num_together == 1)
    assert (session.num_drafts_together > 0) == (num_together > 1)
    await plain.decode(len(session.text))
    assert plain.text == session.text, "no draft changes a token"


@in_module_loop
@pytest.mark.usefixtures("unhurried")
@pytest.mark.parametrize("limit", [12, 64])
async def test_an_answer_tells_of_so_many_tokens_at_most(
    channel: grpc.aio.Channel, names: Iterator[str], limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that has lost one goes back so far: each round commits four tokens of a loop."""
    monkeypatch.setattr(ahead, "MAX_TOLD_TOKENS", limit)
    session = looking(channel, next(names), LOOKED_UP["loop"])
    await session.run(12)
    session.num_together = 8
    told = []
    while len(session.text) < 100:
        begin, num_messages = len(session.text), session.num_messages
        while session.num_messages == num_messages or session.answered:
            await session.run(1)
        told.append(len(session.text) - begin)
    assert max(told) == min(limit, 8 * 4)


@in_module_loop
async def test_nothing_is_known_where_a_coordinator_does_not_take_matched_drafts(
    channel: grpc.aio.Channel, names: Iterator[str], counted: Callable[[], tuple[float, float]]
) -> None:
    """An older one accepts them by its rule; where it drafts nothing its plain rounds are scored ahead."""
    session = looking(channel, next(names), LOOKED_UP["few tokens"], matches_chosen=False)
    await session.run(30)
    assert session.num_accepted > 0
    assert counted() == (0, 0)
    session.next_round.CopyFrom(pb.NextRound(plain=True, max_length=128))
    await session.decode(len(session.text) + 3)
    await session.stream.close()
    assert counted() == (3, 2)


@in_module_loop
async def test_what_follows_drawn_tokens_is_not_known(
    channel: grpc.aio.Channel, names: Iterator[str], counted: Callable[[], tuple[float, float]]
) -> None:
    stream = TargetStream(channel, next(names))
    message = score_request(tokens=PROMPT, draft_tokens=DRAFT, supports=packed_supports(*SUPPORTS), sources=[1, 2, 3])
    message.score.next_round.CopyFrom(PLAIN_ROUND)
    await stream.ask(message)
    await stream.close()
    assert counted() == (0, 0)


@in_module_loop
@pytest.mark.parametrize(
    ("next_round", "left", "is_begun"),
    [
        (pb.NextRound(plain=True), None, True),
        (pb.NextRound(draft_lengths=[0] * 14 + [3]), None, True),
        (pb.NextRound(), None, False),
        (pb.NextRound(draft_lengths=[3] * 14), None, False),
        (pb.NextRound(plain=True), 1, True),
        (pb.NextRound(plain=True), 0, False),
        (pb.NextRound(draft_lengths=[3] * 15), 2, True),
        (pb.NextRound(draft_lengths=[3] * 15), 1, False),
    ],
    ids=map(str, range(8)),
)
async def test_a_round_that_nobody_knows_of_is_not_begun(
    channel: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    next_round: pb.NextRound,
    left: int | None,
    is_begun: bool,
) -> None:
    """By then the text is a loop, whose end has the longest match, and `left` tokens may be left."""
    session = looking(channel, next(names), LOOKED_UP["loop"])
    await session.run(20)
    length = len(session.text) + 4
    session.next_round.CopyFrom(next_round)
    session.next_round.max_length = 0 if left is None else length + left
    await session.run(1)
    await session.stream.close()
    assert len(session.text) == length, "all of the draft was accepted"
    assert counted() == (20 + is_begun, 20)


def otherwise(draft: Proposal) -> dict[str, Proposal]:
    """Return drafts that are not quite a chain of three equal tokens."""
    token = draft.tokens[0]
    other = token - 1 if token else 1
    drawn = SparseDistribution((token, other), (0.5, 0.5))
    return {
        "nothing": Proposal(),
        "fewer tokens": Proposal(draft.tokens[:2], draft.distributions[:2]),
        "another token": Proposal((token, other, token), (one_hot(token), one_hot(other), one_hot(token))),
        "a tree": Proposal(draft.tokens, draft.distributions, (0, 1, 1)),
        "drawn tokens": Proposal(draft.tokens, (drawn, *draft.distributions[1:])),
    }


@in_module_loop
@pytest.mark.parametrize("what", ["nothing", "fewer tokens", "another token", "a tree", "drawn tokens"])
async def test_another_draft_is_scored_anew(
    channel: grpc.aio.Channel,
    without: grpc.aio.Channel,
    names: Iterator[str],
    counted: Callable[[], tuple[float, float]],
    what: str,
) -> None:
    """By then the text is a loop, and the round with what is looked up has been begun."""
    answers = []
    for worker in (channel, without):
        session = looking(worker, next(names), LOOKED_UP["loop"])
        await session.run(20)
        draft = session.draft()
        assert len(set(draft.tokens)) == 1
        assert len(draft) == 3
        await session.round(otherwise(draft)[what])
        await session.stream.close()
        answers.append(values(session.answers[-1]))
    assert answers[0] == answers[1]
    assert counted() == (21 - (what == "drawn tokens"), 19), "what follows drawn tokens is not known"


@in_module_loop
@pytest.mark.parametrize(
    "what", ["another token", "two tokens", "an earlier start", "a later start", "another text before it"]
)
async def test_another_round_is_scored_anew(
    channel: grpc.aio.Channel,
    names: Iterator[str],
    reference: Reference,
    counted: Callable[[], tuple[float, float]],
    what: str,
) -> None:
    stream = TargetStream(channel, next(names))
    token = drawn(await begun(stream, 0, PROMPT))
    other = (token + 1) % 200
    tokens = {"another token": [other], "two tokens": [token, 9], "an earlier start": [PROMPT[-1], token]}
    start = len(PROMPT) - (what == "an earlier start") + (what == "a later start")
    message = score_request(start=start, tokens=tokens.get(what, [token]))
    if what == "another text before it":
        message.score.prefix_digest = chain(b"", [*PROMPT[:-1], PROMPT[-1] + 1])
        assert (await stream.ask(message)).cached_len == 0, "the worker holds other tokens"
    elif what == "a later start":
        message.score.prefix_digest = chain(b"", PROMPT)
        assert (await stream.ask(message)).cached_len < start, "it has not that many"
    else:
        answer = await stream.ask(message)
        text = [*PROMPT[:start], *message.score.tokens]
        assert_scores(decoded(answer, []), reference(text).softmax(-1)[-1:], len(text))
    assert counted() == (1, 0)


@in_module_loop
async def test_a_message_without_promise_ends_it(
    channel: grpc.aio.Channel, names: Iterator[str], counted: Callable[[], tuple[float, float]]
) -> None:
    stream = TargetStream(channel, next(names))
    token = drawn(await begun(stream, 0, PROMPT))
    await stream.score(len(PROMPT), [token])
    await stream.close()
    assert counted() == (1, 1)


@in_module_loop
async def test_what_has_failed_before_it_was_asked_for_is_scored_anew(
    channel: grpc.aio.Channel, names: Iterator[str], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may have failed for the sake of others in its forward."""
    stream = TargetStream(channel, next(names))
    with monkeypatch.context() as patched:
        patched.setattr(AheadTask, "begin_after", begin_wrong)
        text = [*PROMPT, drawn(await begun(stream, 0, PROMPT))]
        await TargetStream(channel, next(names)).score(0, PROMPT)  # by now it has failed
    answer = await stream.score(len(PROMPT), text[-1:])
    assert_scores(decoded(answer, []), reference(text).softmax(-1)[-1:], len(text))


def begin_wrong(task: AheadTask, previous: ScoreTask) -> None:
    """Append a token that the model does not know."""
    task.append_instead(previous.round.committed_length, [10**6])


@in_module_loop
@pytest.mark.parametrize("why", ["draft tokens", "a full context"])
async def test_only_plain_rounds_are_scored_ahead(
    channel: grpc.aio.Channel, names: Iterator[str], counted: Callable[[], tuple[float, float]], why: str
) -> None:
    stream = TargetStream(channel, next(names))
    tokens = [5] * 128 if why == "a full context" else PROMPT
    message = score_request(start=0, tokens=tokens, next_round=PLAIN_ROUND)
    if why == "draft tokens":
        message.score.draft_tokens.extend(DRAFT)
        message.score.supports.CopyFrom(packed_supports(*SUPPORTS))
    await stream.ask(message)
    await stream.close()
    assert counted() == (0, 0)


@in_module_loop
@pytest.mark.parametrize("regex", [None, "[a-z]+"])
async def test_what_a_grammar_allows_is_not_scored_ahead(
    names: Iterator[str], counted: Callable[[], tuple[float, float]], regex: str | None
) -> None:
    """Its coordinator may know the next tokens, and drafts those."""
    async with connected_target(MODELS / "target") as channel:
        stream = TargetStream(channel, next(names), SamplingParams(regex=regex, seed=1))
        await begun(stream, 0, PROMPT)
        await stream.close()
    assert counted() == ((0, 0) if regex else (1, 0))


@in_module_loop
async def test_a_round_is_used_if_it_observed_what_is_asked_for(
    channel: grpc.aio.Channel, names: Iterator[str], counted: Callable[[], tuple[float, float]]
) -> None:
    stream = TargetStream(channel, next(names), observations=ObservationRequest(num_top_tokens=2))
    answers = [await begun(stream, 0, PROMPT)]
    for without in (False, True, True, False):
        tokens, start = [drawn(answers[-1])], len(PROMPT) + len(answers) - 1
        message = score_request(start=start, tokens=tokens, next_round=PLAIN_ROUND, without_observations=without)
        answers.append(await stream.ask(message))
    assert [answer.observations.count for answer in answers] == [len(PROMPT), 1, 0, 0, 1]
    assert counted() == (4, 3), "what follows a round without observations has none either"


@in_module_loop
@pytest.mark.parametrize("how", ["closed", "abandoned", "taken over"])
async def test_nothing_is_left_of_a_stream_that_ends(
    model_folder: Path, names: Iterator[str], reference: Reference, how: str
) -> None:
    async with connected_target(model_folder) as channel:
        name = next(names)
        stream = TargetStream(channel, name, epoch=1)
        text = [*PROMPT, drawn(await begun(stream, 0, PROMPT))]
        if how == "closed":
            await stream.close()
        elif how == "abandoned":
            await stream.abandon()
        answer = await TargetStream(channel, name, epoch=2).score(0, [*text, 9])
        assert_scores(decoded(answer, []), reference([*text, 9]).softmax(-1)[-1:], len(text) + 1)
        assert (answer.load.num_running, answer.load.num_waiting) == (1, 0), "its own forward had no other session"


@in_module_loop
async def test_many_sessions_in_a_small_cache_get_their_texts(model_folder: Path, names: Iterator[str]) -> None:
    """Places change hands while rounds are scored ahead: what was evicted is told and sent again."""
    settings = {"kv_cache_bytes": 1 << 16, "cache_turn_s": 0.005}
    num_missed = {False: 0, True: 0}
    async with connected_target(model_folder, **settings) as small, connected_target(model_folder) as large:

        async def text_of(channel: grpc.aio.Channel, number: int) -> list[int]:
            stream, text, held = TargetStream(channel, next(names), SamplingParams(seed=number)), list(PROMPT), 0
            while len(text) < len(PROMPT) + 40:
                answer = await begun(stream, held, text[held:])
                if answer.cached_len < held:
                    held, num_missed[channel is small] = answer.cached_len, num_missed[channel is small] + 1
                    continue
                text.append(drawn(answer))
                held = len(text) - 1
            await stream.close()
            return text

        texts = [await asyncio.gather(*(text_of(channel, n) for n in range(24))) for channel in (small, large)]
    assert texts[0] == texts[1]
    assert num_missed[True] > num_missed[False] == 0
