"""What a service's process does before it imports anything else; each service's `__main__` imports this first.

Where a package is missing it says what to install, in one sentence in place of a traceback. The garbage collector
rests until the service is ready (specdec/serving/server.py): torch and transformers make a million objects that stay,
and to look at them again and again took a fifth of the import's time. Another program is left as it is.
"""

import gc
import sys
from pathlib import Path
from types import TracebackType

EXTRAS = {
    "coordinator": "'specdec[server,embedded]'",
    "gateway": "'specdec[gateway]'",
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
    gc.disable()
