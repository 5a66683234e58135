"""Judging choices of layers by the target's own answers: how much of them such a draft would have accepted."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from models.layer_costs import MAX_DRAFT_TOKENS, Costs
from models.layer_search import Choice, Layers
from specdec.engine.layers import LayerStack

SEED = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt with the target's answer, and the target's distribution at each token of the answer."""

    tokens: Tensor  # [1, prompt + answer]
    distributions: Tensor  # [answer, V]


@torch.inference_mode()
def answered(
    model: PreTrainedModel, prompts: Iterable[Sequence[int]], num_tokens: int, temperature: float
) -> Iterator[Answer]:
    """Yield each prompt with at most `num_tokens` tokens that the whole model generates after it."""
    generating: Any = model  # transformers annotates little of it
    torch.manual_seed(SEED)
    drawn = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature else {}
    for prompt in prompts:
        given = torch.tensor([list(prompt)], device=model.device)
        tokens = generating.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=num_tokens,
            do_sample=bool(temperature),
            pad_token_id=0,
            **drawn,
        )
        yield Answer(tokens, _distributions(model, tokens, len(prompt), temperature))


def _distributions(model: PreTrainedModel, tokens: Tensor, num_prompt: int, temperature: float) -> Tensor:
    """Return the model's distribution before each token after the prompt, [tokens - num_prompt, V]."""
    count = tokens.shape[1] - num_prompt
    logits: Tensor = model(tokens[:, :-1], use_cache=False, logits_to_keep=count).logits[0, -count:].float()
    if temperature:
        return (logits / temperature).softmax(-1)
    return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)


class LayerJudge:
    """Judges choices of a model's layers on answers."""

    def __init__(self, model: PreTrainedModel, answers: Sequence[Answer], costs: Costs, temperature: float) -> None:
        self._model, self._answers, self._costs, self._temperature = model, answers, costs, temperature
        self._stack = LayerStack(model)

    @torch.inference_mode()
    def __call__(self, layers: Layers) -> Choice:
        """Return the choice's acceptance and its expected speed-up at the best number of draft tokens."""
        self._stack.keep(layers)
        accepted = [self._accepted(answer) for answer in self._answers]
        speed_up, num_draft_tokens = best_speed_up(accepted, self._costs, len(layers))
        return Choice(layers, float(torch.cat(accepted).mean()), speed_up, num_draft_tokens)

    def _accepted(self, answer: Answer) -> Tensor:
        """Return the chance that each token's draft is accepted, sum min(p, q) (Leviathan et al. 2023): [answer]."""
        num_prompt = answer.tokens.shape[1] - len(answer.distributions)
        draft = _distributions(self._model, answer.tokens, num_prompt, self._temperature)
        return torch.minimum(answer.distributions, draft).sum(-1)


def best_speed_up(accepted: Sequence[Tensor], costs: Costs, num_layers: int) -> tuple[float, int]:
    """Return the expected speed-up over plain decoding, and the number of draft tokens that gives it."""
    rounds = [
        (costs.target[0] * tokens_per_round(accepted, count) / (count * costs.draft(num_layers) + costs.target[count]))
        for count in range(1, MAX_DRAFT_TOKENS + 1)
    ]
    return max((speed_up, count) for count, speed_up in enumerate(rounds, start=1))


def tokens_per_round(accepted: Sequence[Tensor], num_draft_tokens: int) -> float:
    """Return how many tokens a round commits, from what is accepted at each token of texts, [length] each.

    Rounds may begin at any token; one that begins near the end counts as far as the text goes.
    """
    kept = total = 0.0
    for text in accepted:
        padded = torch.cat([text, text.new_zeros(num_draft_tokens - 1)])
        runs = padded.unfold(0, num_draft_tokens, 1).cumprod(-1)  # [length, num_draft_tokens]
        whole = runs[: max(1, len(text) - num_draft_tokens + 1)]
        kept, total = kept + float(whole.sum()), total + len(whole)
    return 1.0 + kept / total
