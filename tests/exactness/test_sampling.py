"""Logits to distributions: equal to transformers' processors where they exist, else to the definition."""

import math
from collections import Counter
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.exact.codec import distributions_from_proto, distributions_to_proto
from specdec.exact.sampling import (
    CHUNK_TOKENS,
    NUCLEUS_TOKENS,
    SamplingContext,
    draft_distributions,
    draw,
    draw_dense,
    greedy_tokens,
    in_one_copy,
    next_token_distributions,
    on_cpu,
    sparse_distributions,
    top_tokens,
)
from specdec.exact.values import SparseDistribution
from specdec.types import SamplingParams

VOCAB_SIZE = 3 * NUCLEUS_TOKENS  # so that some nuclei are larger than the first look
LOGITS = torch.randn(6, VOCAB_SIZE, generator=torch.Generator().manual_seed(0)) * 3
PEAKED = LOGITS.clone()
PEAKED[:, :5] += 12
TIED = (LOGITS * 2).round() / 2
PROMPT, COMPLETION = (1, 2, 3, 3, 500), (3, 7, 7, 7, 9)


def rows_of(logits: torch.Tensor, sampling: SamplingParams, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    """Return the rows of several positions with the same parameters and history."""
    return next_token_distributions(logits, [SamplingContext(sampling, PROMPT, COMPLETION)] * len(logits), vocab_size)


def transformers_rows(logits: torch.Tensor, *processors: object) -> torch.Tensor:
    """Return what transformers samples from."""
    history = cast(torch.LongTensor, torch.tensor([[*PROMPT, *COMPLETION]] * len(logits)))
    return LogitsProcessorList(processors)(history, cast(torch.FloatTensor, logits.clone())).softmax(-1)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.9, 50.0])
def test_temperature(temperature: float) -> None:
    expected = transformers_rows(LOGITS, TemperatureLogitsWarper(temperature))
    torch.testing.assert_close(rows_of(LOGITS, SamplingParams(temperature=temperature)), expected)


@pytest.mark.parametrize("logits", [LOGITS, TIED], ids=["distinct", "tied"])
@pytest.mark.parametrize("top_k", [1, 2, 50, NUCLEUS_TOKENS + 1, VOCAB_SIZE, 10 * VOCAB_SIZE])
def test_top_k(logits: torch.Tensor, top_k: int) -> None:
    """Tokens tied with the k-th are kept, as transformers keeps them."""
    expected = transformers_rows(logits, TopKLogitsWarper(top_k))
    torch.testing.assert_close(rows_of(logits, SamplingParams(top_k=top_k)), expected)


@pytest.mark.parametrize("logits", [LOGITS, PEAKED], ids=["flat", "peaked"])
@pytest.mark.parametrize("top_p", [0.001, 0.3, 0.9, 0.99, 0.99999])
def test_top_p(logits: torch.Tensor, top_p: float) -> None:
    expected = transformers_rows(logits, TopPLogitsWarper(top_p))
    torch.testing.assert_close(rows_of(logits, SamplingParams(top_p=top_p)), expected)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95])
def test_top_p_of_ties_keeps_the_first(top_p: float) -> None:
    """The smallest set with the mass, by the definition: sorted by probability, then by id."""
    for row, full in zip(rows_of(TIED, SamplingParams(top_p=top_p)), TIED.softmax(-1).double(), strict=True):
        order = sorted(range(VOCAB_SIZE), key=lambda token: (-full[token].item(), token))
        mass = full[order].cumsum(0)
        kept = order[: int((mass - full[order] < top_p * mass[-1]).sum())]
        assert row.nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("min_p", [0.001, 0.1, 0.9, 1.0])
def test_min_p(min_p: float) -> None:
    expected = transformers_rows(PEAKED, MinPLogitsWarper(min_p))
    torch.testing.assert_close(rows_of(PEAKED, SamplingParams(min_p=min_p)), expected)


@pytest.mark.parametrize("penalty", [0.5, 1.3, 100.0])
def test_repetition_penalty(penalty: float) -> None:
    """Each token seen in prompt or completion is penalised once."""
    expected = transformers_rows(LOGITS, RepetitionPenaltyLogitsProcessor(penalty))
    torch.testing.assert_close(rows_of(LOGITS, SamplingParams(repetition_penalty=penalty)), expected)


def test_all_of_them_in_order() -> None:
    sampling = SamplingParams(temperature=0.7, top_k=40, top_p=0.8, repetition_penalty=1.2)
    expected = transformers_rows(
        LOGITS,
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(40),
        TopPLogitsWarper(0.8),
    )
    torch.testing.assert_close(rows_of(LOGITS, sampling), expected)


