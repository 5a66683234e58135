"""Drafting with some of the target's own layers, which needs no training (Zhang et al. 2024, "Draft & Verify").

The draft reads the target's embeddings and ends in its norm and head; the layers between that are left out are not even
loaded. `python -m models.find_layers` finds which to keep. Everything that needs torch is imported when the drafter is
built.
"""

import re
from contextlib import AsyncExitStack

from pydantic import Field

from draft_service.drafter import Drafter, DrafterKind
from draft_service.model.settings import DraftModelSettings
from specdec.serving.server import Server

MAX_LAYERS = 10_000  # so that a range cannot take the memory
REMEDY = "give numbers and ranges like 0,1,2,5-9, counted from 0; python -m models.find_layers finds good ones"


class SelfDrafterSettings(DraftModelSettings):
    """Settings of the drafter `self`."""

    self_model: str | None = Field(None, description="hub id or folder of the target; needed for the drafter `self`")
    self_layers: str | None = Field(None, description="its layers that the drafter `self` keeps, like 0,1,2,5-9")


def layer_numbers(text: str) -> tuple[int, ...]:
    """Return the layers that a text like 0,1,2,5-9 names, in ascending order. Raises ValueError."""
    layers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,5})(?:-(\d{1,5}))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last or last >= MAX_LAYERS:
            raise ValueError(f"--self-layers has {part.strip()!r}; {REMEDY}")
        layers.update(range(first, last + 1))
    return tuple(sorted(layers))


def check(settings: SelfDrafterSettings) -> None:
    """Raise ValueError where there is no target, or no layers are named."""
    if not settings.self_model:
        raise ValueError("--self-model is missing: the drafter `self` needs the target's folder or hub id")
    if settings.self_layers is None:
        raise ValueError(f"--self-layers is missing: the drafter `self` needs layers to keep; {REMEDY}")
    layer_numbers(settings.self_layers)


async def build(settings: SelfDrafterSettings, server: Server, stack: AsyncExitStack) -> Drafter:
    """Load the layers and start their engine. Raises ValueError for layers that there are not."""
    from draft_service.model.start import started_drafter

    assert settings.self_model, "checked at the start"
    assert settings.self_layers, "checked at the start"
    layers = layer_numbers(settings.self_layers)
    return await started_drafter(KIND.name, settings, settings.self_model, server, stack, layers=layers)


KIND = DrafterKind("self", SelfDrafterSettings, build, check, lambda settings: bool(settings.self_model))
