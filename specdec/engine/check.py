"""The self-check at every load: packed forwards must agree with the model's own.

Some architectures ignore the registered attention function and would be silently wrong; so a model is served only after
its packed forward, fed in pieces and as a tree, truncated and fed again, has given the logits of its own plain forward.

In float32 the two agree to rounding, and any real error is visible. In bfloat16 rounding is as large as a small error,
so a model that computes in bfloat16 is checked twice: a float32 copy of it strictly (where the copy is affordable), and
itself against the noise between two of its own attention functions.
"""

import copy

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.errors import ModelRefused
from specdec.engine.feed import Feed
from specdec.engine.model import LanguageModel
from specdec.engine.pretrained import num_embeddings
from specdec.engine.sequence import Sequence

PROMPT_LENGTHS = (23, 14)
FLOAT32_TOLERANCE = 1e-3  # of the logits' spread, largest difference; summing in another order gives 1e-6 to 1e-5
NOISE_FACTOR = 3.0  # in bfloat16: times the model's disagreement with itself under another attention function
NOISE_FLOOR = 0.03  # of the logits' spread, root mean square; bfloat16 models measured 0.01 to 0.02
UNKNOWN_NOISE = 0.05  # where there is no other function; experts chosen by near ties move it most (0.07 to 0.12)
MAX_COPY_BYTES = 2 << 30  # a float32 copy up to here is checked in about a second


class Reference:
    """A model's own logits, computed before its attention function is replaced."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._prompts = _prompts(model)
        self._logits = _own_logits(model, self._prompts)  # [tokens of all prompts, vocab]
        if model.dtype == torch.float32:
            self._distance, self._tolerance = _largest, FLOAT32_TOLERANCE
        else:
            noise = _noise(model, self._prompts, self._logits)
            self._distance, self._tolerance = _root_mean_square, max(NOISE_FLOOR, NOISE_FACTOR * noise)

    def check(self, packed: LanguageModel) -> None:
        """Raise ModelRefused where the packed model gives other logits."""
        disagreement = self._distance(_packed_logits(packed, self._prompts), self._logits)
        if not disagreement <= self._tolerance:  # NaN disagrees
            raise ModelRefused(
                f"{packed.name} gives other logits when its sequences are packed ({disagreement:.2g} of their spread, "
                f"allowed {self._tolerance:.2g}), so it would not be served exactly; choose another architecture"
            )


def float32_copy(model: PreTrainedModel) -> PreTrainedModel | None:
    """Return a float32 copy of a model of lower precision, or None where there is no need or no room for one."""
    if model.dtype == torch.float32 or not is_affordable(model):
        return None
    return nn.Module.to(copy.deepcopy(model), torch.float32)


def is_affordable(model: PreTrainedModel) -> bool:
    """Return whether there is room for a float32 copy of the whole model."""
    return 4 * model.num_parameters() <= MAX_COPY_BYTES


def _prompts(model: PreTrainedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    longest = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None) or 1 << 30
    num_ids = num_embeddings(model)
    lengths = [min(length, longest) for length in PROMPT_LENGTHS]
    return [torch.randint(num_ids, (length,), generator=generator).tolist() for length in lengths]


@torch.inference_mode()
def _own_logits(model: PreTrainedModel, prompts: list[list[int]]) -> torch.Tensor:
    """Return the plain forward's logits, float32 [tokens of all prompts, vocab]."""
    inputs = [torch.tensor([prompt], device=model.device) for prompt in prompts]
    return torch.cat([model(input_ids=tokens, use_cache=False).logits[0].float() for tokens in inputs])


def _noise(model: PreTrainedModel, prompts: list[list[int]], own: torch.Tensor) -> float:
    """Return how far the model's own logits move under another of its attention functions."""
    used = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
        return _root_mean_square(_own_logits(model, prompts), own)
    except (ValueError, ImportError):  # a soft cap, or no such function for this architecture
        return UNKNOWN_NOISE
    finally:
        model.set_attn_implementation(used)


def _packed_logits(model: LanguageModel, prompts: list[list[int]]) -> torch.Tensor:
    """Feed the prompts in one batch: a chain, a tree, a chain, each after a rejected one; return [tokens, vocab]."""
    sequences = [model.cache.open(f"self-check {index}") for index in range(len(prompts))]
    rows: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start, end, feed_span in ((0.0, 0.3, _feed_chain), (0.3, 0.7, _feed_tree), (0.7, 1.0, _feed_chain)):
        spans = [prompt[int(start * len(prompt)) : int(end * len(prompt))] for prompt in prompts]
        _feed_and_reject(model, sequences, spans)
        for collected, part in zip(rows, feed_span(model, sequences, spans), strict=True):
            collected.append(part)
    for sequence in sequences:
        sequence.close()
    return torch.cat([torch.cat(collected) for collected in rows])


def _feed_and_reject(model: LanguageModel, sequences: list[Sequence], spans: list[list[int]]) -> None:
    for sequence in sequences:
        sequence.mark_committed(sequence.length)
    model.forward([Feed(sequence, span[::-1], 0) for sequence, span in zip(sequences, spans, strict=True)])
    for sequence in sequences:
        sequence.truncate(sequence.num_committed)


def _feed_chain(model: LanguageModel, sequences: list[Sequence], spans: list[list[int]]) -> list[torch.Tensor]:
    """Return the logits of each span [len(span), vocab]."""
    feeds = [Feed(sequence, span, len(span)) for sequence, span in zip(sequences, spans, strict=True)]
    return list(torch.split(model.forward(feeds).logits, [len(span) for span in spans]))


def _feed_tree(model: LanguageModel, sequences: list[Sequence], spans: list[list[int]]) -> list[torch.Tensor]:
    """Feed each span with a wrong token before each of its tokens, as siblings; keep the right path."""
    feeds = [
        Feed(
            sequence,
            [token for right in span for token in ((right + 1) % model.num_token_ids, right)],
            2 * len(span),
            parents=tuple(parent for depth in range(len(span)) for parent in (2 * depth, 2 * depth)),
        )
        for sequence, span in zip(sequences, spans, strict=True)
    ]
    parts = torch.split(model.forward(feeds).logits, [feed.num_rows for feed in feeds])
    for sequence, span in zip(sequences, spans, strict=True):
        start = sequence.num_committed
        sequence.resume(start, span, num_committed=start + len(span))
    return [part[1::2] for part in parts]


def _largest(ours: torch.Tensor, own: torch.Tensor) -> float:
    return float((ours - own).abs().max() / own.std())


def _root_mean_square(ours: torch.Tensor, own: torch.Tensor) -> float:
    return float((ours - own).pow(2).mean().sqrt() / own.std())