def test_presence_and_frequency_penalties_see_the_completion_only() -> None:
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    expected = LOGITS.clone()
    for token, count in Counter(COMPLETION).items():
        expected[:, token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(rows_of(LOGITS, sampling), expected.softmax(-1))


def test_logit_bias_comes_before_penalties() -> None:
    sampling = SamplingParams(logit_bias={3: 4.0, 8: -100.0}, repetition_penalty=2.0)
    biased = LOGITS.clone()
    biased[:, 3] += 4.0
    biased[:, 8] -= 100.0
    expected = transformers_rows(biased, RepetitionPenaltyLogitsProcessor(2.0))
    torch.testing.assert_close(rows_of(LOGITS, sampling), expected)


def test_the_callers_logits_are_not_modified() -> None:
    logits = LOGITS.clone()
    rows_of(logits, SamplingParams(temperature=0.5, top_k=3, logit_bias={1: 1.0}, presence_penalty=1.0))
    assert torch.equal(logits, LOGITS)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_has_no_probability(temperature: float) -> None:
    """Ids past the real vocabulary are no tokens, however probable their logits."""
    padded = torch.cat([LOGITS, torch.full((len(LOGITS), 9), 99.0)], dim=-1)
    sampling = SamplingParams(temperature=temperature)
    assert torch.equal(rows_of(padded, sampling), rows_of(LOGITS, sampling))
    contexts = [SamplingContext(sampling)] * len(padded)
    assert draft_distributions(padded, contexts, VOCAB_SIZE, 0.99, 64) == draft_distributions(
        LOGITS, contexts, VOCAB_SIZE, 0.99, 64
    )


def test_temperature_0_is_one_hot_at_the_maximum() -> None:
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5, min_p=0.5)
    for logits in (LOGITS, TIED):
        rows = rows_of(logits, greedy)
        assert torch.equal(rows, torch.nn.functional.one_hot(logits.argmax(-1), VOCAB_SIZE).float())


def test_each_row_has_its_own_parameters() -> None:
    """A batch of sessions gives each the rows that it would have alone."""
    params = [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-6),
        SamplingParams(top_k=3, temperature=2.0),
        SamplingParams(top_p=0.5, presence_penalty=1.0),
        SamplingParams(min_p=0.2, logit_bias={0: 5.0}),
    ]
    contexts = [SamplingContext(sampling, PROMPT, COMPLETION) for sampling in params]
    together = next_token_distributions(LOGITS, contexts, VOCAB_SIZE)
    alone = [next_token_distributions(LOGITS[[i]], [context], VOCAB_SIZE)[0] for i, context in enumerate(contexts)]
    torch.testing.assert_close(together, torch.stack(alone))
    drafts = draft_distributions(LOGITS, contexts, VOCAB_SIZE, 1.0, VOCAB_SIZE)
    assert [len(row.token_ids) for row in drafts] == [int((row > 0).sum()) for row in together]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=2),
        SamplingParams(top_p=0.5),
        SamplingParams(min_p=0.1),
    ],
    ids=str,
)
def test_non_finite_logits_spoil_only_their_row(sampling: SamplingParams, bad: float) -> None:
    logits = LOGITS.clone()
    logits[2, 17] = bad
    logits[4] = -math.inf
    contexts = [SamplingContext(sampling)] * len(logits)
    rows = next_token_distributions(logits, contexts, VOCAB_SIZE)
    good = [0, 1, 3, 5]
    assert rows.sum(-1).isfinite().tolist() == [index in good for index in range(6)]
    torch.testing.assert_close(rows[good], next_token_distributions(LOGITS, contexts, VOCAB_SIZE)[good])
    drafts = draft_distributions(logits, contexts, VOCAB_SIZE, 0.99, 64)
    assert [bool(row.token_ids) for row in drafts] == [index in good for index in range(6)]
    draw_dense(rows, [0.5] * 6)  # for bad rows any result is allowed, but no exception


