"""What a round commits, where it is cut, and that text does not depend on how rounds and chunks are cut."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.generation import CommittedChunk, Generation, Limits, OutputToken, Round
from specdec.exact.prefix import chain
from specdec.exact.values import PositionLogprobs, Proposal, Scores, TargetDistribution, Verdict, one_hot
from specdec.types import FinishReason, RoundDraft, SamplingParams, Statistics, TokenLogprobs, TokenOrigin

EOS = 0
PROMPT = (5, 6)
LETTERS = "|abcdefgh"  # token to text; some tokens have no text, as the bytes of half a character
NO_TEXT = 9
SEED = SamplingParams(seed=1, max_new_tokens=100)
LIMITS = Limits(100, 1000, frozenset({EOS}))


@dataclass
class Letters:
    """A detokenizer: a letter a token; NO_TEXT is half a character, completed as "xy" by the next."""

    pending: bool = False

    def push(self, token: int) -> str:
        if token == NO_TEXT:
            self.pending = True
            return ""
        text = "xy" * self.pending + LETTERS[token]
        self.pending = False
        return text


def generation(
    sampling: SamplingParams = SEED,
    limits: Limits = LIMITS,
    emitted: Sequence[OutputToken] = (),
    finish: FinishReason | None = None,
) -> Generation:
    return Generation(PROMPT, sampling, limits, Letters(), emitted=list(emitted), finish=finish)


def play(state: Generation, tokens: Sequence[int], num_drafted: int | None = None) -> Round:
    """Run a round that accepts all tokens but the last; `num_drafted` counts the rejected ones too."""
    *accepted, last = tokens
    num_drafted = len(accepted) if num_drafted is None else num_drafted
    drafts = (*accepted, *[1] * (num_drafted - len(accepted)))
    origin = TokenOrigin.BONUS if num_drafted == len(accepted) else TokenOrigin.RECOVERED
    proposal = Proposal(drafts, tuple(map(one_hot, drafts)))
    positions = tuple(TargetDistribution((1.0,), 0.0, last) for _ in range(num_drafted + 1))
    every = {token: -token / 8 for token in (*drafts, last)}
    logprobs = tuple(PositionLogprobs(every, ((index, -1.0),)) for index in range(num_drafted + 1))
    scores = Scores(positions, logprobs if state.sampling.num_logprobs is not None else ())
    return state.advance(proposal, scores, Verdict(tuple(range(len(accepted))), last, origin), 0.25, 0.5)


def tokens_of(entries: Sequence[OutputToken]) -> list[int]:
    return [entry.token for entry in entries]


# ---- where it ends


def test_a_round_commits_accepted_and_closing_tokens() -> None:
    state = generation()
    played = play(state, [1, 2, 3], num_drafted=4)
    assert tokens_of(played.emitted) == [1, 2, 3]
    assert [entry.origin for entry in played.emitted] == [
        TokenOrigin.ACCEPTED,
        TokenOrigin.ACCEPTED,
        TokenOrigin.RECOVERED,
    ]
    assert (played.base_length, played.base_digest) == (2, chain(b"", PROMPT))
    assert (played.digest, played.finish) == (chain(b"", (*PROMPT, 1, 2, 3)), None)
    assert state.committed == [*PROMPT, 1, 2, 3]
    assert state.text == "abc"


def test_tree_rounds_commit_the_accepted_path() -> None:
    """The second child of the root, and that one's child; each with the log probabilities of its own position."""
    state = generation(replace(SEED, num_logprobs=1))
    proposal = Proposal((1, 2, 3, 4), tuple(map(one_hot, (1, 2, 3, 4))), (0, 0, 1, 2))
    every = {token: -1.0 for token in range(1, 6)}
    logprobs = tuple(PositionLogprobs(every, ((position, -1.0),)) for position in range(5))
    scores = Scores((TargetDistribution((), 1.0, 5),) * 5, logprobs)
    played = state.advance(proposal, scores, Verdict((1, 3), 5, TokenOrigin.BONUS))
    assert tokens_of(played.emitted) == [2, 4, 5]
    tops = [entry.logprobs.top[0][0] for entry in played.emitted if entry.logprobs]
    assert tops == [0, 2, 4]
    assert (played.statistics.num_draft_tokens, played.statistics.num_accepted_tokens) == (4, 2)
    assert (played.statistics.num_drafts_per_depth, played.statistics.num_accepted_tokens_per_depth) == ((1, 1), (1, 1))


