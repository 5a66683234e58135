"""What both workers do with a model: load and describe it, run tasks on it, and watch that it makes progress."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

import torch
from transformers.utils.logging import disable_progress_bar

from specdec.engine import (
    CacheMiss,
    EngineError,
    EngineLoop,
    LanguageModel,
    Processor,
    Quantization,
    Task,
    load_language_model,
)
from specdec.engine.helpers import set_helpers
from specdec.engine.parallel import Group, leading
from specdec.errors import InternalError, UnavailableError
from specdec.serving.background import in_background
from specdec.serving.model_fingerprint import model_fingerprint
from specdec.serving.process import supervised
from specdec.serving.processors import spare_processors
from specdec.serving.server import Server
from specdec.serving.settings import ModelSettings
from specdec.serving.telemetry import get_logger
from specdec.serving.tokenizer import fingerprint, is_here, load_tokenizer, num_token_ids, tokenizer_folder
from specdec.types import ModelInfo

EXIT_AFTER_STALL_FACTOR = 2.0  # times as long as a stall: the process ends, and its supervisor starts another
MAX_FAILED_FORWARDS = 8  # in a row: a device in such a state does not recover within the process
WATCH_S = 0.25


async def load_model(
    settings: ModelSettings,
    name: str,
    layers: Sequence[int] = (),
    quantization: Quantization | None = None,
    group: Group | None = None,
) -> tuple[LanguageModel, ModelInfo]:
    """Load the model on a separate thread, so that health checks are answered meanwhile.

    `layers`, `quantization` and `group` as in `load_language_model`; this process leads the group. Raises ModelRefused,
    CacheFull, GroupLost or TokenizerMissing.
    """
    begin = time.perf_counter()
    get_logger().info("loading" if is_here(name) else "downloading", model=name)
    loaded = await in_background(lambda: _load(settings, name, layers, quantization, group))
    get_logger().info("loaded", model=name, elapsed_s=round(time.perf_counter() - begin, 2))
    return loaded


def _load(
    settings: ModelSettings,
    name: str,
    layers: Sequence[int],
    quantization: Quantization | None,
    group: Group | None,
) -> tuple[LanguageModel, ModelInfo]:
    model = language_model(settings, name, layers, quantization, group)
    info = describe(model, tokenizer_folder(name), layers, quantization or "")
    return (leading(model, group) if group else model), info


def use_processors(settings: ModelSettings) -> None:
    """Set this process's threads and helpers."""
    torch.set_num_threads(settings.num_threads)
    spare = spare_processors(settings.num_threads)
    set_helpers(spare if settings.num_helpers is None else settings.num_helpers)


def language_model(
    settings: ModelSettings,
    name: str,
    layers: Sequence[int] = (),
    quantization: Quantization | None = None,
    group: Group | None = None,
) -> LanguageModel:
    """Load what `load_language_model` does, as the settings say."""
    use_processors(settings)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # logs are events, one a line
    return load_language_model(
        name,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_bytes=settings.kv_cache_bytes,
        layers=layers,
        quantization=quantization,
        group=group,
    )


def describe(model: LanguageModel, folder: Path, layers: Sequence[int] = (), quantization: str = "") -> ModelInfo:
    """Return what there is to compare between a draft and a target."""
    tokenizer = load_tokenizer(str(folder))
    path = Path(model.name).expanduser()
    return ModelInfo(
        name=path.resolve().name if path.is_dir() else model.name,
        tokenizer_fingerprint=fingerprint(tokenizer),
        # a tokenizer may have more tokens than the model; ids that the model cannot read do not count
        vocab_size=min(num_token_ids(tokenizer), model.num_token_ids, model.vocab_size),
        # what does not fit into the whole cache can never be served
        context_length=min(model.context_length, model.cache.num_tokens),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        eos_token_ids=eos_token_ids(folder),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        fingerprint=model_fingerprint(folder, _numbers(model, layers, quantization)),
        quantization=quantization,
    )


