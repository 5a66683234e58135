"""Drafting with an EAGLE-3 head, which reads hidden states of the target and drafts token after token.

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


class Eagle3Settings(HeadSettings):
    """Settings of the drafter `eagle3`."""

    eagle3_head: str | None = Field(None, description="hub id or folder of the head; needed for the drafter `eagle3`")


def check(settings: Eagle3Settings) -> None:
    """Raise ValueError where the head or its target is missing."""
    check_head(settings, "eagle3", settings.eagle3_head)


async def build(settings: Eagle3Settings, server: Server, stack: AsyncExitStack) -> "HeadDrafter":
    """Load the head and start its thread. Raises ValueError where it cannot be used."""
    from draft_service.heads.build import build_drafter

    assert settings.eagle3_head, "checked at the start"
    return await build_drafter(KIND.name, settings.eagle3_head, settings, server, stack)


KIND = DrafterKind("eagle3", Eagle3Settings, build, check, lambda settings: bool(settings.eagle3_head))
