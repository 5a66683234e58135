"""What the compiled code reads and draws from rows: what torch does in specdec/exact/sampling.py, the reference."""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from specdec.engine import rows as compiled
from specdec.engine.native import num_lanes
from specdec.engine.rows import largest_tokens, likely_winners, read_and_draw
from specdec.exact import race, sampling
from specdec.exact.race import MAX_RUNNERS, Draw, Race
from specdec.exact.sampling import CHUNK_TOKENS, SamplingContext
from specdec.exact.values import TargetDistribution
from specdec.types import SamplingParams
from tests.engine.kernel import needs_kernel

pytestmark = needs_kernel

SIZES = [1, 3, 16, 40, CHUNK_TOKENS, CHUNK_TOKENS + 1, 3 * CHUNK_TOKENS - 5, 32 * CHUNK_TOKENS]
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-30),
    SamplingParams(temperature=0),
    SamplingParams(temperature=0.8, top_k=5),
    SamplingParams(top_p=0.6),
    SamplingParams(min_p=0.1),
    SamplingParams(temperature=0, top_k=5),
    SamplingParams(temperature=0.7, logit_bias={0: 2.5}),
]


@pytest.fixture(params=[4, 8, 16], autouse=True)
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the code run with narrower vectors too; a processor has those that it has."""
    if request.param > num_lanes():
        pytest.skip(f"this processor's vectors have {num_lanes()} floats")
    monkeypatch.setattr(compiled, "num_lanes", lambda: request.param)


def logits_of(num_rows: int, size: int, seed: int = 1) -> torch.Tensor:
    """Return logits that lie between other numbers, as those of a model that pads its vocabulary."""
    whole = 3 * torch.randn(num_rows, size + 7, generator=torch.Generator().manual_seed(seed))
    whole[:, size:] = 1e9
    return whole[:, :size]


def unions_of(num_rows: int, size: int) -> list[tuple[int, ...]]:
    """Return lists of tokens: none, one, some, all."""
    counts = [0, 1, 4, size]
    source = np.random.default_rng(2)
    return [tuple(sorted(source.permutation(size)[: counts[row % 4]].tolist())) for row in range(num_rows)]


def by(uniforms: Sequence[float]) -> list[Draw]:
    """Return draws without races."""
    return list(map(Draw, uniforms))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_rows_are_read_and_drawn_as_by_torch(params: SamplingParams, size: int) -> None:
    logits, unions = logits_of(12, size), unions_of(12, size)
    contexts, uniforms = [SamplingContext(params)] * 12, [row / 12 for row in range(12)]
    found = read_and_draw(logits, contexts, unions, by(uniforms))
    expected = sampling.read_and_draw(logits, contexts, unions, by(uniforms))
    dense = sampling.next_token_distributions(logits, contexts, size).double()
    for row, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours.support_probs, theirs.support_probs, rtol=2e-6, atol=1e-37)
        np.testing.assert_allclose(ours.tail_mass, theirs.tail_mass, rtol=2e-6, atol=1e-7)
        if theirs.tail_mass:
            _check_draw(dense[row], unions[row], uniforms[row], ours.tail_token)


def _check_draw(row: torch.Tensor, union: Sequence[int], uniform: float, token: int) -> None:
    """The token is one outside the union, where the sum of the others' probabilities reaches the number."""
    outside = row.clone()
    outside[list(union)] = 0
    cumulative = (outside.cumsum(-1) / outside.sum()).tolist()
    assert outside[token] > 0
    assert (cumulative[token - 1] if token else 0) <= uniform + 1e-6
    assert uniform - 1e-6 <= cumulative[token]


@pytest.mark.parametrize("size", [*SIZES, 2 * MAX_RUNNERS, 200 * CHUNK_TOKENS])
@pytest.mark.parametrize("params", [*SAMPLINGS, SamplingParams(temperature=50)], ids=str)
def test_races_are_run_as_by_torch(params: SamplingParams, size: int) -> None:
    """Also beside rows without one; at a high temperature more tokens have a chance than may run by themselves."""
    logits, contexts = logits_of(12, size), [SamplingContext(params)] * 12
    unions = unions_of(12, size)
    draws = [Draw(row / 12, None if union else Race(2**63 + row, 70 + row)) for row, union in enumerate(unions)]
    found = read_and_draw(logits, contexts, unions, draws)
    expected = sampling.read_and_draw(logits, contexts, unions, draws)
    for ours, theirs, draw in zip(found, expected, draws, strict=True):
        assert ours is not None
        assert theirs is not None
        np.testing.assert_allclose(ours.tail_mass, theirs.tail_mass, rtol=1e-5, atol=1e-7)
        assert not draw.race or ours.tail_token == theirs.tail_token


