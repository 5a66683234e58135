"""The device that is checked: a GPU as workers use it, or in a dry run a CPU that goes through the same code."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from benchmarks.measure import hardware
from specdec.engine import LanguageModel, load_language_model
from specdec.engine.graphs import Graphs, Repeater
from specdec.engine.load import serve_in_memory
from specdec.engine.paged import PagedBackend

COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 24}
MIN_KV_CACHE_BYTES = 1 << 26


@dataclass(frozen=True, slots=True)
class Place:
    """One device."""

    device: str  # cuda or cpu

    @property
    def is_dry(self) -> bool:
        """Whether there is no GPU, so that the figures say nothing."""
        return self.device == "cpu"

    def load(self, folder: Path, dtype: str) -> LanguageModel:
        """Load a model as a worker on a GPU does."""
        options: dict[str, Any] = {"device": self.device, "dtype": dtype, "kv_cache_bytes": MIN_KV_CACHE_BYTES}
        if self.is_dry:
            options |= {"new_backend": PagedBackend, "block_tokens": 16}
        return self._recorded(load_language_model(str(folder), **options))

    def serve(self, model: PreTrainedModel, kv_cache_bytes: int) -> LanguageModel:
        """Serve a model that is in this device's memory."""
        options: dict[str, Any] = {"new_backend": PagedBackend} if self.is_dry else {}
        return self._recorded(serve_in_memory(model, kv_cache_bytes=kv_cache_bytes, **options))

    def _recorded(self, model: LanguageModel) -> LanguageModel:
        if self.is_dry and isinstance(model.backend, PagedBackend):
            model.replay(Graphs(model.decoder, model.backend, Repeater(), model.context_length))
        return model

    def synchronize(self) -> None:
        """Wait until the device has done what it was asked to do."""
        if not self.is_dry:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repetitions: int) -> float:
        """Return the shortest of some runs, after one that does not count."""
        times = []
        for _ in range(repetitions + 1):
            began = time.perf_counter()
            work()
            self.synchronize()
            times.append(time.perf_counter() - began)
        return min(times[1:])

    def bandwidth(self) -> float:
        """Return how many bytes a second the device reads and writes while it copies."""
        source = torch.zeros(COPIED_BYTES[self.device], dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source), 5)

    @property
    def num_bytes(self) -> int:
        """The device's memory."""
        return 1 << 30 if self.is_dry else torch.cuda.get_device_properties(0).total_memory

    def describe(self) -> str:
        """Return what was checked, in a line."""
        versions = f"torch {torch.__version__}"
        if self.is_dry:
            return f"{hardware()}, {versions}"
        facts = torch.cuda.get_device_properties(0)
        return (
            f"{facts.name}, {facts.total_memory / 2**30:.0f} GiB, capability {facts.major}.{facts.minor}, "
            f"CUDA {torch.version.cuda}, {versions}; {hardware()}"
        )
