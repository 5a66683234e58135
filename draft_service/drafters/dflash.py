"""Drafting with a DFlash head, which reads hidden states of the target and drafts a block at once.

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


class DFlashSettings(HeadSettings):
    """Settings of the drafter `dflash`."""

    dflash_head: str | None = Field(None, description="hub id or folder of the head; needed for the drafter `dflash`")


def check(settings: DFlashSettings) -> None:
    """Raise ValueError where the head or its target is missing."""
    check_head(settings, "dflash", settings.dflash_head)


async def build(settings: DFlashSettings, server: Server, stack: AsyncExitStack) -> "HeadDrafter":
    """Load the head and start its thread. Raises ValueError where it cannot be used."""
    from draft_service.heads.build import build_drafter

    assert settings.dflash_head, "checked at the start"
    return await build_drafter(KIND.name, settings.dflash_head, settings, server, stack)


KIND = DrafterKind("dflash", DFlashSettings, build, check, lambda settings: bool(settings.dflash_head))
