"""Batches of samples of similar length, and the held-out ones that no head is trained on."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from models.heads.samples import Sample, SampleReader

HELD_OUT_EVERY = 23  # samples: prime to the kinds and temperatures, which take turns
SORTED_AT_ONCE = 16  # batches whose samples are sorted by length, so that little is padded

StatesOf = Callable[[torch.Tensor], torch.Tensor]
"""Gives the states [N, T, layers, hidden_size] of tokens [N, T]."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Samples side by side, padded at their ends."""

    tokens: torch.Tensor  # int64 [N, T]
    states: torch.Tensor  # float32 [N, T, layers, hidden_size]
    is_answer: torch.Tensor  # bool [N, T]: tokens that the target wrote

    @property
    def num_answer_tokens(self) -> int:
        """Tokens that the target wrote."""
        return int(self.is_answer.sum())


class Samples:
    """The samples of some stores, in two parts."""

    def __init__(
        self,
        readers: Sequence[SampleReader],
        max_tokens: int,
        device: torch.device | None = None,
        states_of: StatesOf | None = None,
    ) -> None:
        """Count samples with an answer; `max_tokens` cuts longer ones.

        Batches are on the `device`, by default the CPU, with the states of the stores, or those that `states_of` gives.
        """
        self._readers = readers
        self._max_tokens = max_tokens
        self._device = device
        self._states_of = states_of
        places = [
            (reader, index)
            for reader in readers
            for index, entry in enumerate(reader.entries)
            if entry.num_prompt_tokens < min(entry.num_tokens, max_tokens)
        ]
        self.held_out = places[::HELD_OUT_EVERY]
        self.training = [place for number, place in enumerate(places) if number % HELD_OUT_EVERY]

    def endless(self, batch_tokens: int, seed: int, skipped: int = 0) -> Iterator[Batch]:
        """Yield batches of the training samples, each of about `batch_tokens` tokens, after `skipped` batches."""
        chooser = random.Random(seed)
        number = 0
        while True:
            shuffled = chooser.sample(self.training, len(self.training))
            for group in self._groups(shuffled, batch_tokens, chooser):
                number += 1
                if number > skipped:
                    yield self._batch(group)

    def of_held_out(self, batch_tokens: int, temperature: float) -> Iterator[Batch]:
        """Yield batches of the held-out samples of a temperature, once."""
        chosen = [place for place in self.held_out if place[0].entries[place[1]].temperature == temperature]
        for group in self._groups(chosen, batch_tokens, random.Random(0)):
            yield self._batch(group)

    def counts(self, vocab_size: int) -> torch.Tensor:
        """Return how often the target wrote each token in the training samples, int64 [vocab_size]."""
        total = torch.zeros(vocab_size, dtype=torch.long)
        for reader, index in self.training:
            entry = reader.entries[index]
            answer = reader.tokens[entry.begin + entry.num_prompt_tokens : entry.end].astype("int64")
            total += torch.bincount(torch.from_numpy(answer), minlength=vocab_size)
        return total

    def _groups(
        self, places: Sequence[tuple[SampleReader, int]], batch_tokens: int, chooser: random.Random
    ) -> Iterator[list[Sample]]:
        groups: list[list[tuple[SampleReader, int]]] = []
        chunk = SORTED_AT_ONCE * max(1, batch_tokens // self._max_tokens * 2)
        for begin in range(0, len(places), chunk):
            by_length = sorted(places[begin : begin + chunk], key=lambda place: place[0].entries[place[1]].num_tokens)
            groups += self._filled(by_length, batch_tokens)
        chooser.shuffle(groups)
        for group in groups:
            yield [reader[index] for reader, index in group]

    def _filled(
        self, places: Sequence[tuple[SampleReader, int]], batch_tokens: int
    ) -> list[list[tuple[SampleReader, int]]]:
        groups: list[list[tuple[SampleReader, int]]] = [[]]
        for place in places:  # rising lengths: the last one is what all others are padded to
            length = min(place[0].entries[place[1]].num_tokens, self._max_tokens)
            if groups[-1] and length * (len(groups[-1]) + 1) > batch_tokens:
                groups.append([])
            groups[-1].append(place)
        return groups if groups[0] else []

    def _batch(self, samples: Sequence[Sample]) -> Batch:
        most = self._max_tokens
        tokens = pad_sequence([sample.tokens[:most] for sample in samples], batch_first=True).to(self._device)
        if self._states_of is None:
            states = pad_sequence([sample.states[:most] for sample in samples], batch_first=True).to(self._device)
        else:
            states = self._states_of(tokens)
        places = torch.arange(tokens.shape[1])
        begins = torch.tensor([sample.entry.num_prompt_tokens for sample in samples])
        ends = torch.tensor([min(sample.entry.num_tokens, most) for sample in samples])
        is_answer = (places >= begins[:, None]) & (places < ends[:, None])
        return Batch(tokens, states.float(), is_answer.to(self._device))