@pytest.mark.parametrize("vocab_size", [8 * CHUNK_TOKENS, 9 * CHUNK_TOKENS, 9 * CHUNK_TOKENS + 1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_are_the_largest(vocab_size: int, dtype: torch.dtype) -> None:
    """Best first, whether they are found by chunks or not; several of them in one chunk, and equal ones."""
    rows = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[1, -8:] = torch.arange(8) + 10
    rows[2] = 0
    ids = top_tokens(rows, 8)
    assert rows.gather(1, ids).equal(rows.topk(8, dim=-1).values)
    assert all(len(set(row)) == 8 for row in ids.tolist())
    assert ids[1].tolist() == list(range(vocab_size - 1, vocab_size - 9, -1))


def test_greedy_drafts_are_those_of_the_dense_row() -> None:
    contexts = [SamplingContext(SamplingParams(temperature=0, presence_penalty=3.0), PROMPT, COMPLETION)] * len(TIED)
    dense = sparse_distributions(next_token_distributions(TIED, contexts, VOCAB_SIZE), 0.99, 64)
    assert draft_distributions(TIED, contexts, VOCAB_SIZE, 0.99, 64) == dense
    assert dense == [SparseDistribution((token,), (1.0,)) for token in map(int, (TIED - penalty()).argmax(-1))]


@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -math.inf])
def test_greedy_tokens_are_those_of_the_dense_rows(bad: float | None) -> None:
    """Also where the first of equal maxima is asked for, and where a row is not a distribution."""
    logits = torch.cat([TIED, torch.full((6, 3), 1e9)], dim=-1)  # past the vocabulary
    if bad is not None:
        logits[3, 7 if bad > 0 or math.isnan(bad) else slice(None)] = bad
    contexts = [SamplingContext(SamplingParams(temperature=0, presence_penalty=3.0), PROMPT, COMPLETION)] * len(TIED)
    dense = next_token_distributions(logits, contexts, VOCAB_SIZE)
    tokens = greedy_tokens(logits, contexts, VOCAB_SIZE)
    assert [token is None for token in tokens] == [index == 3 and bad is not None for index in range(6)]
    for row, token in zip(dense, tokens, strict=True):
        assert (token is None) == (not row.sum().isfinite())
        assert token is None or row.tolist() == [float(place == token) for place in range(VOCAB_SIZE)]
    assert any(int((row == row.max()).sum()) > 1 for row in TIED - penalty()), "no two maxima are equal"


def penalty() -> torch.Tensor:
    """Return what a presence penalty of 3 takes from each token."""
    return 3.0 * torch.isin(torch.arange(VOCAB_SIZE), torch.tensor(COMPLETION))


# ---- sparse rows and draws

distributions = arrays.arrays(
    np.float32,
    st.tuples(st.integers(1, 3), st.integers(2, 40)),
    elements=st.floats(-30, 30, width=32),
)
uniform_numbers = st.floats(0, 1, exclude_max=True)


@settings(deadline=None)
@given(distributions, st.floats(0.05, 5.0), st.integers(0, 50), st.floats(0.01, 1.0), st.floats(0.0, 1.0))
def test_rows_are_distributions(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> None:
    sampling = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    rows = next_token_distributions(
        torch.from_numpy(logits), [SamplingContext(sampling)] * len(logits), logits.shape[-1]
    )
    assert (rows >= 0).all()
    torch.testing.assert_close(rows.sum(-1), torch.ones(len(logits)))
    kept = torch.where(rows > 0, torch.from_numpy(logits), -torch.inf).amax(-1)
    # nearer to the maximum, two tokens may have the same float32 probability
    assert (kept >= torch.from_numpy(logits).amax(-1) - 1e-5 * max(1.0, temperature)).all()


@settings(deadline=None)
@given(distributions, st.floats(0.01, 1.0), st.integers(1, 50))
def test_supports_are_the_smallest_with_the_mass(logits: np.ndarray, mass: float, most: int) -> None:
    dense = torch.from_numpy(logits).softmax(-1)
    for full, row in zip(dense.double(), sparse_distributions(dense, mass, most), strict=True):
        size = len(row.token_ids)
        ordered = full.sort(descending=True).values
        needed = int((ordered.cumsum(0) - ordered < mass - 1e-9).sum())
        assert min(needed, most) - 1 <= size <= min(most, len(full))
        assert full[list(row.token_ids)].min() >= ordered[size - 1]
        assert abs(sum(row.probs) - 1) < 1e-6
        expected = full[list(row.token_ids)] / full[list(row.token_ids)].sum()
        torch.testing.assert_close(torch.tensor(row.probs, dtype=torch.float64), expected, rtol=1e-5, atol=0)


@settings(deadline=None)
@given(distributions, uniform_numbers)
def test_decoded_distributions_redraw_the_same_token(logits: np.ndarray, uniform: float) -> None:
    """What is shipped is what was drawn from: no rounding between the two."""
    rows = sparse_distributions(torch.from_numpy(logits).softmax(-1), 0.99, 64)
    decoded = distributions_from_proto(distributions_to_proto(rows))
    assert decoded == rows
    assert [draw(row, uniform) for row in decoded] == [draw(row, uniform) for row in rows]


def drawn(weights: torch.Tensor, uniforms: list[float]) -> tuple[list[int], list[float]]:
    tokens, masses = draw_dense(weights, uniforms)
    return tokens.tolist(), masses.tolist()


@settings(deadline=None)
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30).filter(any), uniform_numbers)
def test_no_draw_gives_a_token_without_probability(weights: list[float], uniform: float) -> None:
    tokens, masses = drawn(torch.tensor([weights]), [uniform])
    assert weights[tokens[0]] > 0
    assert masses[0] == pytest.approx(math.fsum(weights))
    row = SparseDistribution(tuple(range(len(weights))), tuple(weights))
    assert weights[draw(row, uniform)] > 0
    assert draw(row, uniform) == tokens[0]


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), uniform_numbers)
def test_draws_by_chunks_are_those_of_the_whole_row(seed: int, num_chunks: int, uniform: float) -> None:
    """The same weights beside one token more, which are not cut into chunks, give the same token."""
    generator = np.random.default_rng(seed)
    weights = generator.random((3, num_chunks, CHUNK_TOKENS)) * (generator.random((3, num_chunks, CHUNK_TOKENS)) < 0.3)
    weights *= generator.random((3, num_chunks, 1)) < 0.7
    # sums of multiples of a power of two are exact in any order
    chunked = torch.from_numpy((np.floor(weights * 1024) / 1024).astype(np.float32).reshape(3, -1))
    whole = torch.cat([chunked, torch.zeros(3, 1)], dim=-1)
    for each in (uniform, 0.0, 1 - 2**-53):
        assert drawn(chunked, [each] * 3) == drawn(whole, [each] * 3)