@pytest.mark.parametrize("size", [1, 5, 40, 1000, 20_000])
@pytest.mark.parametrize("count", [1, 8, 64])
def test_likely_winners_are_those_of_the_reference(size: int, count: int) -> None:
    rows = logits_of(6, size).softmax(-1)
    rows[4] = math.nan
    names = torch.from_numpy(np.random.default_rng(5).permutation(50_000)[:size])
    races = [Race(row, 2**40 + row) for row in range(6)]
    tokens, chances = likely_winners(rows, races, count, names)
    expected, theirs = race.likely_winners(rows.double().numpy(), races, count, names.numpy())
    np.testing.assert_allclose(chances, theirs, rtol=1e-9)
    is_guessed = np.nan_to_num(np.array(theirs)) > 0
    assert is_guessed[:4].any(axis=1).all()
    assert np.array_equal(np.array(tokens)[is_guessed], np.array(expected)[is_guessed])
    unnamed, _ = likely_winners(rows, races, count)
    assert unnamed == race.likely_winners(rows.double().numpy(), races, count, np.arange(size))[0]


def test_draws_follow_the_probabilities() -> None:
    """By numbers that lie evenly in [0, 1) each token is drawn as often as it is probable."""
    count, union = 4096, (3, 20)
    logits = logits_of(1, 40).expand(count, -1)
    contexts = [SamplingContext(SamplingParams(temperature=0.8))] * count
    uniforms = [(index + 0.5) / count for index in range(count)]
    found = read_and_draw(logits.contiguous(), contexts, [union] * count, by(uniforms))
    tokens = Counter(each.tail_token for each in found if each)
    probs = (logits[0].double() / 0.8).softmax(-1)
    mass = 1 - probs[list(union)].sum()
    assert found[0] is not None
    assert found[0].tail_mass == pytest.approx(float(mass), rel=1e-6)
    for token, prob in enumerate(probs.tolist()):
        assert abs(tokens[token] - (token not in union) * prob / float(mass) * count) <= 1.01


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", SAMPLINGS, ids=str)
def test_a_row_that_is_no_distribution_spoils_no_other(params: SamplingParams, bad: float) -> None:
    """One such number is enough, but of minus infinity: there it takes the whole row."""
    logits, contexts, uniforms = logits_of(4, 300), [SamplingContext(params)] * 4, [0.1, 0.5, 0.9, 0.9999]
    unions = [(), (5,), (7, 299), ()]
    good = read_and_draw(logits, contexts, unions, by(uniforms))
    logits[1, 5 if bad > 0 or math.isnan(bad) else slice(None)] = bad
    logits[2, 11] = bad if bad < 0 else 0.0
    found = read_and_draw(logits, contexts, unions, by(uniforms))
    assert [each is None for each in found] == [False, True, False, False]
    assert (found[0], found[3]) == (good[0], good[3])


def test_bad_numbers_are_noticed_where_all_tokens_are_listed() -> None:
    logits = torch.full((2, 3), math.nan)
    contexts = [SamplingContext(SamplingParams(top_k=5)), SamplingContext(SamplingParams())]
    assert read_and_draw(logits, contexts, [(0, 1, 2)] * 2, by([0.5] * 2)) == [None, None]


@pytest.mark.parametrize("token", [-1, 300, 1 << 40])
def test_a_token_that_does_not_exist_is_refused(token: int) -> None:
    """Else memory would be read and written that is another's."""
    with pytest.raises(IndexError, match="300"):
        read_and_draw(logits_of(1, 300), [SamplingContext(SamplingParams())], [(2, token)], by([0.5]))