def _numbers(model: LanguageModel, layers: Sequence[int], quantization: str) -> dict[str, str]:
    """Return what the output depends on besides the files."""
    numbers = {"dtype": str(model.dtype), "quantisation": quantization or "none"}
    return {**numbers, "layers": ",".join(map(str, layers))} if layers else numbers


def eos_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the tokens that end a text: what the model's makers generate with, else what its configuration says."""
    config = _read_json(folder / "config.json")
    for source in (_read_json(folder / "generation_config.json"), config, config.get("text_config") or {}):
        ids = source.get("eos_token_id")
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (int(ids),)
    return ()


def _read_json(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
    return content


def new_engine(settings: ModelSettings, model: LanguageModel, processor: Processor[Any]) -> EngineLoop[Any]:
    """Return the engine that the settings ask for, not yet started. Raises EngineError for settings that clash."""
    return EngineLoop(
        model,
        processor,
        max_batch_tokens=settings.max_batch_tokens,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        turn_s=settings.cache_turn_s,
    )


class Watched(Protocol):
    """A thread that computes, and says whether it makes progress; an engine is one."""

    @property
    def last_step_age_s(self) -> float: ...
    @property
    def num_failed_forwards(self) -> int: ...
    def is_stalled(self, max_age_s: float) -> bool: ...
    async def check(self) -> None: ...
    def start(self) -> None: ...
    def stop(self) -> None: ...


@asynccontextmanager
async def running(engine: Watched, server: Server, stalled_s: float, watch_s: float = WATCH_S) -> AsyncIterator[None]:
    """Run the engine. While a forward takes longer than `stalled_s` the server is not ready.

    The server fails, and with it the process, if the engine has ended, hangs for longer still, or fails each time.
    """
    engine.start()
    try:
        async with supervised(server, "engine watch", _watch(engine, server, stalled_s, watch_s)):
            yield
    finally:
        # a thread that hangs cannot be joined; it dies with the process
        if not engine.is_stalled(stalled_s):
            await asyncio.to_thread(engine.stop)


async def _watch(engine: Watched, server: Server, stalled_s: float, watch_s: float) -> None:
    was_well = True
    while True:
        await asyncio.sleep(watch_s)
        is_well = not engine.is_stalled(stalled_s) and await _passes_check(engine, stalled_s)
        if is_well != was_well:
            facts = {"step_age_s": engine.last_step_age_s, "num_failed_forwards": engine.num_failed_forwards}
            get_logger().error("engine_state", is_well=is_well, **facts)
            await server.set_ready(is_well)
        was_well = is_well
        if engine.is_stalled(EXIT_AFTER_STALL_FACTOR * stalled_s):
            server.fail("the engine has stopped, or hangs; the log has the cause, a new process the remedy")
        if engine.num_failed_forwards >= MAX_FAILED_FORWARDS:
            problem = f"the last {engine.num_failed_forwards} forwards have failed"
            server.fail(f"{problem}; the log has the cause, a new process the remedy")


async def _passes_check(engine: Watched, limit_s: float) -> bool:
    """Return whether the engine works, after a forward has failed: it may have been the fault of one session."""
    num_failed = engine.num_failed_forwards
    if num_failed:
        with suppress(EngineError, TimeoutError):  # what counts is whether another one has failed
            async with asyncio.timeout(limit_s):
                await engine.check()
    return engine.num_failed_forwards <= num_failed


async def run_task(engine: EngineLoop[Any], task: Task[Any]) -> Any:
    """Run a task to its end. Raises its SpecdecError or CacheMiss; UnavailableError where the engine has stopped."""
    try:
        return await engine.run(task)
    except CacheMiss:
        raise
    except EngineError as error:
        if engine.is_stalled(math.inf):
            raise UnavailableError("the engine has stopped; ask another worker") from error
        get_logger().error("task_failed", error=type(error).__name__)
        raise InternalError from error
