"""Checks before anything is started: what would stop the services later, and less clearly."""

import importlib.util
import re
import socket
from collections.abc import Mapping
from pathlib import Path

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from specdec.accounting.architecture import models_beside
from specdec.channel import is_loopback
from specdec.serving.local.commands import coordinator_command, gateway_command, worker_commands
from specdec.serving.local.options import ADDRESS_VARIABLE, MODEL_FREE, NO_DRAFT, CannotRun, Options
from specdec.serving.settings import ENV_PREFIX, refuse_unknown, settings_of, variable_names
from specdec.serving.state_folder import FolderLock, redis_server, store_folder
from specdec.serving.store_url import OWN_STORES, QUOTING, StoreUrl

MODULES = ("coordinator", "target_service", "draft_service")
GATEWAY = "gateway"  # the module of the service that is not always started
GATEWAY_PACKAGES = ("starlette", "uvicorn", "h11")  # what it imports and this process does not
REDIS_TIMEOUT_S = 5.0
SECURITY_VARIABLES = tuple(
    f"{ENV_PREFIX}{name}" for name in ("TLS_", "WORKER_TLS_", "COORDINATOR_TLS", "TOKENS_", "JWT_", "HEALTH_PORT")
)
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def check(options: Options, environment: Mapping[str, str]) -> None:
    """Raise CannotRun for what would stop the services later and less clearly."""
    _check_model("--target", options.target)
    if options.draft not in (*MODEL_FREE, NO_DRAFT):
        _check_model("--draft", options.draft)
    _check_heads(options)
    _check_variables(options, environment)
    _check_overridden(options, environment)
    _check_security(options, environment)
    _check_port(options.host, options.port, "--port")
    if options.http_port is not None:
        _check_gateway(options)
    _check_store(options)


def notices(options: Options) -> list[tuple[str, str]]:
    """Return what is worth saying before the start, each with the name of the service that it is about."""
    models = [("target worker", options.target), ("draft worker", options.draft)]
    return [
        (service, f"no folder {name} here; asking the hub")
        for service, name in models
        if name not in (*MODEL_FREE, NO_DRAFT) and not Path(name).expanduser().is_dir()
    ]


def _check_model(flag: str, name: str) -> None:
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(flag, name, folder)
    elif folder.exists():
        raise CannotRun(f"{flag}: {name} is a file; give the model's folder", 2)
    elif not HUB_ID.fullmatch(name) or name.startswith("."):
        raise CannotRun(f"{flag}: there is no folder {name}; give a model's folder, or a hub id like org/name", 2)
    else:
        _check_neighbours(flag, name)


def _check_neighbours(flag: str, name: str) -> None:
    """Refuse what is rather a mistyped folder than a hub id, for which a hub would be asked for a minute."""
    if beside := models_beside(name):
        raise CannotRun(f"{flag}: there is no folder {name}; beside it there are {', '.join(beside)}", 2)


