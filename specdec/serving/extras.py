"""What to install where a package that a service imports is missing: one sentence in place of a traceback.

Each service's `__main__` imports this first. It changes nothing in a process that runs another program.
"""

import sys
from pathlib import Path
from types import TracebackType

EXTRAS = {
    "coordinator": "'specdec[server,embedded]'",
    "target_service": "'specdec[models]'",
    "draft_service": "'specdec[models]', or 'specdec[server]' for n-grams alone",
}


def name_extras(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print what to install for a module that is missing; show any other error as Python does."""
    if not isinstance(error, ModuleNotFoundError):
        sys.__excepthook__(kind, error, trace)
        return
    problem = f"the package of the module {error.name} is not installed"
    print(f"{PROGRAM}: {problem}; run: pip install {EXTRAS[PROGRAM]}", file=sys.stderr)


PROGRAM = Path(sys.argv[0]).parent.name
if PROGRAM in EXTRAS:
    sys.excepthook = name_extras
