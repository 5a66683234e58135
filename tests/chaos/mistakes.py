"""Planted mistakes: what chaos must find. Some are made by a process of the service, some by a client."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from tests.simulation.mistakes import Change

# of a process: the places of production code that are changed in it
OF_PROCESSES: dict[str, tuple[Change, ...]] = {
    "": (),
    "a target that scores with other weights": (
        Change(
            "specdec.serving.model_worker:describe",
            "fingerprint=model_fingerprint(folder, _numbers(model, layers, quantization)),",
            'fingerprint="0" * 32,',
        ),
    ),
    "a coordinator that shows what is not committed": (
        Change(
            "coordinator.running:RunningGeneration._publish",
            "await self._store.commit(self.session_id, self.epoch, played, statistics)",
            "pass",
        ),
    ),
}
OF_CLIENTS = ("emits a chunk again", "loses a chunk", "changes a token")


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Let this process make a mistake while the context lasts."""
    with ExitStack() as stack:
        for change in OF_PROCESSES[name]:
            stack.enter_context(change.made())
        yield
