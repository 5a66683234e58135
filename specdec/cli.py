"""The `specdec` command: generate, look at sessions, run the services on this machine, plan what to draft."""

import argparse
import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Callable, Coroutine, Sequence
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NoReturn

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: its log is not for users

from specdec import asking
from specdec.accounting import command as accounting
from specdec.accounting.architecture import NotUnderstood
from specdec.arguments import FAILED, WRONG_USAGE, CommandError, Parser, add_sampling_flags, checked, with_flags
from specdec.channel import address_problem
from specdec.client import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_S
from specdec.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    SpecdecError,
    UnauthenticatedError,
)
from specdec.parameters import MAX_UINT32, Number, WholeNumber
from specdec.planning import command as planning
from specdec.request import MAX_TIMEOUT_S
from specdec.security_flags import add_security_flags, print_new_token
from specdec.timeline import command as timeline
from specdec.timeline.errors import TraceError
from specdec.types import MAX_DRAFT_TOKENS, AcceptanceRuleName
from specdec.watching import command as watching

INTERRUPTED = 130  # exit code
ADDRESS_VARIABLE = "SPECDEC_ADDRESS"
# matches "ADRESS" and "ADDR", but not the variables of the services
SIMILAR = 0.72
UP_DESCRIPTION = (
    "Run target, draft and coordinator on this machine, until Ctrl-C, and with --http-port a gateway for OpenAI's "
    "clients. Prints `specdec ready on HOST:PORT` once a token was generated. Every setting of the services can also "
    "be given as an environment variable, except those that have a flag here: SPECDEC_LOG_LEVEL=debug is the services' "
    "own flag --log-level; `python -m coordinator --help` lists the coordinator's. A service that ends by itself is "
    "started again on its port, and running generations go on."
)


Command = Callable[[argparse.Namespace], Coroutine[Any, Any, None]]


def parser(*, with_up: bool = False) -> Parser:
    """Return the parser of the command line; the flags of `up` come from the services' packages, on request."""
    top = Parser(
        prog="specdec",
        description="Exact speculative decoding: a small model drafts, a large model checks, the text is the large "
        "model's.",
    )
    commands = top.add_subparsers(metavar="COMMAND")
    _add_generate(commands)
    _add_session(commands)
    model = commands.add_parser("model", help="print the models of a running service")
    _finish(model, asking.model)
    watching.add(commands, _finish, _host_and_port, asking.connected)
    timeline.add(commands, _finish)
    planning.add(commands, _finish_offline)
    accounting.add(commands, _finish_offline, _config_folder)
    token = commands.add_parser("token", help="make a bearer token, and the hash that the service's tokens file needs")
    _finish_offline(token, print_new_token)
    version = commands.add_parser("version", help="print the version")
    version.set_defaults(work=_version)
    up = commands.add_parser("up", help="run the services on this machine", description=UP_DESCRIPTION)
    up.set_defaults(work=_up)
    if with_up:
        _serving().add_flags(up)
    return top


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser(
        "generate",
        help="continue a prompt",
        description="Continue PROMPT, token by token as it is committed; then a line of statistics on standard error. "
        "On a terminal, colours tell where each token came from: drafted and accepted (green), recovered after a "
        "rejection (yellow), or the bonus after a wholly accepted draft (cyan).",
    )
    generate.add_argument("prompt", metavar="PROMPT", help="what to continue; - reads standard input")
    generate.add_argument("--chat", action="store_true", help="the prompt is a user's message, to be answered")
    generate.add_argument("--request-id", metavar="ID", help="repeat a request under its id: its session continues")
    _add_json(generate)
    add_sampling_flags(generate)
    speculation = generate.add_argument_group("Speculative decoding")
    draft_tokens = checked(WholeNumber(0, MAX_DRAFT_TOKENS))
    speculation.add_argument(
        "--num-draft-tokens",
        type=draft_tokens,
        metavar="COUNT",
        help="tokens drafted in a round; 0: none (default: automatic)",
    )
    speculation.add_argument(
        "--drafter",
        metavar="NAME",
        help="one that the service offers, as model, recycle, suffix or eagle3 (default: it chooses, round by round)",
    )
    rules = [rule.name.lower() for rule in AcceptanceRuleName]
    speculation.add_argument("--acceptance-rule", choices=rules, help="(default: the service's)")
    _finish(generate, asking.generate)


