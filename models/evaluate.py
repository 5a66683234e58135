"""Measure a pair on the held-out files: `python -m models.evaluate [folder with target/ and draft/]`.

Acceptance rate: the mean over tokens of sum min(p, q), with p the target's and q the draft's distribution, on the
target's continuations of held-out prompts (Leviathan et al. 2023, corollary 3.6), before any truncation.
"""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from models.corpus import END_OF_TEXT_ID, Tokens, windows
from models.rows import continuations

FOLDER = Path(__file__).parent
PROMPT, NEW = 256, 128  # tokens
PROMPTS_PER_FILE = 4
DRAFT_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Agreement:
    """How well draft and target agree at each token of the target's continuations: both [sequences, NEW]."""

    acceptance: Tensor
    same_argmax: Tensor

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens of a greedy round, the bonus token included, when the draft proposes DRAFT_LENGTH."""
        return self.same_argmax.numel() / sum(map(rounds, self.same_argmax.tolist()))


def rounds(agreed: list[bool]) -> int:
    """Count the rounds that greedy decoding takes over a continuation, given the positions where the draft agrees."""
    position, count = 0, 0
    while position < len(agreed):
        proposal = agreed[position : position + DRAFT_LENGTH]
        position += 1 + (proposal.index(False) if False in proposal else len(proposal))
        count += 1
    return count


def held_out_streams(tokenizer: Tokenizer) -> list[Tokens]:
    """Return the tokens of each held-out file."""
    paths = sorted((FOLDER / "heldout").glob("*.py"))
    return [np.array(tokenizer.encode(path.read_text(encoding="utf-8")).ids, np.uint16) for path in paths]


def held_out_prompts(streams: list[Tokens]) -> Tensor:
    """Cut prompts at regular intervals from each file: [prompts, PROMPT]."""
    prompts: list[Tokens] = []
    for stream in streams:
        starts = np.linspace(0, len(stream) - PROMPT - NEW, PROMPTS_PER_FILE).astype(int)
        prompts.extend(stream[start : start + PROMPT] for start in starts)
    return torch.from_numpy(np.stack(prompts).astype(np.int64))


@torch.inference_mode()
def loss(model: LlamaForCausalLM, streams: list[Tokens]) -> float:
    """Return the mean cross-entropy, in nats per token, over the held-out files."""
    ended = [np.append(stream, np.uint16(END_OF_TEXT_ID)) for stream in streams]
    texts = torch.from_numpy(windows(np.concatenate(ended), 0).astype(np.int64))
    losses = [
        cross_entropy(model(batch[:, :-1]).logits.flatten(0, 1).float(), batch[:, 1:].flatten(), reduction="none")
        for batch in texts.split(16)
    ]
    return torch.cat(losses).mean().item()


def bits_per_byte(nats: float, streams: list[Tokens]) -> float:
    """Convert a loss in nats per token to bits per byte, which is comparable between vocabularies."""
    num_bytes = sum(path.stat().st_size for path in (FOLDER / "heldout").glob("*.py"))
    return nats * sum(map(len, streams)) / num_bytes / math.log(2)


@torch.inference_mode()
def agreement(target: LlamaForCausalLM, draft: LlamaForCausalLM, tokens: Tensor) -> Agreement:
    """Compare the distributions of both models at each new token of sequences [sequences, PROMPT + NEW]."""
    rows = [model(tokens).logits[:, PROMPT - 1 : -1].float().softmax(-1) for model in (target, draft)]
    return Agreement(torch.minimum(*rows).sum(-1), rows[0].argmax(-1) == rows[1].argmax(-1))


def continued(target: LlamaForCausalLM, prompts: Tensor, temperature: float) -> Tensor:
    """Return prompts with the target's continuations: [prompts, PROMPT + NEW]."""
    temperatures = torch.full((len(prompts),), temperature)
    drawn = [tokens for _, tokens in continuations(target, prompts, PROMPT + NEW, temperatures, seed=0)]
    return torch.cat([prompts, *drawn], 1)


def repetition(tokens: Tensor, length: int = 8) -> float:
    """Return the fraction of 8-grams in the continuations that occurred earlier in the same one."""
    grams = tokens[:, PROMPT:].unfold(1, length, 1)
    distinct = sum(len(sequence.unique(dim=0)) for sequence in grams)
    return 1.0 - distinct / (grams.shape[0] * grams.shape[1])


def report(folder: Path) -> None:
    """Print the figures of the model card."""
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    target, draft = (AutoModelForCausalLM.from_pretrained(folder / name).eval() for name in ("target", "draft"))
    streams = held_out_streams(tokenizer)
    for name, model in (("target", target), ("draft", draft)):
        parameters = sum(weight.numel() for weight in model.parameters())
        nats = loss(model, streams)
        print(f"{name}: {parameters:,} parameters, loss {nats:.3f}, {bits_per_byte(nats, streams):.3f} bits a byte")
    prompts = held_out_prompts(streams)
    for temperature in (1.0, 0.0):
        tokens = continued(target, prompts, temperature)
        found = agreement(target, draft, tokens)
        print(
            f"temperature {temperature:.0f}: acceptance rate {found.acceptance.mean():.3f}, "
            f"same argmax {found.same_argmax.float().mean():.3f}, "
            f"greedy tokens a round at K = {DRAFT_LENGTH} {found.tokens_per_round:.2f}, "
            f"repeated 8-grams {repetition(tokens):.3f}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER)
    report(parser.parse_args().folder)
