"""Settings that the drafters with heads share."""

from typing import Literal

from pydantic import Field

from draft_service.support import SupportSettings


class HeadSettings(SupportSettings):
    """Settings of every head."""

    head_target: str | None = Field(None, description="hub id or folder of the target; needed for heads")
    head_shape: Literal["tree", "chain"] = Field(
        "tree", description="what heads draft: a tree of the most promising tokens, or a chain of drawn ones"
    )


def check_head(settings: HeadSettings, kind: str, folder: str | None) -> None:
    """Raise ValueError unless there are a head and its target."""
    if not folder:
        raise ValueError(f"--{kind}-head is missing: the drafter `{kind}` needs one; or leave --drafters unset")
    if not settings.head_target:
        raise ValueError(f"--{kind}-head needs --head-target, the target's folder or hub id")
