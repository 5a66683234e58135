"""Checks before anything is started: what would stop the services later, and less clearly."""

import re
import socket
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from specdec.serving.local.commands import coordinator_command, worker_commands
from specdec.serving.local.options import ADDRESS_VARIABLE, MODEL_FREE, NO_DRAFT, CannotRun, Options
from specdec.serving.settings import ENV_PREFIX, refuse_unknown, settings_of, variable_names

MODULES = ("coordinator", "target_service", "draft_service")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(options: Options, environment: Mapping[str, str]) -> None:
    """Raise CannotRun for what would stop the services later and less clearly."""
    _check_model("--target", options.target)
    if options.draft not in (*MODEL_FREE, NO_DRAFT):
        _check_model("--draft", options.draft)
    _check_variables(environment)
    _check_overridden(options, environment)
    _check_port(options.host, options.port)
    _check_store(options.store)


def _check_model(flag: str, name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise CannotRun(f"{flag}: the folder {name} holds no model (no config.json)", 2)
    elif not HUB_ID.fullmatch(name) or name.startswith("."):
        raise CannotRun(f"{flag}: there is no folder {name}; give a model's folder, or a hub id like org/name", 2)


def _check_variables(environment: Mapping[str, str]) -> None:
    kinds = [settings_of(module) for module in MODULES]
    known = [ADDRESS_VARIABLE, *(name for kind in kinds for name in variable_names(kind))]
    try:
        refuse_unknown(known, [name for name in environment if name.startswith(ENV_PREFIX)], "variable")
    except ValueError as error:
        raise CannotRun(str(error), 2) from None


def _check_overridden(options: Options, environment: Mapping[str, str]) -> None:
    """Refuse variables that would have no effect: a service's flag, which `up` gives, wins over its variable."""
    commands = [*worker_commands(options, num_cores=1), coordinator_command(options, [], [])]
    flags = {flag for command in commands for flag in command.flags if flag.startswith("--")} | {"--metrics-port"}
    given = {name for command in commands for name in command.variables}
    given |= {ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}
    for name in sorted(given):
        if name in environment:
            raise CannotRun(f"{name} has no effect here; unset it, and give the command's own flag (--help)", 2)


def _check_port(host: str, port: int) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotRun(
                f"cannot listen on {host}:{port} ({reason}); choose another with --host or --port"
            ) from None


def _check_store(store: str) -> None:
    url = urlsplit(store)
    if url.scheme not in ("redis", "rediss"):
        return  # the coordinator knows the others
    try:
        place = f"{url.hostname or 'localhost'}:{url.port or 6379}"
    except ValueError as error:
        raise CannotRun(f"--store is no address: {error}", 2) from None
    try:
        socket.create_connection((url.hostname or "localhost", url.port or 6379), timeout=5).close()
    except OSError:
        raise CannotRun(f"no Redis answers on {place}; start one there, or leave --store embedded") from None
