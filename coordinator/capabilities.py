"""What the workers of this coordinator serve: the target models, the drafters, and whether they fit together."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from coordinator.canary import Canary
from coordinator.draft import DraftWorkers, OfferedDrafter
from coordinator.joint_names import parts_of
from coordinator.target import TargetWorkers
from specdec.errors import InvalidArgumentError, ModelMismatchError, UnavailableError
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo

REFRESH_S = 5.0  # between two ticks, if the workers do not change
MIN_WAIT_S = 0.1  # even if they change more often
FORGET_AFTER = 2  # ticks without an answer


def of_any_name(_: str) -> bool:
    """Let any model count."""
    return True


class ServedModels:
    """The target models that answer, the one that began to answer last at the end."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelInfo] = OrderedDict()  # by fingerprint
        self._num_missed: Counter[str] = Counter()  # by fingerprint: ticks without its answer

    @property
    def newest(self) -> ModelInfo | None:
        """The model for new sessions; None before the first answer."""
        return self.newest_of(of_any_name)

    def newest_of(self, counts: Callable[[str], bool]) -> ModelInfo | None:
        """Return the newest model whose name counts, or None."""
        return next((model for model in reversed(self._models.values()) if counts(model.name)), None)

    def observe(self, answers: Sequence[ModelInfo], is_tick: bool = True) -> None:
        """Record what the workers serve; at a tick, what they no longer serve.

        Without any answer nothing changes: the same workers may come back.
        """
        # workers of one model may have caches of several sizes: what is promised must fit into each
        longest_first = sorted(answers, key=lambda answer: answer.context_length, reverse=True)
        by_fingerprint = {answer.fingerprint: answer for answer in longest_first}
        # of several that are new at once the most frequent one counts as the newest
        counts = Counter(answer.fingerprint for answer in answers)
        for fingerprint in sorted(by_fingerprint, key=counts.__getitem__):
            self._models[fingerprint] = by_fingerprint[fingerprint]
            self._num_missed[fingerprint] = 0
        if by_fingerprint and is_tick:
            self._forget(self._models.keys() - by_fingerprint.keys())

    def _forget(self, missing: Iterable[str]) -> None:
        for fingerprint in missing:
            self._num_missed[fingerprint] += 1
            if self._num_missed[fingerprint] >= FORGET_AFTER:
                del self._models[fingerprint], self._num_missed[fingerprint]


