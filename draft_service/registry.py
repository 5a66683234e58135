"""The registry of drafters: every module in `draft_service/drafters/` that has a `KIND`."""

import pkgutil
from collections.abc import Mapping
from importlib import import_module

from draft_service import drafters
from draft_service.drafter import DrafterKind


def registered() -> Mapping[str, DrafterKind]:
    """Return the kinds of drafters by name. Importing them loads no model library."""
    modules = [import_module(f"{drafters.__name__}.{found.name}") for found in pkgutil.iter_modules(drafters.__path__)]
    kinds = [module.KIND for module in modules if hasattr(module, "KIND")]
    return {kind.name: kind for kind in kinds}
