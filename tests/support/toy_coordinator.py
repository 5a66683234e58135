"""A coordinator with toy workers and a real store: production service, registry and rounds, no network."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from coordinator.detached import DetachedRule
from coordinator.draft import OfferedDrafter
from coordinator.followed import Ending
from coordinator.generation import CommittedChunk
from coordinator.loads import ReportedLoads
from coordinator.prompts import EncodedPrompt, Prompts
from coordinator.quotas import Quotas
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.rounds import DEFAULT_OPTIONS, Scored, ScoreOptions
from coordinator.service import Coordinator
from coordinator.session_workers import Workers
from coordinator.sessions import SessionStore
from coordinator.streams import SessionOpening
from specdec import messages
from specdec.exact.prefix import chain
from specdec.exact.values import Proposal
from specdec.types import ModelInfo, SamplingParams
from specdec.v1 import generation_pb2
from tests.support.toys import VOCAB_SIZE, ToyDrafter, ToyModel, ToyScorer, markov_logits

SEED = 11
LENGTH = 24
PROMPT = (1,)
SAMPLING = SamplingParams(seed=SEED, max_new_tokens=LENGTH)
MAX_TURNS = 100_000  # of the event loop; longer waits fail the test


class Drafter(ToyDrafter):
    """A toy drafter that counts how it was closed."""

    num_closed = num_abandoned = 0

    async def close(self) -> None:
        self.num_closed += 1

    def abandon(self) -> None:
        self.num_abandoned += 1


class Scorer(ToyScorer):
    """A toy scorer that counts how it was closed, and waits or fails on request."""

    num_closed = num_abandoned = 0
    before: Callable[[int], Any]

    async def score(self, committed: list[int], proposal: Proposal, options: ScoreOptions = DEFAULT_OPTIONS) -> Scored:
        await self.before(len(committed) - len(PROMPT))
        return await super().score(committed, proposal, options)

    async def close(self) -> None:
        self.num_closed += 1

    def abandon(self) -> None:
        self.num_abandoned += 1


class Gate:
    """Lets rounds pass that begin before `limit` completion tokens; blocks the others until it is opened."""

    def __init__(self, limit: int | None = None) -> None:
        self.limit, self.opened = limit, asyncio.Event()

    async def __call__(self, length: int) -> None:
        if self.limit is not None and length >= self.limit:
            await self.opened.wait()
        await asyncio.sleep(0)


class ToyWorkers:
    """Opens toy scorers and drafters, and keeps a list of them."""

    def __init__(self) -> None:
        self.loads = ReportedLoads()
        self.before: Callable[[int], Any] = Gate()
        self.scorers: list[Scorer] = []
        self.drafters: list[Drafter] = []

    @property
    def ends(self) -> list[tuple[int, int]]:
        """How often each handle was closed and abandoned: scorers, then drafters."""
        handles: list[Scorer | Drafter] = [*self.scorers, *self.drafters]
        return [(handle.num_closed, handle.num_abandoned) for handle in handles]

    def open(self, session: SessionOpening, *rest: object) -> Any:
        """Return a scorer for a target connection, a drafter for a draft connection."""
        return self._drafter() if isinstance(rest[0], str) else self._scorer()

    def _scorer(self) -> Scorer:
        scorer = Scorer(ToyModel(markov_logits(1), SAMPLING, prompt=PROMPT), SEED)
        scorer.before = self.before
        self.scorers.append(scorer)
        return scorer

    def _drafter(self) -> Drafter:
        self.drafters.append(Drafter(ToyModel(markov_logits(2), SAMPLING, prompt=PROMPT), SEED))
        return self.drafters[-1]


class ToyCapabilities:
    """One toy target and one toy draft."""

    target = ModelInfo("toy", vocab_size=VOCAB_SIZE, context_length=1000)
    drafters = ("toy",)

    def target_of(self, session_id: str) -> ModelInfo:
        """Return the one target."""
        return self.target

    def check_tokenizer(self, model: ModelInfo) -> None:
        """Accept every tokenizer."""

    def ask_soon(self) -> None:
        """Do nothing."""

    def session_drafters(self, name: str | None) -> dict[str, OfferedDrafter]:
        return {"toy": OfferedDrafter(self.target)}


class ToyCoordinator(Coordinator):
    """A coordinator with toy workers over a store; two of them may share the store."""

    def __init__(
        self,
        store: SessionStore,
        maximum: int = 8,
        detached: DetachedRule = DetachedRule(),  # noqa: B008  # frozen
        quotas: Callable[[], Quotas] = Quotas,
    ) -> None:
        self.store, self.running, self.toys = store, RunningGenerations(maximum), ToyWorkers()
        workers: Any = Workers(self.toys, self.toys, ToyCapabilities())  # type: ignore[arg-type]
        vocabulary = {f"t{token}": token for token in range(VOCAB_SIZE)}
        prompts = Prompts(Tokenizer(WordLevel(vocabulary, unk_token="t0")), None)
        limits = RequestLimits(LENGTH, 8)
        super().__init__(workers, prompts, store, self.running, limits, detached=detached, quotas=quotas)

    async def create(self, session_id: str, when_detached: int = 0) -> None:
        """Create a session that drafts three tokens a round."""
        request = generation_pb2.GenerateRequest(
            sampling=messages.sampling_to_proto(SAMPLING),
            when_detached=generation_pb2.DetachedPolicy.ValueType(when_detached),
        )
        request.speculation.num_draft_tokens = 3
        await self.store.create(session_id, b"", request.SerializeToString(), EncodedPrompt(PROMPT, chain(b"", PROMPT)))

    async def tokens(self, session_id: str, offset: int = 0, digest: bytes = b"") -> list[int]:
        """Return all tokens of a session, to its end."""
        async with aclosing(self.follow(session_id, offset, digest)) as chunks:
            return [token async for chunk, _ in chunks for token in tokens_of(chunk)]

    async def stored(self, session_id: str) -> list[int]:
        """Return the committed tokens."""
        return [entry.token for entry in (await self.store.read(session_id)).emitted]


Chunks = AsyncGenerator[tuple[CommittedChunk, Ending | None]]


def tokens_of(chunk: CommittedChunk) -> list[int]:
    return [entry.token for entry in chunk.emitted]


def generation_tasks() -> list[str]:
    """Return the names of the generations whose rounds run in this process."""
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("generation")]


async def lapse(store: SessionStore, session_id: str = "s") -> None:
    """Let a session's lease be over, as if its owner had said nothing for long."""
    await store.release(session_id, (await store.read(session_id)).epoch)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    for _ in range(MAX_TURNS):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition did not become true")


async def take(chunks: Chunks, count: int) -> list[int]:
    """Read chunks until there are at least `count` tokens."""
    return (await take_last(chunks, count))[0]


async def take_last(chunks: Chunks, count: int) -> tuple[list[int], CommittedChunk]:
    """Read chunks until there are at least `count` tokens; return them and the last chunk."""
    tokens: list[int] = []
    while len(tokens) < count:
        chunk, _ = await anext(chunks)
        tokens += tokens_of(chunk)
    return tokens, chunk


async def read_into(tokens: list[int], chunks: Chunks) -> None:
    """Append every token as it arrives."""
    async for chunk, _ in chunks:
        tokens += tokens_of(chunk)
