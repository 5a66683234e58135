"""A position's logits have the same bits in any batch: alone, in pieces, beside other sessions, in a tree.

In int8 always; in float32 and bfloat16 where the forward is one call of our kernels.
"""

import random
import re
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from torch import nn

from specdec.engine import Feed, LanguageModel, linear, quantized
from specdec.engine.fused import FusedDecoder
from specdec.engine.helpers import set_helpers
from specdec.engine.integer import OneDnnProduct
from specdec.engine.linear import MIN_FLOAT32_LANES, KernelLinear
from specdec.engine.native import has_bytes, has_pairs, num_lanes
from specdec.engine.rowwise import RowwiseSdpaBackend
from tests.engine.test_integer import absent
from tests.engine.tiny_models import FUSED, load
from tests.support import architectures

DEMO_TARGET = Path(__file__).parents[2] / "models" / "target"
LENGTH = 70
SIZES = (1, 2, 5, 9, 16, 32)  # rows of a forward, of one session or of so many


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)
    set_helpers(0)


@pytest.fixture(
    scope="module",
    params=[
        *(f"{name} in int8" for name in (*FUSED, "demo")),
        *(f"{name} in int8 without our kernel" for name in ("llama", "mistral")),
        *(f"{name} in {dtype}" for name in (*FUSED, "demo") for dtype in ("float32", "bfloat16")),
    ],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LanguageModel:
    """Return a small model, with room for 40 sessions."""
    torch.set_num_threads(1)
    name, kind, *without_kernel = re.split(" in | without ", request.param)
    folder = DEMO_TARGET if name == "demo" else architectures.build(name, tmp_path_factory.mktemp(name))
    if kind != "int8":
        return in_one_call(load(folder, dtype=kind, kv_cache_bytes=64 << 20))
    new_backend = RowwiseSdpaBackend if without_kernel else None
    assert without_kernel or not has_bytes() or in_one_call(load(folder, quantization="int8", kv_cache_bytes=1 << 20))
    return load(folder, quantization="int8", kv_cache_bytes=64 << 20, new_backend=new_backend)


def in_one_call(model: LanguageModel) -> LanguageModel:
    """Return the model; skip the test where no kernel computes a forward of its type in one call."""
    if not (isinstance(model.decoder, FusedDecoder) and model.decoder.is_compiled):
        assert num_lanes() < MIN_FLOAT32_LANES or (model.dtype == torch.bfloat16 and not has_pairs())
        pytest.skip(f"this processor has no instructions for our kernel of {model.dtype}, or there is no kernel")
    return model


def text_of(model: LanguageModel, seed: int, length: int = LENGTH) -> list[int]:
    return random.Random(seed).choices(range(min(model.num_token_ids, model.vocab_size)), k=length)


def in_pieces(model: LanguageModel, text: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return the logits of a text that is fed by itself, in pieces of these sizes, again and again."""
    sequence, rows = model.cache.open("by itself"), list[torch.Tensor]()
    while sequence.length < len(text):
        piece = list(text[sequence.length : sequence.length + sizes[len(rows) % len(sizes)]])
        rows.append(model.forward([Feed(sequence, piece, len(piece))]).logits)
    sequence.close()
    return torch.cat(rows)


@lru_cache(maxsize=8)  # texts of one model, and of the one before
def one_by_one(model: LanguageModel, seed: int, length: int) -> torch.Tensor:
    """Return the logits of a text of `text_of` that is fed by itself, token by token, with one thread."""
    return in_pieces(model, text_of(model, seed, length), [1])


def beside_others(model: LanguageModel, text: Sequence[int], num_others: int, size: int) -> torch.Tensor:
    """Return the logits of a text that is fed in pieces, between other sessions that feed other numbers of tokens."""
    rng, names = random.Random(num_others), [f"other {number}" for number in range(num_others)]
    sequence, rows = model.cache.open("between"), list[torch.Tensor]()
    while sequence.length < len(text):
        piece = list(text[sequence.length : sequence.length + size])
        fed = [text_of(model, rng.getrandbits(32), rng.randint(1, 3)) for _ in names]
        others = [Feed(model.cache.open(name), tokens, 1) for name, tokens in zip(names, fed, strict=True)]
        place = rng.randint(0, num_others)
        output = model.forward([*others[:place], Feed(sequence, piece, len(piece)), *others[place:]])
        rows.append(output.logits[place : place + len(piece)])
    for name in ("between", *names):
        model.cache.open(name).close()
    return torch.cat(rows)


def are_halved(model: LanguageModel) -> list[bool]:
    """Return whether the weights of a model's layers are halved, one by one."""
    found: list[nn.Module] = []

    def note(layer: nn.Module) -> nn.Module:
        found.append(layer)
        return layer

    model.decoder.replace_linears(note)
    return [isinstance(layer, KernelLinear) and bool(layer.as_read.is_halved) for layer in found]


def test_halved_weights_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo target was published in bfloat16: served in float32, half of each weight's bytes are zeros."""
    halved = in_one_call(load(DEMO_TARGET, kv_cache_bytes=4 << 20))
    monkeypatch.setattr(linear, "can_be_halved", lambda weight: False)
    whole = load(DEMO_TARGET, kv_cache_bytes=4 << 20)
    assert (set(are_halved(halved)), set(are_halved(whole))) == ({True}, {False})
    text = text_of(halved, 5)
    for size in (1, 5, 9, LENGTH):
        assert torch.equal(in_pieces(halved, text, [size]), in_pieces(whole, text, [size]))


class TestBits:
    @pytest.mark.parametrize("size", SIZES)
    def test_pieces_do_not_matter(self, model: LanguageModel, size: int) -> None:
        assert torch.equal(in_pieces(model, text_of(model, 1), [size]), one_by_one(model, 1, LENGTH))

    def test_one_prefill_equals_single_tokens(self, model: LanguageModel) -> None:
        assert torch.equal(in_pieces(model, text_of(model, 1), [LENGTH]), one_by_one(model, 1, LENGTH))

    @pytest.mark.parametrize("size", [1, 5])
    @pytest.mark.parametrize("num_others", [1, 4, 8, 15, 31])
    def test_other_sessions_do_not_matter(self, model: LanguageModel, num_others: int, size: int) -> None:
        text = text_of(model, 3, 20)
        assert torch.equal(beside_others(model, text, num_others, size), one_by_one(model, 3, 20))

    @pytest.mark.parametrize(("num_threads", "num_helpers"), [(2, 0), (1, 2)])
    def test_threads_and_helpers_give_the_same_bits(
        self, model: LanguageModel, num_threads: int, num_helpers: int
    ) -> None:
        text = text_of(model, 4, 33)
        alone = in_pieces(model, text, [1])
        torch.set_num_threads(num_threads)
        set_helpers(num_helpers)
        assert torch.equal(in_pieces(model, text, [33]), alone)
        assert torch.equal(beside_others(model, text, 5, 16), alone)

    def test_hidden_states_are_the_same(self, model: LanguageModel) -> None:
        text, layers = text_of(model, 5, 20), tuple(range(model.num_layers + 1))
        one, two = model.cache.open("one"), model.cache.open("two")
        whole = model.forward([Feed(one, text, 1, hidden_layers=layers, num_observed=20)]).hidden_states[0]
        single = [
            model.forward([Feed(two, [token], 1, hidden_layers=layers, num_observed=1)]).hidden_states[0]
            for token in text
        ]
        one.close()
        two.close()
        assert whole is not None
        assert torch.equal(whole, torch.cat([states for states in single if states is not None]))


class TestTrees:
    def test_branches_have_the_bits_of_chains(self, model: LanguageModel) -> None:
        """The right token is each time the second child; then the path is kept, and the text goes on."""
        text = text_of(model, 6, 40)
        assert torch.equal(in_trees(model, text), in_pieces(model, text, [1]))


def in_trees(model: LanguageModel, text: Sequence[int]) -> torch.Tensor:
    """Return the logits of a text that is fed as trees of 1 to 4 levels, in each a wrong token and the right one."""
    sequence, rows = model.cache.open("in trees"), list[torch.Tensor]()
    while sequence.length < len(text):
        start = sequence.length
        span = text[start : start + 2 + len(rows) % 4]
        closing, right = span[0], span[1:]
        tree = [token for each in right for token in ((each + 1) % model.vocab_size, each)]
        parents = tuple(parent for depth in range(len(right)) for parent in (2 * depth, 2 * depth))
        sequence.mark_committed(start + 1)
        logits = model.forward([Feed(sequence, [closing, *tree], 1 + len(tree), parents)]).logits
        rows.append(logits[[0, *range(2, len(tree) + 1, 2)]])
        assert sequence.resume(start + 1, list(right), num_committed=start + len(span)) == []
    sequence.close()
    return torch.cat(rows)


def test_processors_without_the_kernel_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized, "has_bytes", lambda: False)
    model = load(DEMO_TARGET, quantization="int8", kv_cache_bytes=8 << 20)
    text = text_of(model, 7)
    logits = in_pieces(model, text, [1, 9])
    monkeypatch.setattr(OneDnnProduct, "__call__", absent)
    other = load(DEMO_TARGET, quantization="int8", kv_cache_bytes=8 << 20)
    assert torch.equal(in_pieces(other, text, [1, 9]), logits)
