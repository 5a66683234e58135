"""The `specdec` command: run the services on this machine, generate, look at sessions."""

import asyncio
import importlib.metadata
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from contextlib import aclosing, asynccontextmanager, nullcontext, suppress
from typing import Annotated, Any, Literal, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: its own log is not for people

import typer

from specdec import terminal
from specdec.client import Chunk, Client, Message, SamplingParams, SpecdecError, SpeculationParams
from specdec.errors import InvalidArgument, Unavailable
from specdec.serving import local

FAILED, WRONG_USAGE, INTERRUPTED = 1, 2, 130

app = typer.Typer(
    help="Exact speculative decoding: a small model guesses, a large model checks, the text is the large model's.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
session_app = typer.Typer(help="Look at, cancel and resume sessions.", no_args_is_help=True)
app.add_typer(session_app, name="session")


def _host_and_port(address: str) -> str:
    if ":" not in address:
        raise typer.BadParameter(f"{address!r} is no address; give host:port, as 127.0.0.1:50051")
    return address


def _bias(entry: str) -> tuple[int, float]:
    token, _, bias = entry.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise typer.BadParameter(f"{entry!r} is not ID=BIAS, as 42=-1.5") from None


def _digest(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        raise typer.BadParameter(f"{digits!r} is no digest; it is the 32 hexadecimal digits of a chunk") from None


Address = Annotated[
    str,
    typer.Option(envvar=local.ADDRESS_VARIABLE, callback=_host_and_port, help="where the coordinator listens"),
]
SessionId = Annotated[str, typer.Argument(metavar="ID", help="the session, as a chunk names it")]
Json = Annotated[bool, typer.Option("--json", help="print JSON, one object a line for each chunk")]
DEFAULT_ADDRESS = "127.0.0.1:50051"
DRAWING, ENDING, SPECULATING = "How tokens are drawn", "When it ends", "How it is speculated"


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="what to continue; - reads standard input")],
    address: Address = DEFAULT_ADDRESS,
    chat: Annotated[bool, typer.Option("--chat", help="the prompt is a user's message, to be answered")] = False,
    request_id: Annotated[
        str | None, typer.Option(help="repeat a request under its id, and its session goes on")
    ] = None,
    json: Json = False,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token", rich_help_panel=DRAWING)] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="keep the k most probable; 0: all", rich_help_panel=DRAWING)] = 0,
    top_p: Annotated[float, typer.Option(help="keep this much of the mass", rich_help_panel=DRAWING)] = 1.0,
    min_p: Annotated[
        float, typer.Option(help="drop what is less probable than this, relative to the best", rich_help_panel=DRAWING)
    ] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1: none", rich_help_panel=DRAWING)] = 1.0,
    presence_penalty: Annotated[float, typer.Option(help="0: none", rich_help_panel=DRAWING)] = 0.0,
    frequency_penalty: Annotated[float, typer.Option(help="0: none", rich_help_panel=DRAWING)] = 0.0,
    logit_bias: Annotated[
        list[Any] | None,
        typer.Option(
            parser=_bias, metavar="ID=BIAS", help="add to a token's logit; repeatable", rich_help_panel=DRAWING
        ),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, help="the same seed and --num-draft-tokens, the same text", rich_help_panel=DRAWING),
    ] = None,
    num_logprobs: Annotated[
        int | None, typer.Option(help="log probabilities, with --json", rich_help_panel=DRAWING)
    ] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=0, help="most tokens", rich_help_panel=ENDING)] = None,
    stop: Annotated[
        list[str] | None, typer.Option(help="end before this text; repeatable", rich_help_panel=ENDING)
    ] = None,
    stop_token_id: Annotated[
        list[int] | None, typer.Option(help="end after this token; repeatable", rich_help_panel=ENDING)
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="go on after the model's end", rich_help_panel=ENDING)
    ] = False,
    num_draft_tokens: Annotated[
        int | None,
        typer.Option(help="tokens drafted in a round; 0: none", show_default="automatic", rich_help_panel=SPECULATING),
    ] = None,
    drafter: Annotated[
        str | None, typer.Option(help="model or ngram", show_default="the service's first", rich_help_panel=SPECULATING)
    ] = None,
) -> None:
    """Continue PROMPT, token by token as it is committed; then a line of statistics on standard error.

    On a terminal, colours tell where each token came from: drafted and accepted, recovered after a rejection, or the
    bonus after a whole accepted draft.
    """
    sampling = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_new_tokens=max_new_tokens,
        num_logprobs=num_logprobs,
        logit_bias=dict(logit_bias or ()),
        stop=tuple(stop or ()),
        stop_token_ids=tuple(stop_token_id or ()),
        ignore_eos=ignore_eos,
    )
    speculation = SpeculationParams(num_draft_tokens, drafter)
    text = _standard_input() if prompt == "-" else prompt

    async def work() -> None:
        async with _connected(address) as client:
            chunks = client.generate(
                [Message("user", text)] if chat else text,
                sampling=sampling,
                speculation=speculation,
                request_id=request_id,
            )
            await _print_chunks(chunks, json)

    _run(work())