def test_eos_inside_an_accepted_run_ends_there() -> None:
    state = generation()
    played = play(state, [1, EOS, 2, 3])
    assert (tokens_of(played.emitted), played.finish) == ([1, EOS], FinishReason.EOS)
    assert (state.text, state.done, state.committed) == ("a", True, [*PROMPT, 1, EOS])
    assert played.digest == chain(b"", (*PROMPT, 1, EOS))


def test_ignore_eos_goes_on() -> None:
    state = generation(replace(SEED, ignore_eos=True))
    assert play(state, [1, EOS, 2]).finish is None
    assert state.text == "a|b"


def test_a_stop_token_ends_despite_ignored_eos() -> None:
    state = generation(replace(SEED, ignore_eos=True, stop_token_ids=(EOS, 3)))
    played = play(state, [1, 3, 2])
    assert (tokens_of(played.emitted), played.finish, state.text) == ([1, 3], FinishReason.STOP, "a")


@pytest.mark.parametrize("rounds", [[[1, 2, 3, 4, 5]], [[1, 2], [3, 4, 5]], [[1], [2], [3], [4], [5]]])
def test_a_stop_string_across_tokens_and_rounds(rounds: list[list[int]]) -> None:
    state = generation(replace(SEED, stop=("cd",)))
    for tokens in rounds:
        if not state.done:
            play(state, tokens)
    assert (tokens_of(state.emitted), state.finish, state.text) == ([1, 2, 3, 4], FinishReason.STOP, "ab")


def test_held_back_text_appears_without_a_stop() -> None:
    state = generation(replace(SEED, stop=("cd",)))
    play(state, [1, 2, 3])
    assert (state.text, state.chunk(0, 3).text) == ("ab", "ab")
    play(state, [5])
    assert state.chunk(3, 4).text == "ce"


@pytest.mark.parametrize("ending", [EOS, 4])
def test_held_back_text_appears_at_the_end(ending: int) -> None:
    state = generation(replace(SEED, stop=("cx",), max_new_tokens=4), replace(LIMITS, max_new_tokens=4))
    play(state, [1, 2, 3, ending])
    last = "" if ending == EOS else "d"
    assert (state.text, state.chunk(0, 4).text) == (f"abc{last}", f"abc{last}")


@pytest.mark.parametrize("most", [1, 2, 3, 4])
def test_never_past_max_new_tokens(most: int) -> None:
    state = generation(limits=replace(LIMITS, max_new_tokens=most))
    play(state, [1, 2])
    if not state.done:
        play(state, [3, 4, 5, 6, 7])
    assert (len(state.emitted), state.finish, state.remaining_tokens) == (most, FinishReason.LENGTH, 0)
    assert state.text == "abcdefg"[:most]


def test_never_past_the_context() -> None:
    state = generation(limits=replace(LIMITS, context_length=len(PROMPT) + 3))
    assert state.remaining_tokens == 3
    play(state, [1, 2, 3, 4, 5])
    assert (tokens_of(state.emitted), state.finish) == ([1, 2, 3], FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        (SEED, [1, EOS], FinishReason.EOS),
        (replace(SEED, stop_token_ids=(2,)), [1, 2], FinishReason.STOP),
        (replace(SEED, stop=("ab",)), [1, 2], FinishReason.STOP),
        (SEED, [1, 2], FinishReason.LENGTH),
    ],
)
def test_a_stop_on_the_last_token_counts(sampling: SamplingParams, tokens: list[int], reason: FinishReason) -> None:
    state = generation(sampling, replace(LIMITS, max_new_tokens=2))
    assert play(state, tokens).finish is reason


