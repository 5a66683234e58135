"""All three services on loopback ports in the test's process: real servers and engines, no child processes."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import coordinator.draft
import coordinator.target
from coordinator.__main__ import SERVICE as GENERATION_SERVICE
from coordinator.__main__ import built as built_coordinator
from coordinator.checks import Checks
from coordinator.settings import CoordinatorSettings
from draft_service.__main__ import SERVICE as DRAFT_SERVICE
from draft_service.__main__ import built as built_draft
from draft_service.drafter import DrafterKind
from draft_service.registry import registered
from draft_service.settings import settings_for
from specdec.serving.server import serving
from target_service.__main__ import SERVICE as TARGET_SERVICE
from target_service.__main__ import built as built_target
from target_service.settings import TargetSettings

PATIENT_S = 100.0
WORKER = {"port": 0, "dtype": "float32", "kv_cache_bytes": 64 << 20, "drain_s": 0}


@dataclass(frozen=True, slots=True)
class Cluster:
    """Where the coordinator and the workers listen."""

    address: str
    target_address: str
    draft_address: str


@contextmanager
def patient_rounds() -> Iterator[float]:
    """Let workers be waited for as long as they take, also on a machine that stands still for seconds.

    A round whose draft is given up is plain: it makes other draws of a seed. Yields `draft_timeout_s`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coordinator.draft, "CHECKS", Checks(after_s=PATIENT_S, timeout_s=PATIENT_S, needs_other=False))
        patch.setattr(coordinator.draft, "MIN_ROUND_S", PATIENT_S)
        for workers in (coordinator.draft, coordinator.target):
            patch.setattr(workers, "DESCRIBE_TIMEOUT_S", PATIENT_S)
        yield PATIENT_S


@asynccontextmanager
async def cluster(
    target: Path,
    draft_model: Path | None = None,
    *,
    drafters: str = "",
    kinds: Mapping[str, DrafterKind] | None = None,
    draft_settings: Mapping[str, object] | None = None,
    target_settings: Mapping[str, object] | None = None,
    **settings: object,
) -> AsyncIterator[Cluster]:
    """Serve a target, drafters (`model` where there is a draft, and `ngram`), and a coordinator, all in float32."""
    torch.set_num_threads(1)
    drafters = drafters or ("model,ngram" if draft_model else "ngram")
    async with AsyncExitStack() as stack:
        drafting = {"drafters": drafters, **(draft_settings or {})}
        target_address = await stack.enter_async_context(serving_target(target, **(target_settings or {})))
        draft_address = await stack.enter_async_context(serving_draft(draft_model, kinds, **drafting))
        served = {"target": target_address, "draft": draft_address, "tokenizer": str(target)} | settings
        address = await stack.enter_async_context(serving_coordinator(**served))
        yield Cluster(address, target_address, draft_address)


@asynccontextmanager
async def serving_target(model: Path, **settings: object) -> AsyncIterator[str]:
    """Serve one target worker in float32; yield its address."""
    worker = TargetSettings.model_validate({"model": str(model), **WORKER} | settings)
    async with serving(worker, TARGET_SERVICE, lambda server: built_target(worker, server)) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def serving_draft(
    model: Path | None, kinds: Mapping[str, DrafterKind] | None = None, /, **settings: object
) -> AsyncIterator[str]:
    """Serve one draft worker in float32; yield its address."""
    offered = kinds or registered()
    values = {"model": str(model) if model else None, **WORKER} | settings
    worker = settings_for(offered).model_validate(values)
    async with serving(worker, DRAFT_SERVICE, lambda server: built_draft(worker, server, offered)) as server:
        yield f"127.0.0.1:{server.port}"


@asynccontextmanager
async def serving_coordinator(**settings: object) -> AsyncIterator[str]:
    """Serve one coordinator; yield its address."""
    own = CoordinatorSettings.model_validate({"port": 0, "drain_s": 0, "store": "memory"} | settings)
    async with serving(own, GENERATION_SERVICE, lambda server: built_coordinator(own, server)) as server:
        yield f"127.0.0.1:{server.port}"


def save_tokenizer(folder: Path, size: int, prefix: str = "t") -> Path:
    """Save a tokenizer of `size` words next to a model."""
    vocabulary = {f"{prefix}{number}": number for number in range(size)}
    Tokenizer(WordLevel(vocabulary, unk_token=f"{prefix}0")).save(str(folder / "tokenizer.json"))
    return folder
