"""`python -m models.train_head --target FOLDER --kind KIND`: train a drafter for a target, from nothing to export.

1. The target answers generated instructions, or continues passages of `--texts`; its hidden states are kept.
2. The head learns to give the target's distributions, for `--minutes`; every five minutes, and at the end, it prints
   how drafts of held-out samples would fare, by depth.
3. It is written in the format in which such heads are published, with a model card.

Each step continues where an interrupted run stopped; delete the folder given as `--work` to begin again. On a GPU the
states are not kept, but computed again for each batch, and several processes can sample at once.
"""

import argparse
import multiprocessing
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice, repeat
from math import inf
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
from models.heads.target import TargetParts, TargetStates, load_parts, state_layers
from models.heads.training import Budget, Run
from specdec.engine import EngineError, LanguageModel, load_language_model
from specdec.engine.pretrained import choose_device, choose_dtype, text_config
from specdec.serving.model_fingerprint import model_fingerprint
from specdec.serving.model_worker import eos_token_ids
from specdec.serving.tokenizer import load_tokenizer

WORK = Path(__file__).parent / "work" / "heads"
CACHE_BYTES = 3 << 30
CACHE_SHARE = 0.6  # of a GPU's memory, for all that sample at once
PASSAGE_TOKENS = (32, 256)
MAX_OWN_TOKENS = 160  # of an instruction that the target writes
UNUSED_STATES = (0,)  # of instructions: only those of their answers are kept
MAX_SAMPLE_TOKENS = 640  # longer ones are cut for training
OWN = 0.0  # of the instructions: more of them did not make a better head of SmolLM2 (docs/drafters.md)
SEED = 1
SEEDS_APART = 1_000_000  # of one sampling process from the next


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
    device: torch.device
    num_samplers: int
    sampling_minutes: float

    @property
    def computes_states(self) -> bool:
        """Whether the target's states are computed for each batch instead of kept."""
        return self.device.type == "cuda"

    @property
    def seeds(self) -> Sequence[int]:
        """The seed of each process that samples."""
        return [SEED + SEEDS_APART * number for number in range(self.num_samplers)]


def collect(plan: Plan) -> list[SampleStore]:
    """Let the target answer until there are enough samples. Raises EngineError, ValueError."""
    seeds = [seed for seed in plan.seeds if not _is_complete(plan, _store(plan, seed))]
    if plan.num_samplers == 1:
        for seed in seeds:
            _sample(plan, seed)
    elif seeds:
        context = multiprocessing.get_context("spawn")  # a GPU does not outlast a fork
        with ProcessPoolExecutor(len(seeds), context) as processes:
            list(processes.map(_sample, repeat(plan), seeds))
    return [_store(plan, seed) for seed in plan.seeds]


def _store(plan: Plan, seed: int) -> SampleStore:
    """Open the store of one sampling process. Raises ModelRefused, ValueError."""
    config = text_config(str(plan.target))
    dtype = choose_dtype("auto", plan.device, config.hidden_size)
    layers = () if plan.computes_states else state_layers(config.num_hidden_layers)
    fingerprint = model_fingerprint(plan.target, {"dtype": str(dtype), "quantisation": "none"})
    name = f"{'samples' if layers else 'texts'}-{fingerprint[:16]}"
    folder = plan.work / (name if seed == SEED else f"{name}-{seed}")
    return SampleStore(folder, Facts(fingerprint, layers, config.hidden_size))


def _is_complete(plan: Plan, store: SampleStore) -> bool:
    return store.num_tokens >= plan.num_tokens // plan.num_samplers


def _sample(plan: Plan, seed: int) -> None:
    """Let the target answer in this process, which has a part of all samples to give."""
    store = _store(plan, seed)
    end_s = time.monotonic() + 60 * plan.sampling_minutes
    model = load_language_model(str(plan.target), device=plan.device.type, kv_cache_bytes=_cache_bytes(plan))
    ends = eos_token_ids(plan.target)
    sampler = Sampler(model, store.facts.layers, ends, plan.max_new_tokens, seed + len(store.entries))
    instructions = islice(_instructions(plan, model, seed), len(store.entries), None)
    total = plan.num_tokens // plan.num_samplers
    with tqdm(total=total, initial=store.num_tokens, unit="tokens", desc="the target answers") as bar:
        for instruction, tokens, states in sampler.answers(instructions, plan.num_at_once):
            store.append(instruction.kind, instruction.temperature, len(instruction.tokens), tokens, states)
            bar.update(len(tokens))
            if _is_complete(plan, store) or time.monotonic() > end_s:
                return


def _cache_bytes(plan: Plan) -> int:
    if not plan.computes_states:
        return CACHE_BYTES
    return int(CACHE_SHARE * torch.cuda.get_device_properties(plan.device).total_memory) // plan.num_samplers


def _instructions(plan: Plan, model: LanguageModel, seed: int) -> Iterator[Instruction]:
    tokenizer, template = load_tokenizer(str(plan.target)), load_chat_template(plan.target)
    if plan.texts:
        return from_texts(tokenizer, read_texts(plan.texts), *PASSAGE_TOKENS, seed)
    ours = from_grammar(tokenizer, template, seed)
    if template is None or plan.own == 0:
        return ours
    seed = random.getrandbits(32)  # what an interrupted run had asked is not asked again
    sampler = Sampler(model, UNUSED_STATES, eos_token_ids(plan.target), MAX_OWN_TOKENS, seed, "instruction")
    return mixed(ours, OwnInstructions(tokenizer, template).written(sampler, plan.num_at_once), plan.own)


def train(plan: Plan, stores: Sequence[SampleStore]) -> None:
    """Train on the samples, and export. Raises EngineError, ValueError."""
    samples = _samples(plan, stores)
    target = load_parts(plan.target, plan.name, _layers(plan)).to(plan.device)
    fingerprint = stores[0].facts.fingerprint
    if not samples.training or not samples.held_out:
        num_entries = sum(len(store.entries) for store in stores)
        raise ValueError(f"{num_entries} answers are too few to train on; raise --tokens")
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
    write_card(plan.out, _card(plan, stores, run, coverage, evaluation))
    print(f"{plan.out} is ready; serve it: specdec up --target {plan.target} {kind.flag} {plan.out}")


def _layers(plan: Plan) -> tuple[int, ...]:
    return state_layers(text_config(str(plan.target)).num_hidden_layers)


def _samples(plan: Plan, stores: Sequence[SampleStore]) -> Samples:
    readers = [store.reader() for store in stores]
    if not plan.computes_states:
        return Samples(readers, MAX_SAMPLE_TOKENS)
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


def _card(plan: Plan, stores: Sequence[SampleStore], run: Run, coverage: float, evaluation: str) -> Trained:
    kind = KINDS[plan.kind]
    weights = run.objective.head.parameters()
    return Trained(
        kind=plan.kind,
        paper=kind.paper,
        flag=kind.flag,
        target=plan.name,
        fingerprint=stores[0].facts.fingerprint,
        num_parameters=sum(weight.numel() for weight in weights if weight.requires_grad),
        draft_vocab_size=plan.draft_vocab_size,
        coverage=coverage,
        prompts="passages of text" if plan.texts else "generated instructions",
        num_tokens=sum(store.num_tokens for store in stores),
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
        device=choose_device(flags.device),
        num_samplers=flags.samplers,
        sampling_minutes=flags.sampling_minutes,
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
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="what computes (default: %(default)s)")
    add("--samplers", type=count, default=1, help="processes that sample at once (default: %(default)s)")
    add("--sampling-minutes", type=float, default=inf, help="after which sampling ends (default: when it has --tokens)")
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
