"""Tiny models for the engine's tests: served by the engine, and run by transformers as the reference."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from specdec.engine import LanguageModel, load_language_model
from tests.support import architectures

KV_CACHE_BYTES = 1 << 20
TOLERANCE = 1e-4  # times the standard deviation; float32 sums in another order differ by 1e-6 to 2e-5
FUSED = ["llama", "mistral", "qwen2", "qwen3"]


def load(folder: Path, **options: Any) -> LanguageModel:
    """Load a model as the workers do, in float32 on the CPU unless `options` say otherwise."""
    defaults: dict[str, Any] = {"device": "cpu", "dtype": "float32", "kv_cache_bytes": KV_CACHE_BYTES}
    return load_language_model(str(folder), **{**defaults, **options})


class ReferenceModel:
    """A model run by transformers: one text at a time, eager attention, no cache."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def outputs(self, text: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [len(text), vocab_size] and hidden states [len(text), num_layers + 1, hidden_size]."""
        with torch.inference_mode():
            output = self._model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        return output.logits[0], torch.stack([state[0] for state in output.hidden_states], dim=1)

    def logits(self, text: list[int]) -> torch.Tensor:
        """Return logits [len(text), vocab_size]."""
        return self.outputs(text)[0]


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Assert that the values differ by no more than rounding."""
    assert actual.shape == expected.shape
    spread = float(expected.std())
    assert spread > 0.3, "the tiny model's logits are too flat to show an error"
    assert (actual - expected).abs().max() <= TOLERANCE * max(1.0, spread)


def random_tokens(seed: int, count: int) -> list[int]:
    """Return random token ids, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(architectures.VOCAB_SIZE, (count,), generator=generator).tolist()
    return tokens