def test_tokens_text_and_logprobs_are_cut_together() -> None:
    state = generation(replace(SEED, stop=("bc",), num_logprobs=1))
    played = play(state, [1, 2, 3, 4, 5], num_drafted=6)
    chunk = state.chunk(0, 3)
    assert tokens_of(chunk.emitted) == [1, 2, 3]
    assert [entry.logprobs for entry in chunk.emitted] == [
        TokenLogprobs(-token / 8, ((index, -1.0),)) for index, token in enumerate((1, 2, 3))
    ]
    assert (chunk.text, chunk.text_ends, chunk.digest) == ("a", (1, 1, 1), played.digest)
    # num_accepted_tokens counts what was accepted, also what the stop cut away
    expected = Statistics(
        num_rounds=1,
        num_draft_tokens=6,
        num_accepted_tokens=4,
        num_tokens=3,
        draft_s=0.25,
        score_s=0.5,
        num_drafts_per_depth=(1,) * 6,
        num_accepted_tokens_per_depth=(1, 1, 1, 1, 0, 0),
    )
    assert state.statistics == played.statistics == expected


def test_chunks_tell_of_the_rounds_that_ran_here() -> None:
    state = generation(replace(SEED, stop=("bc",)))
    state.replay([OutputToken(1, TokenOrigin.BONUS)], None)
    play(state, [1, 2], num_drafted=3)
    play(state, [3, 4, 5], num_drafted=6)
    assert state.chunk(0, 4).rounds == (RoundDraft("none", 3, 3, 3), RoundDraft("none", 6, 6, 4))
    assert state.chunk(0, 2).rounds == ()
    assert state.chunk(2, 4).rounds == state.chunk(0, 4).rounds
    state.cut(3, FinishReason.CANCELLED)
    assert state.chunk(0, 3).rounds == (RoundDraft("none", 3, 3, 3),)


def test_statistics_are_sums() -> None:
    state = generation()
    play(state, [1, 2], num_drafted=3)
    assert play(state, [3]).statistics == Statistics(2, 3, 1, 3, 0.5, 1.0, 0, 0, (1, 1, 1), (1, 0, 0))


def test_counts_by_depth_add_up() -> None:
    state = generation()
    for tokens, num_drafted in (([1, 2], 1), ([1, 2, 3], 3), ([1], 2), ([1], 0)):
        statistics = play(state, tokens, num_drafted).statistics
    assert statistics.num_drafts_per_depth == (3, 2, 1)
    assert statistics.num_accepted_tokens_per_depth == (2, 1, 0)
    assert sum(statistics.num_accepted_tokens_per_depth) == statistics.num_accepted_tokens


# ---- independence of rounds and chunks


TOKENS = st.lists(st.integers(0, NO_TEXT), min_size=1, max_size=25)
STOPS = st.lists(st.text("abcxy|", min_size=1, max_size=3), max_size=3).map(tuple)
SIZES = st.lists(st.integers(1, 4), min_size=25, max_size=25)


def played(tokens: list[int], sizes: list[int], stops: tuple[str, ...], *, ignore_eos: bool = False) -> Generation:
    """Commit the tokens in rounds of these sizes, as far as they reach."""
    state = generation(replace(SEED, stop=stops, ignore_eos=ignore_eos, num_logprobs=1))
    for size in sizes:
        if tokens and not state.done:
            play(state, tokens[:size])
            tokens = tokens[size:]
    return state


def whole(state: Generation) -> CommittedChunk:
    return state.chunk(0, len(state.emitted))


def ended_text(state: Generation) -> str:
    """End a generation; return its text, with what was held back for stop strings."""
    state.end(FinishReason.CANCELLED)
    return state.text


def facts(state: Generation) -> tuple[object, ...]:
    """Return everything that a client sees except origins, which depend on rounds."""
    chunk = whole(state)
    return state.committed, state.finish, state.text, chunk.text, chunk.text_ends, chunk.digest


@settings(deadline=None, derandomize=True, database=None)
@given(TOKENS, SIZES, SIZES, STOPS, st.booleans())
def test_text_does_not_depend_on_rounds(
    tokens: list[int], sizes: list[int], others: list[int], stops: tuple[str, ...], ignore_eos: bool
) -> None:
    first, second = (played(tokens, each, stops, ignore_eos=ignore_eos) for each in (sizes, others))
    assert facts(first) == facts(second)
    for offset in range(len(first.committed) - len(PROMPT) + 1):
        assert first.digest_at(offset) == chain(b"", first.committed[: len(PROMPT) + offset])


