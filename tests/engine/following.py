"""A second process for tests of models that two processes share.

`python -m tests.engine.following RENDEZVOUS` reads a line of JSON for each model to follow: folder and options.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from specdec.engine import EngineError, LanguageModel
from specdec.engine.parallel import END, Group, Place, follow, leading
from tests.engine.tiny_models import load

SIZE = 2


class Pair:
    """This process and one that follows it."""

    def __init__(self, group: Group, process: asyncio.subprocess.Process) -> None:
        self.group = group
        self._process = process

    @asynccontextmanager
    async def loaded(
        self, folder: Path, other: dict[str, Any] | None = None, **options: Any
    ) -> AsyncIterator[LanguageModel]:
        """Let both load a model, with `other` settings in the follower; give it to this process, which leads."""
        assert self._process.stdin is not None
        told = {"folder": str(folder), **options, **(other or {})}
        self._process.stdin.write(json.dumps(told).encode() + b"\n")
        await self._process.stdin.drain()
        yield leading(load(folder, group=self.group, **options), self.group)
        self.group.send(END)


@asynccontextmanager
async def paired(folder: Path) -> AsyncIterator[Pair]:
    """Start the other process, which meets this one in `folder`; it must end without an error."""
    rendezvous = f"file://{folder}/rendezvous"
    command = (sys.executable, "-m", "tests.engine.following", rendezvous)
    process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
    group = await asyncio.to_thread(Group, Place(0, SIZE, 0, rendezvous), torch.device("cpu"))
    try:
        yield Pair(group, process)
    finally:
        group.close()
        await process.communicate(b"")  # the end of its list of models
    assert process.returncode == 0


def main() -> None:
    """Follow one model after the other, until there is no more; one that is refused is left out."""
    torch.set_num_threads(1)
    group = Group(Place(1, SIZE, 1, sys.argv[1]), torch.device("cpu"))
    for line in sys.stdin:
        options = json.loads(line)
        try:
            model = load(Path(options.pop("folder")), group=group, **options)
        except EngineError as error:
            print(f"refused: {error}", file=sys.stderr)
            continue
        follow(model, group)
    group.close()


if __name__ == "__main__":
    main()