def _add_session(commands: Any) -> None:
    session = commands.add_parser("session", help="look at, cancel and resume sessions")
    session.set_defaults(help_of=session)
    actions = session.add_subparsers(metavar="COMMAND")
    show = actions.add_parser("show", help="print what the store holds of a session")
    cancel = actions.add_parser("cancel", help="end a session; what it has stays readable")
    resume = actions.add_parser("resume", help="print a session from its first token on, and continue it if unfinished")
    for each, work in ((show, asking.show), (cancel, asking.cancel), (resume, asking.resume)):
        each.add_argument("session_id", type=_session_id, metavar="ID", help="the session, as a chunk names it")
        _finish(each, work)
    _add_json(show)
    _add_json(resume)
    offset = checked(WholeNumber(0, MAX_UINT32))
    resume.add_argument(
        "--offset", type=offset, default=0, metavar="COUNT", help="completion tokens to leave out (default: 0)"
    )
    resume.add_argument(
        "--digest", type=_digest, default=b"", metavar="HEX", help="the digest at the offset, to be compared"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print JSON, for streams one object a line for each chunk")


def _finish(command: argparse.ArgumentParser, work: Command) -> None:
    command.add_argument(
        "--address",
        type=_host_and_port,
        default=os.environ.get(ADDRESS_VARIABLE) or DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help=f"where the coordinator listens (default: {ADDRESS_VARIABLE}, else {DEFAULT_ADDRESS})",
    )
    command.add_argument(
        "--timeout-s",
        type=checked(Number(0, MAX_TIMEOUT_S, excludes_low=True, metavar="SECONDS")),
        default=DEFAULT_TIMEOUT_S,
        metavar="SECONDS",
        help=f"give up after this time; until then a broken connection is tried again (default: {DEFAULT_TIMEOUT_S:g})",
    )
    add_security_flags(command)
    command.set_defaults(work=work)


def _finish_offline(command: argparse.ArgumentParser, print_result: Callable[[argparse.Namespace], None]) -> None:
    """Tell a command that needs no service what it runs."""

    async def work(flags: argparse.Namespace) -> None:
        try:
            print_result(flags)
        except NotUnderstood as error:
            raise CommandError(str(error), WRONG_USAGE) from None

    command.set_defaults(work=work)


def _host_and_port(address: str) -> str:
    if problem := address_problem(address):
        raise argparse.ArgumentTypeError(f"{problem}, here or in {ADDRESS_VARIABLE}")
    return address


def _session_id(name: str) -> str:
    if not name:
        raise argparse.ArgumentTypeError(f"is empty; {asking.WHERE_ID_IS}")
    return name


def _digest(digits: str) -> bytes:
    try:
        return bytes.fromhex(digits)
    except ValueError:
        problem = f"is {digits!r}; give the 32 hexadecimal digits of a chunk's digest"
        raise argparse.ArgumentTypeError(problem) from None


async def _version(flags: argparse.Namespace) -> None:
    try:
        print(f"specdec {importlib.metadata.version('specdec')}")
    except importlib.metadata.PackageNotFoundError:
        raise CommandError("this is a checkout that is not installed; run make setup") from None


async def _up(flags: argparse.Namespace) -> None:
    serving = _serving()
    try:
        await serving.run(flags)
    except serving.local.CannotRun as error:
        raise CommandError(str(error), error.exit_code) from None


def _serving() -> Any:
    """Import what `up` runs. Raises CommandError where the packages of the services are not installed."""
    try:
        from specdec.serving import up
    except ModuleNotFoundError as error:
        missing = error.name
    else:
        missing = up.missing_package()
        if missing is None:
            return up
    problem = f"`specdec up` runs the services, and {missing} is not installed"
    raise CommandError(f"{problem}; run: pip install 'specdec[server,embedded,models]'")


def _config_folder(name: str) -> Path:
    """Return the folder of a hub model's configuration. Raises CommandError."""
    try:
        from specdec.serving.tokenizer import TokenizerMissing, config_folder
    except ModuleNotFoundError as error:
        problem = f"there is no folder {name}, and to ask the hub {error.name} is needed"
        raise CommandError(f"{problem}; run: pip install 'specdec[server]'") from None
    try:
        return config_folder(name)
    except TokenizerMissing as error:
        raise CommandError(str(error)) from None


# ---- running one


def _refuse_misspelt_address() -> None:
    """Refuse a variable that is nearly SPECDEC_ADDRESS; the services' own variables belong to them."""
    wanted = ADDRESS_VARIABLE.removeprefix("SPECDEC_")
    for name in os.environ:
        rest = name.removeprefix("SPECDEC_")
        if rest not in (name, wanted) and SequenceMatcher(None, rest, wanted).ratio() >= SIMILAR:
            raise CommandError(f"unknown variable {name}; the nearest is {ADDRESS_VARIABLE}", WRONG_USAGE)


def _run(words: Sequence[str]) -> int:
    """Run a command; return its exit code. What is expected to go wrong becomes one sentence."""
    try:
        flags = parser(with_up=words[:1] == ["up"]).parse_args(words)
        if "work" not in flags:
            getattr(flags, "help_of", parser()).print_help()
            return WRONG_USAGE
        _refuse_misspelt_address()
        asyncio.run(flags.work(flags))
    except InvalidArgumentError as error:
        return _failed(with_flags(error, flags), WRONG_USAGE, error)
    except SpecdecError as error:
        if remedy := _remedy(error, flags):
            error.add_note(remedy)
        return _failed(str(error), FAILED, error)
    except CommandError as error:
        return _failed(str(error), error.exit_code)
    except TraceError as error:
        return _failed(str(error), FAILED)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _give_up_output()
        return FAILED
    except OSError as error:
        _give_up_output()
        return _failed(f"cannot go on: {error}", FAILED)
    return 0


def _remedy(error: SpecdecError, flags: argparse.Namespace) -> str | None:
    """Return which flag can mend an error, if one can."""
    if isinstance(error, UnauthenticatedError) and not flags.token_file:
        return "--token-file FILE sends a token"
    if isinstance(error, DeadlineExceededError):
        return f"--timeout-s gives it more than {flags.timeout_s:g} s"
    return None


def _give_up_output() -> None:
    """Point standard output at nothing: the interpreter's flush at exit must not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _failed(sentence: str, exit_code: int, error: BaseException | None = None) -> int:
    """Print a sentence and the hints that an error carries; return the exit code."""
    for line in (sentence, *getattr(error, "__notes__", ())):
        print(f"specdec: {line}", file=sys.stderr)
    return exit_code


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line, and exit."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115  # the caller closed its output
    sys.exit(_run(list(sys.argv[1:] if arguments is None else arguments)))


if __name__ == "__main__":
    main()
