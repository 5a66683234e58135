"""The command `specdec watch`: looks at a service every few seconds, and draws what changed."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from specdec.arguments import checked
from specdec.client import AsyncClient
from specdec.errors import UnavailableError
from specdec.parameters import Number
from specdec.process_status import ProcessStatus
from specdec.terminal import in_colour, is_coloured
from specdec.watching.page import COLOURS, STATES, page
from specdec.watching.readings import Reading, reading

ASK_S = 10.0  # for one look; the service waits up to 3 s for a worker
DEFAULT_INTERVAL_S = 2.0
ONCE_S = 1.0  # between the two looks of a single page: rates need two
HOME, CLEAR_LINE, CLEAR_BELOW = "\x1b[H", "\x1b[K", "\x1b[J"  # ECMA-48
ENTER, LEAVE = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"  # a screen of its own, without a cursor
DESCRIPTION = (
    "Follow a running service: sessions, speed, acceptance by drafter, the store, refusals, and every worker with its "
    "state and load. Where it does not write to a terminal, and with --once, one page is printed. Where clients have "
    "tokens, the token has to be of a tenant that the coordinator counts as an operator (--operators)."
)
Command = Callable[[argparse.Namespace], Coroutine[Any, Any, None]]
Look = Callable[[], Coroutine[Any, Any, Sequence[ProcessStatus]]]
Connect = Callable[[argparse.Namespace], Any]


def add(
    commands: Any,
    finish: Callable[[argparse.ArgumentParser, Command], None],
    address: Callable[[str], str],
    connect: Connect,
) -> None:
    """Add the command; `address` checks one, `connect` gives a client that has connected, and its notice of outages."""
    watch = commands.add_parser("watch", help="follow a running service", description=DESCRIPTION)
    watch.add_argument("place", nargs="?", type=address, metavar="HOST:PORT", help="the same as --address")
    watch.add_argument("--once", action="store_true", help="print one page, and end")
    watch.add_argument("--json", action="store_true", help="print JSON: one object, on a terminal one for each look")
    watch.add_argument(
        "--interval-s",
        type=checked(Number(0, 3600, excludes_low=True, metavar="SECONDS")),
        default=DEFAULT_INTERVAL_S,
        metavar="SECONDS",
        help=f"between two looks (default: {DEFAULT_INTERVAL_S:g})",
    )
    finish(watch, lambda flags: run(flags, connect))


async def run(flags: argparse.Namespace, connect: Connect) -> None:
    """Look until interrupted, or once. Raises SpecdecError."""
    flags.address = flags.place or flags.address
    async with connect(flags) as (client, _):
        if flags.once or not sys.stdout.isatty():
            _print(flags, await _once(client))
        else:
            await _follow(flags, client)


def _print(flags: argparse.Namespace, seen: Reading) -> None:
    print(json.dumps(asdict(seen)) if flags.json else "\n".join([_title(flags.address), "", *page(seen)]), flush=True)


async def _once(client: AsyncClient) -> Reading:
    before, began_s = await client.get_status(timeout_s=ASK_S), time.monotonic()
    await asyncio.sleep(ONCE_S)
    return reading(before, await client.get_status(timeout_s=ASK_S), time.monotonic() - began_s)


async def _follow(flags: argparse.Namespace, client: AsyncClient) -> None:
    before, looked_s = await client.get_status(timeout_s=ASK_S), time.monotonic()
    screen = Screen(sys.stdout, is_coloured=is_coloured(sys.stdout, os.environ))
    with screen if not flags.json else _NoScreen():
        while True:
            await asyncio.sleep(flags.interval_s)
            try:
                after, now_s = await client.get_status(timeout_s=ASK_S), time.monotonic()
            except UnavailableError as error:
                screen.note(str(error))  # the page stays; the client connects again
                continue
            seen = reading(before, after, now_s - looked_s)
            before, looked_s = after, now_s
            if flags.json:
                _print(flags, seen)
            else:
                screen.draw([f"{_title(flags.address)}  every {flags.interval_s:g} s, Ctrl-C leaves", "", *page(seen)])


def _title(address: str) -> str:
    return f"specdec {address}  {time.strftime('%H:%M:%S')}"


class _NoScreen:
    def __enter__(self) -> None:
        """Leave the terminal as it is."""

    def __exit__(self, *_: object) -> None:
        """Nothing to give back."""


class Screen:
    """A terminal's other screen, on which each page is drawn over the one before."""

    def __init__(self, stream: TextIO, *, is_coloured: bool) -> None:
        self._stream, self._is_coloured = stream, is_coloured
        self._lines: Sequence[str] = ()

    def __enter__(self) -> "Screen":
        self._stream.write(ENTER)
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.write(LEAVE)
        self._stream.flush()

    def draw(self, lines: Sequence[str]) -> None:
        """Draw a page, cut to the terminal's size."""
        self._lines = lines
        size = os.get_terminal_size(self._stream.fileno())
        shown = [self._coloured(line[: size.columns]) for line in lines[: size.lines - 1]]
        self._stream.write(HOME + "".join(f"{line}{CLEAR_LINE}\n" for line in shown) + CLEAR_BELOW)
        self._stream.flush()

    def note(self, sentence: str) -> None:
        """Say something above the last page."""
        self.draw([f"{time.strftime('%H:%M:%S')}  {sentence}", *self._lines[1:]])

    def _coloured(self, line: str) -> str:
        """Colour the state of a worker's line."""
        if self._is_coloured and line.startswith(("target ", "draft ")):
            for state, shown in STATES.items():
                line = line.replace(f"  {shown} ", f"  {in_colour(shown, COLOURS[state])} ", 1)
        return line
