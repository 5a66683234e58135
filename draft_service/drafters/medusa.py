"""Drafting with Medusa heads, each of which predicts another token from the target's last hidden state.

Everything that needs torch is imported when the drafter is built.
"""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from pydantic import Field

from draft_service.drafter import DrafterKind
from draft_service.heads.settings import HeadSettings, check_head
from specdec.serving.server import Server

if TYPE_CHECKING:
    from draft_service.heads.drafter import HeadDrafter


class MedusaSettings(HeadSettings):
    """Settings of the drafter `medusa`."""

    medusa_head: str | None = Field(None, description="hub id or folder of the head; needed for the drafter `medusa`")


def check(settings: MedusaSettings) -> None:
    """Raise ValueError where the head or its target is missing."""
    check_head(settings, "medusa", settings.medusa_head)


async def build(settings: MedusaSettings, server: Server, stack: AsyncExitStack) -> "HeadDrafter":
    """Load the head and start its thread. Raises ValueError where it cannot be used."""
    from draft_service.heads.build import build_drafter

    assert settings.medusa_head, "checked at the start"
    return await build_drafter(KIND.name, settings.medusa_head, settings, server, stack)


KIND = DrafterKind("medusa", MedusaSettings, build, check, lambda settings: bool(settings.medusa_head))
