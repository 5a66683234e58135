"""Settings of a draft worker that also offers the toy."""

from benchmarks.toy_drafters import KINDS
from draft_service.settings import settings_for

SETTINGS = settings_for(KINDS)