def test_rounding_never_draws_a_token_without_weight_at_a_chunks_end() -> None:
    """What is left of a chunk's sum by rounding does not lead past its last token that has a weight."""
    weights = torch.rand(64, 3 * CHUNK_TOKENS, generator=torch.Generator().manual_seed(3))
    weights[:, CHUNK_TOKENS - 5 : CHUNK_TOKENS + 5] = 0
    weights[:, -5:] = 0
    mass = weights.double().sum(-1)
    first = weights[:, :CHUNK_TOKENS].double().sum(-1)
    uniforms = [float(np.nextafter(each, side)) for each in (first / mass).tolist() for side in (0.0, 1.0)]
    tokens, _ = drawn(weights.repeat_interleave(2, dim=0), uniforms)
    assert (weights.repeat_interleave(2, dim=0)[range(128), tokens] > 0).all()
    tokens, _ = drawn(weights, [1 - 2**-53] * 64)
    assert (weights[range(64), tokens] > 0).all()


@pytest.mark.parametrize("size", [5, CHUNK_TOKENS, 2 * CHUNK_TOKENS])
def test_a_row_without_mass_is_never_an_error(size: int) -> None:
    assert drawn(torch.zeros(2, size), [0.0, 0.999]) == ([0, 0], [0.0, 0.0])


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval(uniform: float) -> None:
    weights = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]])
    assert drawn(weights, [uniform])[0] == [1 if uniform == 0 else 3]


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_draws_follow_the_row(seed: int) -> None:
    """Equally spaced uniforms hit each token in proportion to its probability, to one in a thousand."""
    probs = np.random.default_rng(seed).dirichlet(np.ones(6)).astype(np.float32)
    uniforms = [(index + 0.5) / 1000 for index in range(1000)]
    tokens, _ = drawn(torch.from_numpy(probs).expand(1000, -1), uniforms)
    row = SparseDistribution(tuple(range(6)), tuple(probs.tolist()))
    assert Counter(tokens) == Counter(draw(row, uniform) for uniform in uniforms)
    for token in range(6):
        assert abs(tokens.count(token) / 1000 - probs[token]) <= 0.002


@settings(deadline=None)
@given(
    st.lists(st.floats(width=32), max_size=8),
    st.lists(st.integers(0, 2**32), max_size=8),
    st.lists(st.booleans(), max_size=8),
    st.lists(st.floats(), max_size=8),
)
def test_one_copy_holds_every_number(
    probs: list[float], tokens: list[int], flags: list[bool], masses: list[float]
) -> None:
    """What a GPU sends in one copy is, bit for bit, what it would send in several."""
    sent = [
        torch.tensor(probs, dtype=torch.float32),
        torch.tensor(tokens, dtype=torch.int64).view(-1, 1),
        torch.tensor(flags, dtype=torch.bool),
        torch.tensor(masses, dtype=torch.float64),
    ]
    for copied in (in_one_copy(sent), on_cpu(*sent)):
        assert [(each.dtype, each.shape) for each in copied] == [(each.dtype, each.shape) for each in sent]
        assert [repr(each.tolist()) for each in copied] == [repr(each.tolist()) for each in sent]
