"""A model that two processes share computes what one process computes: logits, trees, hidden states, evictions."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig

from specdec.engine import Feed, LanguageModel, ModelRefused
from specdec.engine.attention import Segment
from specdec.engine.decoder import PackedRow
from specdec.engine.parallel import Group, Place, check_device, check_divisible, place_in
from specdec.engine.parallel.messages import Compact, ForwardMessage, Resize, decode
from tests.engine.following import Pair, paired
from tests.engine.scenarios import check_hidden_states, check_tree_rounds
from tests.engine.tiny_models import ReferenceModel, assert_close, load, random_tokens
from tests.support import architectures

ARCHITECTURES = ["llama", "qwen3", "gemma2", "mixtral"]  # ties, head norms, soft caps and windows, experts
SMALL_CACHE_BYTES = 1 << 16  # of a share: seven blocks, which three texts of 70 tokens do not fit into
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    torch.set_num_threads(1)
    async with paired(tmp_path_factory.mktemp("pair")) as started:
        yield started


@in_module_loop
@pytest.mark.parametrize("name", ARCHITECTURES)
async def test_shared_models_match_the_reference(name: str, pair: Pair, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    reference = ReferenceModel(folder)
    async with pair.loaded(folder) as model:
        check_tree_rounds(model, reference)
        check_hidden_states(model, reference)


@in_module_loop
async def test_evictions_happen_in_both_processes(pair: Pair, tmp_path: Path) -> None:
    """Texts take turns in a cache that holds two of three, so that runs are evicted, moved and grown."""
    folder = architectures.build("llama", tmp_path)
    reference, texts = ReferenceModel(folder), [random_tokens(seed, 100) for seed in range(3)]
    num_evicted = 0
    async with pair.loaded(folder, kv_cache_bytes=SMALL_CACHE_BYTES) as model:
        for length in (40, 70, 100):
            for number, text in enumerate(texts):
                sequence = model.cache.open(str(number))
                num_evicted += length > 40 and sequence.length == 0
                rows = model.forward([Feed(sequence, text[sequence.length : length], 1)]).logits
                assert_close(rows[0], reference.logits(text[:length])[-1])
    assert num_evicted >= 2


@in_module_loop
async def test_long_rows_reach_the_follower(pair: Pair, tmp_path: Path) -> None:
    """A message that is longer than a frame comes in two parts."""
    folder = architectures.build("llama", tmp_path)
    text, sessions = random_tokens(1, 100), 8
    async with pair.loaded(folder) as model:
        rows = model.forward([Feed(model.cache.open(f"{number}"), text, 1) for number in range(sessions)]).logits
    expected = ReferenceModel(folder).logits(text)[-1]
    for row in rows:
        assert_close(row, expected)


@in_module_loop
async def test_lower_precision_is_checked_in_float32(pair: Pair, tmp_path: Path) -> None:
    folder = architectures.build("llama", tmp_path)
    text = random_tokens(1, 30)
    async with pair.loaded(folder, dtype="bfloat16") as model:
        assert model.dtype == torch.bfloat16
        shared = model.forward([Feed(model.cache.open("text"), text, 30)]).logits
    assert _spread_of_difference(shared, ReferenceModel(folder).logits(text)) < 0.1


@in_module_loop
async def test_shares_of_different_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    """Each process compares with the whole model that it finds, so both see it."""
    first, second = (architectures.build("llama", tmp_path / name, seed=len(name)) for name in ("a", "bb"))
    with pytest.raises(ModelRefused, match="gives other logits"):
        async with pair.loaded(first, other={"folder": str(second)}):
            pass


@in_module_loop
async def test_caches_of_different_sizes_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = architectures.build("llama", tmp_path)
    with pytest.raises(ModelRefused, match="blocks in their KV caches"):
        async with pair.loaded(folder, other={"kv_cache_bytes": 1 << 19}):
            pass


@in_module_loop
async def test_nothing_is_computed_after_a_failed_forward(pair: Pair, tmp_path: Path) -> None:
    """How far the follower came in it is unknown; here nobody has told it anything."""
    folder = architectures.build("llama", tmp_path)
    async with pair.loaded(folder) as model:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(pair.group, "send", _raise)
            with pytest.raises(RuntimeError, match="planted"):
                _forward_one(model)
        with pytest.raises(Exception, match="only a new start helps"):
            _forward_one(model)


def test_messages_arrive_as_they_were() -> None:
    sent = ForwardMessage(
        [Resize("a session", 3), Compact("a session", 4, [5, 7])],
        [Segment("a session", 4, 3, (0, 1)), Segment("ü", 0, 1)],
        PackedRow([1, 2, 3, 4], [4, 5, 6, 0], [0, 3], [1], (0, 2)),
    )
    assert decode(sent.encode()) == sent


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [
        ("gpt2", 2, "no plan to divide"),
        ("llama", 3, "4 attention heads, which 3 processes cannot share evenly"),
        ("llama", 4, "2 key-value heads, which 4 processes cannot share evenly"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(name: str, size: int, words: str, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(architectures.build(name, tmp_path))
    with pytest.raises(ModelRefused, match=words):
        check_divisible("the model", config, size)


def test_a_device_that_torch_does_not_choose_is_refused() -> None:
    other = "cpu" if torch.accelerator.is_available() else "cuda"
    with pytest.raises(ModelRefused, match="hide it"):
        check_device(torch.device(other), Place(0, 2, 0, ""))


@pytest.mark.parametrize(("kind", "options"), [("int8", {"quantization": "int8"}), ("some layers", {"layers": (0, 1)})])
@in_module_loop
async def test_other_models_than_the_whole_are_not_shared(
    kind: str, options: dict[str, object], pair: Pair, tmp_path: Path
) -> None:
    folder = architectures.build("llama", tmp_path)
    with pytest.raises(ModelRefused, match=f"with {kind}.* by several processes"):
        load(folder, group=pair.group, **options)


@pytest.mark.parametrize(
    "environment",
    [{}, {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, {"RANK": "0", "WORLD_SIZE": "2"}],
)
def test_a_process_may_be_alone(environment: dict[str, str]) -> None:
    assert place_in(environment) is None


def test_torchruns_variables_say_the_place() -> None:
    launched = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert place_in(launched) == Place(5, 8, 1, "env://")
    assert place_in(launched | {"LOCAL_WORLD_SIZE": "4"}) == Place(5, 8, 1, "env://", is_local=False)


def test_processes_on_several_machines_are_refused() -> None:
    with pytest.raises(ModelRefused, match="several machines"):
        Group(Place(0, 8, 0, "env://", is_local=False), torch.device("cpu"))


def _forward_one(model: LanguageModel) -> None:
    model.forward([Feed(model.cache.open("one"), [1], 1)])


def _raise(message: bytes) -> None:
    raise RuntimeError("planted")


def _spread_of_difference(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).pow(2).mean().sqrt() / expected.std())
