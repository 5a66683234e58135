"""Answers on a GPU: thousands at once, each in a slot of a rectangular cache; a step is one recorded CUDA graph.

The engine that serves the target packs sequences of any length, and prepares each batch on the CPU; to sample millions
of tokens from a small target that is what takes the time. Here every slot reads one token a step, of its prompt or of
its answer, whatever the others do, so that all steps are alike. The device runs the next steps while the CPU keeps
what has ended and prepares what is asked next.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from math import inf
from typing import Any

import torch
from transformers import AttentionInterface, Cache, PreTrainedModel

from models.heads.samples import Instruction
from specdec.engine import EngineError

ATTENTION_NAME = "specdec_slots"
STEPS_AT_ONCE = 8  # between two looks at what has ended
WARM_UP_STEPS = 3  # before a graph is recorded
MEMORY_SHARE = 0.4  # of a device's free memory, for one of the two that sample: instructions, and answers
LOGIT_BYTES = 16  # of a token of the vocabulary: its logit in two types, the noise, and their sum


class SlotSampler:
    """Lets a target answer many instructions at once; an answer that ends makes room for the next instruction."""

    def __init__(
        self, model: PreTrainedModel, eos_token_ids: Sequence[int], max_new_tokens: int, max_tokens: int, seed: int
    ) -> None:
        """`max_tokens`: of prompt and answer; instructions that leave no room for an answer are not asked.

        Raises EngineError for a model whose layers do not all attend to the whole text.
        """
        check_whole_attention(model)
        self._model = model
        self._ends = tuple(eos_token_ids)
        self._max_new_tokens = max_new_tokens
        self._max_tokens = max_tokens
        self._seed = seed

    def answers(
        self, instructions: Iterator[Instruction], num_at_once: int
    ) -> Iterator[tuple[Instruction, list[int], bytes]]:
        """Yield each instruction with all tokens of prompt and answer; no states, which `Sampler` gives."""
        num_at_once = int(min(num_at_once, self._num_that_fit()))
        slots = Slots(self._model, num_at_once, self._max_tokens, self._ends, self._seed)
        askable = (asked for asked in instructions if len(asked.tokens) < self._max_tokens)
        asked: list[Instruction | None] = [None] * num_at_once
        ready: deque[Instruction] = deque(islice(askable, num_at_once))
        while True:
            ended = slots.ended()
            answered = [
                (instruction, tokens, b"")
                for row, tokens in zip(ended, slots.texts(ended), strict=True)
                if (instruction := asked[row]) is not None
            ]
            begun = {row: ready.popleft() for row in ended[: len(ready)]}
            for row in ended:
                asked[row] = begun.get(row)
            if not any(asked):
                yield from answered
                return
            slots.begin(begun, self._max_new_tokens)
            slots.advance()
            ready.extend(islice(askable, max(0, len(ended) - len(ready))))  # while the device works
            yield from answered

    def _num_that_fit(self) -> float:
        """Return how many slots the device has memory for."""
        if self._model.device.type != "cuda":
            return inf
        config: Any = self._model.config.get_text_config()
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        cached = 2 * config.num_hidden_layers * num_heads * size * self._model.dtype.itemsize * self._max_tokens
        free, _ = torch.cuda.mem_get_info(self._model.device)
        num_slots: int = int(MEMORY_SHARE * free) // (cached + LOGIT_BYTES * config.vocab_size)
        return max(1, num_slots)


class Slots:
    """Texts side by side on a device, each of which gets one token longer in a step until it has ended."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_tokens: int, ends: Sequence[int], seed: int) -> None:
        self._model = model
        self._cache = SlotCache(num_slots, max_tokens)
        device = model.device
        self._tokens = torch.zeros(num_slots, max_tokens, dtype=torch.long, device=device)
        self._places = torch.arange(max_tokens, device=device)
        self._position = torch.zeros(num_slots, dtype=torch.long, device=device)  # of the token to be read
        self._num_prompt_tokens = torch.ones(num_slots, dtype=torch.long, device=device)
        self._limit = torch.ones(num_slots, dtype=torch.long, device=device)
        self._temperature = torch.zeros(num_slots, 1, device=device)
        self._has_ended = torch.ones(num_slots, dtype=torch.bool, device=device)
        self._ends = torch.tensor(list(ends) or [-1], device=device)
        self._graph: torch.cuda.CUDAGraph | None = None
        torch.manual_seed(seed)

    def ended(self) -> list[int]:
        """Wait for the device; return the slots whose text has ended, or that never had one."""
        return self._has_ended.nonzero()[:, 0].tolist()

    def texts(self, rows: Sequence[int]) -> list[list[int]]:
        """Return all tokens of the texts of slots."""
        chosen = torch.tensor(rows, dtype=torch.long, device=self._tokens.device)
        tokens, lengths = self._tokens[chosen].tolist(), (self._position[chosen] + 1).tolist()
        return [text[:length] for text, length in zip(tokens, lengths, strict=True)]

    def begin(self, instructions: dict[int, Instruction], max_new_tokens: int) -> None:
        """Begin texts in slots."""
        if not instructions:
            return
        rows = torch.tensor(list(instructions), device=self._tokens.device)
        prompts = torch.zeros(len(instructions), self._tokens.shape[1], dtype=torch.long)
        for prompt, instruction in zip(prompts, instructions.values(), strict=True):
            prompt[: len(instruction.tokens)] = torch.tensor(instruction.tokens)
        lengths = torch.tensor([len(instruction.tokens) for instruction in instructions.values()])
        temperatures = torch.tensor([[instruction.temperature] for instruction in instructions.values()])
        self._tokens[rows] = prompts.to(rows.device)
        self._num_prompt_tokens[rows] = lengths.to(rows.device)
        self._limit[rows] = (lengths + max_new_tokens).clamp(max=self._tokens.shape[1]).to(rows.device)
        self._temperature[rows] = temperatures.to(rows.device)
        self._position[rows] = 0
        self._has_ended[rows] = False

    def advance(self) -> None:
        """Let the device read and draw some tokens of each text; return before it has."""
        if self._tokens.device.type == "cuda" and self._graph is None:
            self._graph = self._recorded()
        for _ in range(STEPS_AT_ONCE):
            if self._graph is None:
                self._step()
            else:
                self._graph.replay()

    def _recorded(self) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP_STEPS):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step()
        return graph

    @torch.no_grad()
    def _step(self) -> None:
        """Read a token of each text; where it is the last one, draw the next from the target's distribution."""
        position = self._position[:, None]
        self._cache.positions = self._position
        logits = self._model(
            input_ids=self._tokens.gather(1, position),
            position_ids=position,
            attention_mask=(self._places <= position)[:, None, None],
            past_key_values=self._cache,
            use_cache=True,
        ).logits[:, -1]
        following = (position + 1).clamp(max=self._tokens.shape[1] - 1)
        is_known = self._has_ended[:, None] | (following < self._num_prompt_tokens[:, None])
        token = torch.where(is_known, self._tokens.gather(1, following), self._drawn(logits.float()))
        self._tokens.scatter_(1, following, token)
        is_last = (token == self._ends).any(dim=1) | (following[:, 0] + 1 >= self._limit)
        self._position.copy_(torch.where(self._has_ended, self._position, following[:, 0]))
        self._has_ended.logical_or_(is_last & ~is_known[:, 0])

    def _drawn(self, logits: torch.Tensor) -> torch.Tensor:
        """Draw a token [N, 1] from each row of logits [N, V]: the largest of logits and Gumbel noise."""
        noise = torch.empty_like(logits).exponential_().log_()
        return (logits - noise * self._temperature).argmax(dim=-1, keepdim=True)


