"""Settings of the services: a class each, read from flags and from SPECDEC_... variables; flags win.

Nothing unknown is accepted: a flag or variable that no setting owns stops the start and names the nearest that exists.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from specdec.channel import MAX_MESSAGE_BYTES
from specdec.parameters import nearest_hint

ENV_PREFIX = "SPECDEC_"

Port = Annotated[int, Field(ge=0, le=65535)]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]


class ServiceSettings(BaseSettings):
    """What every service has: where it listens, what it reports, how it ends."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        frozen=True,
        extra="forbid",
        cli_kebab_case=True,
        cli_implicit_flags=True,
        cli_hide_none_type=True,
        cli_avoid_json=True,
        cli_exit_on_error=False,
    )
    max_request_bytes: ClassVar[int] = MAX_MESSAGE_BYTES

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all IPv4, [::] for all")
    port: Port = Field(50051, description="port to listen on; 0 takes a free one and logs it")
    metrics_port: Port | None = Field(None, description="port for Prometheus; unset: no metrics, 0: a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe event logged")
    log_format: Literal["json", "text"] = Field("json", description="one JSON object a line, or text for people")
    drain_s: float = Field(20.0, ge=0, le=3600, description="seconds that running calls get to end at shutdown")


class ModelSettings(ServiceSettings):
    """What a worker that runs a language model has on top."""

    dtype: Dtype = Field("auto", description="number type; auto: bfloat16 where the processor is fast at it")
    device: Device = Field("auto", description="auto: cuda where there is one")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 16, description="memory for the KV cache, in bytes")
    num_threads: int = Field(1, ge=1, le=1024, description="threads of a forward on the CPU")
    max_batch_tokens: int = Field(2048, ge=1, description="maximum number of tokens in a forward")
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="maximum number of tokens of one session's prompt in a forward"
    )


SettingsT = TypeVar("SettingsT", bound=ServiceSettings)


def load(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Read settings from flags and environment, or print one sentence for each that is wrong and exit with 2."""
    flags = list(sys.argv[1:] if arguments is None else arguments)
    try:
        refuse_unknown(flag_names(kind), [flag.split("=")[0] for flag in flags if flag.startswith("--")], "flag")
        refuse_unknown(variable_names(kind), [name for name in os.environ if name.startswith(ENV_PREFIX)], "variable")
        return CliApp.run(kind, cli_args=flags)
    except ValidationError as error:
        _stop(program, [_sentence(kind, dict(entry)) for entry in error.errors()])
    except (SettingsError, ValueError) as error:
        _stop(program, [str(error)])


def flag_names(kind: type[ServiceSettings]) -> list[str]:
    """Return the flags that this service knows, with leading dashes."""
    return [f"--{name.replace('_', '-')}" for name in kind.model_fields] + ["--help"]


def variable_names(kind: type[ServiceSettings]) -> list[str]:
    """Return the environment variables that this service knows."""
    return [f"{ENV_PREFIX}{name.upper()}" for name in kind.model_fields]


def refuse_unknown(known: Sequence[str], given: Sequence[str], what: str) -> None:
    """Raise ValueError for the first given name that is not known, naming the nearest one."""
    for name in given:
        # --no-x is how a boolean x is turned off
        if name not in known and name.replace("--no-", "--", 1) not in known:
            raise ValueError(f"unknown {what} {name}{nearest_hint(name, known)} (all: --help)")


def _sentence(kind: type[ServiceSettings], error: dict[str, Any]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    where = f"--{name.replace('_', '-')} (or {ENV_PREFIX}{name.upper()})"
    if error["type"] == "missing":
        return f"{where} is required: {kind.model_fields[name].description}"
    return f"{where} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _stop(program: str, sentences: Sequence[str]) -> NoReturn:
    for sentence in sentences:
        print(f"{program}: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def settings_of(module: str) -> type[ServiceSettings]:
    """Return the settings of the service that `python -m module` runs, from its own `settings.py`."""
    kind: type[ServiceSettings] = import_module(f"{module}.settings").SETTINGS
    return kind
