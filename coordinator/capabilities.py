"""What the workers of this coordinator serve: the target models, the drafters, and whether they fit together."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TypeVar

from coordinator.draft import DraftWorkers, OfferedDrafter
from coordinator.joint_names import parts_of
from coordinator.target import TargetWorkers
from specdec.errors import InvalidArgumentError, ModelMismatchError, SpecdecError, UnavailableError
from specdec.outside import REAL, Outside
from specdec.retry import RetryPolicy
from specdec.serving.telemetry import get_logger
from specdec.tls import handshake_problem
from specdec.types import ModelInfo

RETRY = RetryPolicy(first_s=0.2, maximum_s=2.0)  # while a kind of worker does not answer
REFRESH_S = 15.0  # while it does
MIN_WAIT_S = 0.5  # even if the workers seem to change more often
NUM_ROUTES = 8  # for finding targets: a model that half of the workers serve is missed in 1 of 256 refreshes
FORGET_AFTER = 2  # refreshes without an answer

T = TypeVar("T")


class ServedModels:
    """The target models that answer, the one that began to answer last at the end."""

    def __init__(self) -> None:
        self._models: OrderedDict[str, ModelInfo] = OrderedDict()  # by fingerprint
        self._num_missed: Counter[str] = Counter()  # by fingerprint: refreshes without its answer

    @property
    def newest(self) -> ModelInfo | None:
        """The model for new sessions; None before the first answer."""
        return next(reversed(self._models.values()), None)

    def observe(self, answers: Sequence[ModelInfo]) -> None:
        """Record the answers of one refresh. Without any answer nothing changes: the same workers may come back."""
        # workers of one model may have caches of several sizes: what is promised must fit into each
        longest_first = sorted(answers, key=lambda answer: answer.context_length, reverse=True)
        by_fingerprint = {answer.fingerprint: answer for answer in longest_first}
        # of several that are new at once the most frequent one counts as the newest
        counts = Counter(answer.fingerprint for answer in answers)
        for fingerprint in sorted(by_fingerprint, key=counts.__getitem__):
            self._models[fingerprint] = by_fingerprint[fingerprint]
            self._num_missed[fingerprint] = 0
        if by_fingerprint:
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
        outside: Outside = REAL,
    ) -> None:
        self._target_workers, self._draft_workers = target, draft
        self._tokenizer_fingerprint = tokenizer_fingerprint
        self._outside = outside
        self._targets = ServedModels()
        self._drafters: Mapping[str, OfferedDrafter] = {}  # also those that do not answer now
        self._draft_answers = False
        self._outdated = asyncio.Event()

    @property
    def target(self) -> ModelInfo:
        """The target model of new sessions.

        Raises UnavailableError before one answered, ModelMismatchError as `check_tokenizer`.
        """
        newest = self._targets.newest
        if newest is None:
            raise UnavailableError("no target worker has answered yet; try again soon")
        self.check_tokenizer(newest)
        return newest

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
        """Return once a target worker answered, and the draft workers were asked once."""
        num_failures = 0
        while not await self._ask_target():
            num_failures += 1
            await asyncio.sleep(self._pause_s(num_failures))
        await self._ask_draft()

    def ask_soon(self) -> None:
        """Request a refresh: the workers have changed."""
        self._outdated.set()

    async def watch(self) -> None:
        """Refresh periodically, forever."""
        num_failures = 0
        while True:
            await self._wait(self._pause_s(num_failures) if num_failures else REFRESH_S)
            answered = [await self._ask_target(), await self._ask_draft()]
            num_failures = 0 if all(answered) else num_failures + 1

    async def _wait(self, seconds: float) -> None:
        """Wait for a time, or until the workers have changed, but at least MIN_WAIT_S."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._outdated.wait()
                await asyncio.sleep(MIN_WAIT_S)
        self._outdated.clear()

    async def _ask_target(self) -> bool:
        before = self._targets.newest
        answers = await asyncio.gather(*map(self._target_model, range(NUM_ROUTES)))
        models = [answer for answer in answers if isinstance(answer, ModelInfo)]
        self._targets.observe(models)
        newest = self._targets.newest
        if newest and newest != before:
            get_logger().info("target_model", name=newest.name, fingerprint=newest.fingerprint)
        if not models:
            failures = [answer for answer in answers if isinstance(answer, SpecdecError)]
            reasons = sorted({failure.reason for failure in failures})
            cause = handshake_problem(failures[0].message) if failures else None
            get_logger().warning("target_unavailable", reasons=reasons, **({"cause": cause} if cause else {}))
        return bool(models)

    async def _target_model(self, route: int) -> ModelInfo | SpecdecError:
        try:
            return await _described(self._target_workers.describe(route))
        except SpecdecError as error:
            return error

    async def _ask_draft(self) -> bool:
        if self._draft_workers is None:
            return True
        did_answer = self._draft_answers
        try:
            self._drafters = await _described(self._draft_workers.describe())
            self._draft_answers = True
        except SpecdecError:
            self._draft_answers = False
        if did_answer != self._draft_answers:
            get_logger().info("draft_workers", answering=self._draft_answers, drafters=list(self._drafters))
        return self._draft_answers

    def _pause_s(self, num_failures: int) -> float:
        return RETRY.pause_s(num_failures, 0.0, self._outside.uniform()) or 0.0


async def _described(call: Awaitable[T]) -> T:
    """Return a worker's answer. Raises SpecdecError; no answer of a worker may end this coordinator."""
    try:
        return await call
    except SpecdecError:
        raise
    except Exception as error:
        get_logger().error("malformed_description", exc_info=error)
        raise UnavailableError("a worker described itself against the contract") from error