class SlotCache(Cache):
    """Keys and values of all slots, each layer's [slots, kv_heads, max_tokens, size]."""

    def __init__(self, num_slots: int, max_tokens: int) -> None:
        super().__init__(layers=[])
        self.positions = torch.empty(0)
        self._shape = num_slots, max_tokens
        self._kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_unused: Any, **_options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new key and value [slots, kv_heads, 1, size] at each slot's position; return all of them."""
        if layer_idx not in self._kept:
            num_slots, max_tokens = self._shape
            self._kept[layer_idx] = tuple(  # type: ignore[assignment]  # of two
                new.new_zeros(num_slots, new.shape[1], max_tokens, new.shape[3]) for new in (key_states, value_states)
            )
        rows = torch.arange(len(key_states), device=key_states.device)
        for kept, new in zip(self._kept[layer_idx], (key_states, value_states), strict=True):
            kept[rows, :, self.positions] = new[:, :, 0]
        return self._kept[layer_idx]


def slot_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_unused: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers' attention functions do.

    Shapes: query [N, heads, 1, size], key and value [N, kv_heads, L, size], mask [N, 1, 1, L] -> [N, 1, heads, size].
    The heads that share keys are the rows of one product: nothing is repeated.
    """
    grouped = query[:, :, 0].unflatten(1, (key.shape[1], -1))  # [N, kv_heads, group, size]
    scores = grouped @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    weights = scores.float().masked_fill(~attention_mask, float("-inf")).softmax(dim=-1).to(value.dtype)
    return (weights @ value).flatten(1, 2)[:, None], None


AttentionInterface.register(ATTENTION_NAME, slot_attention)


def check_whole_attention(model: PreTrainedModel) -> None:
    """Let the model attend in slots. Raises EngineError where a layer has a window, a bias or sinks."""
    config = model.config
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    special = ("sliding_window", "attn_logit_softcapping", "attention_chunk_size", "alibi")
    found = [name for name in special if getattr(config, name, None)]
    if layer_types != {"full_attention"} or (found and getattr(config, "use_sliding_window", True)):
        raise EngineError(f"a {config.model_type} cannot be sampled in slots: {', '.join(found) or layer_types}")
    model.set_attn_implementation(ATTENTION_NAME)
