"""The models behind this coordinator: what the target is, which drafters answer, and whether they fit together."""

import asyncio
from collections.abc import Mapping

from coordinator.draft import DraftWorkers
from coordinator.target import TargetWorkers
from specdec.errors import InvalidArgumentError, ModelMismatchError, SpecdecError, UnavailableError
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo

ASK_AGAIN_S = 1.0  # while a kind of worker does not answer
REFRESH_S = 15.0  # while it does


class WorkerCapabilities:
    """What the workers said of themselves, kept up to date by `watch`."""

    def __init__(self, target: TargetWorkers, draft: DraftWorkers | None, tokenizer_fingerprint: str) -> None:
        self._target_workers, self._draft_workers = target, draft
        self._fingerprint = tokenizer_fingerprint
        self._target: ModelInfo | None = None
        self._known: Mapping[str, ModelInfo] = {}  # drafters, also those that do not answer now
        self._answering = False

    @property
    def target(self) -> ModelInfo:
        """The target model.

        Raises UnavailableError before it was heard of, ModelMismatchError if it has another tokenizer.
        """
        if self._target is None:
            raise UnavailableError("no target worker has answered yet; try again soon")
        if self._target.tokenizer_fingerprint != self._fingerprint:
            problem = f"the target {self._target.name} has another tokenizer than this coordinator"
            raise ModelMismatchError(f"{problem}; start the coordinator with --tokenizer {self._target.name}")
        return self._target

    @property
    def drafters(self) -> tuple[str, ...]:
        """The drafters that answer now."""
        return tuple(self._known) if self._answering else ()

    def drafter(self, name: str | None) -> tuple[str, ModelInfo | None]:
        """Return a drafter, by default the first on offer, and its model; None while no draft worker was heard of.

        Raises InvalidArgumentError for a name that is not on offer, ModelMismatchError if its tokenizer is not the
        target's.
        """
        if not self._known:
            return name or "", None
        chosen = name or next(iter(self._known))
        if chosen not in self._known:
            raise InvalidArgumentError({"speculation.drafter": f"is {chosen!r}; on offer: {', '.join(self._known)}"})
        model = self._known[chosen]
        if model.tokenizer_fingerprint not in ("", self.target.tokenizer_fingerprint):
            remedy = "serve a draft of the target's family, or set num_draft_tokens to 0"
            raise ModelMismatchError(
                f"the draft {model.name} and the target {self.target.name} differ in tokenizer; {remedy}"
            )
        return chosen, model

    async def ready(self) -> None:
        """Return once the target answered, and the draft workers had one chance to."""
        while not await self._ask_target():  # noqa: ASYNC110  # there is no event: the other side is a network away
            await asyncio.sleep(ASK_AGAIN_S)
        await self._ask_draft()

    async def watch(self) -> None:
        """Keep asking, for ever."""
        while True:
            await asyncio.sleep(REFRESH_S if self._answering or not self._draft_workers else ASK_AGAIN_S)
            await self._ask_target()
            await self._ask_draft()

    async def _ask_target(self) -> bool:
        try:
            self._target = await self._target_workers.describe()
        except SpecdecError as error:
            get_logger().warning("target_unavailable", reason=error.reason)
            return False
        return True

    async def _ask_draft(self) -> None:
        if self._draft_workers is None:
            return
        was_answering = self._answering
        try:
            self._known = await self._draft_workers.describe()
            self._answering = True
        except SpecdecError:
            self._answering = False
        if was_answering != self._answering:
            get_logger().info("draft_workers", answering=self._answering, drafters=list(self._known))
