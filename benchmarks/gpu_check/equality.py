"""The device gives what the CPU gives: logits of chains, trees and cut texts in batches, and greedy texts."""

import random
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.gpu_check.models import ARCHITECTURES, VOCAB_SIZE, save
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from specdec.engine import Feed, LanguageModel, load_language_model
from specdec.exact.tree import path_to

FUSED = ("llama", "qwen3", "mistral")
PIECE_TOKENS, CHAIN_TOKENS, TREE_TOKENS, NUM_ROUNDS = 256, 6, 10, 4
MAX_DIFFERENCE = 1e-3  # in float32, of the logits' spread, as in the check at every load
MAX_NOISE_RATIO = 1.5  # in bfloat16: the device's distance from float32, to the CPU's own
NOISE_FLOOR = 0.01
MAX_GAP = 0.25  # in bfloat16, of the spread: how far the best two logits may be apart where greedy texts part


@dataclass(frozen=True, slots=True)
class Sizes:
    """How long the texts are."""

    lengths: tuple[int, ...]
    num_greedy: int


FULL = Sizes((700, 300, 90, 1), 64)
DRY = Sizes((90, 40, 17, 1), 24)


def check_equality(place: Place, report: Report, sizes: Sizes) -> None:
    """Compare every architecture, in both number types."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ARCHITECTURES:
            saved = save(name, Path(folder))
            exact = _on_cpu(saved, "float32")
            logits, greedy = scenario(exact, sizes), greedy_texts(exact, sizes)
            with report.part(f"{name}, float32"):
                _check_float32(place.load(saved, "float32"), report, sizes, name, logits, greedy)
            rounded = scenario(_on_cpu(saved, "bfloat16"), sizes)
            with report.part(f"{name}, bfloat16"):
                _check_bfloat16(place.load(saved, "bfloat16"), report, sizes, name, logits, rounded, greedy)


def _on_cpu(folder: Path, dtype: str) -> LanguageModel:
    return load_language_model(str(folder), device="cpu", dtype=dtype, kv_cache_bytes=1 << 26)


def _check_float32(
    model: LanguageModel, report: Report, sizes: Sizes, name: str, expected: torch.Tensor, texts: list[list[int]]
) -> None:
    difference = float((scenario(model, sizes) - expected).abs().max() / expected.std())
    report.add(f"{name}, float32: logits", difference <= MAX_DIFFERENCE, f"largest difference {difference:.1e}")
    plain, verified = greedy_texts(model, sizes), verified_texts(model, sizes, texts)
    same = plain == texts == verified
    if name in FUSED:  # others may depend on numbers on the device, and run by calls then
        num_graphs = len(model.graphs.buckets) if model.graphs else 0
        report.add(f"{name}, float32: graphs", num_graphs > 0, f"{num_graphs} recorded")
    found = f"{len(texts)} texts of {sizes.num_greedy} tokens, one by one and {CHAIN_TOKENS} at a time"
    report.add(f"{name}, float32: greedy texts", same, f"{found}: {'the same' if same else 'others'}")


def _check_bfloat16(
    model: LanguageModel,
    report: Report,
    sizes: Sizes,
    name: str,
    exact: torch.Tensor,
    rounded: torch.Tensor,
    texts: list[list[int]],
) -> None:
    ours, cpus = (_distance(logits, exact) for logits in (scenario(model, sizes), rounded))
    holds = ours <= MAX_NOISE_RATIO * cpus + NOISE_FLOOR
    report.add(f"{name}, bfloat16: logits", holds, f"distance from float32 {ours:.3f}, the CPU's {cpus:.3f}")
    gap = _gap_where_texts_part(model, sizes, texts)
    found = "the same texts" if gap is None else f"texts part where the best two are {gap:.3f} of the spread apart"
    report.add(f"{name}, bfloat16: greedy texts", gap is None or gap <= MAX_GAP, found)


def _distance(logits: torch.Tensor, exact: torch.Tensor) -> float:
    return float((logits - exact).pow(2).mean().sqrt() / exact.std())


def scenario(model: LanguageModel, sizes: Sizes) -> torch.Tensor:
    """Return the logits of prompts in pieces, then of rounds with chains, trees and single tokens, [rows, vocab]."""
    texts = [_Text(model, number, length) for number, length in enumerate(sizes.lengths)]
    rows = [text.read(PIECE_TOKENS) for text in texts]
    for _ in range(NUM_ROUNDS):
        rows.append(_forward(model, [text.chain() for text in texts]))
        for text in texts:
            text.cut()
        rows.append(_forward(model, [text.tree() for text in texts]))
        for text in texts:
            text.accept()
        rows.append(_forward(model, [text.chain(1) for text in texts]))
        rows.append(_forward(model, [texts[0].tree(), *(text.chain(1) for text in texts[1:])]))
        texts[0].accept()
    for text in texts:
        text.sequence.close()
    return torch.cat(rows)


def _forward(model: LanguageModel, feeds: list[Feed]) -> torch.Tensor:
    return model.forward(feeds).logits.cpu()


class _Text:
    """A text of random tokens, the same on every device."""

    def __init__(self, model: LanguageModel, number: int, length: int) -> None:
        self._model, self._length, self._random = model, length, random.Random(number)
        self.sequence = model.cache.open(f"text {number}")
        self._tree: list[int] = []
        self._parents: tuple[int, ...] = ()

    def tokens(self, count: int) -> list[int]:
        """Return the next tokens."""
        return [self._random.randrange(VOCAB_SIZE) for _ in range(count)]

    def read(self, piece: int) -> torch.Tensor:
        """Read the prompt in pieces; return the last two rows of each."""
        rows = []
        while self.sequence.length < self._length:
            tokens = self.tokens(min(piece, self._length - self.sequence.length))
            rows.append(_forward(self._model, [Feed(self.sequence, tokens, min(2, len(tokens)))]))
        return torch.cat(rows)

    def chain(self, count: int = CHAIN_TOKENS) -> Feed:
        """Return a feed of tokens, one after the other."""
        self.sequence.mark_committed(self.sequence.length)
        return Feed(self.sequence, self.tokens(count), count)

    def cut(self) -> None:
        """Take some of the last chain back."""
        self.sequence.truncate(self.sequence.length - self._random.randrange(CHAIN_TOKENS))

    def tree(self) -> Feed:
        """Return a feed of a token and a tree."""
        self.sequence.mark_committed(self.sequence.length + 1)
        self._tree = self.tokens(TREE_TOKENS)
        self._parents = tuple(self._random.randint(max(0, node - 2), node) for node in range(TREE_TOKENS))
        return Feed(self.sequence, [*self.tokens(1), *self._tree], TREE_TOKENS + 1, self._parents)

    def accept(self) -> None:
        """Keep a path of the last tree."""
        path = [self._tree[node] for node in path_to(self._random.randrange(TREE_TOKENS) + 1, self._parents)]
        start = self.sequence.num_committed
        self.sequence.resume(start, path, num_committed=start + len(path))


def greedy_texts(model: LanguageModel, sizes: Sizes) -> list[list[int]]:
    """Return greedy continuations of a batch of prompts, token by token."""
    texts: list[list[int]] = [[] for _ in sizes.lengths]
    for rows in _continued(model, sizes, lambda number, length: texts[number][length : length + 1], 1):
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row[-1].argmax()))
    return texts


def verified_texts(model: LanguageModel, sizes: Sizes, drafts: list[list[int]]) -> list[list[int]]:
    """Return what greedy decoding chooses at every token of the drafts, some tokens at a time."""
    texts: list[list[int]] = [[] for _ in sizes.lengths]
    rows_of = _continued(model, sizes, lambda number, at: drafts[number][at : at + CHAIN_TOKENS], CHAIN_TOKENS)
    for rows in rows_of:
        for text, row in zip(texts, rows, strict=True):
            text.extend(row.argmax(-1).tolist())
    return [text[: sizes.num_greedy] for text in texts]


def _continued(
    model: LanguageModel, sizes: Sizes, following: Callable[[int, int], list[int]], at_once: int
) -> Iterator[tuple[torch.Tensor, ...]]:
    """Give the logits of each prompt's last token, then those of what follows, for all prompts together."""
    generators = [random.Random(100 + number) for number in range(len(sizes.lengths))]
    sequences = [model.cache.open(f"greedy {number}") for number in range(len(sizes.lengths))]
    prompts = [
        [generator.randrange(VOCAB_SIZE) for _ in range(length)]
        for generator, length in zip(generators, sizes.lengths, strict=True)
    ]
    feeds = [Feed(sequence, prompt, 1) for sequence, prompt in zip(sequences, prompts, strict=True)]
    yield torch.split(_forward(model, feeds), [feed.num_rows for feed in feeds])
    for at in range(0, sizes.num_greedy - 1, at_once):
        fed = [following(number, at) for number in range(len(sequences))]
        feeds = [Feed(sequence, tokens, len(tokens)) for sequence, tokens in zip(sequences, fed, strict=True)]
        yield torch.split(_forward(model, feeds), [feed.num_rows for feed in feeds])
    for sequence in sequences:
        sequence.close()


def _gap_where_texts_part(model: LanguageModel, sizes: Sizes, texts: list[list[int]]) -> float | None:
    """Return the largest distance of the best logit from that of the text's own token, where they differ."""
    gaps: list[float] = []
    number_of = [0] * len(texts)
    for rows in _continued(model, sizes, lambda number, at: texts[number][at : at + 1], 1):
        for number, row in enumerate(rows):
            token = texts[number][number_of[number]]
            number_of[number] += 1
            gap = float((row[-1].max() - row[-1][token]) / row[-1].std())
            gaps += [gap] if gap > 0 else []
    return max(gaps, default=None)
