"""`make exactness`: through real servers, the text has the target's distribution.

Two tiny random models, so small that the target's distribution of the first tokens can be written down:
every text of four tokens out of six. Real workers and a real coordinator, each a process, generate texts
speculatively; a joint chi-square compares them with that distribution, from transformers' own forward in float64.
It detects a total variation of about 0.02 at 20,000 texts. Seeds are fixed: every run generates the same texts.

    python -m benchmarks.exactness --generations 20000 --case top_p --case n-gram
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks.judging import LETTERS, Agreement, History, agreement, joint_distribution, reference_distribution
from benchmarks.random_heads import save_heads
from benchmarks.toy_drafters import KIND as TOY
from specdec import AsyncClient, Completion, SamplingParams, SpeculationParams
from specdec.serving.child import Child, LogLine, print_errors
from specdec.serving.local import HEADS, Command, Options, running, worker_commands
from specdec.types import AcceptanceRuleName

VOCAB_SIZE = len(LETTERS)
END = "f"  # of a text that has the form of its grammar
NUM_TOKENS = 4
NUM_DRAFT_TOKENS = 3
NUM_TREE_TOKENS = 7
PROMPT = (0, 1, 4, 2, 5, 3, 1, 0)  # each token has followed another, so that n-gram drafts never run dry
TREE_DRAFTERS = (TOY.name, "recycle", "suffix", "model+recycle", *HEADS)
SUPPORT_MASS, SUPPORT_MAX = 0.95, 4
ROUNDED = "rounded"  # the draft whose weights are rounded to int8 when it is loaded
CHOOSING = "(a[bc]|[bcd][ad]){3}"  # two letters or four are possible each time
FORCING = "a(bcdaa|cabda)|b(addac|ddabc)|ccdaba"  # at most two letters are chosen, the others follow
NUM_CONCURRENT = 64
TEXTS_OF_ONE = 25  # at least, of each session at once: 64 of them starve the drafters of a slow, busy machine
ASK_AGAIN_S = 0.2
REJECT_BELOW = 1e-3
MAX_DEVIATIONS = 5.0
MAX_FAILED_DRAFTS = 0.25  # for each text: a machine that pauses for a second costs every session at once a draft


@dataclass(frozen=True)
class Case:
    """One way of generating."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    speculation: SpeculationParams = field(
        default_factory=lambda: SpeculationParams(num_draft_tokens=NUM_DRAFT_TOKENS, drafter="model")
    )
    kills_draft: bool = False
    draft: str = "draft"  # the folder of the draft model, see `save_pair`


CASES = {
    "K = 3": Case(),
    "top_p 0.8": Case(SamplingParams(top_p=0.8)),
    "top_k 3": Case(SamplingParams(top_k=3)),
    "penalties": Case(SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4)),
    "plain": Case(speculation=SpeculationParams(num_draft_tokens=0)),  # all rounds but the first are scored ahead
    "plain, penalties": Case(
        SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.4),
        SpeculationParams(num_draft_tokens=0),
    ),
    "n-gram": Case(speculation=SpeculationParams(num_draft_tokens=NUM_DRAFT_TOKENS, drafter="ngram")),
    "draft killed": Case(kills_draft=True),
    "token rule": Case(
        speculation=SpeculationParams(
            num_draft_tokens=NUM_DRAFT_TOKENS, drafter="model", acceptance_rule=AcceptanceRuleName.TOKEN
        )
    ),
    "recycle": Case(speculation=SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter="recycle")),
    "suffix": Case(speculation=SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter="suffix")),
    "recycle, top_p 0.8": Case(
        SamplingParams(top_p=0.8), SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter="recycle")
    ),
    "self": Case(speculation=SpeculationParams(num_draft_tokens=NUM_DRAFT_TOKENS, drafter="self")),
    "other tokenizer": Case(draft="other"),
    "other tokenizer, penalties": Case(
        SamplingParams(repetition_penalty=1.3, frequency_penalty=0.4, logit_bias={3: 1.0}), draft="other"
    ),
    "draft in int8": Case(draft=ROUNDED),
    "model and recycle": Case(speculation=SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter="model+recycle")),
    "model, stopping early": Case(speculation=SpeculationParams(drafter="model")),
    **{kind: Case(speculation=SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter=kind)) for kind in HEADS},
    "eagle3, top_p 0.8": Case(
        SamplingParams(top_p=0.8), SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter="eagle3")
    ),
    "grammar": Case(SamplingParams(regex=CHOOSING)),
    "grammar, forced text": Case(SamplingParams(regex=FORCING)),
    "grammar, tree": Case(
        SamplingParams(regex=CHOOSING, top_p=0.9),
        SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter=TOY.name),
    ),
    "grammar, other tokenizer": Case(SamplingParams(regex=CHOOSING), draft="other"),
    "automatic": Case(speculation=SpeculationParams()),
    "tree": Case(speculation=SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter=TOY.name)),
    "tree, top_p 0.8": Case(
        SamplingParams(top_p=0.8), SpeculationParams(num_draft_tokens=NUM_TREE_TOKENS, drafter=TOY.name)
    ),
}


