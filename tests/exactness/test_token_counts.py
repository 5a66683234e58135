"""Penalties from counts that grow with the text: the same logits as from the whole text, bit for bit."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.exact.sampling import SamplingContext, changed_logits
from specdec.exact.token_counts import TokenCounts
from specdec.types import SamplingParams

VOCAB_SIZE = 50
SAMPLING = [
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.7),
    SamplingParams(frequency_penalty=-0.3),
    SamplingParams(repetition_penalty=0.8, presence_penalty=0.25, frequency_penalty=0.5, logit_bias={3: 2.0}),
]


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("num_drafted", [0, 1, 7])
@pytest.mark.parametrize("dense_fraction", [0, 1000], ids=["the tokens that were seen", "whole rows"])
def test_counts_give_the_logits_of_the_whole_text(
    sampling: SamplingParams, num_drafted: int, dense_fraction: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(num_drafted)
    text = rng.choices(range(VOCAB_SIZE), k=40)
    drafted = rng.choices(range(VOCAB_SIZE), k=num_drafted)
    counts = TokenCounts()
    for length in (5, 12, 13, 40):
        counts.update(length - 1, text, length, 10)
    monkeypatch.setattr("specdec.exact.sampling.DENSE_FRACTION", dense_fraction)
    logits = torch.randn(3, VOCAB_SIZE, generator=torch.Generator().manual_seed(1))
    counted = SamplingContext(sampling, completion=drafted, counts=counts)
    whole = SamplingContext(sampling, text[:10], [*text[10:], *drafted])
    penalised = changed_logits(logits, [counted] * 3)
    assert torch.equal(penalised, by_token(logits, text, drafted, sampling))
    assert torch.equal(penalised, changed_logits(logits, [whole] * 3))


def by_token(logits: torch.Tensor, text: list[int], drafted: list[int], sampling: SamplingParams) -> torch.Tensor:
    """Penalise token by token."""
    logits = logits.clone()
    for token, value in sampling.logit_bias.items():
        logits[:, token] += value
    completion = [*text[10:], *drafted]
    for token in {*text, *drafted}:
        values = logits[:, token]
        values = torch.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
        times = torch.tensor(float(completion.count(token)))
        if times:
            values = values - (sampling.presence_penalty + sampling.frequency_penalty * times)
        logits[:, token] = values
    return logits


def by_hand(text: list[int], num_prompt: int) -> tuple[list[int], list[float]]:
    return (
        [text.count(token) for token in range(VOCAB_SIZE)],
        [float(text[num_prompt:].count(token)) for token in range(VOCAB_SIZE)],
    )


@given(st.data())
def test_any_truncation_and_appending_is_counted(data: st.DataObject) -> None:
    counts, text, num_prompt = TokenCounts(), list[int](), data.draw(st.integers(0, 8))
    for _ in range(data.draw(st.integers(1, 8))):
        start = data.draw(st.integers(0, len(text)))
        text = [*text[:start], *data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6))]
        counts.update(start, text, len(text), num_prompt)
        times, completion_times = counts.times_of(np.arange(VOCAB_SIZE))
        assert (times.tolist(), completion_times.tolist()) == by_hand(text, num_prompt)
        ids, times, completion_times = counts.counted()
        assert set(text) <= set(ids.tolist())
        assert len(set(ids.tolist())) == len(ids)
        assert [times.tolist(), completion_times.tolist()] == [each.tolist() for each in counts.times_of(ids)]


def test_a_round_reads_its_own_tokens_only() -> None:
    class Watched(Sequence[int]):
        def __len__(self) -> int:
            return 40_000

        def __getitem__(self, index: Any) -> Any:
            read.append(len(range(*index.indices(len(self)))))
            return [token % VOCAB_SIZE for token in range(*index.indices(len(self)))]

    read, counts = list[int](), TokenCounts()
    counts.update(0, Watched(), 30_000, 10)
    read.clear()
    counts.update(30_000, Watched(), 30_004, 10)
    assert sum(read) == 4
