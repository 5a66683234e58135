"""How fast forwards of a model of a real one's shape are, against what reading its weights and cache must take."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_check.models import LARGE, SMALL, layer_bytes, random_model
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report, table
from specdec.engine import Feed, LanguageModel, LayerShape
from specdec.exact.sampling import SamplingContext, draw_dense, next_token_distributions, on_cpu
from specdec.types import SamplingParams

NUM_DRAFT_TOKENS = (0, 5)
MEMORY_SHARE = 0.85  # of the device, for weights and cache
PROFILED_FORWARDS, PROFILE_ROWS = 5, 14


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured."""

    shape: dict[str, Any]
    batches: tuple[tuple[int, int], ...]  # sessions, and the tokens that each holds
    repetitions: int
    profiled: tuple[int, int]


FULL = Load(LARGE, ((1, 512), (4, 512), (16, 512), (64, 512), (1, 8192), (4, 8192)), 20, (16, 512))
DRY = Load(SMALL, ((1, 40), (4, 40), (1, 300)), 3, (4, 40))


@dataclass(frozen=True, slots=True)
class Subject:
    """The model that is measured, and what its forwards read."""

    model: LanguageModel
    weight_bytes: int  # that each forward reads: all but the embeddings, of which it reads some rows
    token_bytes: int  # of one token in the cache
    num_layers: int

    def bound_s(self, batch: int, cached_tokens: int, bandwidth: float) -> float:
        """Return the seconds that reading weights and cache takes."""
        return (self.weight_bytes + batch * cached_tokens * self.token_bytes) / bandwidth


def measure(place: Place, report: Report, load: Load, end_s: float) -> None:
    """Add the tables of speeds, and a profile; configurations that would begin after `end_s` are left out."""
    bandwidth = place.bandwidth()
    subject = _subject(place, load)
    rows, left_out = [], 0
    for batch, cached_tokens in load.batches:
        for num_draft_tokens in NUM_DRAFT_TOKENS:
            if time.perf_counter() > end_s:
                left_out += 1
                continue
            with report.part(f"speed of {batch} sessions of {cached_tokens}, K = {num_draft_tokens}"):
                rows.append(_row(place, subject, load.repetitions, (batch, cached_tokens), num_draft_tokens, bandwidth))
                print("  " + " | ".join(rows[-1]), flush=True)
    titles = (
        "sessions",
        "tokens of each",
        "K",
        "forward, ms",
        "called, not replayed, ms",
        "bound, ms",
        "of the bound",
        "positions/s",
    )
    report.sections.append(("Speed", f"{_explained(subject, load, bandwidth, left_out)}\n\n{table(titles, rows)}"))
    with report.part("profile"):
        report.sections.append(("Profile", _profiled(place, subject, load)))


def _subject(place: Place, load: Load) -> Subject:
    """Return a random model with as many layers as fit into the device's memory beside the cache."""
    shape = load.shape
    size = shape["hidden_size"] // shape["num_attention_heads"]
    one_layer = LayerShape(shape["num_key_value_heads"], size, size).num_bytes(torch.bfloat16)
    pages = max(batch * (cached_tokens // 256 + 2) for batch, cached_tokens in load.batches)
    cache_bytes = pages * 256 * one_layer  # of one layer
    ends = 2 * 2 * shape["vocab_size"] * shape["hidden_size"]
    fitting = int((MEMORY_SHARE * place.num_bytes - ends) // (layer_bytes(shape) + cache_bytes))
    num_layers = max(1, min(shape["num_hidden_layers"], fitting))
    pretrained = random_model(shape, place.device, num_layers)
    embeddings: nn.Module = pretrained.get_input_embeddings()
    read = sum(parameter.nbytes for parameter in pretrained.parameters())
    read -= sum(parameter.nbytes for parameter in embeddings.parameters())
    model = place.serve(pretrained, num_layers * cache_bytes)
    return Subject(model, read, num_layers * one_layer, num_layers)


def _row(
    place: Place,
    subject: Subject,
    repetitions: int,
    sessions: tuple[int, int],
    num_draft_tokens: int,
    bandwidth: float,
) -> tuple[str, ...]:
    model, num_tokens = subject.model, num_draft_tokens + 1
    with _sessions(model, *sessions) as forward_of:
        replayed = _median_s(place, lambda: forward_of(num_tokens), repetitions)
        with model.called():
            called = _median_s(place, lambda: forward_of(num_tokens), repetitions)
    bound = subject.bound_s(*sessions, bandwidth)
    times = (f"{1000 * seconds:.2f}" for seconds in (replayed, called, bound))
    counts = map(str, (*sessions, num_draft_tokens))
    return (*counts, *times, f"{bound / replayed:.0%}", f"{sessions[0] * num_tokens / replayed:.0f}")


@contextmanager
def _sessions(model: LanguageModel, batch: int, cached_tokens: int) -> Iterator[Any]:
    """Give what scores tokens of each of some sessions that hold so many, draws after each, and takes them back."""
    sequences = [model.cache.open(f"session {number}") for number in range(batch)]
    for sequence in sequences:
        model.forward([Feed(sequence, [5] * cached_tokens, 0)])

    def forward(num_tokens: int) -> torch.Tensor:
        logits = model.forward([Feed(sequence, [5] * num_tokens, num_tokens) for sequence in sequences]).logits
        contexts = [SamplingContext(SamplingParams(temperature=1, seed=1))] * len(logits)
        distributions = next_token_distributions(logits, contexts, logits.shape[1])
        tokens, _ = on_cpu(*draw_dense(distributions, [0.5] * len(logits)))
        for sequence in sequences:
            sequence.truncate(cached_tokens)
        return tokens

    yield forward
    for sequence in sequences:
        sequence.close()


def _median_s(place: Place, work: Any, repetitions: int) -> float:
    times = []
    for _ in range(repetitions + 2):
        began = time.perf_counter()
        work()
        place.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times[2:])


def _explained(subject: Subject, load: Load, bandwidth: float, left_out: int) -> str:
    shape, num_layers = load.shape, subject.num_layers
    cut = "" if num_layers == shape["num_hidden_layers"] else f" (of {shape['num_hidden_layers']}: more do not fit)"
    text = (
        f"A random Llama in bfloat16: {num_layers} layers{cut}, width {shape['hidden_size']}, vocabulary "
        f"{shape['vocab_size']}, {subject.weight_bytes / 1e9:.2f} GB read a forward. Each session has "
        f"K + 1 tokens scored after those that it holds; a row is the median of {load.repetitions} forwards with a "
        f"draw at every position. The bound is those bytes, and the cache's, at {bandwidth / 1e9:.0f} GB/s, at which "
        "this device copies."
    )
    return text + (f" {left_out} rows were left out: time was up." if left_out else "")


def _profiled(place: Place, subject: Subject, load: Load) -> str:
    """Return what took the most time in some forwards with K = 5."""
    activities = [ProfilerActivity.CPU] if place.is_dry else [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with _sessions(subject.model, *load.profiled) as forward_of:
        forward_of(6)
        with profile(activities=activities) as profiled:
            for _ in range(PROFILED_FORWARDS):
                forward_of(6)
            place.synchronize()
    key = "self_cpu_time_total" if place.is_dry else "self_device_time_total"
    found = profiled.key_averages().table(sort_by=key, row_limit=PROFILE_ROWS, max_name_column_width=60)
    batch, cached_tokens = load.profiled
    head = f"{PROFILED_FORWARDS} forwards of {batch} sessions of {cached_tokens} tokens with K = 5, replayed."
    return f"{head}\n\n```text\n{found.strip()}\n```"
