"""The kernel gives what attention is defined to give, in every form, with the same bits in every batch."""

import logging
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from specdec.engine import compiled
from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.compiled import CompiledBackend, RowwiseCompiledBackend
from specdec.engine.native import kernels, num_lanes
from specdec.engine.pool import LayerShape
from specdec.engine.rowwise import RowwiseSdpaBackend
from specdec.engine.sdpa import SdpaBackend
from specdec.exact.tree import path_to
from specdec.types import MAX_DRAFT_TOKENS
from tests.engine.helping import helpers, until_helped
from tests.engine.kernel import NO_KERNEL, needs_kernel
from tests.engine.tiny_models import load
from tests.support import architectures

ROOT = Path(__file__).parents[2]
BLOCK_TOKENS = 32
MAX_PROMPT = 100_000  # tokens
PLAIN = AttentionOptions(0.2)
# query heads, KV heads, size of a key and of a value: whole vectors and parts of one, one to five heads that share keys
HEADS = {
    "9/3 of 64": (9, 3, 64, 64),
    "4 of 16": (4, 4, 16, 16),
    "5/1 of 80": (5, 1, 80, 80),
    "2 of 24/40": (2, 2, 24, 40),
}
TREE = (0, 0, 1, 1, 3, 2, 6, 0)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(params=[4, 8, 16])
def lanes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Let the kernel compute with vectors of so many floats."""
    if kernels() is None:
        pytest.skip(NO_KERNEL)
    if request.param > num_lanes():
        pytest.skip(f"this processor's vectors have {num_lanes()} floats")
    monkeypatch.setattr(compiled, "num_lanes", lambda: request.param)
    return int(request.param)


@dataclass
class Text:
    """A sequence's new tokens after `past` cached ones."""

    past: int
    num_tokens: int
    parents: tuple[int, ...] = ()

    def segment(self, key: str) -> Segment:
        return Segment(key, self.past, self.num_tokens, self.parents)


class Layer:
    """One layer of random numbers: cached ones for each text, and the new tokens'."""

    def __init__(self, heads: str, texts: Sequence[Text], dtype: torch.dtype = torch.float32, seed: int = 0) -> None:
        self.num_heads, self.num_kv_heads, self.key_size, self.value_size = HEADS[heads]
        self.texts, self.dtype = texts, dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.cached = [self._pair(text.past) for text in texts]
        self.new = [self._pair(text.num_tokens) for text in texts]
        self.queries = [self._random(text.num_tokens, self.num_heads, self.key_size) for text in texts]

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator).to(self.dtype)

    def _pair(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = count, self.num_kv_heads
        return self._random(*shape, self.key_size), self._random(*shape, self.value_size)

    def attend(
        self,
        options: AttentionOptions,
        backend: type[CompiledBackend] = RowwiseCompiledBackend,
        only: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return what the backend answers for the texts, or only for some of them, in another order."""
        chosen = range(len(self.texts)) if only is None else only
        shape = LayerShape(self.num_kv_heads, self.key_size, self.value_size)
        num_bytes = shape.num_bytes(self.dtype) * 200 * BLOCK_TOKENS
        made = backend([shape], PoolOptions(num_bytes, BLOCK_TOKENS, self.dtype, torch.device("cpu")))
        for index in chosen:
            text = self.texts[index]
            made.pool.resize(str(index), -(-(text.past + text.num_tokens) // BLOCK_TOKENS))
        for index in chosen:
            slots = slice(first := made.pool.first_slot(str(index)), first + self.texts[index].past)
            made.pool.layers[0].keys[slots], made.pool.layers[0].values[slots] = self.cached[index]
        plan = made.plan([self.texts[index].segment(str(index)) for index in chosen])
        query = torch.cat([self.queries[index] for index in chosen])
        key, value = (torch.cat([self.new[index][which] for index in chosen]) for which in (0, 1))
        output = plan.attend(query, key, value, options)
        assert output.dtype == self.dtype
        return list(torch.split(output, [self.texts[index].num_tokens for index in chosen]))

    def expected(self, options: AttentionOptions) -> list[torch.Tensor]:
        """Return the definition's numbers, in float64."""
        return [self._expected(index, options) for index in range(len(self.texts))]

    def _expected(self, index: int, options: AttentionOptions) -> torch.Tensor:
        text, group = self.texts[index], self.num_heads // self.num_kv_heads
        keys, values = (
            torch.cat([old, new]).double().repeat_interleave(group, dim=1)
            for old, new in zip(self.cached[index], self.new[index], strict=True)
        )
        rows = []
        tree_start = text.past + text.num_tokens - len(text.parents)
        for token, query in enumerate(self.queries[index].double()):
            slot = text.past + token
            seen = list(range(min(slot + 1, tree_start)))
            if slot >= tree_start:
                seen += [tree_start + node for node in path_to(slot - tree_start + 1, text.parents)]
            seen = seen[-options.window :] if options.window else seen
            scores = torch.einsum("hd,shd->hs", query, keys[seen]) * options.scaling
            if options.softcap:
                scores = torch.tanh(scores / options.softcap) * options.softcap
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks.double()[:, None]], dim=1)
            weights = scores.softmax(1)[:, : len(seen)]
            rows.append(torch.einsum("hs,shd->hd", weights, values[seen]))
        return torch.stack(rows)


