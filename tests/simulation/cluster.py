"""The processes of one world, built from production's parts as the services' `__main__` modules do."""

import random
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from coordinator.capabilities import WorkerCapabilities
from coordinator.draft import DraftWorkers, draft_watch
from coordinator.pool.pool import WorkerPool
from coordinator.prompts import Prompts
from coordinator.registry import RunningGenerations
from coordinator.requests import RequestLimits
from coordinator.service import Coordinator
from coordinator.servicer import GenerationServicer
from coordinator.session_ids import SessionIds
from coordinator.session_workers import Workers
from coordinator.sessions import SessionStore
from coordinator.stores import scripts
from coordinator.stores.client import RedisClient
from coordinator.target import TargetWorkers, target_watch
from draft_service.model.drafter import ModelDrafter
from draft_service.model.tasks import DraftProcessor
from draft_service.servicer import DraftServicer
from specdec.errors import UnavailableError
from specdec.outside import Outside
from specdec.v1 import draft_pb2_grpc, generation_pb2_grpc, target_pb2_grpc
from target_service.scorer import Scorer
from target_service.servicer import TargetServicer
from tests.simulation.engine import TOKENIZER, VOCAB_SIZE, InlineEngine, ToyLanguageModel, ToyText, described
from tests.simulation.ledger import Ledger, Owner, Trace
from tests.simulation.loop import Process, virtual_loop
from tests.simulation.network import Network
from tests.simulation.store import SECRET, SimulatedRedis

SESSION_TTL_S = 3600.0
DRAFT_TIMEOUT_S, SCORE_TIMEOUT_S, TARGET_PATIENCE_S = 2.0, 60.0, 30.0  # production's defaults
MAX_NEW_TOKENS = 32
TARGET, OTHER_TARGET = ToyText(1), ToyText(2)
DRAFT = ToyText(1, noise=1.0)
PROMPTS = Prompts(Tokenizer(WordLevel({f"t{token}": token for token in range(VOCAB_SIZE)}, unk_token="t0")), None)

Build = Callable[[Process], Coroutine[Any, Any, None]]


@dataclass(slots=True)
class Cluster:
    """Processes by name, and how to start each again."""

    random: random.Random
    network: Network
    trace: Trace
    ledger: Ledger
    stores: list[SimulatedRedis]
    step_s: float = 0.005  # of a model's forward
    num_blocks: int = 1000  # of a worker's cache
    prefill_chunk_tokens: int = 256  # of a prompt, in a forward
    score_timeout_s: float = SCORE_TIMEOUT_S
    has_drafts: bool = True
    num_replicas: int = 0  # of each store, and that a commit waits for
    processes: dict[str, Process] = field(default_factory=dict)
    running: dict[str, RunningGenerations] = field(default_factory=dict)  # by coordinator
    pools: dict[str, list[WorkerPool[Any]]] = field(default_factory=dict)  # by coordinator
    models: dict[str, ToyLanguageModel] = field(default_factory=dict)  # by worker
    clock_offset_s: float = 0.0  # of the stores' wall clock
    texts: list[ToyText] = field(default_factory=list)  # of the models that are served
    _builds: dict[str, Build] = field(default_factory=dict)

    @property
    def outside(self) -> Outside:
        """Virtual time, and randomness of the seed."""
        return Outside(lambda: virtual_loop().time(), self.random.random, self.random.getrandbits)

    def add(self, name: str, build: Build) -> None:
        """Add a process, not started yet."""
        self._builds[name] = build

    def names(self, kind: str = "") -> list[str]:
        """Return the processes whose names begin with `kind`."""
        return [name for name in self._builds if name.startswith(kind)]

    async def start(self, name: str) -> None:
        """Start a process that does not run."""
        process = self.processes[name] = Process(name)
        self.network.join(process)
        process.on_death.append(self.ledger.died)
        self.trace.note(name, "starts")
        await process.spawn(self._builds[name](process), name=f"start of {name}")

    def kill(self, name: str) -> None:
        """Kill a process, as SIGKILL does."""
        self.trace.note(name, "is killed")
        self.processes[name].kill()

    # ---- what runs in them

    def coordinator(self, store: SimulatedRedis, address: str) -> Build:
        """Return how to start a coordinator."""

        async def build(process: Process) -> None:
            network, outside = self.network, self.outside
            server = network.serve(address, process)
            targets = target_watch(network.resolver("target"), network.channel, outside)
            drafts = draft_watch(network.resolver("draft"), network.channel, outside)
            target = TargetWorkers(targets.pool, self.score_timeout_s, TARGET_PATIENCE_S, outside)
            draft = DraftWorkers(drafts.pool, DRAFT_TIMEOUT_S, outside) if self.has_drafts else None
            workers = Workers(target, draft, WorkerCapabilities(target, draft, TOKENIZER))
            self.pools[process.name] = [targets.pool, drafts.pool]
            process.spawn(targets.run(), name="target pool")
            process.spawn(drafts.run(), name="draft pool")
            running = self.running[process.name] = RunningGenerations(8)
            redis = RedisClient(
                store.route(), num_replicas=self.num_replicas, outside=outside, read_script=scripts.read_script
            )
            sessions = SessionStore(redis, SESSION_TTL_S, outside)
            await _answering(sessions)
            limits = RequestLimits(MAX_NEW_TOKENS, 8)
            service = Coordinator(workers, PROMPTS, sessions, running, limits, outside)
            servicer = GenerationServicer(service, SessionIds(SECRET, outside), outside)
            generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
            await workers.capabilities.ready()
            process.spawn(workers.capabilities.watch(), name="capabilities")
            process.spawn(service.watch(), name="upkeep")
            self.ledger.owners[service.owner] = Owner(process, running)
            server.is_ready = True

        return build

    def target(self, text: ToyText = TARGET, fingerprint: str = "target model") -> Build:
        """Return how to start a target worker."""
        self.texts += [text] if text not in self.texts else []

        async def build(process: Process) -> None:
            server = self.network.serve("target", process)
            scorer = Scorer(VOCAB_SIZE, observation_window=16)
            model = ToyLanguageModel(text, self.num_blocks, self.ledger.scored)
            engine = self._engine(process, model, scorer)
            servicer = TargetServicer(engine, scorer, described("toy", fingerprint))
            target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server)
            server.is_ready = True

        return build

    def draft(self) -> Build:
        """Return how to start a draft worker."""

        async def build(process: Process) -> None:
            server = self.network.serve("draft", process)
            model = ToyLanguageModel(DRAFT, self.num_blocks)
            engine = self._engine(process, model, DraftProcessor(VOCAB_SIZE, 0.999, VOCAB_SIZE))
            drafter = ModelDrafter("model", engine, described("toy draft", "draft model"), num_outcomes=3)
            draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftServicer({"model": drafter}), server)
            server.is_ready = True

        return build

    def _engine(self, process: Process, model: ToyLanguageModel, processor: Any) -> InlineEngine[Any]:
        def step_s() -> float:
            return self.random.uniform(0.5, 1.5) * self.step_s * process.slowness

        self.models[process.name] = model
        return InlineEngine(model, processor, step_s, self.outside, self.prefill_chunk_tokens)


async def _answering(store: SessionStore) -> None:
    """Return once a store answered; a coordinator that cannot start is started again."""
    while True:
        with suppress(UnavailableError):
            return await store.answers()