# ---- the pair

ARCHITECTURE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "bos_token_id": None,
}


OTHER_TOKENS = ("f", "b", "ab", "a", "e", "c", "ca")  # of another tokenizer: other ids, two letters at once, and no d


def save_pair(folder: Path) -> tuple[Path, Path]:
    """Save a target, a draft that is the target disturbed, its copy, another tokenizer's; return the first two."""
    save_model(folder / "other", OTHER_TOKENS)
    save_model(folder / ROUNDED, disturbance=0.05)
    return save_model(folder / "target"), save_model(folder / "draft", disturbance=0.05)


@torch.no_grad()
def save_model(folder: Path, tokens: Sequence[str] = LETTERS, disturbance: float = 0.0) -> Path:
    """Save a tiny random Llama with distributions far from uniform, and its tokenizer."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        sizes = {"vocab_size": len(tokens), "eos_token_id": tokens.index(END)}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**ARCHITECTURE | sizes))
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=disturbance)
    model.save_pretrained(folder)
    tokenizer_of(tokens).save(str(folder / "tokenizer.json"))
    return folder


def tokenizer_of(tokens: Sequence[str]) -> Tokenizer:
    """Return a byte-level tokenizer with these tokens."""
    vocabulary = {text: token for token, text in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, [(text[0], text[1]) for text in tokens if len(text) > 1]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@torch.no_grad()
def logits_of(folder: Path, num_layers: int) -> Callable[[History], np.ndarray]:
    """Return the logits [V] of a model, or of its first layers, after every text of up to NUM_TOKENS - 1 tokens.

    They come from one float64 forward over all texts.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    model.config.num_hidden_layers = num_layers  # the forward runs so many
    texts = list(np.ndindex((VOCAB_SIZE,) * (NUM_TOKENS - 1)))
    logits = model(torch.tensor([(*PROMPT, *text) for text in texts])).logits[:, len(PROMPT) - 1 :].numpy()
    known = {text[:size]: row[size] for text, row in zip(texts, logits, strict=True) for size in range(NUM_TOKENS)}
    return known.__getitem__


def distributions_of(
    folder: Path, sampling: SamplingParams, num_layers: int = ARCHITECTURE["num_hidden_layers"]
) -> Callable[[History], np.ndarray]:
    """Return the next-token distributions [V] of a model, or of its first layers, under sampling parameters."""
    logits = logits_of(folder, num_layers)
    return lambda text: reference_distribution(logits(text), sampling, PROMPT, text)


# ---- what acceptance should be

Distributions = Callable[[History], np.ndarray]
DraftDistributions = Callable[[History, History], np.ndarray]  # after the committed text and the draft tokens so far
Mass = dict[History, float]


