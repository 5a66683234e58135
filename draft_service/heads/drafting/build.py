"""Makes the drafter of a head: loads it, checks that it fits the target, and starts its thread."""

import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draft_service.heads.drafting.dflash import DFlashRunner
from draft_service.heads.drafting.drafter import HeadDrafter
from draft_service.heads.drafting.eagle3 import Eagle3Runner
from draft_service.heads.drafting.loop import HeadLoop, Runner
from draft_service.heads.drafting.medusa import MedusaRunner
from draft_service.heads.drafting.predictions import Predictions
from draft_service.heads.formats.dflash import load_dflash
from draft_service.heads.formats.eagle3 import load_eagle3
from draft_service.heads.formats.medusa import load_medusa
from draft_service.heads.formats.target import TargetFolder, target_folder
from draft_service.heads.settings import HeadSettings
from draft_service.heads.vocabulary import DraftVocabulary
from specdec.engine import EngineError
from specdec.engine.pretrained import choose_device, choose_dtype
from specdec.serving.background import in_background
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import eos_token_ids, running
from specdec.serving.server import Server
from specdec.serving.telemetry import get_logger
from specdec.serving.tokenizer import fingerprint, load_tokenizer, num_token_ids, tokenizer_folder
from specdec.types import ModelInfo


@dataclass(frozen=True, slots=True)
class HeadParts:
    """What a head is loaded from, and how it is run."""

    folder: str
    target: TargetFolder
    vocab_size: int  # the end of the target's real vocabulary
    device: torch.device
    dtype: torch.dtype
    settings: HeadSettings

    @property
    def draws(self) -> bool:
        """Whether chains are drawn."""
        return self.settings.head_shape == "chain"

    def predictions(self, vocabulary: DraftVocabulary) -> Predictions:
        """Return what reads the head's logits."""
        return Predictions(vocabulary, self.vocab_size, self.settings.support_mass, self.settings.support_max)


def eagle3_runner(parts: HeadParts) -> Eagle3Runner:
    """Load an EAGLE-3 head. Raises HeadRefused."""
    head = load_eagle3(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    return Eagle3Runner(head, parts.predictions(head.vocabulary), parts.draws, parts.settings.kv_cache_bytes)


def dflash_runner(parts: HeadParts) -> DFlashRunner:
    """Load a DFlash head. Raises HeadRefused."""
    head = load_dflash(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    return DFlashRunner(head, parts.predictions(head.vocabulary), parts.draws, parts.settings.kv_cache_bytes)


def medusa_runner(parts: HeadParts) -> MedusaRunner:
    """Load Medusa heads. Raises HeadRefused."""
    head = load_medusa(parts.folder, parts.target.folder, parts.dtype).to(parts.device)
    predictions, max_bytes = parts.predictions(head.vocabulary), parts.settings.kv_cache_bytes
    return MedusaRunner(head, parts.target.num_layers, predictions, parts.draws, max_bytes)


async def build_drafter(
    name: str,
    folder: str,
    settings: HeadSettings,
    new_runner: Callable[[HeadParts], Runner[Any]],
    server: Server,
    stack: AsyncExitStack,
) -> HeadDrafter:
    """Return the drafter, its thread running. Raises ValueError for a head that cannot be used."""
    torch.set_num_threads(settings.num_threads)
    begin = time.perf_counter()
    get_logger().info("loading", head=folder, target=settings.head_target)
    try:
        runner, model = await in_background(lambda: load_runner(folder, settings, new_runner))
    except EngineError as error:
        raise ValueError(str(error)) from error
    loop = HeadLoop(runner)
    get_logger().info("loaded", head=folder, elapsed_s=round(time.perf_counter() - begin, 2))
    await stack.enter_async_context(running(loop, server, settings.stalled_s))
    return HeadDrafter(name, runner, loop, model, _grammars(settings, model))


def _grammars(settings: HeadSettings, model: ModelInfo) -> GrammarCompiler:
    target = settings.head_target
    assert target, "checked at the start"
    eos = eos_token_ids(tokenizer_folder(target))
    return GrammarCompiler(lambda: load_tokenizer(target).to_str(), model.vocab_size, eos)


def load_runner(
    folder: str, settings: HeadSettings, new_runner: Callable[[HeadParts], Runner[Any]]
) -> tuple[Runner[Any], ModelInfo]:
    """Return what runs a head, and its description. Raises HeadRefused, TokenizerMissing or ModelRefused."""
    assert settings.head_target, "checked at the start"
    target = target_folder(settings.head_target)
    tokenizer = load_tokenizer(settings.head_target)
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device, target.hidden_size)
    vocab_size = min(num_token_ids(tokenizer), target.vocab_size)
    runner = new_runner(HeadParts(folder, target, vocab_size, device, dtype, settings))
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