@settings(deadline=None, derandomize=True, database=None)
@given(TOKENS, SIZES, STOPS, st.lists(st.integers(0, 25), max_size=6))
def test_chunks_of_any_cut_make_the_whole(
    tokens: list[int], sizes: list[int], stops: tuple[str, ...], cuts: list[int]
) -> None:
    state = played(tokens, sizes, stops)
    last = len(state.emitted)
    bounds = sorted({0, last, *(cut for cut in cuts if cut < last)})
    chunks = [state.chunk(begin, end) for begin, end in pairwise(bounds)]
    assert "".join(chunk.text for chunk in chunks) == whole(state).text
    assert [entry for chunk in chunks for entry in chunk.emitted] == state.emitted
    offsets = [sum(len(chunk.text) for chunk in chunks[:index]) for index in range(len(chunks))]
    ends = [offset + end for offset, chunk in zip(offsets, chunks, strict=True) for end in chunk.text_ends]
    assert tuple(ends) == whole(state).text_ends
    assert [chunk.digest for chunk in chunks] == [state.digest_at(end) for end in bounds[1:]]
    rounds = [each for chunk in chunks for each in chunk.rounds]
    assert rounds == list(whole(state).rounds)
    assert all(
        chunk.offset < each.end <= chunk.offset + len(chunk.emitted) for chunk in chunks for each in chunk.rounds
    )
    assert state.chunk(last, last).text == (state.text[ends[-1] :] if state.done else "")


@settings(deadline=None, derandomize=True, database=None)
@given(TOKENS, SIZES, STOPS)
def test_a_replay_is_identical(tokens: list[int], sizes: list[int], stops: tuple[str, ...]) -> None:
    state = played(tokens, sizes, stops)
    again = generation(state.sampling, LIMITS, state.emitted, state.finish)
    assert facts(again) == facts(state)
    assert (again.emitted, again.done) == (state.emitted, state.done)
    replayed = generation(state.sampling, LIMITS, state.emitted, state.finish)
    assert ended_text(replayed) == ended_text(played(tokens, sizes, stops))
    if not state.done:
        assert play(again, [1, 2]) == replace(play(state, [1, 2]), statistics=again.statistics)
        assert facts(again) == facts(state)


@settings(deadline=None, derandomize=True, database=None)
@given(TOKENS, SIZES, STOPS, st.integers(0, 25))
def test_a_cut_is_the_replay_of_what_remains(
    tokens: list[int], sizes: list[int], stops: tuple[str, ...], length: int
) -> None:
    """A cancelled session looks the same to a client that followed it and to one that reads it from the store."""
    state = played(tokens, sizes, stops)
    length = min(length, len(state.emitted) - 1)
    again = generation(state.sampling, LIMITS, state.emitted[:length], FinishReason.CANCELLED)
    state.cut(length, FinishReason.CANCELLED)
    assert facts(state) == facts(again)
    assert (state.emitted, state.done) == (again.emitted, True)


def test_a_cut_releases_held_back_text() -> None:
    state = generation(replace(SEED, stop=("cd",)))
    play(state, [1, 2, 3])
    play(state, [5, 6])
    state.cut(3, FinishReason.CANCELLED)
    assert (state.text, state.chunk(0, 2).text, state.chunk(2, 3).text) == ("abc", "ab", "c")


def test_uniforms_are_fresh_and_survive_a_replay() -> None:
    state = generation()
    first = state.uniforms(3)
    assert first == generation().uniforms(3)
    play(state, [1])
    second = state.uniforms(3)
    drawn = [*first.accept, first.close, *second.accept, second.close]
    assert len(set(drawn)) == len(drawn)
    assert generation(emitted=state.emitted).uniforms(3) == second


def test_prefix_digests_are_those_of_the_committed_tokens() -> None:
    state = Generation(tuple(range(150)), SEED, LIMITS, Letters())
    play(state, [1, 2, 3])
    for length in (153, 0, 151, 150, 149, 64, 63, 130):
        assert state.prefix_digest(length) == chain(b"", state.committed[:length])