@session_app.command("show")
def session_show(session_id: SessionId, address: Address = DEFAULT_ADDRESS, json: Json = False) -> None:
    """Print what the store holds of a session."""

    async def work() -> None:
        async with _connected(address) as client:
            session = await client.get_session(session_id)
            print(terminal.session_as_json(session) if json else "\n".join(terminal.session_lines(session)))

    _run(work())


@session_app.command("cancel")
def session_cancel(session_id: SessionId, address: Address = DEFAULT_ADDRESS) -> None:
    """End a session; what it has stays readable."""

    async def work() -> None:
        async with _connected(address) as client:
            print((await client.cancel(session_id)).name.lower())

    _run(work())


@session_app.command("resume")
def session_resume(
    session_id: SessionId,
    address: Address = DEFAULT_ADDRESS,
    offset: Annotated[int, typer.Option(min=0, help="completion tokens to leave out")] = 0,
    digest: Annotated[
        Any, typer.Option(parser=_digest, metavar="HEX", help="the digest at the offset, to be compared")
    ] = None,
    json: Json = False,
) -> None:
    """Print a session from its first token on, and go on with it if it is unfinished."""

    async def work() -> None:
        async with _connected(address) as client:
            await _print_chunks(client.resume(session_id, offset, digest or b""), json)

    _run(work())


@app.command()
def model(address: Address = DEFAULT_ADDRESS) -> None:
    """Print the models behind a running service."""

    async def work() -> None:
        async with _connected(address) as client:
            print("\n".join(terminal.model_lines(await client.get_model())))

    _run(work())


@app.command()
def version() -> None:
    """Print the version."""
    try:
        print(f"specdec {importlib.metadata.version('specdec')}")
    except importlib.metadata.PackageNotFoundError:
        _fail("this is a checkout that is not installed; run make setup", FAILED)


@app.command()
def up(
    target: Annotated[str, typer.Option(metavar="DIR|ID", help="the large model: a folder, or a hub id")],
    draft: Annotated[
        str, typer.Option(metavar="DIR|ID|ngram|none", help="the small model; ngram needs none, none is plain decoding")
    ] = local.NGRAM_ONLY,
    host: Annotated[str, typer.Option(help="address of the coordinator; workers stay on loopback")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port of the coordinator; 0 takes a free one")] = 50051,
    store: Annotated[str, typer.Option(metavar="embedded|redis://...", help="where sessions are kept")] = "embedded",
    dtype: Annotated[Literal["auto", "float32", "bfloat16"], typer.Option(help="number type of both models")] = "auto",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="where both models run")] = "auto",
    num_targets: Annotated[int, typer.Option(min=1, help="target workers")] = 1,
    num_drafts: Annotated[int, typer.Option(min=1, help="draft workers")] = 1,
    target_threads: Annotated[
        int | None, typer.Option(min=1, help="threads of a target worker", show_default="half the cores")
    ] = None,
    draft_threads: Annotated[
        int | None, typer.Option(min=1, help="threads of a draft worker", show_default="a quarter of them, at most 4")
    ] = None,
    metrics_ports: Annotated[
        int | None,
        typer.Option(min=1, max=65000, help="first port for Prometheus: coordinator, then targets, then drafts"),
    ] = None,
    drain_s: Annotated[float, typer.Option(min=0, help="seconds that running streams get at the end")] = 5.0,
) -> None:
    """Run target, draft and coordinator on this machine, until Ctrl-C.

    Prints `specdec ready on HOST:PORT` once a token was generated. Every setting of the services can also be given as
    an environment variable, but for those that a flag here gives: SPECDEC_LOG_LEVEL=debug is the services' own flag
    --log-level; `python -m coordinator --help` lists the coordinator's. A service that ends by itself ends all of them:
    this is for one machine, a deployment goes on.
    """
    options = local.Options(
        target=target,
        draft=draft,
        host=host,
        port=port,
        store=store,
        dtype=dtype,
        device=device,
        num_targets=num_targets,
        num_drafts=num_drafts,
        target_threads=target_threads,
        draft_threads=draft_threads,
        metrics_ports=metrics_ports,
        drain_s=drain_s,
    )
    _run(_serve(options))


