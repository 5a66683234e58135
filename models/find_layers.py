"""Find which of a target's layers to keep for the drafter `self`, by measured gain.

    python -m models.find_layers --target models/smollm2 --minutes 10

The target answers prompts; a choice of layers is judged by how often its draft tokens of these answers would be
accepted, and by what forwards of that many layers cost on this machine. It ends with the flags to use, also where no
choice is faster than plain decoding, and says so. Messages between services are not counted.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from models.instructions import load_grammar, training_instructions
from models.layer_costs import Costs, measured_costs
from models.layer_judge import LayerJudge, answered
from models.layer_search import Choice, Layers, exchanges, first_look, removals
from specdec.engine import EngineError
from specdec.engine.layers import LayerStack
from specdec.engine.pretrained import choose_device, load_pretrained
from specdec.serving.tokenizer import tokenizer_folder

HELD_OUT = 3  # every third answer judges the outcome and takes no part in the search
MAX_PROMPT_TOKENS = 96


class TimeOver(Exception):
    """The minutes are spent."""


# ---- prompts


def instruction_prompts(tokenizer: Any, seed: int) -> Iterator[list[int]]:
    """Yield instructions of every kind in turn, through the target's chat template where it has one."""
    kinds = [training_instructions(kind, seed) for kind in load_grammar().kinds]
    for prompt in chain.from_iterable(zip(*kinds, strict=False)):
        text = prompt
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        yield tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids[-MAX_PROMPT_TOKENS:]


def text_prompts(tokenizer: Any, files: Sequence[Path]) -> Iterator[list[int]]:
    """Yield pieces of text files. Raises ValueError for a file that is not text."""
    for file in files:
        try:
            tokens = tokenizer(file.read_text(encoding="utf-8")).input_ids
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} cannot be read as text ({error}); give UTF-8 text files") from None
        for begin in range(0, len(tokens), MAX_PROMPT_TOKENS):
            yield tokens[begin : begin + MAX_PROMPT_TOKENS]


def chosen_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Return the prompts that the flags ask for. Raises ValueError where they are too few, or cannot be tokenized."""
    tokenizer: Any = AutoTokenizer.from_pretrained(tokenizer_folder(str(options.target)))
    endless = text_prompts(tokenizer, options.texts) if options.texts else instruction_prompts(tokenizer, seed=0)
    prompts = list(islice(endless, options.prompts))
    if len(prompts) < HELD_OUT:
        raise ValueError(f"{len(prompts)} prompts are too few; give at least {HELD_OUT}, or longer texts")
    return prompts


# ---- the search


def search(judge: LayerJudge, num_layers: int, ends_at: float) -> Choice | None:
    """Return the fastest choice that was found until `ends_at`, by time.monotonic(); None if time was too short."""
    best: Choice | None = None

    @cache
    def judged(layers: Layers) -> Choice:
        if time.monotonic() > ends_at:
            raise TimeOver
        return judge(layers)

    try:
        for choice in chain(first_look(num_layers, judged), removals(num_layers, judged)):
            best = choice if best is None or choice.speed_up > best.speed_up else best
            report(choice, num_layers, best)
        assert best
        for choice in exchanges(best, num_layers, judged):
            best = choice
            report(choice, num_layers, best)
        print("no exchange of a layer is faster")
    except TimeOver:
        print("the minutes are spent; more of them (--minutes) may find a better choice")
    return best


def report(choice: Choice, num_layers: int, best: Choice) -> None:
    """Print one step."""
    print(
        f"{len(choice.layers):3} of {num_layers} layers: acceptance {choice.acceptance:.3f}, expected speed-up "
        f"{choice.speed_up:.2f} at K = {choice.num_draft_tokens} (best so far {best.speed_up:.2f})",
        flush=True,
    )


def named(layers: Layers) -> str:
    """Return layers as --self-layers takes them: 0,1,2,5 becomes 0-2,5."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and runs[-1][-1] == layer - 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


# ---- the program


def conclude(choice: Choice, unseen: Choice, target: Path) -> None:
    """Print what the choice gains on texts that the search has not seen, and the flags."""
    print(
        f"on texts that the search has not seen: acceptance {unseen.acceptance:.3f}, expected speed-up "
        f"{unseen.speed_up:.2f} at K = {unseen.num_draft_tokens}"
    )
    if unseen.speed_up <= 1:
        print("no choice of layers makes this target faster on this machine; this is the best that was found:")
    print(f"python -m draft_service --self-model {target} --self-layers {named(choice.layers)}")


def run(options: argparse.Namespace) -> None:
    """Answer prompts, measure costs, search, and print the outcome. Raises ValueError."""
    prompts = chosen_prompts(options)
    model = load_pretrained(str(options.target), choose_device("auto"), options.dtype)
    model.set_attn_implementation("sdpa")
    num_layers = len(LayerStack(model))
    costs = measured_costs(options.target, num_layers, options.dtype)
    print(
        f"a target forward of one token takes {costs.target[0]:.1f} ms, of five {costs.target[4]:.1f}; a draft token "
        f"{costs.first_layer:.1f} ms with one layer and {costs.more_layers:.2f} with each more",
        flush=True,
    )
    seen, unseen = judges(model, prompts, costs, options)
    best = search(seen, num_layers, time.monotonic() + 60 * options.minutes)
    if best is None:
        raise ValueError("not one layer could be removed in that time; give more --minutes, or fewer --prompts")
    conclude(best, unseen(best.layers), options.target)


def judges(
    model: PreTrainedModel, prompts: list[list[int]], costs: Costs, options: argparse.Namespace
) -> tuple[LayerJudge, LayerJudge]:
    """Return a judge for the search, and one with answers that the search does not see."""
    print(f"the target answers {len(prompts)} prompts", flush=True)
    answers = list(answered(model, prompts, options.tokens, options.temperature))
    unseen = answers[::HELD_OUT]
    seen = [answer for index, answer in enumerate(answers) if index % HELD_OUT]
    return (
        LayerJudge(model, seen, costs, options.temperature),
        LayerJudge(model, unseen, costs, options.temperature),
    )


def main() -> None:
    """Find layers; exit with 1 and one sentence where that cannot be."""
    parser = argparse.ArgumentParser(prog="python -m models.find_layers", description=__doc__.split("\n")[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of the target model")
    parser.add_argument("--minutes", type=float, default=10, help="to search, at most (default: %(default)g)")
    parser.add_argument("--prompts", type=int, default=18, help="number of prompts (default: %(default)s)")
    parser.add_argument("--texts", type=Path, nargs="+", help="text files to take prompts from, not instructions")
    parser.add_argument("--tokens", type=int, default=32, help="maximum number of tokens of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="of target and draft (default: %(default)g)")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16 (default: %(default)s)")
    parser.add_argument("--num-threads", type=int, default=1, help="threads of a forward (default: %(default)s)")
    options = parser.parse_args()
    disable_progress_bar()
    torch.set_num_threads(options.num_threads)
    try:
        run(options)
    except (ValueError, EngineError) as error:
        sys.exit(f"find_layers: {error}")


if __name__ == "__main__":
    main()
