"""Starting a draft model: loaded, described, and its engine running."""

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from tokenizers import Tokenizer

from draft_service.drafter import Drafter
from draft_service.metrics import METRICS
from draft_service.model.drafter import ModelDrafter
from draft_service.model.reencoding import ReencodedText, Reencoder
from draft_service.model.settings import DraftModelSettings
from draft_service.model.tasks import DraftProcessor
from draft_service.model.translating import TranslatingDrafter, TranslatingProcessor
from draft_service.model.vocabulary import shared_vocabulary
from specdec.engine import EngineError, EngineLoop, LanguageModel
from specdec.serving.grammars import GrammarCompiler
from specdec.serving.model_worker import eos_token_ids, load_model, new_engine, running
from specdec.serving.server import Server
from specdec.serving.telemetry import get_logger
from specdec.serving.tokenizer import fingerprint, load_tokenizer, num_token_ids, tokenizer_folder
from specdec.types import ModelInfo


async def started_drafter(
    name: str,
    settings: DraftModelSettings,
    model: str,
    server: Server,
    stack: AsyncExitStack,
    *,
    layers: Sequence[int] = (),
    target_tokenizer: str | None = None,
) -> Drafter:
    """Return a drafter called `name` that runs a model, or only some of its layers.

    `target_tokenizer` names the target, whose tokenizer may be another than the model's. Raises ValueError.
    """
    start = partial(_running_engine, settings, server, stack)
    quantization = None if settings.draft_quantization == "none" else settings.draft_quantization
    target = load_tokenizer(target_tokenizer) if target_tokenizer else None
    try:
        loaded, info = await load_model(settings, model, layers, quantization)
        if target and target_tokenizer and fingerprint(target) != info.tokenizer_fingerprint:
            eos = eos_token_ids(tokenizer_folder(target_tokenizer))
            grammars = GrammarCompiler(target.to_str, num_token_ids(target), eos)
            return await _translating(name, settings, loaded, info, target, load_tokenizer(model), start, grammars)
        grammars = GrammarCompiler(lambda: load_tokenizer(model).to_str(), info.vocab_size, info.eos_token_ids)
        num_outcomes = settings.draft_ahead_outcomes if settings.draft_ahead else 0
        processor = DraftProcessor(info.vocab_size, settings.support_mass, settings.support_max)
        return ModelDrafter(name, await start(loaded, processor), info, num_outcomes, grammars)
    except EngineError as error:
        raise ValueError(str(error)) from error


async def _translating(
    name: str,
    settings: DraftModelSettings,
    model: LanguageModel,
    info: ModelInfo,
    target: Tokenizer,
    draft: Tokenizer,
    start: Callable[[LanguageModel, DraftProcessor], Awaitable[EngineLoop[Any]]],
    grammars: GrammarCompiler,
) -> TranslatingDrafter:
    """Return a drafter with a model of another tokenizer. Raises ValueError where the two have nothing in common."""
    draft.encode_special_tokens = True  # text that looks like a special token is text
    vocabulary = shared_vocabulary(target, draft, info.vocab_size)
    get_logger().info("vocabularies", num_target=vocabulary.num_target_ids, num_shared=len(vocabulary.draft_of))
    reencoder = Reencoder(target, draft, info.vocab_size)
    engine = await start(model, TranslatingProcessor(vocabulary, settings.support_mass, settings.support_max))
    seen_as = replace(info, tokenizer_fingerprint=fingerprint(target), eos_token_ids=())
    return TranslatingDrafter(name, engine, seen_as, vocabulary, partial(ReencodedText, reencoder), grammars)


async def _running_engine(
    settings: DraftModelSettings, server: Server, stack: AsyncExitStack, model: LanguageModel, processor: DraftProcessor
) -> EngineLoop[Any]:
    """Return an engine that runs until the stack is closed. Raises EngineError for settings that clash."""
    engine = new_engine(settings, model, processor)
    METRICS.watch(engine)
    await stack.enter_async_context(running(engine, server, settings.stalled_s))
    return engine
