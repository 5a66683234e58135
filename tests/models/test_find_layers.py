"""Finding layers: the search against all choices, expected tokens against a simulation, and the program."""

import random
import subprocess
import sys
from itertools import combinations
from pathlib import Path

import pytest
import torch

from models.find_layers import named
from models.layer_costs import Costs
from models.layer_judge import best_speed_up, tokens_per_round
from models.layer_search import Choice, Layers, exchanges, first_look, removals
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.cluster import save_tokenizer

ROOT = Path(__file__).parents[2]
WORTH = (0.5, 0.1, 0.3, 0.05, 0.2, 0.4)  # of each layer


class Judge:
    """Says that each layer adds its worth, and costs as much as every other; counts the questions."""

    def __init__(self) -> None:
        self.num_asked = 0

    def __call__(self, layers: Layers) -> Choice:
        self.num_asked += 1
        acceptance = sum(WORTH[layer] for layer in layers)
        return Choice(layers, acceptance, acceptance / (2 + len(layers)), 1)


def test_removals_take_what_costs_least() -> None:
    judge = Judge()
    found = [choice.layers for choice in removals(len(WORTH), judge)]
    assert found == [(0, 1, 2, 4, 5), (0, 2, 4, 5), (0, 2, 5), (0, 5), (0,)]
    assert judge.num_asked < sum(range(2, 7)), "bounds spare most questions"


def test_first_look_covers_every_size() -> None:
    judge = Judge()
    found = [choice.layers for choice in first_look(len(WORTH), judge)]
    assert found == [(0, 1, 2, 4, 5), (0, 2, 4, 5), (0, 2, 5), (0, 5), (0,)]
    assert judge.num_asked == 11


@pytest.mark.parametrize("begin", [(1,), (3, 4), (0, 1, 2, 3, 4, 5)])
def test_exchanges_end_at_the_best_choice(begin: Layers) -> None:
    judge = Judge()
    every = [layers for size in range(1, 7) for layers in combinations(range(6), size)]
    found = list(exchanges(judge(begin), len(WORTH), judge))
    assert found[-1].layers == max(every, key=lambda layers: judge(layers).speed_up)


def test_tokens_per_round_equal_a_simulation() -> None:
    """Independent acceptances: rounds are played token by token, from everywhere in the text."""
    accepted = torch.tensor([0.9, 0.2, 0.7, 0.5, 0.8, 0.6])
    chooser, total, num_rounds = random.Random(1), 0, 40_000
    for _ in range(num_rounds):
        begin = chooser.randrange(4)
        length = 0
        while length < 3 and chooser.random() < accepted[begin + length]:
            length += 1
        total += 1 + length
    assert tokens_per_round([accepted], 3) == pytest.approx(total / num_rounds, abs=0.02)


def test_speed_up_weighs_tokens_against_costs() -> None:
    always, never = [torch.ones(20)], [torch.zeros(20)]
    costs = Costs([10.0] * 9, first_layer=1.0, more_layers=1.0)
    speed_up, num_draft_tokens = best_speed_up(always, costs, 1)
    assert speed_up == pytest.approx(9 * 10 / 18)
    assert num_draft_tokens == 8
    assert best_speed_up(always, costs, 10)[0] == pytest.approx(9 * 10 / 90)
    speed_up, num_draft_tokens = best_speed_up(never, costs, 1)
    assert speed_up == pytest.approx(10 / 11)
    assert num_draft_tokens == 1


@pytest.mark.parametrize(("layers", "text"), [((0,), "0"), ((0, 1, 2, 5), "0-2,5"), ((3, 5, 6), "3,5-6")])
def test_layers_are_named_as_flags_take_them(layers: Layers, text: str) -> None:
    assert named(layers) == text


@pytest.mark.long
def test_program_ends_with_the_flags(tmp_path: Path) -> None:
    folder = save_tokenizer(build("llama", tmp_path), VOCAB_SIZE)
    texts = tmp_path / "texts.txt"
    texts.write_text("t5")
    ended = found_layers("--target", str(folder), "--texts", *[str(texts)] * 6, "--tokens", "8", "--dtype", "float32")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[-1].startswith(f"python -m draft_service --self-model {folder} --self-layers ")
    assert "2 of 3 layers: acceptance" in ended.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--target", "/models/nowhere"), "the folder /models/nowhere does not exist"),
        (("--target", "models/draft", "--texts", "models/draft/model.safetensors"), "cannot be read as text"),
        (("--target", "models/draft", "--prompts", "1"), "1 prompts are too few"),
    ],
)
@pytest.mark.long(but=("flags0-the folder /models/nowhere does not exist",))
def test_bad_input_is_one_sentence(flags: tuple[str, ...], words: str) -> None:
    ended = found_layers(*flags)
    assert (ended.returncode, len(ended.stderr.splitlines())) == (1, 1), ended.stderr
    assert words in ended.stderr


def found_layers(*flags: str) -> "subprocess.CompletedProcess[str]":
    """Run the program."""
    command = [sys.executable, "-m", "models.find_layers", *flags]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