TEXTS = [Text(130, 1), Text(63, 3), Text(0, 70), Text(20, 1 + len(TREE), TREE), Text(127, 2), Text(200, 12), Text(0, 1)]
FORMS = {
    "plain": lambda heads: PLAIN,
    "window": lambda heads: AttentionOptions(0.2, window=7),
    "wide window": lambda heads: AttentionOptions(0.2, window=66),
    "softcap": lambda heads: AttentionOptions(0.5, softcap=3.0),
    "sinks": lambda heads: AttentionOptions(0.2, sinks=torch.linspace(-2, 4, heads)),
    "all": lambda heads: AttentionOptions(0.5, 33, 5.0, torch.linspace(-2, 4, heads)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_attention_is_what_it_is_defined_to_be(heads: str, form: str, dtype: torch.dtype, lanes: int) -> None:
    layer, options = Layer(heads, TEXTS, dtype), FORMS[form](HEADS[heads][0])
    rounding = 1e-2 if dtype == torch.bfloat16 else 2e-6
    for backend, tolerance in ((CompiledBackend, 4 * rounding), (RowwiseCompiledBackend, rounding)):  # torch's, ours
        for given, expected in zip(layer.attend(options, backend), layer.expected(options), strict=True):
            torch.testing.assert_close(given.double(), expected, rtol=tolerance, atol=tolerance)


@needs_kernel
def test_the_kernel_takes_rounds_whole_and_prompts_where_it_is_the_faster_one(lanes: int) -> None:
    assert (compiled.max_tokens() > MAX_PROMPT) == (lanes >= 8)
    assert lanes == 4 or compiled.max_tokens() >= 1 + MAX_DRAFT_TOKENS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_a_texts_bits_do_not_depend_on_others(heads: str, form: str, dtype: torch.dtype, lanes: int) -> None:
    layer, options = Layer(heads, TEXTS, dtype), FORMS[form](HEADS[heads][0])
    together = layer.attend(options)
    order = random.Random(1).sample(range(len(TEXTS)), len(TEXTS))
    for index, given in zip(order, layer.attend(options, only=order), strict=True):
        assert torch.equal(given, together[index])
    for index, given in enumerate(together):
        assert torch.equal(given, layer.attend(options, only=[index])[0])


@pytest.mark.parametrize("form", FORMS)
def test_a_tokens_bits_are_those_of_a_chain(form: str, lanes: int) -> None:
    """A token of a tree, and one of many new tokens, get the bits that a forward for each token of the text gives."""
    options = FORMS[form](9)
    whole = Layer("9/3 of 64", [Text(20, 1 + len(TREE), TREE)])
    (given,), (keys, values), (new_keys, new_values) = whole.attend(options), whole.cached[0], whole.new[0]
    for node in range(1, len(TREE) + 1):
        path = [0, *(1 + one for one in path_to(node, TREE))]
        single = Layer("9/3 of 64", [Text(19 + len(path), 1)])
        kept = [*path[:-1]]
        single.cached[0] = torch.cat([keys, new_keys[kept]]), torch.cat([values, new_values[kept]])
        single.new[0] = new_keys[[path[-1]]], new_values[[path[-1]]]
        single.queries[0] = whole.queries[0][[path[-1]]]
        assert torch.equal(single.attend(options)[0][0], given[path[-1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("heads", HEADS)
def test_helpers_change_nothing(heads: str, form: str, dtype: torch.dtype, lanes: int) -> None:
    layer, options = (
        Layer(heads, [*TEXTS, Text(2900, 3), Text(900, 1 + len(TREE), TREE)], dtype),
        FORMS[form](HEADS[heads][0]),
    )
    alone, reads_little = layer.attend(options), options.window is not None or HEADS[heads][1] == 1
    with helpers(2):
        for _ in range(5) if reads_little else until_helped(5):
            assert all(torch.equal(*pair) for pair in zip(layer.attend(options), alone, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_seen_by_those_that_read_them(
    bad: float, dtype: torch.dtype, lanes: int
) -> None:
    layer = Layer("9/3 of 64", [Text(70, 2), Text(70, 2)], dtype)
    layer.cached[0][1][3, 0, 5] = bad  # a value of the first text
    layer.new[1][0][1, 0, 5] = float("nan")  # the key of the second text's second token
    first, second = layer.attend(PLAIN)
    assert not first[:, :3, 5].isfinite().any()
    assert first[:, 3:].isfinite().all()
    assert second[0].isfinite().all()
    assert second[1, :3].isnan().all()


@needs_kernel
def test_queries_and_keys_may_lie_anywhere() -> None:
    """Models hand in slices of their joined projections, or rows whose heads come first."""
    layer = Layer("9/3 of 64", [Text(70, 3), Text(9, 2)])
    expected = layer.attend(PLAIN)
    layer.queries = [rows.transpose(0, 1).contiguous().transpose(0, 1) for rows in layer.queries]
    apart = [tuple(torch.cat([part, part], dim=1)[:, : part.shape[1]] for part in pair) for pair in layer.new]
    layer.new = [(key, value) for key, value in apart]
    layer.texts, layer.cached = layer.texts[:1], layer.cached[:1]  # one text: what is handed in is not joined
    assert torch.equal(layer.attend(PLAIN)[0], expected[0])


@needs_kernel
def test_torchs_kernels_serve_where_ours_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = architectures.build("llama", tmp_path)
    assert isinstance(load(folder).backend, CompiledBackend)
    assert isinstance(load(folder, quantization="int8").backend, RowwiseCompiledBackend)
    monkeypatch.setattr(compiled, "kernels", lambda: None)
    assert isinstance(load(folder).backend, SdpaBackend)
    assert isinstance(load(folder, quantization="int8").backend, RowwiseSdpaBackend)


@needs_kernel
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_missing_kernel_is_logged_once(
    dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = architectures.build("llama", tmp_path)
    load(folder, dtype=dtype)
    assert engine_records(caplog) == []
    monkeypatch.setattr(compiled, "kernels", lambda: None)
    load(folder, dtype=dtype)
    (record,) = engine_records(caplog)
    assert (record.levelno, record.getMessage()) == (logging.WARNING, "attention_kernel_missing")
    assert record.__dict__["model"] == str(folder)
    assert "install a C compiler" in record.__dict__["remedy"]


@needs_kernel
def test_kernel_is_missed_only_where_it_would_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    assert not compiled.lacks_kernel(cpu, torch.float32)
    monkeypatch.setattr(compiled, "kernels", lambda: None)
    assert compiled.lacks_kernel(cpu, torch.float32)
    assert not compiled.lacks_kernel(cpu, torch.float16)
    assert not compiled.lacks_kernel(torch.device("cuda"), torch.float32)


def engine_records(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.name.startswith("specdec.engine")]


def test_specdec_is_built_without_a_compiler(tmp_path: Path) -> None:
    command: list[str | Path] = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        tmp_path / "lib",
        "--build-temp",
        tmp_path / "temp",
    ]
    told = subprocess.run(
        command, check=False, cwd=ROOT, env={**os.environ, "CC": "false"}, capture_output=True, text=True, timeout=60
    )
    assert told.returncode == 0, told.stderr
    assert not list(tmp_path.rglob("*.so"))
