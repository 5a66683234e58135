"""The training data of the draft: the target's continuations of prompts, with its distribution at every position.

A row is a next-token distribution, at the temperature of its sequence. A cached row is a support of the 64 most
probable tokens with their log-probabilities; the loss treats the tail as one more token.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.cache_utils import Cache, DynamicLayer

from models.corpus import WINDOW, epoch
from models.workers import count, rank

SUPPORT = 64
SEQUENCES = 48  # in a batch: enough to amortise reading the weights
# The demo and the benchmarks sample at 1 and decode greedily; 0.6 covers the temperatures between.
TEMPERATURES = (0.0, 0.0, 0.6, 1.0, 1.0)
COLDEST = 0.3  # rows of greedy sequences use this temperature: a one-hot row has no gradient elsewhere
PROMPT_LENGTHS = range(96, 417, 32)


class ReservedLayer(DynamicLayer):
    """A layer's keys and values in memory preallocated for one window, so that appending copies no earlier token."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Append states [sequences, heads, new, 64]; return all states so far [sequences, heads, total, 64]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            shape = (*key_states.shape[:2], WINDOW, key_states.shape[3])
            self.reserved = key_states.new_empty(shape), value_states.new_empty(shape)
        start = self.get_seq_length()
        end = start + key_states.shape[2]
        for reserved, states in zip(self.reserved, (key_states, value_states), strict=True):
            reserved[:, :, start:end] = states
        self.keys, self.values = (reserved[:, :, :end] for reserved in self.reserved)
        return self.keys, self.values


@dataclass(frozen=True, slots=True)
class Rows:
    """Sequences and the target's rows after each of their tokens but the last.

    tokens: [sequences, WINDOW]; support and log_probs: [sequences, WINDOW - 1, SUPPORT]; temperatures: [sequences];
    prompt_lengths: [sequences], where the target's tokens begin.
    """

    tokens: Tensor
    support: Tensor
    log_probs: Tensor
    temperatures: Tensor
    prompt_lengths: Tensor

    def select(self, index: Tensor) -> "Rows":
        """Return some of the sequences, in the types that the loss computes with."""
        return Rows(
            self.tokens[index].long(),
            self.support[index].long(),
            self.log_probs[index].float(),
            self.temperatures[index],
            self.prompt_lengths[index],
        )


def draw(logits: Tensor, temperatures: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a token per row, logits [rows, vocabulary], by the Gumbel-max trick; temperature 0 takes the argmax."""
    uniforms = torch.rand(logits.shape, generator=generator).clamp_min(1e-20)
    return (logits.float() - temperatures[:, None] * (-uniforms.log()).log()).argmax(-1)


def decode_mask(tokens: Tensor, length: int) -> Tensor | None:
    """Return an all-visible mask [1, 1, 1, length] for one new token per sequence, and None for a prompt.

    Given any mask, transformers packs the query heads that share a key head, which on a CPU in bfloat16 makes
    attention five times faster than torch's `enable_gqa`.
    """
    return torch.ones(1, 1, 1, length, dtype=torch.bool) if tokens.shape[1] == 1 else None


@torch.inference_mode()
def continuations(
    model: LlamaForCausalLM, prompts: Tensor, length: int, temperatures: Tensor, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Continue prompts [sequences, prompt] up to a length: yield the logits and the tokens drawn after them."""
    generator = torch.Generator().manual_seed(seed)
    cache, tokens = Cache(layer_class_to_replicate=ReservedLayer), prompts
    for end in range(prompts.shape[1], length):
        logits = model(tokens, attention_mask=decode_mask(tokens, end), past_key_values=cache, use_cache=True).logits
        tokens = draw(logits[:, -1], temperatures, generator)[:, None]
        yield logits, tokens


def sample_rows(model: LlamaForCausalLM, prompts: Tensor, temperatures: Tensor, seed: int) -> Rows:
    """Continue prompts [sequences, prompt] to a full window and keep the target's rows."""
    tokens, support, log_probs = [prompts], [], []
    served = temperatures.clamp_min(COLDEST)
    for logits, drawn in continuations(model, prompts, WINDOW, temperatures, seed):
        scaled = logits.float() / served[:, None, None]
        kept = scaled.topk(SUPPORT, sorted=False)
        support.append(kept.indices.short())
        log_probs.append((kept.values - scaled.logsumexp(-1, keepdim=True)).half())
        tokens.append(drawn)
    lengths = torch.full((len(prompts),), prompts.shape[1])
    return Rows(torch.cat(tokens, 1).short(), torch.cat(support, 1), torch.cat(log_probs, 1), served, lengths)


def write_rows(model: LlamaForCausalLM, work: Path, minutes: float) -> None:
    """Sample batch after batch from prompts cut from training files, for a time budget; one file per batch."""
    (work / "rows").mkdir(exist_ok=True)
    began = time.monotonic()
    prompts = epoch(work, 0, np.random.default_rng(1))
    temperatures = torch.tensor([TEMPERATURES[index % len(TEMPERATURES)] for index in range(SEQUENCES)])
    for number in range(rank(), len(prompts) // SEQUENCES, count()):
        path = work / "rows" / f"{number:04}.safetensors"
        if path.exists():
            continue
        if time.monotonic() - began > 60 * minutes:
            break
        length = PROMPT_LENGTHS[number * 7 % len(PROMPT_LENGTHS)]  # all of them, alternating long and short
        chosen = prompts[number * SEQUENCES : (number + 1) * SEQUENCES, :length]
        rows = sample_rows(model, torch.from_numpy(chosen.astype(np.int64)), temperatures, seed=number)
        tensors = {name: getattr(rows, name) for name in Rows.__slots__}
        save_file(tensors, path)
        print(f"rows {number}: {SEQUENCES} sequences, {time.monotonic() - began:.0f} s", flush=True)


def read_rows(work: Path) -> Rows:
    """Read every batch of rows."""
    batches = [load_file(path) for path in sorted((work / "rows").glob("*.safetensors"))]
    return Rows(**{name: torch.cat([batch[name] for batch in batches]) for name in Rows.__slots__})
