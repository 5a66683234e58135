"""transformers' own `generate` in this process: plain, with prompt lookup, and with an assistant model.

The same weights and number type as a target worker's, on as many threads, without services: what a program gets that
loads the model itself.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.measure import Prompt
from specdec import SamplingParams, Statistics

logging.getLogger("transformers.generation.utils").setLevel(logging.ERROR)  # it warns of how it calls itself
LOOKUP_TOKENS = 10  # that prompt lookup drafts: what transformers' documentation uses


class Reference:
    """A model as transformers runs it."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
        self.model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)

    def encode(self, prompt: Prompt) -> torch.Tensor:
        """Return the prompt's tokens [1, N]."""
        if not prompt.is_chat:
            return torch.tensor([self._tokenizer(prompt.text).input_ids])
        messages = [{"role": "user", "content": prompt.text}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self._tokenizer(text, add_special_tokens=False).input_ids])

    def continuation(self, prompt: Prompt, sampling: SamplingParams, **drafting: Any) -> tuple[int, ...]:
        """Return a completion's tokens; `drafting` are words of `generate`."""
        ids = self.encode(prompt)
        words = self._words(sampling) | drafting
        output = self.model.generate(ids, attention_mask=torch.ones_like(ids), **words)
        return tuple(output[0, ids.shape[1] :].tolist())

    @torch.inference_mode()
    def gap(self, prompt: Prompt, completion: Sequence[int]) -> float:
        """Return by how much the two best logits differ after a prompt and the beginning of its completion."""
        ids = torch.cat([self.encode(prompt), torch.tensor([completion], dtype=torch.long)], dim=1)
        best, second = self.model(ids).logits[0, -1].float().topk(2).values.tolist()
        return float(best - second)

    def _words(self, sampling: SamplingParams) -> dict[str, Any]:
        end = None if sampling.ignore_eos else self.model.generation_config.eos_token_id
        sampled = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature else {}
        length = {"max_new_tokens": sampling.max_new_tokens, "eos_token_id": end, "pad_token_id": 0}
        return {"do_sample": bool(sampled)} | sampled | length


@dataclass(frozen=True, slots=True)
class InProcess:
    """One of transformers' ways of drafting."""

    name: str
    reference: Reference
    num_threads: int
    drafting: Mapping[str, Any] = field(default_factory=dict)

    async def complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        """Complete a prompt, on another thread: the channels to the services stay alive."""
        return await asyncio.to_thread(self._complete, prompt, sampling)

    def _complete(self, prompt: Prompt, sampling: SamplingParams) -> Statistics:
        torch.set_num_threads(self.num_threads)
        with counted_forwards(self.reference.model) as widths:
            num_tokens = len(self.reference.continuation(prompt, sampling, **self.drafting))
        num_prompt_tokens = self.reference.encode(prompt).shape[1]
        return Statistics(
            num_rounds=len(widths),
            num_draft_tokens=sum(widths) - num_prompt_tokens - (len(widths) - 1),
            num_accepted_tokens=num_tokens - len(widths),
            num_tokens=num_tokens,
        )


@contextmanager
def counted_forwards(model: Any) -> Iterator[list[int]]:
    """Collect how many tokens each forward of a model gets; all but the first get a closing token and a draft."""
    widths: list[int] = []

    def count(_: Any, positional: tuple[Any, ...], named: dict[str, Any]) -> None:
        ids = named["input_ids"] if "input_ids" in named else positional[0]
        widths.append(ids.shape[1])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield widths
    finally:
        hook.remove()


def in_process(target: str, draft: str | None, dtype: str, num_threads: int) -> list[InProcess]:
    """Return transformers' ways with a target, and a draft if it is a model."""
    number_type: torch.dtype = getattr(torch, dtype)
    reference = Reference(target, number_type)
    ways = [
        InProcess("transformers, plain", reference, num_threads),
        InProcess("transformers, prompt lookup", reference, num_threads, {"prompt_lookup_num_tokens": LOOKUP_TOKENS}),
    ]
    if draft is not None:
        assistant = {"assistant_model": Reference(draft, number_type).model}
        ways.append(InProcess("transformers, assisted", reference, num_threads, assistant))
    return ways
