"""The batched language model that both workers share: any transformers causal LM, without padding.

`LanguageModel.forward` appends tokens to many sequences at once and returns the requested outputs at their positions.
`load.py` makes one.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from specdec.engine.attention import AttentionBackend, Segment, attending
from specdec.engine.cache import KvCache
from specdec.engine.decoder import Decoder, DecoderOutput, PackedRow, nothing
from specdec.engine.errors import EngineError, SequenceTooLong
from specdec.engine.feed import Feed, ForwardOutput
from specdec.engine.graphs import Graphs
from specdec.exact.tree import depths_of


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The facts of a model besides its weights."""

    name: str
    context_length: int
    num_token_ids: int  # that it can read
    vocab_size: int  # of its logits
    num_layers: int
    hidden_size: int
    dtype: torch.dtype  # that it computes in, and that the cache stores
    device: torch.device


class LanguageModel:
    """A causal language model with its KV cache. Use it on one thread; `EngineLoop` does."""

    def __init__(self, facts: ModelFacts, decoder: Decoder, backend: AttentionBackend) -> None:
        self.facts = facts
        self.name = facts.name
        self.context_length = facts.context_length
        self.num_token_ids = facts.num_token_ids
        self.vocab_size = facts.vocab_size
        self.num_layers = facts.num_layers
        self.hidden_size = facts.hidden_size
        self.dtype = facts.dtype
        self.device = facts.device
        self.decoder = decoder
        self.backend = backend
        self.cache = KvCache(backend.pool)
        self.graphs: Graphs | None = None  # of the forwards that are replayed

    def replay(self, graphs: Graphs) -> None:
        """Run the forwards that `graphs` takes through it; the decoder must stay as it is from now on."""
        self.graphs = graphs

    @contextmanager
    def called(self) -> Iterator[None]:
        """Run all forwards by calls, as if nothing had been recorded."""
        graphs, self.graphs = self.graphs, None
        try:
            yield
        finally:
            self.graphs = graphs

    @torch.inference_mode()
    def forward(self, feeds: Iterable[Feed], when_prepared: Callable[[], None] = nothing) -> ForwardOutput:
        """Append each feed's tokens to its sequence; return logits and hidden states, in the order of the feeds.

        A sequence may occur once. Raises SequenceTooLong, CacheFull or EngineError for bad feeds; after any exception
        every sequence still holds what it held before.
        """
        feeds = list(feeds)
        with _claimed(feeds):
            for feed in feeds:
                self.check(feed)
                feed.sequence.reserve(feed.sequence.length + len(feed.tokens))
            output = self._forward_packed(feeds, when_prepared)
            for feed in feeds:
                feed.sequence.append(feed.tokens, feed.parents)
        return output

    def check(self, feed: Feed) -> None:
        """Raise EngineError for an invalid feed, SequenceTooLong past the context length."""
        _check_counts(feed)
        self._check_layers(feed)
        if not 0 <= min(feed.tokens) <= max(feed.tokens) < self.num_token_ids:
            raise EngineError(
                f"tokens {min(feed.tokens)} to {max(feed.tokens)} were fed to {self.name}, which knows 0 to "
                f"{self.num_token_ids - 1}; use its own tokenizer"
            )
        feed.sequence.check_append(feed.tokens, feed.parents)
        length = feed.sequence.length + len(feed.tokens) - len(feed.parents) + max(depths_of(feed.parents), default=0)
        if length > self.context_length:
            raise SequenceTooLong(
                f"{length} tokens pass the {self.context_length} that {self.name} can read; shorten the sequence"
            )

    def _check_layers(self, feed: Feed) -> None:
        if feed.hidden_layers and not 0 <= min(feed.hidden_layers) <= max(feed.hidden_layers) <= self.num_layers:
            raise EngineError(
                f"hidden states after {list(feed.hidden_layers)} layers were asked for; {self.name} has "
                f"{self.num_layers} layers"
            )

    def _forward_packed(self, feeds: list[Feed], when_prepared: Callable[[], None]) -> ForwardOutput:
        segments = [
            Segment(feed.sequence.key, feed.sequence.length, len(feed.tokens), tuple(feed.parents)) for feed in feeds
        ]
        row = _packed(feeds, segments, when_prepared)
        logits, states = self._decoded(row, segments)
        num_rows = sum(feed.num_rows for feed in feeds)
        return ForwardOutput(logits[:num_rows].float(), _by_feed(feeds, row, states))

    def _decoded(self, row: PackedRow, segments: list[Segment]) -> DecoderOutput:
        if self.graphs:
            row.when_prepared()
        output = self.graphs.run(row, segments) if self.graphs else None
        if output is not None:
            return output
        with attending(self.backend.plan(segments)):
            return self.decoder(row)


def _check_counts(feed: Feed) -> None:
    num_tokens = len(feed.tokens)
    if not feed.tokens or not 0 <= feed.num_rows <= num_tokens or not 0 <= feed.num_observed <= num_tokens:
        raise EngineError(
            f"{feed.num_rows} rows and {feed.num_observed} hidden states of {num_tokens} tokens were asked for; "
            "feed more tokens"
        )


def _packed(feeds: list[Feed], segments: list[Segment], when_prepared: Callable[[], None]) -> PackedRow:
    tokens: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    observed_rows: list[int] = []
    for feed, segment in zip(feeds, segments, strict=True):
        tokens += feed.tokens
        positions += segment.positions
        end = len(tokens)
        logit_rows += range(end - feed.num_rows, end)
        observed_rows += range(end - _num_observed(feed), end)
    layers = {layer for feed in feeds if feed.num_observed for layer in feed.hidden_layers}
    return PackedRow(tokens, positions, logit_rows or [0], observed_rows, tuple(sorted(layers)), when_prepared)


def _num_observed(feed: Feed) -> int:
    return feed.num_observed if feed.hidden_layers else 0


def _by_feed(feeds: list[Feed], row: PackedRow, states: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """Cut states [observed_rows, hidden_layers, width] into what each feed asked for."""
    if states is None:
        return (None,) * len(feeds)
    parts = torch.split(states, [_num_observed(feed) for feed in feeds])
    return tuple(
        part[:, [row.hidden_layers.index(layer) for layer in feed.hidden_layers]] if _num_observed(feed) else None
        for feed, part in zip(feeds, parts, strict=True)
    )


@contextmanager
def _claimed(feeds: list[Feed]) -> Iterator[None]:
    """Keep the feeds' sequences from evicting one another; free what was reserved and not used."""
    sequences = [feed.sequence for feed in feeds]
    if len(set(sequences)) < len(sequences):
        raise EngineError("a sequence was fed twice in one forward; feed all its tokens at once")
    for sequence in sequences:
        sequence.pin()
    try:
        yield
    except BaseException:
        for sequence in sequences:
            sequence.release()
        raise
    finally:
        for sequence in sequences:
            sequence.unpin()
