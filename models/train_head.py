"""`python -m models.train_head --target FOLDER --kind KIND`: train a drafter for a target, from nothing to export.

1. The target answers generated instructions, or continues passages of `--texts`; its hidden states are kept.
2. The head learns to give the target's distributions, for `--minutes`; every five minutes, and at the end, it prints
   how drafts of held-out samples would fare, by depth.
3. It is written in the format in which such heads are published, with a model card.

Each step continues where an interrupted run stopped; delete the folder given as `--work` to begin again. On a GPU the
states are not kept, but computed again for each batch (`--states`), and thousands of answers are under way at once.
"""

import argparse
import sys
from collections.abc import Sequence
from math import inf
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.measure import hardware
from models.heads.batches import Samples
from models.heads.card import Trained, write_card
from models.heads.collecting import BY_THE_ENGINE, IN_SLOTS, collect
from models.heads.kinds import KINDS
from models.heads.objective import Objective
from models.heads.plan import SEED, Plan
from models.heads.prompts import PYTHON
from models.heads.samples import SampleStore
from models.heads.target import TargetParts, TargetStates, load_parts, state_layers
from models.heads.training import Budget, Run
from specdec.engine import EngineError
from specdec.engine.pretrained import choose_device, text_config

WORK = Path(__file__).parent / "work" / "heads"
MAX_SAMPLE_TOKENS = 640  # longer ones are cut for training
OWN = 0.0  # of the instructions; those of SmolLM2's heads in this repository are half its own (docs/drafters.md)


def train(plan: Plan, store: SampleStore) -> None:
    """Train on the samples, and export. Raises EngineError, ValueError."""
    samples = _samples(plan, store)
    if not samples.training or not samples.held_out:
        raise ValueError(f"{len(store.entries)} answers are too few to train on; raise --tokens or --sampling-minutes")
    target = load_parts(plan.target, plan.name, _layers(plan)).to(plan.device)
    fingerprint = store.facts.fingerprint
    counts = samples.counts(target.vocab_size)
    chosen = counts.topk(min(plan.draft_vocab_size, target.vocab_size)).indices
    torch.manual_seed(SEED)
    kind = KINDS[plan.kind]
    objective = _begun(plan, target, chosen)
    objective.head.to(plan.device)
    run = Run(objective, samples, Budget(plan.minutes), plan.work / f"{plan.kind}-{fingerprint[:16]}.pt")
    run.train(tqdm.write)
    evaluation = run.evaluation()
    print(evaluation, flush=True)
    plan.out.mkdir(parents=True, exist_ok=True)
    kind.save(objective.head.cpu(), plan.out, target, plan.with_lm_head)
    coverage = float(counts[chosen].sum() / counts.sum())
    write_card(plan.out, _card(plan, store, run, coverage, evaluation))
    print(f"{plan.out} is ready; serve it: specdec up --target {plan.target} {kind.flag} {plan.out}")


def _layers(plan: Plan) -> tuple[int, ...]:
    return state_layers(text_config(str(plan.target)).num_hidden_layers)


def _samples(plan: Plan, store: SampleStore) -> Samples:
    readers = [store.reader()] if store.entries else []
    if not plan.computes_states:
        return Samples(readers, MAX_SAMPLE_TOKENS, plan.device)
    states = TargetStates(plan.target, _layers(plan), plan.device)
    return Samples(readers, MAX_SAMPLE_TOKENS, plan.device, states.of)


def _begun(plan: Plan, target: TargetParts, chosen: torch.Tensor) -> Objective:
    """Return the head to train, which drafts the chosen tokens. Raises ValueError."""
    kind = KINDS[plan.kind]
    if plan.further is None:
        return kind.begin(target, chosen)
    if kind.resume is None:
        raise ValueError(f"a head of the kind {plan.kind} cannot be trained further; leave --further out")
    return kind.resume(plan.further, target, chosen)


