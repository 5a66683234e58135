"""The interface between models and attention backends: the attention function of every served model.

All sequences' new tokens lie in one row `[1, total_tokens]`, so linear layers run once over all of them. The function
is registered with transformers' `AttentionInterface` under `ATTENTION_NAME` and hands each layer's queries, keys and
values to the plan of the forward in progress. No mask function is registered under that name, so models build no masks.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import AttentionInterface

from specdec.engine.errors import EngineError, ModelRefused
from specdec.engine.pool import KvPool, LayerShape
from specdec.exact.tree import depths_of

ATTENTION_NAME = "specdec"


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's share of the packed row: new tokens, the last of which may form a tree (see `exact/tree.py`)."""

    key: str
    past: int  # tokens that are cached already
    num_tokens: int
    parents: tuple[int, ...] = ()

    @property
    def total(self) -> int:
        """Tokens that are cached after the forward."""
        return self.past + self.num_tokens

    @property
    def tree_start(self) -> int:
        """The first slot of the tree; every slot before it holds the token of that position."""
        return self.total - len(self.parents)

    @property
    def positions(self) -> list[int]:
        """The new tokens' positions in their text: a token of the tree is one after its parent."""
        root = self.tree_start - 1
        return [*range(self.past, self.tree_start), *(root + depth for depth in depths_of(self.parents))]


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """What a layer passes besides queries, keys and values."""

    scaling: float
    window: int | None = None  # a token attends to positions less than so many before its own
    softcap: float | None = None
    sinks: torch.Tensor | None = None  # [heads]: an attention sink, one logit per head without a value


class AttentionPlan(Protocol):
    """One forward's attention."""

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Store the next layer's new keys and values, and attend to all that is stored.

        Each token sees the text before it; a token of a tree sees the text before the tree, its ancestors and itself.
        Shapes: query [total, heads, key_size], key and value [total, kv_heads, size] -> [total, heads, value_size].
        """
        ...


class AttentionBackend(Protocol):
    """A way of storing keys and values and of attending to them."""

    @property
    def pool(self) -> KvPool:
        """Where keys and values are stored."""
        ...

    def plan(self, segments: Sequence[Segment]) -> AttentionPlan:
        """Return the attention of a forward over these segments, whose slots are reserved."""
        ...


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """The size and type of a backend's storage."""

    num_bytes: int
    block_tokens: int
    dtype: torch.dtype
    device: torch.device


NewBackend = Callable[[Sequence[LayerShape], PoolOptions], AttentionBackend]

_current = threading.local()  # .plan: of the forward that this thread is running


@contextmanager
def attending(plan: AttentionPlan) -> Iterator[None]:
    """Let models on this thread attend through `plan`."""
    _current.plan = plan
    try:
        yield
    finally:
        _current.plan = None


def current_attention() -> AttentionPlan:
    """Return what this thread's forward attends through."""
    plan: AttentionPlan | None = getattr(_current, "plan", None)
    if plan is None:
        raise EngineError("packed attention was called outside of LanguageModel.forward")
    return plan


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    position_bias: torch.Tensor | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do.

    Shapes: query, key and value [1, heads, total, size] -> [1, total, heads, size].
    Raises ModelRefused for a layer that brings its own mask or position bias.
    """
    if attention_mask is not None or position_bias is not None:
        raise ModelRefused(
            f"{type(module).__name__} adds its own mask or bias to attention, which packed sequences cannot honour; "
            "choose a model with rotary or learned positions"
        )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    options = AttentionOptions(scaling, sliding_window, softcap, s_aux)
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))  # [total, heads, size]
    return current_attention().attend(query, key, value, options)[None], None


AttentionInterface.register(ATTENTION_NAME, packed_attention)


class ShapeProbe:
    """An attention plan that stores nothing and records what each layer would store."""

    def __init__(self) -> None:
        self.shapes: list[LayerShape] = []

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Record the layer's shape and answer zeros."""
        self.shapes.append(LayerShape(key.shape[1], key.shape[2], value.shape[2]))
        return query.new_zeros(query.shape[0], query.shape[1], value.shape[2])
