"""Settings of the draft worker: its own, and those of every registered drafter."""

from collections.abc import Mapping
from typing import Any, cast

from pydantic import Field, create_model

from draft_service.drafter import DrafterKind
from draft_service.registry import registered
from specdec.serving.settings import Port, ServiceSettings

BY_DEFAULT = ("eagle3", "dflash", "medusa", "model", "self", "recycle", "ngram", "suffix")


class DraftWorkerSettings(ServiceSettings):
    """The settings that every draft worker has: `python -m draft_service`."""

    drafters: str | None = Field(None, description="drafters on offer, comma separated, default first")
    port: Port = Field(50052, description="port to listen on; 0 takes a free one and logs it")


def settings_for(kinds: Mapping[str, DrafterKind]) -> type[DraftWorkerSettings]:
    """Return the settings of a draft worker that can offer these drafters."""
    bases: Any = (DraftWorkerSettings, *dict.fromkeys(kind.settings for kind in kinds.values()))
    names, unset = ", ".join(kinds), ",".join(BY_DEFAULT)
    description = f"drafters on offer, comma separated, default first: {names}; unset: {unset}, less what lacks a model"
    drafters: Any = (str | None, Field(None, description=description))
    return cast("type[DraftWorkerSettings]", create_model("DraftSettings", __base__=bases, drafters=drafters))


def chosen_kinds(settings: DraftWorkerSettings, kinds: Mapping[str, DrafterKind]) -> list[DrafterKind]:
    """Return the drafters on offer, the default first. Raises ValueError for unknown ones and settings that clash."""
    if settings.drafters is None:
        names = [name for name in BY_DEFAULT if name in kinds and kinds[name].is_equipped(settings)]
    else:
        names = list(dict.fromkeys(name.strip() for name in settings.drafters.split(",")))
    for name in names:
        if name not in kinds:
            raise ValueError(f"--drafters names {name!r}; there are: {', '.join(kinds)}")
        kinds[name].check(settings)
    return [kinds[name] for name in names]


SETTINGS = settings_for(registered())
