"""What the engine asks of torch's function keeps to its rules, and survives what it is known to get wrong.

A stand-in for it refuses whatever torch's own code refuses (`mha_varlen_fwd` in flash_api.cpp, torch 2.13), and returns
the sums in the wrong order, or in the wrong place, wherever torch's own is known to do so (`varlen.py`).
"""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen as torch_varlen

from specdec.engine import Feed, LanguageModel, paged_call, varlen
from specdec.engine.graphs import Graphs, Repeater
from specdec.engine.paged import PagedBackend
from specdec.engine.varlen import FLASH_PAGE_TOKENS, MAX_FLASH_SIZE
from tests.engine.scenarios import check_hidden_states, check_tree_rounds
from tests.engine.test_forward import check_pieces
from tests.engine.tiny_models import ReferenceModel, assert_close, load, random_tokens
from tests.support import architectures

NAMES = ["qwen3", "gemma3", "gpt_oss"]  # heads of 16 numbers; windows, sinks
PLAIN = varlen.varlen_attn


class StandIn:
    """Torch's function, with its rules."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def takes(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return what `takes_flash` would say on a GPU, of tensors in half precision."""
        size = query.shape[-1]
        is_paged = key.dim() == 4
        fits = size == value.shape[-1] and size % 8 == 0 and size <= MAX_FLASH_SIZE
        return fits and (not is_paged or key.shape[1] % FLASH_PAGE_TOKENS == 0)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_q: torch.Tensor,
        cu_k: torch.Tensor,
        max_q: int,
        max_k: int,
        **options: Any,
    ) -> Any:
        """Refuse what torch refuses; then attend in plain steps, and spoil what torch spoils."""
        lengths = cu_q[1:] - cu_q[:-1]
        assert query.dtype == key.dtype == value.dtype
        assert cu_q.dtype == cu_k.dtype == torch.int32
        assert all(numbers.is_contiguous() for numbers in (cu_q, cu_k))
        assert all(tensor.stride(-1) == 1 for tensor in (query, key, value))
        assert key.shape == value.shape
        assert options["num_splits"] == 1
        assert query.shape[1] == key.shape[-2] or options["enable_gqa"]
        assert int(cu_q[-1]) == len(query)
        assert int(lengths.max()) <= max(max_q, 1)
        if key.dim() == 4:
            used, regroups = options["seqused_k"], self._regroups(query, key, max_q, options["window_size"])
            self._check_pages(key, max_k, used, options["block_table"], len(lengths))
            assert not regroups or len(query) == len(lengths), "the queries are reshaped by sequences"
        else:
            used, regroups = cu_k[1:] - cu_k[:-1], False
            assert int(cu_k[-1]) == len(key)
            assert int(used.max()) <= max_k
        assert bool(((used > 0) | (lengths == 0)).all()), "an empty sequence writes its sum to another's place"
        wants_lse = options["return_aux"].lse
        self.calls["packed" if key.dim() == 3 else "regrouped" if regroups else "sums" if wants_lse else "plain"] += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(varlen, "takes_flash", lambda *tensors: False)
            found = PLAIN(query, key, value, cu_q, cu_k, max_q, max_k, **options)
        return (found[0], found[1].flip(0)) if wants_lse and regroups else found

    def _regroups(self, query: torch.Tensor, key: torch.Tensor, max_q: int, window: tuple[int, int]) -> bool:
        return max_q == 1 and query.shape[1] > key.shape[2] and max(window) < 0

    def _check_pages(
        self, key: torch.Tensor, max_k: int, used: torch.Tensor, tables: torch.Tensor, num_sequences: int
    ) -> None:
        assert used.dtype == tables.dtype == torch.int32
        assert used.is_contiguous()
        assert tables.stride(-1) == 1
        assert len(used) == len(tables) == num_sequences
        assert key.shape[1] % FLASH_PAGE_TOKENS == 0
        assert int(used.max()) <= max_k == tables.shape[1] * key.shape[1]
        assert int(used.min()) > 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    torch.set_num_threads(1)
    made = StandIn()
    monkeypatch.setattr(varlen, "takes_flash", made.takes)
    monkeypatch.setattr(torch_varlen, "varlen_attn", made.attend)
    return made


def on_pages(folder: Path, **options: Any) -> LanguageModel:
    """Load a model as a GPU does, with forwards that are recorded."""
    sizes = {"block_tokens": FLASH_PAGE_TOKENS, "kv_cache_bytes": 1 << 24}
    model = load(folder, new_backend=PagedBackend, **{**sizes, **options})
    assert isinstance(model.backend, PagedBackend)
    model.replay(Graphs(model.decoder, model.backend, Repeater(), model.context_length))
    return model


@pytest.mark.parametrize("name", NAMES)
def test_every_call_keeps_to_the_rules(name: str, stand_in: StandIn, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    model, reference = on_pages(folder), ReferenceModel(folder)
    check_pieces(model, reference)
    check_tree_rounds(model, reference)
    check_hidden_states(model, reference)
    assert stand_in.calls["plain" if name != "gpt_oss" else "sums"] > 10


@pytest.mark.parametrize("name", NAMES)
def test_calls_in_parts_keep_to_the_rules(
    name: str, stand_in: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every text is divided, into parts of a page, of which all but the first are empty."""
    monkeypatch.setattr(paged_call, "WHOLE_PAGES", 0)
    monkeypatch.setattr(paged_call, "MIN_PART_PAGES", 1)
    folder = architectures.build(name, tmp_path)
    model, reference = on_pages(folder), ReferenceModel(folder)
    check_pieces(model, reference)
    check_tree_rounds(model, reference)
    assert stand_in.calls["packed"] > 0


@pytest.mark.parametrize(("name", "calls"), [("qwen3", {"regrouped"}), ("gpt_oss", {"sums"})])
def test_single_tokens_are_regrouped_without_sums(
    name: str, calls: set[str], stand_in: StandIn, tmp_path: Path
) -> None:
    folder = architectures.build(name, tmp_path)
    model, reference = on_pages(folder), ReferenceModel(folder)
    text = random_tokens(1, 6)
    sequences = [model.cache.open(key) for key in "abc"]
    model.forward([Feed(sequence, text[:-1], 0) for sequence in sequences])
    stand_in.calls.clear()
    rows = model.forward([Feed(sequence, text[-1:], 1) for sequence in sequences]).logits
    assert_close(rows, reference.logits(text)[-1:].expand(3, -1))
    assert set(stand_in.calls) == calls


def test_half_precision_reaches_the_function(stand_in: StandIn, tmp_path: Path) -> None:
    model = on_pages(architectures.build("gpt_oss", tmp_path), dtype="bfloat16")
    sequence = model.cache.open("a")
    model.forward([Feed(sequence, random_tokens(1, 9), 1), Feed(model.cache.open("b"), [1, 2, 3, 4], 1, (0, 0))])
    assert stand_in.calls["sums"] > 0


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "gemma2"])
def test_other_layers_are_attended_to_in_plain_steps(name: str, stand_in: StandIn, tmp_path: Path) -> None:
    """Heads of 12 numbers, keys and values of two sizes, and soft caps."""
    folder = architectures.build(name, tmp_path)
    model = on_pages(folder)
    check_pieces(model, ReferenceModel(folder))
    assert stand_in.calls.total() == 0
