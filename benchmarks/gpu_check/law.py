"""Texts that are written speculatively on the device have the target's distribution: a joint chi-square test.

The target worker's engine and scorer run on the device; drafts are drawn from distributions that are wrong on purpose.
In float32 the texts are compared with transformers' distribution in float64 on the CPU; in bfloat16 with that of the
same rounded model, as the engine itself gives it.
"""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from benchmarks.exactness import NUM_TOKENS, PROMPT, VOCAB_SIZE, distributions_of, save_model
from benchmarks.gpu_check.place import Place
from benchmarks.gpu_check.report import Report
from benchmarks.judging import Agreement, History, agreement, joint_distribution, reference_distribution
from specdec.engine import EngineLoop, Feed, LanguageModel
from specdec.exact.acceptance import AcceptanceRule, BlockRule, TokenRule
from specdec.exact.randomness import Purpose, acceptance_uniforms, uniforms
from specdec.exact.sampling import draw
from specdec.exact.tree import chain_parents
from specdec.exact.values import ObservationRequest, Proposal, SparseDistribution
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from target_service.scorer import Scorer, ScoreRound, ScoreTask

REJECT_BELOW = 1e-4
NUM_CONCURRENT = 64
SHAPES: dict[str, tuple[tuple[int, ...], AcceptanceRule]] = {
    "K = 3, block rule": (chain_parents(3), BlockRule()),
    "tree, token rule": ((0, 0, 1, 1, 3), TokenRule()),
}
DRAFTS = (  # of the tokens at each depth; the target's own are others
    SparseDistribution((0, 2, 3, 5), (0.4, 0.3, 0.2, 0.1)),
    SparseDistribution((1, 2, 4), (0.5, 0.25, 0.25)),
    SparseDistribution((0, 1, 2, 3, 4, 5), (0.25, 0.25, 0.125, 0.125, 0.125, 0.125)),
)


def check_law(place: Place, report: Report, num_texts: int) -> None:
    """Test chains and trees, in both number types."""
    with tempfile.TemporaryDirectory() as folder:
        saved = save_model(Path(folder))
        for dtype in ("float32", "bfloat16"):
            with report.part(f"law, {dtype}"):
                _check_type(place.load(saved, dtype), report, num_texts, saved)


def _check_type(model: LanguageModel, report: Report, num_texts: int, folder: Path) -> None:
    is_exact = model.dtype == torch.float32
    after = distributions_of(folder, SamplingParams()) if is_exact else distributions_on(model)
    expected = joint_distribution(after, NUM_TOKENS)
    for name, (parents, rule) in SHAPES.items():
        found = agreement(asyncio.run(written(model, num_texts, parents, rule)), expected)
        report.add(f"law, {model.dtype}, {name}".replace("torch.", ""), passes(found), f"{num_texts} texts: {found}")


def passes(found: Agreement) -> bool:
    """Return whether texts may have the distribution."""
    return found.p_value >= REJECT_BELOW


def distributions_on(model: LanguageModel) -> Callable[[History], np.ndarray]:
    """Return the next-token distributions that a model gives after every text of up to NUM_TOKENS - 1 tokens."""
    known: dict[History, np.ndarray] = {}
    sequence = model.cache.open("reference")
    for text in np.ndindex((VOCAB_SIZE,) * (NUM_TOKENS - 1)):
        sequence.truncate(0)
        logits = model.forward([Feed(sequence, [*PROMPT, *text], NUM_TOKENS)]).logits.double().cpu().numpy()
        for size in range(NUM_TOKENS):
            known.setdefault(text[:size], reference_distribution(logits[size], SamplingParams(), PROMPT, text[:size]))
    sequence.close()
    return known.__getitem__


async def written(
    model: LanguageModel, num_texts: int, parents: tuple[int, ...], rule: AcceptanceRule
) -> list[History]:
    """Return the beginnings of texts, each of a seed of its own, many written at a time."""
    scorer = Scorer(VOCAB_SIZE, observation_window=1)
    engine = EngineLoop(model, scorer)
    engine.start()
    places = asyncio.Semaphore(NUM_CONCURRENT)

    async def one(seed: int) -> History:
        async with places:
            return await _text(engine, scorer, seed, parents, rule)

    try:
        return list(await asyncio.gather(*(one(seed) for seed in range(num_texts))))
    finally:
        await asyncio.to_thread(engine.stop)


async def _text(
    engine: EngineLoop[ScoreTask], scorer: Scorer, seed: int, parents: tuple[int, ...], rule: AcceptanceRule
) -> History:
    session = WorkerSession(f"text {seed}", 1, SamplingParams(temperature=1, seed=seed), len(PROMPT))
    text, start = list(PROMPT), 0
    while len(text) < len(PROMPT) + NUM_TOKENS:
        proposal = proposed(seed, len(text), parents)
        supports = [distribution.token_ids for distribution in proposal.distributions]
        given = ScoreRound(start, text[start:], proposal.tokens, supports, proposal.parents)
        scores = await engine.run(scorer.task(session, given, ObservationRequest(), match=False))
        verdict = rule.accept(proposal, scores, acceptance_uniforms(seed, len(text), len(proposal)))
        start = len(text)
        text += [*(proposal.tokens[node] for node in verdict.path), verdict.next_token]
    engine.forget(session.key)
    return tuple(text[len(PROMPT) : len(PROMPT) + NUM_TOKENS])


def proposed(seed: int, length: int, parents: tuple[int, ...]) -> Proposal:
    """Return a tree of tokens, each drawn by itself from the distribution of its depth."""
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    distributions = tuple(DRAFTS[depth - 1] for depth in depths[1:])
    draws = uniforms(seed, length, len(parents), Purpose.DRAFT)
    tokens = tuple(draw(row, number) for row, number in zip(distributions, draws, strict=True))
    return Proposal(tokens, distributions, () if parents == chain_parents(len(parents)) else parents)