def truncated(distribution: np.ndarray) -> np.ndarray:
    """Return what a draft worker ships: the fewest tokens with SUPPORT_MASS, at most SUPPORT_MAX, renormalised; [V]."""
    order = np.argsort(-distribution)[:SUPPORT_MAX]
    size = 1 + int((np.cumsum(distribution[order]) < SUPPORT_MASS).sum())
    cut = np.zeros_like(distribution)
    cut[order[:size]] = distribution[order[:size]]
    cut /= cut.sum()
    return cut


def looked_up(committed: History, drawn: History) -> np.ndarray:
    """Return the n-gram drafter's distribution: what followed the longest known suffix last; [V]."""
    text = (*PROMPT, *committed)
    for length in range(4, 0, -1):
        ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
        if ends:
            distribution: np.ndarray = np.eye(VOCAB_SIZE)[text[ends[-1] + len(drawn) % (len(text) - ends[-1])]]
            return distribution
    raise AssertionError("each token of the prompt has followed another")


def expected_counts(target: Distributions, draft: DraftDistributions, rule: AcceptanceRuleName) -> tuple[float, float]:
    """Return how many tokens a generation drafts, and how many of them are accepted, summed over its rounds."""
    begun: list[Mass] = [{(): 1.0}, *({} for _ in range(NUM_TOKENS))]  # by length: where rounds begin, and how likely
    drafted = accepted = 0.0
    for length in range(NUM_TOKENS):
        num_draft_tokens = min(NUM_DRAFT_TOKENS, NUM_TOKENS - length - 1)
        for text, chance in begun[length].items():
            drafted += chance * num_draft_tokens
            accepted += play_round(text, chance, num_draft_tokens, target, draft, begun, rule)
    return drafted, accepted


def play_round(
    text: History,
    chance: float,
    num_draft_tokens: int,
    target: Distributions,
    draft: DraftDistributions,
    begun: list[Mass],
    rule: AcceptanceRuleName,
) -> float:
    """Add the chances of the rounds that may follow one to `begun`; return how many tokens it accepts on average.

    A prefix x is drafted with chance Q(x) and kept with chance M(x) <= Q(x). A token t is kept after it with chance
    min(M p(t), B q(t)) and closes after it with the rest of M p(t), where B is M for the token rule and Q for the block
    rule: that difference is the whole gain of the block rule (Sun et al. 2024).
    """
    alive: dict[History, tuple[float, float]] = {(): (chance, chance)}  # Q and M of each prefix
    accepted = 0.0
    for _ in range(num_draft_tokens):
        onward: dict[History, tuple[float, float]] = {}
        for drawn, (drafted, kept) in alive.items():
            p, q = target((*text, *drawn)), draft(text, drawn)
            bound = drafted if rule is AcceptanceRuleName.BLOCK else kept
            both = np.minimum(kept * p, bound * q)
            onward |= {(*drawn, token): (drafted * q[token], both[token]) for token in range(len(p)) if q[token]}
            spread(begun, (*text, *drawn), kept * p - both)
        alive = onward
        accepted += sum(kept for _, kept in alive.values())
    for drawn, (_, kept) in alive.items():
        spread(begun, (*text, *drawn), kept * target((*text, *drawn)))
    return accepted


def spread(begun: list[Mass], text: History, weights: np.ndarray) -> None:
    """Note that rounds begin after each closing token [V] of a text; none does where the text is full."""
    if len(text) + 1 < NUM_TOKENS:
        masses = begun[len(text) + 1]
        for token, weight in enumerate(weights):
            masses[*text, token] = masses.get((*text, token), 0.0) + float(weight)


