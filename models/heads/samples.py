"""The target's own answers to training instructions, with its hidden states: what a head learns to predict.

Answers are sampled through the engine that serves the target, so hidden states that are kept are those that a draft
worker will get. Half of the answers are greedy, half are sampled at temperature 1. A store of samples only grows: a run
that was interrupted continues where the last complete answer ended.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.engine import Feed, LanguageModel
from specdec.engine.sequence import Sequence as CachedSequence

INDEX, TOKENS, STATES, FACTS = "index.jsonl", "tokens.bin", "states.bin", "facts.json"


@dataclass(frozen=True, slots=True)
class Facts:
    """What the samples of a store have in common."""

    fingerprint: str  # of the target
    layers: tuple[int, ...]  # l: the state after l layers; none where states are computed when they are needed
    hidden_size: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One answer in a store."""

    kind: str  # of the instruction
    temperature: float
    begin: int  # index of its first token in the store
    num_prompt_tokens: int
    num_tokens: int  # prompt and answer

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.begin + self.num_tokens


@dataclass(frozen=True, slots=True)
class Sample:
    """One answer with the hidden states at each of its tokens."""

    entry: Entry
    tokens: torch.Tensor  # int64 [num_tokens]
    states: torch.Tensor  # bfloat16 [num_tokens, layers, hidden_size]


class SampleStore:
    """A folder of samples: their tokens and states one after the other, and an index line for each that is complete."""

    def __init__(self, folder: Path, facts: Facts) -> None:
        """Open or create a store. Raises ValueError where the folder has samples of another target or other layers."""
        folder.mkdir(parents=True, exist_ok=True)
        self.facts = facts
        self._folder = folder
        _expect_facts(folder / FACTS, facts)
        self.entries = _read_index(folder / INDEX)

    @property
    def num_tokens(self) -> int:
        """Tokens of all complete samples."""
        return self.entries[-1].end if self.entries else 0

    @property
    def _token_bytes(self) -> int:
        return 2 * len(self.facts.layers) * self.facts.hidden_size

    def append(self, kind: str, temperature: float, num_prompt_tokens: int, tokens: list[int], states: bytes) -> None:
        """Add a sample; `states` is bfloat16 [num_tokens, layers, hidden_size]."""
        entry = Entry(kind, temperature, self.num_tokens, num_prompt_tokens, len(tokens))
        _write_at(self._folder / TOKENS, 4 * entry.begin, np.array(tokens, "<u4").tobytes())
        _write_at(self._folder / STATES, self._token_bytes * entry.begin, states)
        with (self._folder / INDEX).open("a", encoding="utf-8") as index:  # last: now it is complete
            index.write(json.dumps(asdict(entry)) + "\n")
        self.entries.append(entry)

    def reader(self) -> "SampleReader":
        """Return the samples that are complete now."""
        shape = (self.num_tokens, len(self.facts.layers), self.facts.hidden_size)
        tokens: NDArray[Any] = np.memmap(self._folder / TOKENS, "<u4", "r", shape=shape[:1])
        states: NDArray[Any] = np.zeros(shape, "<u2")  # which no bytes can be mapped to where there are no layers
        if self.facts.layers:
            states = np.memmap(self._folder / STATES, "<u2", "r", shape=shape)
        return SampleReader(list(self.entries), tokens, states)


@dataclass(frozen=True, slots=True)
class SampleReader:
    """Samples to read in any order."""

    entries: Sequence[Entry]
    tokens: NDArray[Any]
    states: NDArray[Any]

    def __getitem__(self, index: int) -> Sample:
        entry = self.entries[index]
        states = torch.from_numpy(np.array(self.states[entry.begin : entry.end])).view(torch.bfloat16)
        return Sample(entry, torch.from_numpy(self.tokens[entry.begin : entry.end].astype(np.int64)), states)

    def __len__(self) -> int:
        return len(self.entries)


def _expect_facts(file: Path, facts: Facts) -> None:
    if not file.exists():
        file.write_text(json.dumps(asdict(facts)))
        return
    found = json.loads(file.read_text())
    if found != json.loads(json.dumps(asdict(facts))):
        raise ValueError(f"{file.parent} has samples of another target or of other layers; choose another folder")


def _read_index(file: Path) -> list[Entry]:
    if not file.exists():
        return []
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    if len(complete) < len(lines):  # else nothing is written: other processes may be reading
        partial = file.with_suffix(".partial")
        partial.write_text("".join(complete), encoding="utf-8")
        partial.replace(file)
    return [Entry(**json.loads(line)) for line in complete]


