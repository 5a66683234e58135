"""`python -m models.train_head --target FOLDER --kind KIND`: train a drafter for a target, from nothing to export.

1. The target answers generated instructions, or continues passages of `--texts`; its hidden states are kept.
2. The head learns to give the target's distributions, for `--minutes`; every five minutes, and at the end, it prints
   how drafts of held-out samples would fare, by depth.
3. It is written in the format in which such heads are published, with a model card.

Each step continues where an interrupted run stopped; delete the folder given as `--work` to begin again.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.measure import hardware
from coordinator.chat import load_chat_template
from models.heads.batches import Samples
from models.heads.card import Trained, write_card
from models.heads.kinds import KINDS
from models.heads.objective import Objective
from models.heads.own_instructions import OwnInstructions
from models.heads.prompts import PYTHON, from_grammar, from_texts, mixed, read_texts
from models.heads.samples import Facts, Instruction, Sampler, SampleStore
from models.heads.target import TargetParts, load_parts, state_layers
from models.heads.training import Budget, Run
from specdec.engine import EngineError, LanguageModel, load_language_model
from specdec.serving.model_fingerprint import model_fingerprint
from specdec.serving.model_worker import eos_token_ids
from specdec.serving.tokenizer import load_tokenizer

WORK = Path(__file__).parent / "work" / "heads"
CACHE_BYTES = 3 << 30
PASSAGE_TOKENS = (32, 256)
MAX_OWN_TOKENS = 160  # of an instruction that the target writes
UNUSED_STATES = (0,)  # of instructions: only those of their answers are kept
MAX_SAMPLE_TOKENS = 640  # longer ones are cut for training
OWN = 0.0  # of the instructions: more of them did not make a better head of SmolLM2 (docs/drafters.md)
SEED = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to train."""

    target: Path
    name: str  # of the target, as written into the head's configuration
    kind: str
    out: Path
    work: Path
    num_tokens: int
    minutes: float
    draft_vocab_size: int
    texts: Sequence[str]
    own: float
    further: Path | None
    num_at_once: int
    max_new_tokens: int
    with_lm_head: bool


def collect(plan: Plan) -> SampleStore:
    """Let the target answer until there are enough samples. Raises EngineError, ValueError."""
    model = load_language_model(str(plan.target), kv_cache_bytes=CACHE_BYTES)
    layers = state_layers(model.num_layers)
    fingerprint = model_fingerprint(plan.target, {"dtype": str(model.dtype), "quantisation": "none"})
    store = SampleStore(plan.work / f"samples-{fingerprint[:16]}", Facts(fingerprint, layers, model.hidden_size))
    if store.num_tokens >= plan.num_tokens:
        return store
    ends = eos_token_ids(plan.target)
    sampler = Sampler(model, layers, ends, plan.max_new_tokens, SEED + len(store.entries))
    instructions = islice(_instructions(plan, model), len(store.entries), None)
    with tqdm(total=plan.num_tokens, initial=store.num_tokens, unit="tokens", desc="the target answers") as bar:
        for instruction, tokens, states in sampler.answers(instructions, plan.num_at_once):
            store.append(instruction.kind, instruction.temperature, len(instruction.tokens), tokens, states)
            bar.update(len(tokens))
            if store.num_tokens >= plan.num_tokens:
                return store
    return store


def _instructions(plan: Plan, model: LanguageModel) -> Iterator[Instruction]:
    tokenizer, template = load_tokenizer(str(plan.target)), load_chat_template(plan.target)
    if plan.texts:
        return from_texts(tokenizer, read_texts(plan.texts), *PASSAGE_TOKENS, SEED)
    ours = from_grammar(tokenizer, template, SEED)
    if template is None or plan.own == 0:
        return ours
    seed = random.getrandbits(32)  # what an interrupted run had asked is not asked again
    sampler = Sampler(model, UNUSED_STATES, eos_token_ids(plan.target), MAX_OWN_TOKENS, seed, "instruction")
    return mixed(ours, OwnInstructions(tokenizer, template).written(sampler, plan.num_at_once), plan.own)