def expected_rate(case: Case, target: Path, draft: Path) -> float | None:
    """Return a case's acceptance rate by its models.

    None for plain decoding, trees, automatic K, rounded weights, and where the coordinator drafts by a grammar.
    """
    is_unknown = case.draft == ROUNDED or case.sampling.regex == FORCING
    if not case.speculation.num_draft_tokens or case.speculation.drafter in TREE_DRAFTERS or is_unknown:
        return None
    rule = case.speculation.acceptance_rule or AcceptanceRuleName.BLOCK
    rows = drafted_by(case, target, draft)
    drafted, accepted = expected_counts(distributions_of(target, case.sampling), rows, rule)
    return accepted / drafted


def drafted_by(case: Case, target: Path, draft: Path) -> DraftDistributions:
    """Return the distributions of a case's drafter."""
    if case.speculation.drafter == "ngram":
        return looked_up
    if case.draft == "other":
        return translated(draft, case.sampling)
    is_self = case.speculation.drafter == "self"
    model = distributions_of(target, case.sampling, 1) if is_self else distributions_of(draft, case.sampling)
    return lambda *text: truncated(model(sum(text, ())))


def translated(folder: Path, sampling: SamplingParams) -> DraftDistributions:
    """Return the distributions of a draft of another tokenizer, by the target's ids; each text is encoded whole."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    tokenizer, prompt = tokenizer_of(OTHER_TOKENS), "".join(LETTERS[token] for token in PROMPT)
    own_ids = {token: OTHER_TOKENS.index(letter) for token, letter in enumerate(LETTERS) if letter in OTHER_TOKENS}

    @cache
    @torch.no_grad()
    def drafted(committed: History, drawn: History) -> np.ndarray:
        text = tokenizer.encode(prompt + "".join(LETTERS[token] for token in committed)).ids
        own = model(torch.tensor([[*text, *(own_ids[token] for token in drawn)]])).logits[0, -1].numpy()
        logits = np.array([own[own_ids[token]] if token in own_ids else -np.inf for token in range(VOCAB_SIZE)])
        return truncated(reference_distribution(logits, sampling, PROMPT, (*committed, *drawn)))

    return drafted


# ---- the services


class Services:
    """Two workers and a coordinator, each a process; a draft worker that is killed is started again."""

    def __init__(self, target: Path, draft: Path) -> None:
        heads = {kind: str(head) for kind, head in save_heads(target, target.parent / "heads").items()}
        options = Options(
            target=str(target),
            draft=str(draft),
            eagle3_head=heads["eagle3"],
            dflash_head=heads["dflash"],
            medusa_head=heads["medusa"],
            port=0,
            store="memory",
            dtype="float32",
            target_threads=1,
            drain_s=1.0,
        )
        self.num_failed_drafts = 0  # that a coordinator logged
        self.stack = running(options, self._note, commands_with_toys)
        self._draft_command = commands_with_toys(options, 1)[1]

    def _note(self, name: str, entry: LogLine) -> None:
        self.num_failed_drafts += entry.get("event") == "draft_unavailable"
        print_errors(name, entry)

    @property
    def draft(self) -> Child:
        """Return the draft worker that was started last."""
        return [child for child in self.stack.children if child.name == self._draft_command.name][-1]

    @property
    def draft_address(self) -> str:
        """Return where it listens."""
        return f"127.0.0.1:{self.draft.port.result()}"

    def kill_draft(self) -> None:
        """Send SIGKILL."""
        self.draft.signal(signal.SIGKILL)


def commands_with_toys(options: Options, num_cores: int) -> list[Command]:
    """Return a target worker, and a draft worker that also offers the toy drafter and the target's first layer."""
    target, draft = worker_commands(options, num_cores)
    drafters = draft.flags[draft.flags.index("--drafters") + 1]
    more = ("--drafters", f"{drafters},self,{TOY.name}", "--self-model", options.target, "--self-layers", "0")
    rounding = ("--draft-quantization", "int8") if Path(options.draft).name == ROUNDED else ()
    return [target, replace(draft, module="benchmarks.toy_drafters", flags=(*draft.flags, *more, *rounding))]