def _write_at(file: Path, position: int, data: bytes) -> None:
    """Write after what is complete, over what an interrupted run left."""
    file.touch()
    with file.open("r+b") as stream:
        stream.seek(position)
        stream.write(data)


# ---- sampling


@dataclass(frozen=True, slots=True)
class Instruction:
    """What the target is asked."""

    kind: str
    temperature: float
    tokens: list[int]


class Answering(Protocol):
    """What lets a target answer."""

    def answers(
        self, instructions: Iterator[Instruction], num_at_once: int
    ) -> Iterator[tuple[Instruction, list[int], bytes]]:
        """Yield each instruction with all tokens of prompt and answer, and their states [num_tokens, layers, H]."""
        ...


@dataclass(slots=True)
class _Answer:
    """An answer under way."""

    instruction: Instruction
    sequence: CachedSequence
    tokens: list[int]
    unread: list[int]
    states: list[torch.Tensor]

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.instruction.tokens)


class Sampler:
    """Lets the target answer many instructions at once; an answer that ends makes room for the next instruction."""

    def __init__(
        self,
        model: LanguageModel,
        layers: Sequence[int],
        eos_token_ids: Sequence[int],
        max_new_tokens: int,
        seed: int,
        name: str = "sample",
    ) -> None:
        """`name`: of its sequences; two samplers of one model have two names."""
        self._model = model
        self._name = name
        self._layers = tuple(layers)
        self._ends = frozenset(eos_token_ids)
        self._max_new_tokens = max_new_tokens
        self._random = torch.Generator(device=model.device).manual_seed(seed)
        self._num_begun = 0

    def answers(
        self, instructions: Iterator[Instruction], num_at_once: int
    ) -> Iterator[tuple[Instruction, list[int], bytes]]:
        """Yield each instruction with all tokens of prompt and answer, and their states [num_tokens, layers, H]."""
        running: list[_Answer] = []
        while True:
            missing = num_at_once - len(running)
            running += [self._begin(instruction) for _, instruction in zip(range(missing), instructions, strict=False)]
            if not running:
                return
            self._advance(running)
            for answer in [answer for answer in running if self._is_over(answer)]:
                running.remove(answer)
                answer.sequence.close()
                yield answer.instruction, answer.tokens, _bytes_of(answer.states)

    def _begin(self, instruction: Instruction) -> _Answer:
        self._num_begun += 1
        sequence = self._model.cache.open(f"{self._name} {self._num_begun}")
        return _Answer(instruction, sequence, list(instruction.tokens), list(instruction.tokens), [])

    def _advance(self, running: list[_Answer]) -> None:
        """Read what is unread of each answer, and draw its next token."""
        feeds = [
            Feed(
                answer.sequence,
                answer.unread,
                1,
                hidden_layers=self._layers,
                num_observed=len(answer.unread) if self._layers else 0,
            )
            for answer in running
        ]
        output = self._model.forward(feeds)
        temperatures = torch.tensor([answer.instruction.temperature for answer in running])
        for answer, states, token in zip(
            running, output.hidden_states, self._drawn(output.logits, temperatures), strict=True
        ):
            if states is not None:
                answer.states.append(states.to(torch.bfloat16).cpu())
            if not self._is_over(answer):
                answer.tokens.append(token)
                answer.unread = [token]

    def _drawn(self, logits: torch.Tensor, temperatures: torch.Tensor) -> list[int]:
        """Draw a token from each row of logits [N, V]: the largest of logits and Gumbel noise at the temperature."""
        noise = torch.empty_like(logits).exponential_(generator=self._random).log_()
        drawn: list[int] = (logits - noise * temperatures.to(logits.device)[:, None]).argmax(dim=-1).tolist()
        return drawn

    def _is_over(self, answer: _Answer) -> bool:
        """Whether an answer's last token has been read, or would pass the context."""
        num_new = answer.sequence.length - answer.num_prompt_tokens
        return (
            num_new >= self._max_new_tokens
            or (num_new > 0 and answer.sequence.tokens[-1] in self._ends)
            or answer.sequence.length >= self._model.context_length
        )


def _bytes_of(states: Sequence[torch.Tensor]) -> bytes:
    if not states:
        return b""
    joined = torch.cat(list(states)).contiguous()
    return bytes(joined.view(torch.uint8).numpy().tobytes())
