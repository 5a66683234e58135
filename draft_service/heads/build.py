"""Makes the drafter of a head: loads it, checks that it fits the target, and starts its thread."""

import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from draft_service.heads.drafter import HeadDrafter
from draft_service.heads.loop import HeadLoop
from draft_service.heads.settings import HeadSettings
from specdec.engine import EngineError
from specdec.engine.pretrained import choose_device, choose_dtype
from specdec.heads.drafting.loading import HeadParts, load_runner
from specdec.heads.drafting.runner import Runner
from specdec.heads.formats.target import target_folder
from specdec.serving.background import in_background
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import eos_token_ids, running, use_processors
from specdec.serving.server import Server
from specdec.serving.telemetry import get_logger
from specdec.serving.tokenizer import fingerprint, load_tokenizer, num_token_ids, tokenizer_folder
from specdec.types import ModelInfo


async def build_drafter(
    kind: str, folder: str, settings: HeadSettings, server: Server, stack: AsyncExitStack
) -> HeadDrafter:
    """Return the drafter of a head, its thread running. Raises ValueError for a head that cannot be used."""
    use_processors(settings)
    begin = time.perf_counter()
    get_logger().info("loading", head=folder, target=settings.head_target)
    try:
        runner, model = await in_background(lambda: load_head(kind, folder, settings))
    except EngineError as error:
        raise ValueError(str(error)) from error
    loop = HeadLoop(runner)
    get_logger().info("loaded", head=folder, elapsed_s=round(time.perf_counter() - begin, 2))
    await stack.enter_async_context(running(loop, server, settings.stalled_s))
    return HeadDrafter(kind, runner, loop, model, _grammars(settings, model))


def _grammars(settings: HeadSettings, model: ModelInfo) -> GrammarCompiler:
    target = settings.head_target
    assert target, "checked at the start"
    eos = eos_token_ids(tokenizer_folder(target))
    return GrammarCompiler(lambda: load_tokenizer(target).to_str(), model.vocab_size, eos)


def load_head(kind: str, folder: str, settings: HeadSettings) -> tuple[Runner[Any], ModelInfo]:
    """Return what runs a head, and its description. Raises HeadRefused, TokenizerMissing or ModelRefused."""
    assert settings.head_target, "checked at the start"
    target = target_folder(settings.head_target)
    tokenizer = load_tokenizer(settings.head_target)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device, target.hidden_size)
    vocab_size = min(num_token_ids(tokenizer), target.vocab_size)
    parts = HeadParts(
        folder,
        target,
        vocab_size,
        device,
        dtype,
        max_bytes=settings.kv_cache_bytes,
        draws=settings.head_shape == "chain",
        support_mass=settings.support_mass,
        support_max=settings.support_max,
        quantization=None if settings.draft_quantization == "none" else settings.draft_quantization,
    )
    runner = load_runner(kind, parts)
    info = ModelInfo(
        name=Path(folder).expanduser().name,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=vocab_size,
        context_length=int(getattr(target.config, "max_position_embeddings", 0) or 0),
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        hidden_size=runner.hidden_size,
    )
    return runner, info
