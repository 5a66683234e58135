"""One model in several processes: the worker, which serves, and its followers, which only compute.

The worker starts its followers itself (`--tensor-parallel`), or a launcher such as torchrun has started all of them. A
worker whose follower ends cannot go on: it ends too, with an error. A follower ends with its worker.
"""

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress

from specdec.engine import EngineError, LanguageModel
from specdec.engine.parallel import END, RENDEZVOUS_VARIABLE, Group, GroupLost, Place, follow, place_in
from specdec.engine.pretrained import check_shareable, choose_device
from specdec.serving.background import in_background
from specdec.serving.process import CannotServe, collect_garbage_again, unless_failed, yield_to_others
from specdec.serving.server import Server
from specdec.serving.settings import ENV_PREFIX, SharedModelSettings
from specdec.serving.telemetry import configure_logs, get_logger

END_S = 5.0  # that followers get to end; they have nothing to do by then


def launched_place(settings: SharedModelSettings, environment: Mapping[str, str]) -> Place | None:
    """Return the place that a launcher gave this process. Raises CannotServe where the settings do not fit it."""
    place = place_in(environment)
    if place is not None and settings.tensor_parallel not in (1, place.size):
        raise CannotServe(
            f"--tensor-parallel is {settings.tensor_parallel}, but {place.size} processes were launched (WORLD_SIZE); "
            "leave it out, or launch as many"
        )
    return place


def follow_worker(
    settings: SharedModelSettings, program: str, place: Place, load: Callable[[Group], LanguageModel]
) -> None:
    """Be a follower until the worker ends; exit with 1 and one sentence if it dies, or if the model is refused."""
    name = f"{program} follower {place.rank}"
    yield_to_others(settings.niceness)
    configure_logs(name, settings.log_level, settings.log_format)
    try:
        group = Group(place, choose_device(settings.device))
        model = load(group)
        for number in (signal.SIGTERM, signal.SIGINT):  # a launcher sends them to all; the worker still drains
            signal.signal(number, signal.SIG_IGN)
        collect_garbage_again()
        get_logger().info("following", rank=place.rank, num_processes=place.size, pid=os.getpid())
        follow(model, group)
        group.close()
    except EngineError as error:
        sys.exit(f"{name}: {error}")


@asynccontextmanager
async def shared(settings: SharedModelSettings, server: Server, module: str, model: str) -> AsyncIterator[Group | None]:
    """Give the group that this worker leads, after starting its followers; None where it has none.

    Raises CannotServe if a follower ends meanwhile, ModelRefused where the model cannot be shared, GroupLost.
    """
    place = launched_place(settings, os.environ)
    if place is None and settings.tensor_parallel == 1:
        yield None
        return
    size = place.size if place else settings.tensor_parallel
    await in_background(lambda: check_shareable(model, size))
    if place is not None:
        async with _led(place, settings, server) as group:
            yield group
    else:
        with tempfile.TemporaryDirectory(prefix="specdec-") as folder:
            place = Place(0, size, 0, f"file://{folder}/rendezvous")
            async with _followers(place, settings, server, module), _led(place, settings, server) as group:
                yield group


@asynccontextmanager
async def _led(place: Place, settings: SharedModelSettings, server: Server) -> AsyncIterator[Group]:
    """Connect with the followers; at the end let them end too, unless something failed."""
    device = choose_device(settings.device)
    group = await unless_failed(server, in_background(lambda: Group(place, device)))
    yield group
    if not server.failure.done():
        await asyncio.to_thread(_end, group)


def _end(group: Group) -> None:
    try:
        group.send(END)
    except GroupLost as error:
        get_logger().error("followers_lost", error=str(error))
    group.close()


@asynccontextmanager
async def _followers(place: Place, settings: SharedModelSettings, server: Server, module: str) -> AsyncIterator[None]:
    """Run the processes of the other ranks on this machine; the server fails if one of them ends by itself."""
    followers = [await _start(module, _environment(settings, place, rank)) for rank in range(1, place.size)]
    watches = [asyncio.create_task(_watch(follower, server)) for follower in followers]
    patience_s = 0.0
    try:
        yield
        patience_s = 0.0 if server.failure.done() else END_S
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*(_stop(follower, patience_s) for follower in followers))


def _environment(settings: SharedModelSettings, place: Place, rank: int) -> dict[str, str]:
    """Return a follower's environment: the worker's settings, wherever they came from, and its place."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    values = settings.model_dump(mode="json", exclude_none=True)
    ours = {f"{ENV_PREFIX}{name.upper()}": str(value) for name, value in values.items()}
    launched = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(place.size)}
    return kept | ours | launched | {RENDEZVOUS_VARIABLE: place.rendezvous}


async def _start(module: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    """Start a follower, whose life is tied to this process's."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.serving.child", str(os.getpid()), module),
        stdin=asyncio.subprocess.DEVNULL,
        env=environment,
    )


async def _watch(follower: asyncio.subprocess.Process, server: Server) -> None:
    code = await follower.wait()
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    server.fail(f"a process that shares the model {how}; its log has the cause, a new start the remedy")


async def _stop(follower: asyncio.subprocess.Process, patience_s: float) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(patience_s):
            await follower.wait()
    if follower.returncode is None:
        follower.kill()
        await follower.wait()
