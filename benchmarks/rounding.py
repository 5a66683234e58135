"""`python -m benchmarks.rounding`: how far number types and quantisations move a model's distributions from float32's.

On held-out text, at every position: the divergence (Kullback-Leibler, in nats), sum min(p, q), which is how often a
draft from one is accepted by the other (Leviathan et al. 2023, corollary 3.6), and how often the likeliest token is the
same; and the loss in nats a token.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.forwards import MODELS, loaded
from benchmarks.measure import hardware
from specdec.engine import Feed, LanguageModel
from specdec.serving.tokenizer import load_tokenizer

KINDS = "float32,bfloat16,float32+int8,bfloat16+int8,float32+int4"
SKIPPED = 32  # tokens of a text whose distributions are not compared: little is known of it there


@dataclass(frozen=True, slots=True)
class Distances:
    """Of distributions from others: means over positions."""

    divergence: float
    overlap: float
    same_argmax: float
    loss: float


def texts_of(name: str, files: list[Path], num_tokens: int) -> Iterator[list[int]]:
    """Give the beginning of each file and a part from its middle, of so many tokens."""
    tokenizer = load_tokenizer(name)
    for file in files:
        ids = list(tokenizer.encode(file.read_text(encoding="utf-8")).ids)
        for begin in dict.fromkeys((0, len(ids) // 2)):
            if len(ids) - begin > 2 * SKIPPED:
                yield ids[begin : begin + num_tokens]


def logprobs(model: LanguageModel, text: list[int]) -> torch.Tensor:
    """Return the distributions after each token but the first few and the last, [positions, V]."""
    sequence = model.cache.open("text")
    logits = model.forward([Feed(sequence, text, len(text))]).logits
    sequence.close()
    return logits[SKIPPED:-1].log_softmax(-1)


def distances(models: dict[str, LanguageModel], texts: list[list[int]]) -> dict[str, Distances]:
    """Compare each model with the first, text by text."""
    sums = {kind: torch.zeros(5, dtype=torch.float64) for kind in models}
    first = next(iter(models))
    for text in texts:
        found = {kind: logprobs(model, text) for kind, model in models.items()}
        following = torch.tensor(text[SKIPPED + 1 :])[:, None]
        for kind, rows in found.items():
            sums[kind] += _sums(found[first], rows, following)
    return {kind: Distances(*(total[:4] / total[4]).tolist()) for kind, total in sums.items()}


def _sums(plain: torch.Tensor, rows: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Return the sums of divergence, overlap, equal argmax and loss over positions, and how many there are."""
    divergence = (plain.exp() * (plain - rows)).sum()
    overlap = torch.minimum(plain.exp(), rows.exp()).sum()
    same = (plain.argmax(-1) == rows.argmax(-1)).sum()
    return torch.stack([divergence, overlap, same, -rows.gather(1, following).sum(), torch.tensor(len(rows))]).double()


@torch.inference_mode()
def main() -> None:
    """Print a table a model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[str(MODELS / "target"), str(MODELS / "draft")])
    parser.add_argument("--kinds", default=KINDS, help=f"what to compare with the first (default: {KINDS})")
    parser.add_argument("--texts", type=Path, default=MODELS / "heldout", help="folder of texts (default: held-out)")
    parser.add_argument("--tokens", type=int, default=192, help="maximum number of tokens of a text (default: 192)")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    print(hardware())
    for name in flags.models:
        models = {kind: loaded(name, kind) for kind in flags.kinds.split(",")}
        files = sorted(path for path in flags.texts.iterdir() if path.suffix in (".py", ".md", ".txt"))
        texts = list(texts_of(name, files, flags.tokens))
        title = f"{Path(name).name}, {len(texts)} texts of up to {flags.tokens} tokens, against {next(iter(models))}"
        print(f"\n### {title}\n")
        print("| kind | divergence, nats | sum min(p, q) | same argmax | loss, nats a token |")
        print("|---|---|---|---|---|")
        for kind, found in distances(models, texts).items():
            cells = f"{found.divergence:.5f} | {found.overlap:.4f} | {found.same_argmax:.4f} | {found.loss:.4f}"
            print(f"| {kind} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
