"""Packed forwards match transformers' forward, for every architecture that is served."""

import random
from pathlib import Path

import pytest
import torch

from specdec.engine import CacheFull, EngineError, Feed, LanguageModel, SequenceTooLong
from specdec.engine.attention import AttentionOptions, AttentionPlan, NewBackend, PoolOptions, Segment
from specdec.engine.compiled import RowwiseCompiledBackend
from specdec.engine.fused import FusedDecoder
from specdec.engine.load import BLOCK_TOKENS
from specdec.engine.pool import LayerShape
from specdec.engine.rowwise import RowwiseSdpaBackend
from specdec.engine.sdpa import SdpaBackend
from tests.engine.kernel import needs_kernel
from tests.engine.scenarios import check_hidden_states, check_tree_rounds
from tests.engine.tiny_models import FUSED, ReferenceModel, assert_close, load, random_tokens
from tests.support import architectures

DIFFERENT = ("llama", "gpt2", "gemma3", "gpt_oss", "deepseek_v3")  # from one another as attention goes
BACKENDS = [pytest.param(RowwiseCompiledBackend, marks=needs_kernel), SdpaBackend, RowwiseSdpaBackend]
LENGTHS = (40, 25, 17)  # all longer than the tiny models' sliding windows


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return load(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folder of each served architecture, built on first use."""
    return _Folders(tmp_path_factory)


class _Folders(dict[str, Path]):
    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory

    def __missing__(self, name: str) -> Path:
        self[name] = architectures.build(name, self._factory.mktemp(name))
        return self[name]


@pytest.fixture
def without_fused_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.engine.load.has_fused_forward", lambda model: False)


class TestEveryArchitecture:
    @pytest.mark.parametrize("name", architectures.SERVED)
    def test_chains_match_the_reference(self, name: str, folders: dict[str, Path]) -> None:
        check_pieces(load(folders[name]), ReferenceModel(folders[name]))

    @pytest.mark.parametrize("name", architectures.SERVED)
    def test_trees_match_the_reference(self, name: str, folders: dict[str, Path]) -> None:
        check_tree_rounds(load(folders[name]), ReferenceModel(folders[name]))

    @pytest.mark.parametrize("backend", BACKENDS)
    @pytest.mark.parametrize("name", architectures.SERVED)
    @pytest.mark.long(
        but=[f"{name}-{backend.__name__}" for name in DIFFERENT for backend in (SdpaBackend, RowwiseSdpaBackend)]
    )
    def test_other_attention_matches_the_reference(
        self, name: str, backend: NewBackend, folders: dict[str, Path]
    ) -> None:
        model = load(folders[name], new_backend=backend)
        check_pieces(model, ReferenceModel(folders[name]))
        check_tree_rounds(model, ReferenceModel(folders[name]))

    @pytest.mark.parametrize("name", architectures.SERVED)
    def test_hidden_states_match_the_reference(self, name: str, folders: dict[str, Path]) -> None:
        check_hidden_states(load(folders[name]), ReferenceModel(folders[name]))


@pytest.mark.usefixtures("without_fused_forward")
class TestFusedArchitecturesThroughTransformers:
    @pytest.mark.parametrize("name", FUSED)
    def test_everything_matches_the_reference(self, name: str, folders: dict[str, Path]) -> None:
        model, reference = load(folders[name]), ReferenceModel(folders[name])
        assert not isinstance(model.decoder, FusedDecoder)
        check_pieces(model, reference)
        check_tree_rounds(model, reference)
        check_hidden_states(model, reference)


@pytest.mark.parametrize("name", FUSED)
def test_fused_architectures_use_the_fused_forward(name: str, folders: dict[str, Path]) -> None:
    assert isinstance(load(folders[name]).decoder, FusedDecoder)


def check_pieces(model: LanguageModel, reference: ReferenceModel) -> None:
    """Feed batched texts in uneven pieces, with rejected tokens in between; compare every row with the reference."""
    rng = random.Random(2)
    texts = [random_tokens(length, length) for length in LENGTHS]
    sequences = [model.cache.open(f"text {index}") for index in range(len(texts))]
    rows: list[list[torch.Tensor]] = [[] for _ in texts]
    while any(sequence.length < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        feeds, growing = [], []
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            piece = text[sequence.length : sequence.length + rng.randint(1, 9)]
            if piece and rng.random() < 0.8:
                feeds.append(Feed(sequence, piece, len(piece)))
                growing.append(index)
        if feeds:
            parts = torch.split(model.forward(feeds).logits, [feed.num_rows for feed in feeds])
            for index, part in zip(growing, parts, strict=True):
                rows[index].append(part)
                reject_some(model, sequences[index].key)
    for text, collected in zip(texts, rows, strict=True):
        assert_close(torch.cat(collected), reference.logits(text))


def reject_some(model: LanguageModel, key: str) -> None:
    """Append tokens that do not belong to the text, then truncate them."""
    sequence = model.cache.open(key)
    kept = sequence.length
    model.forward([Feed(sequence, random_tokens(kept, 5), 1)])
    sequence.truncate(kept)


def test_sliding_window_hides_older_tokens(tmp_path: Path) -> None:
    model = load(architectures.build("mistral", tmp_path))
    ending = list(range(40, 40 + 4 * architectures.SLIDING_WINDOW))
    last_rows = []
    for beginning in (1, 2):
        sequence = model.cache.open(str(beginning))
        last_rows.append(model.forward([Feed(sequence, [beginning, *ending], 1)]).logits)
    assert torch.equal(*last_rows)  # windows of seven tokens in three layers do not reach the first token


def test_only_requested_rows_are_returned(model: LanguageModel) -> None:
    one, two = model.cache.open("one"), model.cache.open("two")
    output = model.forward([Feed(one, [1] * 20, 2), Feed(two, [2] * 30, 0)])
    assert (output.logits.shape, output.hidden_states) == ((2, model.vocab_size), (None, None))
    assert model.forward([Feed(one, [1], 0)]).logits.shape == (0, model.vocab_size)


def test_only_requested_rows_reach_the_head(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head is the only linear layer with vocab_size outputs, so its inputs can be counted."""
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def counting(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if weight.shape[0] == architectures.VOCAB_SIZE:
            seen.append(rows.shape[-2])
        return linear(rows, weight, bias)

    monkeypatch.setattr(torch.nn.functional, "linear", counting)
    monkeypatch.setattr("specdec.engine.linear._takes_kernel", lambda linear: False)
    model = load(folder)
    seen.clear()
    model.forward([Feed(model.cache.open("one"), [1] * 20, 2), Feed(model.cache.open("two"), [2] * 30, 0)])
    model.forward([Feed(model.cache.open("one"), [1], 0)])
    assert seen == [2, 1]


@pytest.mark.parametrize("through", ["fused", "transformers"])
def test_bfloat16_gives_float32_logits(through: str, folder: Path, request: pytest.FixtureRequest) -> None:
    if through == "transformers":
        request.getfixturevalue("without_fused_forward")
    model = load(folder, dtype="bfloat16")
    output = model.forward([Feed(model.cache.open("a"), [1, 2], 2, hidden_layers=(0, 3), num_observed=1)])
    assert (output.logits.dtype, model.dtype) == (torch.float32, torch.bfloat16)
    assert output.hidden_states[0] is not None
    assert output.hidden_states[0].dtype == torch.bfloat16
    assert output.hidden_states[0].shape == (1, 2, model.hidden_size)


@pytest.mark.parametrize("count", [1, 5])
def test_repeated_feeds_give_the_same_bits(model: LanguageModel, count: int) -> None:
    sequence = model.cache.open("a")
    model.forward([Feed(sequence, random_tokens(1, 20), 0)])
    first, second = (feed_and_truncate(model, "a", random_tokens(2, count)) for _ in range(2))
    assert torch.equal(first, second)


def feed_and_truncate(model: LanguageModel, key: str, tokens: list[int]) -> torch.Tensor:
    """Return the tokens' logits and truncate the sequence to its former length."""
    sequence = model.cache.open(key)
    length = sequence.length
    logits = model.forward([Feed(sequence, tokens, len(tokens))]).logits
    sequence.truncate(length)
    return logits


class TestBadFeeds:
    @pytest.mark.parametrize(
        ("tokens", "num_rows", "error"),
        [
            ([], 0, EngineError),
            ([1], 2, EngineError),
            ([1], -1, EngineError),
            ([-1], 1, EngineError),
            ([architectures.VOCAB_SIZE], 1, EngineError),
            ([1] * (architectures.CONTEXT_LENGTH - 3), 1, SequenceTooLong),
        ],
    )
    def test_bad_feed_changes_no_sequence(
        self, model: LanguageModel, tokens: list[int], num_rows: int, error: type[Exception]
    ) -> None:
        other, sequence = model.cache.open("other"), model.cache.open("bad")
        model.forward([Feed(other, [1, 2, 3], 0), Feed(sequence, [4, 5, 6, 7], 0)])
        num_free = model.cache.num_free_blocks
        with pytest.raises(error):
            model.forward([Feed(other, [8] * 90, 1), Feed(sequence, tokens, num_rows)])
        assert (list(other.tokens), list(sequence.tokens)) == ([1, 2, 3], [4, 5, 6, 7])
        assert model.cache.num_free_blocks == num_free

    @pytest.mark.parametrize(
        ("parents", "message"), [((0, 0, 1), "hangs from"), ((0, 2), "are not a tree"), ((0, 0, 0, 0), "hangs from")]
    )
    def test_malformed_trees_are_refused(self, model: LanguageModel, parents: tuple[int, ...], message: str) -> None:
        with pytest.raises(EngineError, match=message):
            model.forward([Feed(model.cache.open("a"), [1, 2, 3], 1, parents)])

    @pytest.mark.parametrize(("layers", "count"), [((4,), 1), ((-1,), 1), ((0,), 2), ((0,), -1)])
    def test_unavailable_hidden_states_are_refused(
        self, model: LanguageModel, layers: tuple[int, ...], count: int
    ) -> None:
        with pytest.raises(EngineError, match="hidden states"):
            model.forward([Feed(model.cache.open("a"), [1], 1, hidden_layers=layers, num_observed=count)])

    def test_feeding_a_sequence_twice_is_refused(self, model: LanguageModel) -> None:
        sequence = model.cache.open("a")
        with pytest.raises(EngineError, match="fed twice"):
            model.forward([Feed(sequence, [1], 1), Feed(sequence, [2], 1)])


def test_context_limit_applies_to_positions(model: LanguageModel) -> None:
    """A tree may have more tokens than the context has positions left."""
    sequence = model.cache.open("a")
    length = architectures.CONTEXT_LENGTH - 1
    model.forward([Feed(sequence, random_tokens(1, length), 0)])
    sequence.mark_committed(length)
    assert model.forward([Feed(sequence, [1, 2, 3], 3, (0, 0, 0))]).logits.shape[0] == 3
    sequence.truncate(length)
    with pytest.raises(SequenceTooLong):
        model.forward([Feed(sequence, [1, 2, 3], 3, (0, 0, 1))])


class BreakableBackend(SdpaBackend):
    """An SDPA backend whose plans can be broken."""

    def __init__(self, shapes: list[LayerShape], options: PoolOptions) -> None:
        super().__init__(shapes, options)
        self.num_layers = len(shapes)

    def plan(self, segments: object) -> AttentionPlan:  # type: ignore[override]
        return BreakablePlan(super().plan(segments), self.num_layers)  # type: ignore[arg-type]


class BreakablePlan:
    """Wraps another plan; while `is_broken`, the last layer raises."""

    is_broken = False

    def __init__(self, plan: AttentionPlan, num_layers: int) -> None:
        self._plan = plan
        self._num_left = num_layers

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        self._num_left -= 1
        if self.is_broken and self._num_left == 0:
            raise RuntimeError("out of memory")
        return self._plan.attend(query, key, value, options)


def test_failed_forward_changes_no_sequence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(folder, new_backend=BreakableBackend)
    sequence = model.cache.open("a")
    model.forward([Feed(sequence, [1, 2, 3], 0), Feed(model.cache.open("b"), [3], 0)])
    sequence.mark_committed(3)
    num_free = model.cache.num_free_blocks
    with monkeypatch.context() as patch:
        patch.setattr(BreakablePlan, "is_broken", True)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.forward([Feed(sequence, [9] * 90, 1, (0, 0))])
    assert (list(sequence.tokens), sequence.parents, model.cache.num_free_blocks) == ([1, 2, 3], (), num_free)
    expected = model.forward([Feed(model.cache.open("fresh"), [1, 2, 3, 4], 1)]).logits
    assert_close(model.forward([Feed(sequence, [4], 1)]).logits, expected)


class TestSmallCache:
    @pytest.fixture
    def model(self, folder: Path) -> LanguageModel:
        bytes_per_token = 3 * 2 * 2 * 12 * 4
        model = load(folder, kv_cache_bytes=2 * BLOCK_TOKENS * bytes_per_token)
        assert model.cache.num_blocks == 2
        return model

    def test_pinned_sequences_are_not_evicted(self, model: LanguageModel) -> None:
        one, two = model.cache.open("one"), model.cache.open("two")
        one.pin()
        model.forward([Feed(one, [1] * BLOCK_TOKENS, 0)])
        with pytest.raises(CacheFull, match="more bytes"):
            model.forward([Feed(two, [1] * (BLOCK_TOKENS + 1), 1)])
        assert (one.length, two.length) == (BLOCK_TOKENS, 0)

    def test_sequences_in_the_batch_are_not_evicted(self, model: LanguageModel) -> None:
        one, two = model.cache.open("one"), model.cache.open("two")
        model.forward([Feed(one, [1] * 5, 0)])
        with pytest.raises(CacheFull):
            model.forward([Feed(one, [1], 1), Feed(two, [1] * (BLOCK_TOKENS + 1), 1)])
        assert (one.length, two.length, one.num_pins) == (5, 0, 0)


def test_tree_positions_follow_depth() -> None:
    segment = Segment("a", past=4, num_tokens=5, parents=(0, 0, 1, 3))
    assert (segment.total, segment.tree_start) == (9, 5)
    assert segment.positions == [4, 5, 5, 6, 7]