def _check_folder(flag: str, name: str, folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise CannotRun(f"{flag}: the folder {name} holds no model (no config.json)", 2)
    if not (folder / "tokenizer.json").is_file():
        remedy = "save it there: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        raise CannotRun(f"{flag}: the folder {name} holds no tokenizer (no tokenizer.json); {remedy}", 2)
    if not any(folder.glob("*.safetensors")):
        remedy = "save the model there with save_pretrained; other formats are not loaded"
        raise CannotRun(f"{flag}: the folder {name} holds no weights (no *.safetensors); {remedy}", 2)


def _check_heads(options: Options) -> None:
    if options.heads and options.draft == NO_DRAFT:
        raise CannotRun(f"--draft {NO_DRAFT} means plain decoding; leave it out, or leave out the heads", 2)
    for name, head in options.heads.items():
        folder = Path(head).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise CannotRun(f"--{name}-head: the folder {head} holds no head (no config.json)", 2)
        if not folder.is_dir() and (head.startswith(".") or not HUB_ID.fullmatch(head)):
            raise CannotRun(f"--{name}-head: there is no folder {head}; give a head's folder, or a hub id", 2)
        if not folder.is_dir():
            _check_neighbours(f"--{name}-head", head)


def _check_variables(options: Options, environment: Mapping[str, str]) -> None:
    modules = (*MODULES, GATEWAY) if options.http_port is not None else MODULES
    kinds = [settings_of(module) for module in modules]
    known = [ADDRESS_VARIABLE, *(name for kind in kinds for name in variable_names(kind))]
    try:
        refuse_unknown(known, [name for name in environment if name.startswith(ENV_PREFIX)], "variable")
    except ValueError as error:
        raise CannotRun(str(error), 2) from None


def _check_overridden(options: Options, environment: Mapping[str, str]) -> None:
    """Refuse variables that would have no effect: a service's flag, which `up` gives, wins over its variable."""
    commands = [*worker_commands(options, num_cores=1), coordinator_command(options, [], [])]
    commands += [gateway_command(options, "")] if options.http_port is not None else []
    flags = {flag for command in commands for flag in command.flags if flag.startswith("--")} | {"--metrics-port"}
    given = {name for command in commands for name in command.variables}
    given |= {ENV_PREFIX + flag.removeprefix("--").replace("-", "_").upper() for flag in flags}
    for name in sorted(given):
        if name in environment:
            raise CannotRun(f"{name} has no effect here; unset it, and give the command's own flag (--help)", 2)


def _check_security(options: Options, environment: Mapping[str, str]) -> None:
    """Refuse plain text where others can read it; with TLS or tokens the services are started one by one."""
    names = [name for name in environment if name.startswith(SECURITY_VARIABLES)]
    if names:
        raise CannotRun(f"{names[0]} has no effect here; start the services one by one (docs/security.md)", 2)
    plain = [] if is_loopback(options.host) else [f"--host is {options.host}"]
    if options.store not in OWN_STORES and _store_url(options.store).is_exposed:
        plain.append("--store is on another machine")
    if plain and not options.insecure:
        remedy = "say --insecure, or start the services one by one, with TLS (docs/security.md)"
        raise CannotRun(f"{plain[0]}, where others can read and change plain text; {remedy}", 2)


def _check_gateway(options: Options) -> None:
    missing = next((name for name in GATEWAY_PACKAGES if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        raise CannotRun(f"--http-port: {missing} is not installed; run: pip install 'specdec[gateway]'")
    if options.port == options.http_port != 0:
        raise CannotRun(f"--port and --http-port are both {options.port}; give two", 2)
    _check_port(options.host, options.http_port or 0, "--http-port")


def _check_port(host: str, port: int, flag: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host.strip("[]"), port))
        except OSError as error:
            reason = error.strerror or str(error)
            raise CannotRun(
                f"cannot listen on {host}:{port} ({reason}); choose another with --host or {flag}"
            ) from None


def _check_store(options: Options) -> None:
    """Check the form of the address, then ask a Redis there; check that the embedded store's folder is free."""
    if options.store == "embedded":
        _check_state_folder(options)
    if options.store in OWN_STORES:
        return
    url = _store_url(options.store)
    try:
        _ask_any(url)
    except redis.AuthenticationError as error:
        remedy = f"give --store {options.store.partition('://')[0]}://:PASSWORD@{url.shown}"
        raise CannotRun(f"the Redis on {url.shown} does not let us in ({error}); {remedy}", 2) from None
    except (redis.ConnectionError, redis.TimeoutError, OSError):
        raise CannotRun(f"no Redis answers on {url.shown}; start one there, or leave --store embedded") from None
    except redis.RedisError as error:
        raise CannotRun(f"the Redis on {url.shown} cannot be used: {error}") from None
    except (ValueError, TypeError) as error:
        said = QUOTING if "@" in options.store else error  # which it may quote
        raise CannotRun(f"--store is no address: {said}", 2) from None


def _check_state_folder(options: Options) -> None:
    if redis_server() is None:
        return
    try:
        FolderLock(store_folder(Path(options.state_dir) if options.state_dir else None)).release()
    except ValueError as error:
        raise CannotRun(str(error)) from None


def _store_url(store: str) -> StoreUrl:
    try:
        return StoreUrl.parse(store)
    except ValueError as error:
        raise CannotRun(str(error), 2) from None


def _ask_any(url: StoreUrl) -> None:
    """Log in and ping, once: one of the Sentinels, one of the nodes of a cluster, or the Redis. Raises RedisError."""
    addresses = [url.sentinel(place) if url.kind == "sentinel" else url.node(place) for place in url.places]
    failure: Exception | None = None
    for address in addresses or [url.node()]:
        try:
            return _ask_redis(address)
        except (redis.RedisError, OSError) as error:
            failure = error
    assert failure is not None
    raise failure


def _ask_redis(address: str) -> None:
    limits = {"socket_timeout": REDIS_TIMEOUT_S, "socket_connect_timeout": REDIS_TIMEOUT_S}
    with redis.Redis.from_url(address, retry=Retry(NoBackoff(), 0), **limits) as client:
        client.ping()
