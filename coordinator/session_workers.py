"""Opens a session at the workers: its scorer, its drafters, and the chooser of its plans."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from coordinator import metrics
from coordinator.capabilities import WorkerCapabilities
from coordinator.choosing.chooser import PlanChooser
from coordinator.choosing.shared_statistics import SharedStatistics
from coordinator.draft import DraftLimits, DraftWorkers, OfferedDrafter, SessionDrafter
from coordinator.joint_drafter import joint_drafters
from coordinator.joint_names import AND, joint_names
from coordinator.observing import joined
from coordinator.pool.pool import WorkerPool
from coordinator.running import WorkerHandles
from coordinator.streams import SessionOpening
from coordinator.target import TargetWorkers
from specdec.errors import SpecdecError
from specdec.exact.acceptance import DEFAULT_RULE, RULES
from specdec.exact.lookup import TextLookup
from specdec.exact.values import ObservationRequest
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo, SpeculationParams

UNCONFIRMED = ""  # stands for a drafter that no worker has confirmed yet: any name would add to the statistics


@dataclass(frozen=True, slots=True)
class Workers:
    """The workers of both kinds, and what is known of them."""

    target: TargetWorkers
    draft: DraftWorkers | None
    capabilities: WorkerCapabilities

    @property
    def pools(self) -> dict[str, WorkerPool[Any]]:
        """The pools by kind."""
        pools: dict[str, WorkerPool[Any]] = {"target": self.target.pool}
        return pools | {"draft": self.draft.pool} if self.draft else pools


class SessionWorkers:
    """Opens sessions at the workers; knows what all sessions have measured."""

    def __init__(self, workers: Workers, max_draft_tokens: int) -> None:
        self._workers = workers
        self._max_draft_tokens = max_draft_tokens
        self._statistics = SharedStatistics()
        self._blind = set[tuple[str, str]]()  # drafter and target: what was logged as observing nothing

    def open(self, session: SessionOpening, model: ModelInfo, speculation: SpeculationParams) -> WorkerHandles:
        """Return a session's handles; streams open when rounds first use them. Raises as `session_drafters`."""
        offered = self._offered(speculation)
        observed = joined((drafter.observations for drafter in offered.values()), model.num_layers)
        self._note_blind(offered, observed, model)
        capabilities = self._workers.capabilities
        is_greedy = session.sampling.temperature == 0
        leaves_rule = speculation.acceptance_rule is None and speculation.num_draft_tokens is None
        session = replace(session, is_matched=leaves_rule and not is_greedy)
        rule = speculation.acceptance_rule or DEFAULT_RULE
        drafters = self._drafters(session, model, speculation.drafter or "", offered, observed)
        names = _names(offered, speculation.drafter)
        looks_up = bool(offered) and not speculation.drafter and speculation.num_draft_tokens is None
        return WorkerHandles(
            scorer=self._workers.target.open(session, model.vocab_size, observed, capabilities.ask_soon),
            drafters=drafters,
            joint=joint_drafters(names, drafters),
            rule=RULES[rule],
            chooser=PlanChooser(
                self._statistics.for_seed(None if is_greedy else session.sampling.seed),
                names,
                self._max_draft_tokens,
                speculation.num_draft_tokens,
                is_greedy=is_greedy,
                looks_up=looks_up,
                takes_offers=looks_up and session.sampling.grammar is None,
            ),
            lookup=TextLookup() if looks_up else None,
        )

    def _offered(self, speculation: SpeculationParams) -> Mapping[str, OfferedDrafter]:
        """Return the session's drafters by name; before any worker has answered, the one that it asked for."""
        if self._workers.draft is None or speculation.num_draft_tokens == 0:
            return {}
        offered = self._workers.capabilities.session_drafters(speculation.drafter)
        return offered or {UNCONFIRMED: OfferedDrafter(ModelInfo(""))}

    def _note_blind(
        self, offered: Mapping[str, OfferedDrafter], observed: ObservationRequest, model: ModelInfo
    ) -> None:
        """Log, once, a drafter that asks for layers that the target does not have, or for too many."""
        for name, drafter in offered.items():
            asked = drafter.observations.hidden_layers
            if not set(asked) <= set(observed.hidden_layers) and (name, model.fingerprint) not in self._blind:
                self._blind.add((name, model.fingerprint))
                facts = {"hidden_layers": asked, "target": model.name, "target_layers": model.num_layers}
                get_logger().warning("drafter_observes_nothing", drafter=name, **facts)

    def _drafters(
        self,
        session: SessionOpening,
        model: ModelInfo,
        asked: str,
        offered: Mapping[str, OfferedDrafter],
        observed: ObservationRequest,
    ) -> dict[str, SessionDrafter]:
        workers, drafters = self._workers.draft, dict[str, SessionDrafter]()
        if workers is None:
            return drafters
        for name, drafter in offered.items():
            limits = DraftLimits(
                model.vocab_size, drafter.model.context_length, drafter.observations, observed, session.is_matched
            )
            on_failure = partial(_note_failure, session.session_id)
            drafters[name] = workers.open(session, name or asked, limits, on_failure)
        return drafters


def _names(offered: Mapping[str, OfferedDrafter], asked: str | None) -> list[str]:
    """Return the names to choose among: the one that was asked for, else each drafter's and those of joint ones."""
    if asked and len(offered) > 1:
        return [AND.join(offered)]
    has_model = {name: bool(drafter.model.tokenizer_fingerprint) for name, drafter in offered.items()}
    return [*offered, *joint_names(has_model)]


def _note_failure(session_id: str, error: SpecdecError) -> None:
    metrics.NUM_DRAFT_FAILURES.labels(error.reason).inc()
    get_logger().warning("draft_unavailable", session_id=session_id, reason=error.reason, problem=str(error))
