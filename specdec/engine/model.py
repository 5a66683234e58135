"""The batched language model that both workers share: any transformers causal LM, without padding.

`LanguageModel.forward` appends tokens to many sequences at once and returns the logits that were asked for. Everything
about a model's architecture stays in transformers; only its attention function is ours (`attention.py`).
"""

import inspect
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from specdec.engine.attention import ATTENTION_NAME, PackedAttention, Segment, ShapeProbe, attending
from specdec.engine.check import float32_copy, make_check, num_embeddings
from specdec.engine.errors import CacheFull, EngineError, ModelRefused, SequenceTooLong
from specdec.engine.fused import FusedDecoder, has_fused_forward
from specdec.engine.kv import KvCache, LayerShape, Sequence
from specdec.engine.linear import pack_linears
from specdec.engine.loading import choose_device, load_pretrained

logger = logging.getLogger(__name__)

BLOCK_TOKENS = 32  # half a block is lost per sequence; growing into a new block costs some microseconds
CHECK_CACHE_BYTES = 64 << 20  # for two short prompts of a model small enough to be copied


class _FusedForwardFailed(Exception):
    """The fused decoder cannot serve the model, or not exactly."""


@dataclass(frozen=True, slots=True)
class Feed:
    """Tokens to append to one sequence, and how many of their last positions want logits (0: none)."""

    sequence: Sequence
    tokens: list[int]
    num_rows: int