async def _serve(options: local.Options) -> None:
    """Run until a signal, then end the services in order; a second signal does not wait for them."""
    printer = terminal.LogPrinter(is_coloured=terminal.is_coloured(sys.stderr, os.environ))
    progress = local.Progress(printer, sys.stderr) if sys.stderr.isatty() else None
    stack = local.running(options, progress or printer)
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, _interrupt, task, stack)
    with suppress(asyncio.CancelledError):
        async with progress.shown() if progress else nullcontext(), stack:
            print(f"specdec ready on {stack.address}", flush=True)
            await stack.wait()


def _interrupt(task: "asyncio.Task[Any]", stack: local.Stack) -> None:
    if task.cancelling():
        stack.kill()
    else:
        task.cancel()


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[Client]:
    async with Client(address) as client:
        try:
            await client.connect()
        except Unavailable as error:
            raise local.CannotRun(f"{error}; start one with `specdec up --target DIR --draft DIR`") from None
        yield client


async def _print_chunks(chunks: AsyncGenerator[Chunk, None], json: bool) -> None:
    on_terminal = sys.stdout.isatty()
    in_colour = terminal.is_coloured(sys.stdout, os.environ)
    session_id = ""
    try:
        async with aclosing(chunks):
            async for chunk in chunks:
                session_id = chunk.session_id
                if json:
                    print(terminal.chunk_as_json(chunk), flush=True)
                    continue
                print(terminal.coloured(chunk) if in_colour else chunk.text, end="", flush=True)
                if chunk.finish:
                    print(end="\n" if on_terminal else "", flush=True)
                    print(terminal.statistics_line(chunk.finish), file=sys.stderr)
    except (SpecdecError, asyncio.CancelledError):
        if session_id:
            print(end="\n" if on_terminal and not json else "", flush=True)
            print(f"specdec: `specdec session resume {session_id}` prints it again and goes on", file=sys.stderr)
        raise


def _standard_input() -> str:
    if sys.stdin is None:
        _fail("there is no standard input to read the prompt from; give the prompt as an argument", WRONG_USAGE)
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        _fail(f"standard input is not UTF-8 (byte {error.start}); convert it first", WRONG_USAGE)


def _run(work: Coroutine[Any, Any, None]) -> None:
    """Run a command; whatever is expected to go wrong becomes one sentence and an exit code."""
    try:
        asyncio.run(work)
    except InvalidArgument as error:
        _fail(str(error), WRONG_USAGE)
    except SpecdecError as error:
        _fail(str(error), FAILED)
    except local.CannotRun as error:
        _fail(str(error), error.exit_code)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _give_up_output()
        raise typer.Exit(FAILED) from None
    except OSError as error:
        _give_up_output()
        _fail(f"cannot go on: {error}", FAILED)


def _give_up_output() -> None:
    """Leave standard output alone: the interpreter's own flush at exit must not complain of it either."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(sentence: str, exit_code: int) -> NoReturn:
    print(f"specdec: {sentence}", file=sys.stderr)
    raise typer.Exit(exit_code)


def main() -> None:
    """Run the command line."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # whoever started it closed its output
    app()


if __name__ == "__main__":
    main()
