"""Fixtures of both workers' tests."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine import Feed, ForwardOutput, LanguageModel
from tests.support.architectures import build
from tests.support.cluster import save_tokenizer

NUM_TOKENS = 300  # of the tokenizer; the model pads its logits up to VOCAB_SIZE
Reference = Callable[[Sequence[int]], torch.Tensor]


@dataclass
class Forwards:
    """The number of tokens of each forward in a test."""

    sizes: list[int] = field(default_factory=list)
    by_session: defaultdict[str, list[int]] = field(default_factory=lambda: defaultdict(list))


@pytest.fixture
def forwards(monkeypatch: pytest.MonkeyPatch) -> Forwards:
    """Count the tokens that forwards compute in this test."""
    counts, forward = Forwards(), LanguageModel.forward

    def counting(self: LanguageModel, feeds: Iterable[Feed], *more: Callable[[], None]) -> ForwardOutput:
        feeds = list(feeds)
        counts.sizes.append(sum(len(feed.tokens) for feed in feeds))
        for feed in feeds:
            counts.by_session[feed.sequence.key].append(len(feed.tokens))
        return forward(self, feeds, *more)

    monkeypatch.setattr(LanguageModel, "forward", counting)
    return counts


@pytest.fixture
def names(request: pytest.FixtureRequest) -> Iterator[str]:
    """Session ids that no other test uses."""
    return (f"{request.node.name} {number}" for number in range(1000))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer has fewer tokens than the model has logits."""
    return save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), NUM_TOKENS)


@pytest.fixture(scope="module")
def reference(model_folder: Path) -> Reference:
    """Logits [len(tokens), NUM_TOKENS] of a text, by transformers' own forward over all of it."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)

    def logits(tokens: Sequence[int]) -> torch.Tensor:
        with torch.no_grad():
            result: torch.Tensor = model(torch.tensor([list(tokens)])).logits[0, :, :NUM_TOKENS]
        return result

    return logits


@pytest.fixture
def nan_model_folder(model_folder: Path, tmp_path: Path) -> Path:
    """The same model, but the embedding of token 42 is NaN: only sessions that have this token see NaN."""
    # transformers annotates neither the class that it loads nor its embeddings
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32, tie_word_embeddings=False)
    with torch.no_grad():
        model.get_output_embeddings().weight = torch.nn.Parameter(model.get_output_embeddings().weight.clone())
        model.get_input_embeddings().weight[42] = math.nan
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path)
    return save_tokenizer(tmp_path, NUM_TOKENS)
