"""What the commands of `specdec` that ask a running service do."""

import argparse
import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec import terminal
from specdec.arguments import WRONG_USAGE, CommandError, sampling_of
from specdec.client import AsyncClient
from specdec.completion import SessionStatus
from specdec.errors import NotFoundError, SpecdecError, UnavailableError
from specdec.outage import OutageNotice
from specdec.request import ChatMessage
from specdec.security_flags import security_of
from specdec.stream import AsyncStream
from specdec.types import AcceptanceRuleName, SpeculationParams

START_ONE = "start one with `specdec up --target DIR --draft DIR`, or wait until it says `specdec ready`"
WHERE_ID_IS = "the last line of `specdec generate` names its session"


async def generate(flags: argparse.Namespace) -> None:
    """Continue a prompt, and print the text as it comes."""
    if flags.num_logprobs is not None and not flags.json:
        raise CommandError("--num-logprobs is printed only as JSON; add --json", WRONG_USAGE)
    text = _standard_input() if flags.prompt == "-" else flags.prompt
    sampling = sampling_of(flags)
    rule = AcceptanceRuleName[flags.acceptance_rule.upper()] if flags.acceptance_rule else None
    speculation = SpeculationParams(
        num_draft_tokens=flags.num_draft_tokens, drafter=flags.drafter, acceptance_rule=rule
    )
    async with connected(flags) as (client, outage):
        if flags.chat:
            messages = [ChatMessage("user", text)]
            stream = client.stream_chat(
                messages, sampling=sampling, speculation=speculation, request_id=flags.request_id
            )
        else:
            stream = client.generate(text, sampling=sampling, speculation=speculation, request_id=flags.request_id)
        await _print_stream(stream, outage, flags.json)


async def show(flags: argparse.Namespace) -> None:
    """Print what the store holds of a session."""
    async with connected(flags) as (client, _), _naming(flags):
        session = await client.get_session(flags.session_id)
        print(terminal.session_as_json(session) if flags.json else "\n".join(terminal.session_lines(session)))


async def cancel(flags: argparse.Namespace) -> None:
    """End a session, and print its state."""
    async with connected(flags) as (client, _), _naming(flags):
        status = await client.cancel(flags.session_id)
        print("it had finished before" if status is SessionStatus.FINISHED else status.name.lower())


async def resume(flags: argparse.Namespace) -> None:
    """Print a session's text from an offset on, and continue it."""
    async with connected(flags) as (client, outage), _naming(flags):
        stream = client.resume(flags.session_id, offset=flags.offset, digest=flags.digest)
        await _print_stream(stream, outage, flags.json)


async def model(flags: argparse.Namespace) -> None:
    """Print the models of the service."""
    async with connected(flags) as (client, _):
        print("\n".join(terminal.model_lines(await client.get_model())))


@asynccontextmanager
async def connected(flags: argparse.Namespace) -> AsyncIterator[tuple[AsyncClient, OutageNotice]]:
    """Connect, and keep the user told of outages. Raises CommandError with what to do where nobody answers."""
    outage = OutageNotice(_say_beside_output)
    security = security_of(flags)
    async with AsyncClient(flags.address, timeout_s=flags.timeout_s, on_retry=outage.retrying, **security) as client:
        try:
            await client.connect()
        except UnavailableError as error:
            has_remedy = ";" in error.message
            raise CommandError(f"{error}" if has_remedy else f"{error}; {START_ONE}") from None
        yield client, outage


@asynccontextmanager
async def _naming(flags: argparse.Namespace) -> AsyncIterator[None]:
    """Name the session, and where its id can be found, if the service does not have it."""
    try:
        yield
    except NotFoundError:
        problem = f"{flags.address} has no session {flags.session_id!r}: it was never there, or it has expired"
        raise CommandError(f"{problem}; {WHERE_ID_IS}") from None


def _say_beside_output(sentence: str) -> None:
    """Print a sentence to standard error, on a line of its own also where text was just printed to a terminal."""
    print("\n" if sys.stdout.isatty() else "", f"specdec: {sentence}", sep="", file=sys.stderr, flush=True)


async def _print_stream(stream: AsyncStream, outage: OutageNotice, json: bool) -> None:
    text = terminal.TextOutput(sys.stdout, os.environ)
    outage.waiting()
    try:
        async with stream:
            async for chunk in stream:
                outage.progress()
                if json:
                    print(terminal.chunk_as_json(chunk), flush=True)
                    continue
                text.print(chunk)
                if chunk.finish:
                    text.end_line()
                    print(terminal.statistics_line(chunk.finish, chunk.session_id), file=sys.stderr)
    except (SpecdecError, asyncio.CancelledError) as error:
        if sys.stdout.isatty():
            text.end_line()
        if stream.session_id and not isinstance(error, NotFoundError):
            _hint(error, f"`specdec session resume {stream.session_id}` prints it again and continues")
        raise
    finally:
        outage.ended()


def _hint(error: BaseException, sentence: str) -> None:
    """Print a hint: after the sentence of an error, and at once where there will be none."""
    if isinstance(error, SpecdecError):
        error.add_note(sentence)
    else:
        print(f"specdec: {sentence}", file=sys.stderr)


def _standard_input() -> str:
    if sys.stdin is None:
        problem = "there is no standard input to read the prompt from"
        raise CommandError(f"{problem}; give the prompt as an argument", WRONG_USAGE)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CommandError(f"standard input is not UTF-8 (byte {error.start}); convert it first", WRONG_USAGE) from None
