"""All of specdec on this machine, each service in its own process, on loopback: what `specdec up` runs.

    async with running(Options(target="models/target", draft="models/draft"), print_line) as stack:
        client = AsyncClient(stack.address)

Workers first, on free ports; once they serve, the coordinator; once it serves, one token as proof. They end in the
other order: the coordinator lets its streams finish, then the workers are not needed.
"""

from specdec.serving.local.commands import (
    Command,
    coordinator_command,
    default_threads,
    environment_of,
    worker_commands,
)
from specdec.serving.local.options import ADDRESS_VARIABLE, HEADS, MODEL_FREE, NO_DRAFT, CannotRun, Options
from specdec.serving.local.progress import Progress
from specdec.serving.local.stack import Stack, running

__all__ = [
    "ADDRESS_VARIABLE",
    "HEADS",
    "MODEL_FREE",
    "NO_DRAFT",
    "CannotRun",
    "Command",
    "Options",
    "Progress",
    "Stack",
    "coordinator_command",
    "default_threads",
    "environment_of",
    "running",
    "worker_commands",
]