def _card(plan: Plan, store: SampleStore, run: Run, coverage: float, evaluation: str) -> Trained:
    kind = KINDS[plan.kind]
    weights = run.objective.head.parameters()
    return Trained(
        kind=plan.kind,
        paper=kind.paper,
        flag=kind.flag,
        target=plan.name,
        fingerprint=store.facts.fingerprint,
        num_parameters=sum(weight.numel() for weight in weights if weight.requires_grad),
        draft_vocab_size=plan.draft_vocab_size,
        coverage=coverage,
        prompts="passages of text" if plan.texts else "generated instructions",
        num_tokens=store.num_tokens,
        num_steps=run.step,
        minutes=run.spent_s / 60,
        hardware=_device_name(plan.device) or hardware(),
        evaluation="\n".join(evaluation.splitlines()[1:]),
    )


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def plan_of(arguments: Sequence[str] | None = None) -> Plan:
    """Return what the command line asks for."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    if not 0 <= flags.own <= 1:
        parser.error(f"--own is {flags.own:g}; give 0 to 1")
    if flags.minutes <= 0:
        parser.error(f"--minutes is {flags.minutes:g}; give more than 0")
    torch.set_num_threads(flags.threads)
    device = choose_device(flags.device)
    return Plan(
        target=flags.target,
        name=flags.name or str(flags.target),
        kind=flags.kind,
        out=flags.out or flags.work / f"{flags.target.name}-{flags.kind}",
        work=flags.work,
        num_tokens=flags.tokens,
        minutes=flags.minutes,
        draft_vocab_size=flags.draft_vocabulary,
        texts=flags.texts,
        own=flags.own,
        further=flags.further,
        num_at_once=flags.at_once,
        max_new_tokens=flags.max_new_tokens,
        num_threads=flags.threads,
        with_lm_head=flags.with_lm_head,
        device=device,
        sampling_minutes=flags.sampling_minutes,
        computes_states=(device.type == "cuda") if flags.states == "auto" else flags.states == "computed",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m models.train_head", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, count = parser.add_argument, _positive
    add("--target", type=Path, required=True, help="folder of the target model")
    add("--kind", choices=sorted(KINDS), required=True, help="what to train")
    add("--out", type=Path, help="folder to write to (default: in the folder given as --work)")
    add("--name", help="the target's name in the head's configuration (default: --target)")
    add("--work", type=Path, default=WORK, help="folder of samples and checkpoints (default: %(default)s)")
    add("--tokens", type=count, default=1_000_000, help="samples, prompts included (default: %(default)s)")
    add("--minutes", type=float, default=60.0, help="time to train after sampling (default: %(default)g)")
    add("--draft-vocabulary", type=count, default=8192, help="tokens that are drafted (default: %(default)s)")
    add("--texts", nargs="+", default=[], help=f'text files or folders to continue, "{PYTHON}" for Python\'s library')
    add("--own", type=float, default=OWN, help="part of the instructions that the target writes (default: %(default)g)")
    add("--further", type=Path, metavar="HEAD", help="begin with a head that was exported; as many draft tokens")
    add("--at-once", type=count, help=f"answers under way at once (default: {BY_THE_ENGINE}, in slots {IN_SLOTS})")
    add("--max-new-tokens", type=count, default=200, help="of an answer (default: %(default)s)")
    add("--threads", type=count, default=1, help="of torch (default: %(default)s)")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what computes (default: %(default)s)")
    add("--sampling-minutes", type=float, default=inf, help="after which sampling ends; 0 takes the samples there are")
    add("--states", choices=("auto", "kept", "computed"), default="auto", help="the target's (auto: computed on a GPU)")
    add("--with-lm-head", action="store_true", help="write the target's output layer too, which some servers expect")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}; give 1 or more")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, train, export. Exit with 1 and a sentence where that cannot be."""
    try:
        plan = plan_of(arguments)
        train(plan, collect(plan))
    except (EngineError, ValueError) as error:
        sys.exit(f"train_head: {error}")


if __name__ == "__main__":
    main()
