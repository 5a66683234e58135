"""All of specdec on this machine, each service in its own process, on loopback: what `specdec up` runs.

    async with running(Options(target="models/target", draft="models/draft"), print_line) as stack:
        client = AsyncClient(stack.address)

Workers first, on free ports; once they serve, the coordinator; once it serves, one token as proof, and then the gateway
if one is wanted. They end in the other order: each lets its streams finish while what it calls still serves.
"""

from specdec.serving.local.commands import (
    Command,
    coordinator_command,
    default_threads,
    environment_of,
    gateway_command,
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
    "gateway_command",
    "running",
    "worker_commands",
]