def test_what_the_model_forbids_is_never_drawn() -> None:
    logits = torch.full((64, 2 * CHUNK_TOKENS), -math.inf)
    logits[:, 7] = 0.0
    logits[:, 200] = -80.0
    uniforms = [*(index / 64 for index in range(63)), 1 - 2**-53]
    for union, token in (((), 7), ((7,), 200), ((200,), 7)):
        found = read_and_draw(logits, [SamplingContext(SamplingParams())] * 64, [union] * 64, by(uniforms))
        assert {each.tail_token for each in found if each} == {token}
    found = read_and_draw(logits, [SamplingContext(SamplingParams())] * 64, [(7, 200)] * 64, by(uniforms))
    assert all(each is not None and each.tail_mass == 0 for each in found)


def test_a_rows_bits_depend_on_nothing_beside_it() -> None:
    """Neither on how many rows there are, nor on how they are sampled, nor on where they lie."""
    logits = logits_of(len(SAMPLINGS), 1000)
    unions, uniforms = unions_of(len(SAMPLINGS), 1000), [0.37] * len(SAMPLINGS)
    contexts = [SamplingContext(params) for params in SAMPLINGS]
    together = read_and_draw(logits, contexts, unions, by(uniforms))
    for row, context in enumerate(contexts):
        alone = read_and_draw(logits[row : row + 1].contiguous(), [context], [unions[row]], by([uniforms[row]]))
        assert alone == [together[row]]


def test_rounding_draws_no_token_without_weight() -> None:
    """What is left of a chunk's sum by rounding does not lead past its last token that has a weight."""
    weights = torch.rand(64, 3 * CHUNK_TOKENS, generator=torch.Generator().manual_seed(3))
    weights[:, CHUNK_TOKENS - 5 : CHUNK_TOKENS + 5] = 0
    weights[:, -5:] = 0
    weights /= weights.sum(-1, keepdim=True)
    first = (weights[:, :CHUNK_TOKENS].double().sum(-1) / weights.double().sum(-1)).tolist()
    uniforms = [float(np.nextafter(each, side)) for each in first for side in (0.0, 1.0)] + [1 - 2**-53] * 128
    rows = weights.repeat_interleave(2, dim=0).repeat(2, 1)
    found = compiled._drawn(rows, [compiled.PROBABILITIES] * len(rows), [()] * len(rows), by(uniforms))
    assert all(each is not None and rows[index, each.tail_token] > 0 for index, each in enumerate(found))


def test_a_weight_that_moves_no_sum_is_never_passed_over_for_none() -> None:
    """All that a chunk has may be less than the last digit of what comes before it."""
    weights = torch.zeros(2, 2 * CHUNK_TOKENS)
    weights[:, 0] = 1.0
    weights[:, CHUNK_TOKENS + 90] = 1e-30
    for uniforms in ([0.0, 1 - 2**-53], [1.0, 1.0]):
        found = compiled._drawn(weights, [compiled.PROBABILITIES] * 2, [()] * 2, by(uniforms))
        assert all(each is not None and weights[0, each.tail_token] > 0 for each in found)


def test_greedy_rows_take_the_first_of_equal_maxima() -> None:
    logits = torch.zeros(1, 500)
    logits[0, [77, 300]] = 2.0
    greedy = [SamplingContext(SamplingParams(temperature=0))]
    assert read_and_draw(logits, greedy, [(300,)], by([0.0])) == [TargetDistribution([0.0], 1.0, 77)]
    assert read_and_draw(logits, greedy, [(3, 77)], by([0.0])) == [TargetDistribution([0.0, 1.0], 0.0, 0)]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("count", [1, 8, 64])
def test_largest_tokens_are_those_of_torch(size: int, count: int) -> None:
    """Best first, whatever they lie beside; several of them side by side, and equal ones."""
    rows = logits_of(5, size)
    rows[1, -8:] = torch.arange(min(8, size)) + 10.0
    rows[2] = 0
    rows[3, ::2] = -math.inf
    found = [np.frombuffer(each, np.int32) for each in largest_tokens(rows, count)]
    places = torch.from_numpy(np.stack(found)).long()
    assert rows.gather(1, places).equal(rows.topk(min(count, size), dim=-1).values)
    assert all(len(set(row)) == min(count, size) for row in places.tolist())


def test_a_row_of_bad_numbers_has_some_largest_tokens() -> None:
    rows = logits_of(3, 200)
    rows[1] = math.nan
    rows[1, 3] = 1.0
    found = [np.frombuffer(each, np.int32) for each in largest_tokens(rows, 8)]
    assert all(0 <= place < 200 for each in found for place in each)
    assert found[2].tolist() == rows[2].topk(8).indices.tolist()
