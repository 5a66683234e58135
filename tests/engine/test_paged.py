"""Paged attention gives what transformers gives, in every architecture, across pages, trees, evictions and cuts."""

import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from specdec.engine import Feed, LanguageModel
from specdec.engine.attention import AttentionOptions, PoolOptions, Segment
from specdec.engine.paged import PagedBackend
from specdec.engine.pool import LayerShape
from specdec.engine.sdpa import SdpaBackend
from tests.engine.scenarios import check_hidden_states, check_tree_rounds
from tests.engine.test_forward import check_pieces
from tests.engine.tiny_models import ReferenceModel, assert_close, load, random_tokens
from tests.support import architectures

PAGE_TOKENS = 4  # fewer than a text, a tree or a window has
NUM_TEXTS, ROUNDS = 5, 24


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.build("gemma2", tmp_path_factory.mktemp("gemma2"))


def paged(folder: Path, **options: object) -> LanguageModel:
    return load(folder, new_backend=PagedBackend, block_tokens=PAGE_TOKENS, **options)


@pytest.mark.parametrize("name", architectures.SERVED)
@pytest.mark.long(but=("llama", "gpt2", "gemma3", "gpt_oss", "deepseek_v3", "mixtral"))
def test_every_architecture_matches_the_reference(name: str, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    model, reference = paged(folder), ReferenceModel(folder)
    check_pieces(model, reference)
    check_tree_rounds(model, reference)
    check_hidden_states(model, reference)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt_oss"])
def test_evicted_and_cut_texts_match_the_reference(name: str, tmp_path: Path) -> None:
    """Texts that do not fit into the cache together push one another out, and are cut, in a random order."""
    folder = architectures.build(name, tmp_path)
    model, reference, rng = paged(folder), ReferenceModel(folder), random.Random(3)
    page_bytes = (1 << 20) // model.cache.num_blocks
    model, num_evicted = paged(folder, kv_cache_bytes=32 * page_bytes, self_check=False), 0
    texts = [random_tokens(number, 60) for number in range(NUM_TEXTS)]
    expected = cache(lambda number: reference.logits(texts[number]))
    for _ in range(ROUNDS):
        number, length = rng.randrange(NUM_TEXTS), rng.randint(30, 60)
        sequence = model.cache.open(str(number))
        num_evicted += sequence.length == 0
        sequence.truncate(min(sequence.length, rng.randint(0, length - 1)))
        fed = texts[number][sequence.length : length]
        rows = model.forward([Feed(sequence, fed, min(3, len(fed)))]).logits
        assert_close(rows, expected(number)[length - len(rows) : length])
    assert num_evicted > NUM_TEXTS


def test_bfloat16_is_as_near_as_the_other_backend(folder: Path) -> None:
    text = random_tokens(5, 40)
    exact = ReferenceModel(folder).logits(text)[-8:]
    errors = []
    for backend in (SdpaBackend, PagedBackend):
        model = load(folder, dtype="bfloat16", new_backend=backend, self_check=False)
        logits = model.forward([Feed(model.cache.open("a"), text, 8)]).logits
        errors.append(float((logits - exact).pow(2).mean().sqrt() / exact.std()))
    assert errors[1] < 1.5 * errors[0] < 0.3


def backend_of(num_pages: int) -> PagedBackend:
    shape = LayerShape(1, 4, 4)
    num_bytes = num_pages * PAGE_TOKENS * shape.num_bytes(torch.float32)
    return PagedBackend([shape], PoolOptions(num_bytes, PAGE_TOKENS, torch.float32, torch.device("cpu")))


def attend(backend: PagedBackend, segments: list[Segment], options: AttentionOptions) -> torch.Tensor:
    """Return what random tokens, the same at each call, attend to."""
    for segment in segments:
        backend.pool.resize(segment.key, max(1, -(-segment.total // PAGE_TOKENS)))
    generator = torch.Generator().manual_seed(4)
    total = sum(segment.num_tokens for segment in segments)
    query, key, value = (torch.randn(total, heads, 4, generator=generator) for heads in (2, 1, 1))
    return backend.plan(segments).attend(query, key, value, options)


@pytest.mark.parametrize("softcap", [None, 1.0])
def test_what_other_sequences_hold_is_never_seen(softcap: float | None) -> None:
    """A sequence whose numbers are not numbers, in pages used before and in the same batch, harms no other."""
    segments = [Segment("sound", 0, 5), Segment("tree", 0, 6, (0, 0, 1)), Segment("small tree", 0, 2, (0,))]
    options = AttentionOptions(0.5, softcap=softcap)
    clean = attend(backend_of(9), segments, options)
    backend = backend_of(9)
    backend.pool.resize("broken", 9)
    for layer in backend.pool.layers:
        layer.keys.fill_(torch.nan)
        layer.values.fill_(torch.nan)
    backend.pool.resize("broken", 0)
    assert torch.equal(attend(backend, segments, options), clean)
    assert bool(clean.isfinite().all())


@pytest.mark.parametrize("window", [None, 3])
def test_a_chain_is_a_tree_without_branches(window: int | None) -> None:
    options = AttentionOptions(0.5, window)
    as_chain = attend(backend_of(9), [Segment("a", 0, 9)], options)
    as_tree = attend(backend_of(9), [Segment("a", 0, 9, tuple(range(8)))], options)
    torch.testing.assert_close(as_tree, as_chain)


@pytest.mark.parametrize("length", [5, 60])
def test_all_tokens_of_a_forward_may_be_trees(length: int) -> None:
    backend, options = backend_of(17), AttentionOptions(0.5)
    attend(backend, [Segment("a", 0, length)], options)
    output = attend(backend, [Segment("a", length, 3, (0, 0, 1))], options)
    assert bool(output.isfinite().all())
    assert not torch.equal(output[0], output[1])