class LanguageModel:
    """A causal language model with its KV cache. Use it on one thread; `EngineLoop` does."""

    def __init__(self, model: PreTrainedModel, name: str, kv_cache_bytes: int, block_tokens: int, fused: bool) -> None:
        model.set_attn_implementation(ATTENTION_NAME)
        self.name = name
        self._model = model
        self._fused = FusedDecoder(model) if fused else None
        pack_linears(model)
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        text_config = model.config.get_text_config(decoder=True)
        self.context_length: int = getattr(text_config, "max_position_embeddings", None) or 1 << 30
        self.num_token_ids = num_embeddings(model)
        shapes, self.vocab_size = self._probe()
        self.num_layers = len(shapes)
        self.cache = KvCache(
            shapes, num_bytes=kv_cache_bytes, block_tokens=block_tokens, dtype=self.dtype, device=self.device
        )

    @classmethod
    def load(
        cls,
        name_or_path: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        kv_cache_bytes: int,
        block_tokens: int = BLOCK_TOKENS,
        self_check: bool = True,
    ) -> "LanguageModel":
        """Load a transformers causal LM by hub id or local folder.

        `device` is "auto", "cpu" or "cuda"; `dtype` is "auto", "float32" or "bfloat16" (auto: bfloat16 where the device
        computes it faster). The cache takes `kv_cache_bytes` bytes. Only safetensors weights are read, and no code that
        comes with a model is run. Raises ModelRefused when the model cannot be loaded or served exactly, CacheFull
        when the bytes hold not one block.
        """
        arguments = (name_or_path, choose_device(device), dtype, kv_cache_bytes, block_tokens, self_check)
        try:
            return cls._serve(*arguments, fused=True)
        except _FusedForwardFailed as failure:
            logger.warning("%s; it is served through transformers' own forward", failure)
            return cls._serve(*arguments, fused=False)

    @classmethod
    def _serve(
        cls,
        name: str,
        device: torch.device,
        dtype: str,
        kv_cache_bytes: int,
        block_tokens: int,
        self_check: bool,
        *,
        fused: bool,
    ) -> "LanguageModel":
        pretrained = load_pretrained(name, device, dtype)
        fused = fused and has_fused_forward(pretrained)
        try:
            if self_check:
                cls._check_copy(pretrained, name, CHECK_CACHE_BYTES, block_tokens, fused)
            return cls._checked(pretrained, self_check, name, kv_cache_bytes, block_tokens, fused)
        except CacheFull:
            raise
        except Exception as error:
            if fused:
                raise _FusedForwardFailed(f"the fused decoder does not serve {name}: {error}") from error
            raise

    @classmethod
    def _check_copy(cls, pretrained: PreTrainedModel, *arguments: Any) -> None:
        copy = float32_copy(pretrained)
        if copy is not None:
            cls._checked(copy, True, *arguments)

    @classmethod
    def _checked(cls, pretrained: PreTrainedModel, self_check: bool, *arguments: Any) -> "LanguageModel":
        check = make_check(pretrained) if self_check else None
        model = cls(pretrained, *arguments)
        if check is not None:
            check(model)
        return model

    @property
    def device(self) -> torch.device:
        """Where the weights lie."""
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in, and that the cache stores."""
        return self._model.dtype

    @torch.inference_mode()
    def forward(self, feeds: Iterable[Feed]) -> torch.Tensor:
        """Append each feed's tokens to its sequence; return the wanted logits, float32 [sum of num_rows, vocab_size].

        A sequence may occur once. Rows come in the order of the feeds. Raises SequenceTooLong, CacheFull or EngineError
        for bad feeds; after any exception every sequence still holds what it held before.
        """
        feeds = list(feeds)
        with _claimed(feeds):
            for feed in feeds:
                self.check(feed)
                feed.sequence.reserve(feed.sequence.length + len(feed.tokens))
            logits = self._forward_packed(feeds)
            for feed in feeds:
                feed.sequence.advance(len(feed.tokens))
        return logits

    def check(self, feed: Feed) -> None:
        """Raise EngineError for tokens that the model does not know, SequenceTooLong past the context length."""
        if not 0 <= feed.num_rows <= len(feed.tokens) or not feed.tokens:
            raise EngineError(f"{feed.num_rows} rows of {len(feed.tokens)} tokens were asked for; feed more tokens")
        if not 0 <= min(feed.tokens) <= max(feed.tokens) < self.num_token_ids:
            raise EngineError(
                f"tokens {min(feed.tokens)} to {max(feed.tokens)} were fed to {self.name}, which knows 0 to "
                f"{self.num_token_ids - 1}; use its own tokenizer"
            )
        length = feed.sequence.length + len(feed.tokens)
        if length > self.context_length:
            raise SequenceTooLong(
                f"{length} tokens pass the {self.context_length} that {self.name} can read; shorten the sequence"
            )

    def _forward_packed(self, feeds: list[Feed]) -> torch.Tensor:
        segments: list[Segment] = []
        tokens: list[int] = []  # of all feeds, one after the other
        positions: list[int] = []
        rows: list[int] = []
        for feed in feeds:
            segment = Segment(feed.sequence, len(feed.tokens))
            segments.append(segment)
            tokens += feed.tokens
            positions += range(segment.past, segment.total)
            rows += range(len(tokens) - feed.num_rows, len(tokens))
        attention = PackedAttention(segments, self.cache.layers)
        with attending(attention):
            return self._logits(tokens, positions, rows)

    def _logits(self, tokens: list[int], positions: list[int], rows: list[int]) -> torch.Tensor:
        """Run the model over one packed row; return float32 [len(rows), vocab_size]."""
        kept_rows = rows or [0]  # one row where none is wanted: heads dislike empty input
        if self._fused is not None:
            return self._fused(tokens, positions, kept_rows)[: len(rows)].float()
        keep = torch.tensor(kept_rows, device=self.device)
        packed = torch.tensor([tokens, positions], device=self.device)  # [2, total_tokens]
        options: dict[str, Any] = {"logits_to_keep": keep} if self._takes_rows else {}
        output = self._model(input_ids=packed[:1], position_ids=packed[1:], use_cache=False, **options)
        logits = output.logits[0] if self._takes_rows else output.logits[0, keep]
        wanted: torch.Tensor = logits[: len(rows)].float()
        return wanted

    @torch.inference_mode()
    def _probe(self) -> tuple[list[LayerShape], int]:
        """Return what each layer stores, and the logits' width, from a forward of one token."""
        probe = ShapeProbe()
        with attending(probe):
            logits = self._logits([0], [0], [0])
        num_layers = self._model.config.get_text_config(decoder=True).num_hidden_layers
        if len(probe.shapes) != num_layers:
            raise ModelRefused(
                f"{type(self._model).__name__} sends {len(probe.shapes)} of its {num_layers} layers through "
                "transformers' attention interface, so it cannot be served packed; choose one that uses the interface"
            )
        return probe.shapes, logits.shape[-1]


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
            sequence.truncate(sequence.length)
        raise
    finally:
        for sequence in sequences:
            sequence.unpin()
