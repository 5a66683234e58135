"""Loads the head that the target worker drafts with itself."""

import time

from specdec.engine import EngineError, LanguageModel
from specdec.engine.quantized import has_fast_int8
from specdec.heads.drafting.loading import HeadParts, load_runner
from specdec.heads.formats.files import HeadRefused
from specdec.heads.formats.target import target_folder
from specdec.serving.background import in_background
from specdec.serving.telemetry import get_logger
from specdec.types import ModelInfo
from target_service.own_head import OwnHead
from target_service.settings import TargetSettings

HEAD_SHARE = 8  # the cache's part of memory is so many times what the head keeps of all sessions together


async def load_head(settings: TargetSettings, model: LanguageModel, info: ModelInfo) -> OwnHead:
    """Load it on a separate thread. Raises EngineError for a head that does not fit the model."""
    assert settings.head
    folder, begin = settings.head, time.perf_counter()
    get_logger().info("loading", head=folder)
    try:
        runner = await in_background(
            lambda: load_runner(
                settings.head_kind,
                HeadParts(
                    folder,
                    target_folder(settings.model),
                    info.vocab_size,
                    model.device,
                    model.dtype,
                    max_bytes=settings.kv_cache_bytes // HEAD_SHARE,
                    quantization="int8" if has_fast_int8(model.device) else None,  # a draft may be any
                ),
            )
        )
    except HeadRefused as error:
        raise EngineError(str(error)) from error
    get_logger().info("loaded", head=folder, elapsed_s=round(time.perf_counter() - begin, 2))
    return OwnHead(runner)
