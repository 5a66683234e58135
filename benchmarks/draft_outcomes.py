"""`python -m benchmarks.draft_outcomes`: which rounds a draft worker could draft before it is asked for them.

A worker that has answered does not know how its round will end: how many of its K tokens the target accepts, and which
token closes the round. Draft-ahead bets on one outcome, that all are accepted and the draft's most probable token
follows. This program plays greedy rounds of the demo pair without the services, and counts how often a round ended in
one of the 1, 2, ... outcomes that the draft itself finds likeliest (Kumar et al. 2026, "Saguaro"). A rejected token's
place is taken by the draft's second choice there. It also measures forwards, and says how many outcomes the time of the
target's forward has room for: one takes K + 1 forwards of the draft, each other one K.
"""

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

import torch

from benchmarks.measure import hardware, held_out_prompts
from draft_service.model.forecasts import CONFIDENCE_EXPONENT
from specdec.engine import Feed, LanguageModel, load_language_model
from specdec.serving.tokenizer import load_tokenizer

MODELS = Path(__file__).parent.parent / "models"
NUM_RANKS = 4
KV_CACHE_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a round may end."""

    num_accepted: int
    closing: int


@dataclass(slots=True)
class Counts:
    """What was seen of rounds with K draft tokens."""

    num_draft_tokens: int
    num_rounds: int = 0
    num_tokens: int = 0
    num_bets_won: int = 0  # by all tokens and the most probable one after them
    hits: list[int] = field(default_factory=lambda: [0] * NUM_RANKS)  # rounds that ended in the outcome of each rank
    draft_ms: list[float] = field(default_factory=list)  # of each forward
    target_ms: list[float] = field(default_factory=list)

    def note(self, ranked: Sequence[Outcome], ended: Outcome) -> None:
        """Count a round."""
        self.num_rounds += 1
        self.num_tokens += ended.num_accepted + 1
        bet = next(outcome for outcome in ranked if outcome.num_accepted == self.num_draft_tokens)
        self.num_bets_won += bet == ended
        for rank, outcome in enumerate(ranked[:NUM_RANKS]):
            self.hits[rank] += outcome == ended

    def share_within(self, num_outcomes: int) -> float:
        """Return the share of rounds that ended in one of the likeliest `num_outcomes`."""
        return sum(self.hits[:num_outcomes]) / self.num_rounds

    @property
    def num_fitting(self) -> float:
        """How many outcomes can be drafted while the target scores, as a number that need not be whole."""
        idle_forwards = statistics.median(self.target_ms) / statistics.median(self.draft_ms)
        return max(0.0, (idle_forwards - 1) / self.num_draft_tokens)


def ranked_outcomes(probs: torch.Tensor) -> list[Outcome]:
    """Return how a greedy round may end, the likeliest first, from the draft's probabilities [K + 1, V].

    A token is taken to be accepted with a power of its probability, as the draft worker itself reckons.
    """
    top = probs.topk(2, dim=-1)
    first, second = top.values.unbind(-1)  # [K + 1] each
    accepted = (first**CONFIDENCE_EXPONENT).tolist()
    instead = (second / (1 - first).clamp(min=1e-9)).tolist()
    last = len(probs) - 1
    chances = {Outcome(last, int(top.indices[last, 0])): prod(accepted)}
    for depth in range(last):
        rejected = prod(accepted[:depth]) * (1 - accepted[depth])
        chances[Outcome(depth, int(top.indices[depth, 1]))] = rejected * instead[depth]
    return sorted(chances, key=lambda outcome: -chances[outcome])


class Player:
    """Plays greedy rounds with two models on one text."""

    def __init__(self, draft: LanguageModel, target: LanguageModel, prompt: Sequence[int]) -> None:
        self._models = draft, target
        self._sequences = [model.cache.open("text") for model in self._models]
        self.text = list(prompt)

    def round(self, counts: Counts) -> None:
        """Draft, score and commit one round."""
        (draft, target), (drafting, scoring) = self._models, self._sequences
        rows = []
        drafted: list[int] = []
        for _ in range(counts.num_draft_tokens + 1):
            held = [*self.text, *drafted]
            rows.append(_timed_rows(draft, Feed(drafting, held[drafting.length :], 1), counts.draft_ms)[0])
            drafted.append(int(rows[-1].argmax()))
        drafted.pop()  # the guess of the closing token
        num_rows = len(drafted) + 1
        scored = [*self.text, *drafted][scoring.length :]
        choices = _timed_rows(target, Feed(scoring, scored, num_rows), counts.target_ms).argmax(dim=-1).tolist()
        num_accepted = next((n for n, token in enumerate(drafted) if choices[n] != token), len(drafted))
        counts.note(ranked_outcomes(torch.stack(rows).softmax(dim=-1)), Outcome(num_accepted, choices[num_accepted]))
        kept = len(self.text) + num_accepted
        self.text += choices[: num_accepted + 1]
        for sequence in self._sequences:
            sequence.truncate(min(sequence.length, kept))
            sequence.mark_committed(sequence.length)

    def close(self) -> None:
        """Free both caches."""
        for sequence in self._sequences:
            sequence.close()


def _timed_rows(model: LanguageModel, feed: Feed, times_ms: list[float]) -> torch.Tensor:
    """Return the logits of a forward, and note how long it took."""
    began_s = time.perf_counter()
    logits = model.forward([feed]).logits
    times_ms.append(1000 * (time.perf_counter() - began_s))
    return logits


def lines(all_counts: Sequence[Counts]) -> Iterator[str]:
    """Give the table's rows."""
    within = "".join(f"{f'likeliest {number}':>13}" for number in range(1, NUM_RANKS + 1))
    times = f"{'draft ms':>10}{'target ms':>11}{'room for':>10}"
    yield f"{'K':>2}{'rounds':>8}{'tokens a round':>16}{'bet won':>9}{within}{times}"
    for counts in all_counts:
        shares = "".join(f"{counts.share_within(number):>13.3f}" for number in range(1, NUM_RANKS + 1))
        draft_ms, target_ms = statistics.median(counts.draft_ms), statistics.median(counts.target_ms)
        yield (
            f"{counts.num_draft_tokens:>2}{counts.num_rounds:>8}{counts.num_tokens / counts.num_rounds:>16.2f}"
            f"{counts.num_bets_won / counts.num_rounds:>9.3f}{shares}{draft_ms:>10.2f}{target_ms:>11.2f}"
            f"{counts.num_fitting:>10.1f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft-lengths", default="2,3,4,8", metavar="K,...", help="numbers of draft tokens")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    draft, target = (
        load_language_model(str(MODELS / name), device="cpu", dtype=flags.dtype, kv_cache_bytes=KV_CACHE_BYTES)
        for name in ("draft", "target")
    )
    tokenizer = load_tokenizer(str(MODELS / "target"))
    texts = list(held_out_prompts(MODELS / "heldout").values())[: flags.prompts]
    all_counts = [Counts(int(length)) for length in flags.draft_lengths.split(",")]
    for counts in all_counts:
        for text in texts:
            player = Player(draft, target, tokenizer.encode(text).ids)
            num_prompt = len(player.text)
            while len(player.text) < num_prompt + flags.tokens:
                player.round(counts)
            player.close()
    print(f"{hardware()}, {str(target.dtype).removeprefix('torch.')}, one thread; {len(texts)} prompts, temperature 0")
    print(*lines(all_counts), sep="\n")


if __name__ == "__main__":
    main()