@asynccontextmanager
async def services(target: Path, draft: Path) -> AsyncIterator[Services]:
    """Run the services; supports are cut short, so that tails take part.

    Workers let nobody go first: what is judged is drafts, and on a busy machine they would come too late for a round.
    They draft ahead, on however few cores.
    """
    variables = {"SUPPORT_MASS": SUPPORT_MASS, "SUPPORT_MAX": SUPPORT_MAX, "NICENESS": 0, "DRAFT_AHEAD": "true"}
    with environment(**{f"SPECDEC_{name}": str(value) for name, value in variables.items()}):
        started = Services(target, draft)
        async with started.stack:
            yield started


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Set variables for the services that start here, and restore what they were."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


# ---- generations


async def generate(
    client: AsyncClient, case: Case, seeds: Sequence[int], on_completion: Callable[[int], None] = lambda count: None
) -> list[Completion]:
    """Generate one text a seed, many at a time; `on_completion` is told how many are done."""
    left = iter(seeds)
    completions: list[Completion] = []

    async def generate_some() -> None:
        for seed in left:
            completions.append(await generate_one(client, case, seed))
            on_completion(len(completions))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(min(NUM_CONCURRENT, max(1, len(seeds) // TEXTS_OF_ONE))):
            tasks.create_task(generate_some())
    return completions


async def generate_one(client: AsyncClient, case: Case, seed: int) -> Completion:
    """Generate one text."""
    sampling = replace(case.sampling, seed=seed, max_new_tokens=NUM_TOKENS, ignore_eos=not case.sampling.grammar)
    return await client.complete(prompt_token_ids=PROMPT, sampling=sampling, speculation=case.speculation)


async def completions_of(client: AsyncClient, case: Case, num_generations: int, started: Services) -> list[Completion]:
    """Generate a case's texts; the draft worker is killed after a quarter of them, and is back for the second half."""
    if not case.kills_draft:
        return await generate(client, case, range(num_generations))
    half, quarter = num_generations // 2, num_generations // 4

    def kill_in_time(count: int) -> None:
        if count == quarter:
            started.kill_draft()

    bereft = await generate(client, case, range(half), kill_in_time)
    await until_drafting(client, case)
    return bereft + await generate(client, case, range(half, num_generations))


async def until_drafting(client: AsyncClient, case: Case) -> None:
    """Return once texts are drafted again."""
    drafting = False
    while not drafting:
        await asyncio.sleep(ASK_AGAIN_S)
        drafting = (await generate_one(client, case, seed=0)).finish.statistics.num_draft_tokens > 0


@dataclass(frozen=True)
class Result:
    """A case's figures."""

    name: str
    completions: list[Completion]
    agreement: Agreement
    expected_rate: float | None
    elapsed_s: float
    num_failed_drafts: int  # while nobody kills the draft worker

    @property
    def acceptance_rate(self) -> float:
        """Accepted over drafted; 0 where nothing was drafted."""
        return self._sum("num_accepted_tokens") / max(self._sum("num_draft_tokens"), 1)

    @property
    def tokens_per_round(self) -> float:
        """Committed over rounds, the closing token included."""
        return self._sum("num_tokens") / self._sum("num_rounds")

    @property
    def deviations(self) -> float:
        """How far the acceptance rate is from what the distributions say, in standard errors over generations."""
        if self.expected_rate is None:
            return 0.0
        statistics = [completion.finish.statistics for completion in self.completions]
        excess = [each.num_accepted_tokens - self.expected_rate * each.num_draft_tokens for each in statistics]
        return float(np.mean(excess) / np.std(excess) * len(excess) ** 0.5)

    @property
    def holds(self) -> bool:
        """Return whether distribution and acceptance are what they should be, and drafts came when asked for."""
        is_exact = self.agreement.p_value > REJECT_BELOW and abs(self.deviations) < MAX_DEVIATIONS
        return is_exact and self.drafts_came

    @property
    def drafts_came(self) -> bool:
        """Return whether something was drafted where that was asked for, and hardly any round lacked its drafter."""
        if CASES[self.name].speculation.num_draft_tokens == 0:
            return self._sum("num_draft_tokens") == 0
        num_tolerated = MAX_FAILED_DRAFTS * len(self.completions)
        return self.num_failed_drafts <= num_tolerated and self._sum("num_draft_tokens") > 0

    def _sum(self, name: str) -> float:
        return float(sum(getattr(completion.finish.statistics, name) for completion in self.completions))


async def judge(name: str, num_generations: int, started: Services, target: Path, draft: Path) -> Result:
    """Generate a case's texts and compare them with the distribution."""
    case = CASES[name]
    distribution = joint_distribution(distributions_of(target, case.sampling), NUM_TOKENS)
    begin, num_failed = time.perf_counter(), started.num_failed_drafts
    async with AsyncClient(started.stack.address) as client:
        completions = await completions_of(client, case, num_generations, started)
    elapsed_s = time.perf_counter() - begin
    found = agreement([completion.tokens for completion in completions], distribution)
    num_failed = 0 if case.kills_draft else started.num_failed_drafts - num_failed
    return Result(name, completions, found, expected_rate(case, target, draft), elapsed_s, num_failed)


# ---- the program


def row_of(result: Result) -> tuple[str, ...]:
    """Return a line of the table."""
    return (
        result.name,
        str(len(result.completions)),
        str(result.agreement.num_cells),
        f"{result.agreement.statistic:.1f}",
        f"{result.agreement.p_value:.3g}",
        f"{result.acceptance_rate:.4f}",
        "" if result.expected_rate is None else f"{result.expected_rate:.4f}",
        f"{result.deviations:+.1f}",
        f"{result.tokens_per_round:.3f}",
        f"{len(result.completions) / result.elapsed_s:.0f}",
        f"{result.num_failed_drafts}",
        "holds" if result.holds else "BROKEN",
    )


HEADINGS = (
    "case",
    "generations",
    "cells",
    "chi-square",
    "p",
    "acceptance rate",
    "by the distributions",
    "deviation",
    "tokens per round",
    "generations/s",
    "failed drafts",
    "distribution",
)


def table(results: Sequence[Result]) -> Table:
    """Return all figures."""
    title = f"joint distribution of {NUM_TOKENS} tokens of {VOCAB_SIZE}, K = {NUM_DRAFT_TOKENS}, through real servers"
    figures = Table(title=title)
    for heading in HEADINGS:
        figures.add_column(heading, justify="left" if heading in ("case", "distribution") else "right")
    for result in results:
        figures.add_row(*row_of(result))
    return figures


async def run(num_generations: int, names: Sequence[str], folder: Path) -> list[Result]:
    """Judge the cases one after the other, those of one draft with the same servers."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    target, _ = save_pair(folder)
    results = []
    for kind in dict.fromkeys(CASES[name].draft for name in names):
        draft = folder / kind
        async with services(target, draft) as started:
            for name in (name for name in names if CASES[name].draft == kind):
                results.append(await judge(name, num_generations, started, target, draft))
                print(f"{name}: {results[-1].agreement}", flush=True)
    return results


def main() -> None:
    """Print the table; exit with 1 if a distribution is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exactness", description=__doc__.split("\n")[0])
    parser.add_argument("--generations", type=int, default=20_000, help="of each case (default: %(default)s)")
    parser.add_argument("--case", action="append", choices=CASES, help="only this one; may be repeated")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = asyncio.run(run(arguments.generations, arguments.case or list(CASES), Path(folder)))
    console = Console(width=max(Console().width, 140))
    console.print(table(results))
    console.print(
        f"a distribution is broken where p <= {REJECT_BELOW:g}, or acceptance is {MAX_DEVIATIONS:g} standard errors"
        " off, or drafts failed"
    )
    sys.exit(not all(result.holds for result in results))


if __name__ == "__main__":
    main()