class WorkerCapabilities:
    """What the workers answered last, kept up to date by `watch`."""

    def __init__(
        self,
        target: TargetWorkers,
        draft: DraftWorkers | None,
        tokenizer_fingerprint: str,
        canary: Canary | None = None,
    ) -> None:
        self._canary = canary
        self._target_workers, self._draft_workers = target, draft
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._targets = ServedModels()
        self._drafters: Mapping[str, OfferedDrafter] = {}  # also those that do not answer now
        self._draft_answers = False
        self._changed = asyncio.Event()
        target.pool.on_change.append(self._changed.set)
        if draft:
            draft.pool.on_change.append(self._changed.set)

    @property
    def target(self) -> ModelInfo:
        """The target model of new sessions, but for a canary's share.

        Raises UnavailableError before one answered, ModelMismatchError as `check_tokenizer`.
        """
        newest = self._main
        if newest is None:
            raise UnavailableError("no target worker has answered yet; try again soon")
        self.check_tokenizer(newest)
        return newest

    def target_of(self, session_id: str) -> ModelInfo:
        """Return the target model for a session without text; raises as `target`.

        The canary's share has the others' while the canary does not answer, or where it is not what clients are told
        of the model: with another tokenizer, or a shorter context.
        """
        main = self.target
        if self._canary and self._canary.is_for(session_id):
            found = self._targets.newest_of(self._canary.name.__eq__)
            if found and self._can_stand_for(found, main):
                return found
        return main

    def _can_stand_for(self, canary: ModelInfo, main: ModelInfo) -> bool:
        """Return whether a canary answers now, and takes every request that the main model takes."""
        answering = {description.fingerprint for description in self._target_workers.pool.descriptions}
        return (
            canary.fingerprint in answering
            and canary.tokenizer_fingerprint == main.tokenizer_fingerprint
            and canary.vocab_size == main.vocab_size
            and canary.context_length >= main.context_length
        )

    @property
    def _main(self) -> ModelInfo | None:
        """The newest model that is not the canary; the canary where it is alone."""
        others = self._targets.newest_of(self._canary.name.__ne__) if self._canary else None
        return others or self._targets.newest

    def check_tokenizer(self, model: ModelInfo) -> None:
        """Raise ModelMismatchError if a target model has another tokenizer than this coordinator."""
        if model.tokenizer_fingerprint != self._tokenizer_fingerprint:
            problem = f"the target {model.name} has another tokenizer than this coordinator"
            raise ModelMismatchError(f"{problem}; start the coordinator with --tokenizer {model.name}")

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that answer now."""
        return tuple(self._drafters) if self._draft_answers else ()

    def session_drafters(self, name: str | None) -> Mapping[str, OfferedDrafter]:
        """Return the drafters that a session may use: those that are named (`a+b`), else all that fit the target.

        Empty while no draft worker has answered. Raises InvalidArgumentError for a name that is not on offer,
        ModelMismatchError if a tokenizer differs: the named drafter's, or all of them.
        """
        if not self._drafters:
            return {}
        named = parts_of(name) if name else list(self._drafters)
        if any(part not in self._drafters for part in named):
            raise InvalidArgumentError({"speculation.drafter": f"is {name!r}; on offer: {', '.join(self._drafters)}"})
        wanted = {part: self._drafters[part] for part in named}
        fitting = {key: offered for key, offered in wanted.items() if self._fits(offered.model)}
        if not fitting or (name and len(fitting) < len(wanted)):
            model = next(offered.model for key, offered in wanted.items() if key not in fitting)
            remedy = f"start the draft worker with --target-tokenizer {self.target.name}, or set num_draft_tokens to 0"
            raise ModelMismatchError(
                f"the draft {model.name} and the target {self.target.name} differ in tokenizer; {remedy}"
            )
        return fitting

    def _fits(self, model: ModelInfo) -> bool:
        """Return whether a draft's tokens are the target's; a drafter without a model has no tokenizer of its own."""
        return model.tokenizer_fingerprint in ("", self._tokenizer_fingerprint)

    async def ready(self) -> None:
        """Return once a target worker answered, and all workers of both kinds were asked."""
        pools = [workers.pool for workers in (self._target_workers, self._draft_workers) if workers]
        while not (self._targets.newest and all(pool.was_asked for pool in pools)):
            await self._next_change()
            if self._target_workers.pool.was_asked:
                self._observe_targets()
        self._observe_drafts()

    async def _next_change(self) -> None:
        await self._changed.wait()
        self._changed.clear()

    def ask_soon(self) -> None:
        """Have each worker asked what it serves: what was known of one was wrong."""
        for worker in self._target_workers.pool.workers.values():
            worker.suspected.set()

    async def watch(self) -> None:
        """Follow what the workers say, forever."""
        while True:
            is_tick = await self._wait()
            self._observe_targets(is_tick)
            self._observe_drafts()

    async def _wait(self) -> bool:
        """Wait for the next tick, or until workers have changed and those that change with them; return which."""
        try:
            async with asyncio.timeout(REFRESH_S):
                await self._changed.wait()
        except TimeoutError:
            return True
        await asyncio.sleep(MIN_WAIT_S)
        self._changed.clear()
        return False

    def _observe_targets(self, is_tick: bool = False) -> None:
        before = self._main
        self._targets.observe(self._target_workers.pool.descriptions, is_tick)
        newest = self._main
        if newest and newest != before:
            get_logger().info("target_model", name=newest.name, fingerprint=newest.fingerprint)

    def _observe_drafts(self) -> None:
        offers = self._draft_workers.pool.descriptions if self._draft_workers else []
        did_answer, self._draft_answers = self._draft_answers, bool(offers)
        self._drafters = offers[0] if offers else self._drafters
        if did_answer != self._draft_answers:
            get_logger().info("draft_workers", answering=self._draft_answers, drafters=list(self._drafters))