def train(plan: Plan, store: SampleStore) -> None:
    """Train on the samples, and export. Raises ValueError."""
    target = load_parts(plan.target, plan.name, store.facts.layers)
    samples = Samples([store.reader()], MAX_SAMPLE_TOKENS)
    if not samples.training or not samples.held_out:
        raise ValueError(f"{len(store.entries)} answers are too few to train on; raise --tokens")
    counts = samples.counts(target.vocab_size)
    chosen = counts.topk(min(plan.draft_vocab_size, target.vocab_size)).indices
    torch.manual_seed(SEED)
    kind = KINDS[plan.kind]
    objective = _begun(plan, target, chosen)
    run = Run(objective, samples, Budget(plan.minutes), plan.work / f"{plan.kind}-{store.facts.fingerprint[:16]}.pt")
    run.train(tqdm.write)
    evaluation = run.evaluation()
    print(evaluation, flush=True)
    plan.out.mkdir(parents=True, exist_ok=True)
    kind.save(objective.head, plan.out, target, plan.with_lm_head)
    coverage = float(counts[chosen].sum() / counts.sum())
    write_card(plan.out, _card(plan, store, objective, run, coverage, evaluation))
    print(f"{plan.out} is ready; serve it: specdec up --target {plan.target} {kind.flag} {plan.out}")


def _begun(plan: Plan, target: TargetParts, chosen: torch.Tensor) -> Objective:
    """Return the head to train, which drafts the chosen tokens. Raises ValueError."""
    kind = KINDS[plan.kind]
    if plan.further is None:
        return kind.begin(target, chosen)
    if kind.resume is None:
        raise ValueError(f"a head of the kind {plan.kind} cannot be trained further; leave --further out")
    return kind.resume(plan.further, target, chosen)


def _card(plan: Plan, store: SampleStore, objective: Objective, run: Run, coverage: float, evaluation: str) -> Trained:
    kind = KINDS[plan.kind]
    return Trained(
        kind=plan.kind,
        paper=kind.paper,
        flag=kind.flag,
        target=plan.name,
        fingerprint=store.facts.fingerprint,
        num_parameters=sum(weight.numel() for weight in objective.head.parameters() if weight.requires_grad),
        draft_vocab_size=plan.draft_vocab_size,
        coverage=coverage,
        prompts="passages of text" if plan.texts else "generated instructions",
        num_tokens=store.num_tokens,
        num_steps=run.step,
        minutes=run.spent_s / 60,
        hardware=hardware(),
        evaluation="\n".join(evaluation.splitlines()[1:]),
    )


def plan_of(arguments: Sequence[str] | None = None) -> Plan:
    """Return what the command line asks for."""
    parser = _parser()
    flags = parser.parse_args(arguments)
    if not 0 <= flags.own <= 1:
        parser.error(f"--own is {flags.own:g}; give 0 to 1")
    if flags.minutes <= 0:
        parser.error(f"--minutes is {flags.minutes:g}; give more than 0")
    torch.set_num_threads(flags.threads)
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
        with_lm_head=flags.with_lm_head,
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
    add("--at-once", type=count, default=96, help="answers under way at once (default: %(default)s)")
    add("--max-new-tokens", type=count, default=200, help="of an answer (default: %(default)s)")
    add("--threads", type=count, default=1, help="of torch (default: %(default)s)")
    add("--with-lm-head", action="store_true", help="write the target's output layer too, which some servers expect")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"is {value}; give 1 or more")
    return value


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample, train, export. Exit with 1 and a sentence where that cannot be."""
    plan = plan_of(arguments)
    try:
        train(plan, collect(plan))
    except (EngineError, ValueError) as error:
        sys.exit(f"train_head: {error}")


if __name__ == "__main__":
    main()
