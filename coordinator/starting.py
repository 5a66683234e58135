"""Sessions that begin to be followed at this coordinator: it claims and continues them, or tails those of others."""

import asyncio

from coordinator import metrics, requests
from coordinator.followed import FollowedGeneration
from coordinator.generation import Generation
from coordinator.grammars import SessionGrammars
from coordinator.healing import BEGINNING, SETTLED_S, Position, heal, not_lost, take_back
from coordinator.prompts import Prompts
from coordinator.running import RunningGeneration
from coordinator.session_record import SessionRecord, Status
from coordinator.session_replies import LeasedElsewhere
from coordinator.session_workers import SessionWorkers, Workers
from coordinator.sessions import SessionStore
from coordinator.shown import ShownSessions
from coordinator.streams import SessionOpening
from coordinator.tailing import TailedGeneration
from coordinator.text import StreamDetokenizer
from specdec.errors import NotFoundError
from specdec.outside import Outside
from specdec.serving.tracing import spans
from specdec.types import DetachedPolicy, ModelInfo, SamplingParams

INLINE_TOKENS = 256  # of a completion that is replayed at once, in some milliseconds
NAME_BITS = 64


class SessionStarts:
    """Starts what clients follow here."""

    def __init__(
        self,
        workers: Workers,
        prompts: Prompts,
        grammars: SessionGrammars,
        store: SessionStore,
        shown: ShownSessions,
        max_draft_tokens: int,
        policy: DetachedPolicy,
        outside: Outside,
    ) -> None:
        self.owner = f"{outside.random_bits(NAME_BITS):016x}"  # this coordinator's name in leases
        self._capabilities = workers.capabilities
        self._prompts, self._store, self._shown, self._outside = prompts, store, shown, outside
        self._grammars, self._max_draft_tokens = grammars, max_draft_tokens
        self._session_workers = SessionWorkers(workers, max_draft_tokens)
        self._policy = policy

    async def start(self, session_id: str, position: Position = BEGINNING) -> FollowedGeneration:
        """Claim a session and continue it, with the model that its text belongs to; tail it if it runs elsewhere.

        `position` is its first follower's: no text is added to less than it was shown. Raises NotFoundError,
        ModelMismatchError, DataLossError if the session is lost.
        """
        try:
            with spans.span("claim"):
                session = await self._claimed(session_id, position)
        except LeasedElsewhere as leased:
            return await self._tailed(leased.session)
        try:
            return await self._continued(session)
        except BaseException:
            await self._store.release(session_id, session.epoch)
            raise

    async def _continued(self, session: SessionRecord) -> RunningGeneration:
        if session.epoch > 1:
            metrics.NUM_CONTINUED.inc()
        request = requests.restored(session.request)
        generation = await self.replayed(session, request.sampling)
        policy = request.when_detached or self._policy
        running = RunningGeneration(session, generation, self._store, policy, self._outside)
        if session.status is Status.ACTIVE:
            model = self._model(session)
            opening = self._opening(session, generation, model)
            asked = request.speculation.num_draft_tokens
            forced = await self._grammars.forced(
                generation.sampling, model, self._max_draft_tokens if asked is None else asked
            )
            running.start(self._session_workers.open(opening, model, request.speculation), forced)
            self._shown.take(session.session_id)  # from here on the generation knows what was shown
        return running

    async def _tailed(self, session: SessionRecord) -> TailedGeneration:
        generation = await self.replayed(session, requests.restored(session.request).sampling)
        tailed = TailedGeneration(session, generation, self._store)
        tailed.start()
        return tailed

    async def _claimed(self, session_id: str, position: Position) -> SessionRecord:
        """Claim a session that has what this coordinator and its client were shown; raises as `start`."""
        shown = self._shown.get(session_id)
        if shown:
            await not_lost(heal(self._store, shown))  # one that has its name by now is claimed as it is
        try:
            session = await self._claimed_settled(session_id, position)
        except NotFoundError:
            if position.handed is None:
                raise
            raise self._store.expired() from None
        except LeasedElsewhere as leased:
            if _has_shown(leased.session, position):
                raise
            session = leased.session
        if not _has_shown(session, position):
            await not_lost(take_back(self._store, session_id, position))
            # others may have been shown more than this client
            session = await self._claimed_settled(session_id, position)
        return session

    async def _claimed_settled(self, session_id: str, position: Position) -> SessionRecord:
        """Claim a session of a store that has all that it had, as far as any coordinator knows."""
        session = await self._claim(session_id, position)
        while self._store.unbroken_s < SETTLED_S:
            # it may have gone back in time: what others have shown they bring back first
            await asyncio.sleep(SETTLED_S - self._store.unbroken_s)
            session = await self._claim(session_id, position)
        return session

    async def _claim(self, session_id: str, position: Position) -> SessionRecord:
        # a text that was shown belongs to its model, also where the store went back and has none of it
        served = None if position.offset else self._capabilities.target_of(session_id)
        return await self._store.claim(session_id, served, self.owner)

    async def replayed(self, session: SessionRecord, sampling: SamplingParams) -> Generation:
        """Return a session's state; a long completion is replayed on a thread.

        Raises ModelMismatchError for tokens of another tokenizer.
        """
        if len(session.emitted) <= INLINE_TOKENS:
            return self._generation(session, sampling)
        return await asyncio.to_thread(self._generation, session, sampling)

    def _generation(self, session: SessionRecord, sampling: SamplingParams) -> Generation:
        model = self._model(session)
        self._capabilities.check_tokenizer(model)
        return Generation(
            prompt=session.prompt,
            sampling=sampling,
            limits=requests.limits(sampling, model),
            detokenizer=StreamDetokenizer(self._prompts.tokenizer, session.prompt),
            emitted=list(session.emitted),
            finish=session.finish,
            statistics=session.statistics,
            prompt_digest=session.prompt_digest,
            incarnation=session.incarnation,
        )

    def _model(self, session: SessionRecord) -> ModelInfo:
        """Return the target that a session's text belongs to."""
        return session.model or self._capabilities.target_of(session.session_id)

    def _opening(self, session: SessionRecord, generation: Generation, model: ModelInfo) -> SessionOpening:
        """Return what workers are told of a session."""
        return SessionOpening(
            session_id=session.session_id,
            epoch=session.epoch,
            sampling=generation.sampling,
            num_prompt_tokens=len(session.prompt),
            prefix_digest=generation.prefix_digest,
            model_fingerprint=model.fingerprint,
            incarnation=session.incarnation,
        )


def _has_shown(session: SessionRecord, position: Position) -> bool:
    """Return whether a session has the tokens that its client proves to have been shown."""
    return position.handed is None or session.holds(position.offset, position.digest)
