"""Settings of the services: a class each, read from flags and from SPECDEC_... variables; flags win.

Nothing unknown is accepted: a flag or variable that no setting owns stops the start and names the nearest that exists.
"""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NoReturn, TypeVar

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict, SettingsError

from specdec.channel import MAX_MESSAGE_BYTES, is_loopback
from specdec.parameters import nearest_hint
from specdec.serving.processors import MAX_HELPERS, MAX_SPARE
from specdec.serving.safe_url import is_safe_url
from specdec.serving.tracing.endpoint import endpoint_problem

ENV_PREFIX = "SPECDEC_"

Port = Annotated[int, Field(ge=0, le=65535)]
Dtype = Literal["auto", "float32", "bfloat16"]
Device = Literal["auto", "cpu", "cuda"]
TargetQuantization = Literal["none", "int8"]
DraftQuantization = Literal["none", "int8", "int4"]
HeadKind = Literal["eagle3", "dflash", "medusa"]


class ProcessSettings(BaseSettings):
    """What every process has that serves: where it listens, what it reports, how it ends."""

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

    host: str = Field("127.0.0.1", description="address to listen on; 0.0.0.0 for all IPv4, [::] for all")
    port: Port = Field(50051, description="port to listen on; 0 takes a free one and logs it")
    metrics_port: Port | None = Field(None, description="port for Prometheus; unset: no metrics, 0: a free one")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe event logged")
    log_format: Literal["json", "text"] = Field("json", description="one JSON object a line, or text for people")
    drain_s: float = Field(20.0, ge=0, le=3600, description="seconds that running calls get to end at shutdown")
    niceness: int = Field(
        0, ge=0, le=19, description="how far it lets other programs of its machine go first, as `nice` does"
    )
    tls_certificate: Path | None = Field(
        None, description="PEM file with this service's certificate and its chain; replaced files count within a second"
    )
    tls_key: Path | None = Field(None, description="PEM file with the certificate's key")
    otlp_endpoint: str | None = Field(
        None,
        description="where traces go (OpenTelemetry, OTLP over gRPC), as http://127.0.0.1:4317; unset: what "
        "OTEL_EXPORTER_OTLP_ENDPOINT says, else nothing is traced",
    )
    insecure: bool = Field(False, description="allow plain text where others can read and change it: off loopback")

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        if (self.tls_certificate is None) != (self.tls_key is None):
            yield "--tls-certificate and --tls-key belong together; give both or neither"
        if not self.tls_certificate and not self.insecure and not is_loopback(self.host):
            yield (
                f"--host is {self.host}, where others can read and change plain text; give --tls-certificate and "
                "--tls-key, or say --insecure"
            )
        if self.otlp_endpoint is not None and (problem := endpoint_problem(self.otlp_endpoint)):
            yield f"--otlp-endpoint {problem}"


class ServiceSettings(ProcessSettings):
    """What every gRPC service has on top: rounds to trace, its callers' certificates, the limits of its connections."""

    needs_client_certificates: ClassVar[bool] = True  # where it serves TLS

    trace_rounds: int = Field(
        16,
        ge=0,
        description="of a traced request the first 8 rounds are traced, then one in so many; 1: all, 0: no more",
    )
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities; callers need a certificate of one of them"
    )
    tls_client_names: str | None = Field(
        None, description="names (DNS, URI or IP) of which a caller's certificate needs one, comma separated; *: any"
    )
    health_port: Port | None = Field(
        None, description="port for health checks alone, in plain text, for probes without a certificate or token"
    )
    max_streams: int = Field(16_384, ge=1, description="maximum number of calls at once on one connection")
    reflection: bool = Field(False, description="describe the service to tools such as grpcurl")

    @property
    def message_limit_bytes(self) -> int:
        """Of a message that it receives."""
        return MAX_MESSAGE_BYTES

    @property
    def client_names(self) -> frozenset[str]:
        """The names of which a caller's certificate needs one."""
        return frozenset(name.strip() for name in (self.tls_client_names or "").split(",") if name.strip())

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        yield from super().problems()
        if self.tls_client_ca and not self.tls_certificate:
            yield "--tls-client-ca needs --tls-certificate and --tls-key: without TLS no caller shows a certificate"
        if bool(self.tls_client_ca) != bool(self.client_names):
            yield "--tls-client-ca and --tls-client-names belong together; --tls-client-names '*' lets in any name"
        if self.tls_certificate and not self.tls_client_ca and self.needs_client_certificates:
            yield "--tls-client-ca is missing: this service knows its callers by their certificates alone"


@dataclass(frozen=True, slots=True)
class JwtSettings:
    """Whose signed tokens count."""

    issuer: str
    audience: str
    keys: str | None  # a file or a URL; None: where the issuer's discovery document says
    tenant_claim: str


class ClientFacingSettings(ServiceSettings):
    """What a service has on top that clients call: their tokens."""

    needs_client_certificates: ClassVar[bool] = False

    max_streams: int = Field(1024, ge=1, description="maximum number of calls at once on one connection")
    tokens_file: Path | None = Field(
        None, description="TOML file with the hashes of each tenant's bearer tokens; a replaced file counts at once"
    )
    jwt_issuer: str | None = Field(None, description="issuer (iss) whose signed tokens count")
    jwt_audience: str | None = Field(None, description="audience (aud) that a signed token must be for")
    jwt_keys: str | None = Field(
        None, description="the issuer's public keys (JWKS): a file, or an https URL; unset: where the issuer says"
    )
    jwt_tenant_claim: str = Field("sub", description="claim of a signed token that names the tenant")

    operators: str | None = Field(
        None, description="tenants, comma separated, whose tokens may ask for the status (`specdec watch`); unset: none"
    )

    @property
    def operator_tenants(self) -> frozenset[str]:
        """The tenants that may ask for the status."""
        return frozenset(name.strip() for name in (self.operators or "").split(",") if name.strip())

    @property
    def jwt(self) -> JwtSettings | None:
        """Whose signed tokens count, if any do."""
        if not (self.jwt_issuer and self.jwt_audience):
            return None
        return JwtSettings(self.jwt_issuer, self.jwt_audience, self.jwt_keys, self.jwt_tenant_claim)

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        yield from super().problems()
        if self.jwt is None and (self.jwt_issuer or self.jwt_audience or self.jwt_keys):
            yield "--jwt-issuer and --jwt-audience belong together, and --jwt-keys to them; give both or neither"
        if self.jwt and self.jwt_keys is None and not is_safe_url(self.jwt.issuer):
            yield "--jwt-issuer is no https URL at which its keys could be looked up; give --jwt-keys"
        if "://" in (self.jwt_keys or "") and not is_safe_url(self.jwt_keys or ""):
            yield "--jwt-keys is no https URL: others can change what it answers; give https"
        if self.operators and not self.tokens_file and self.jwt is None:
            yield "--operators names tenants, and clients without tokens have none; give --tokens-file, or leave it out"


class ModelSettings(ServiceSettings):
    """What a worker that runs a language model has on top."""

    dtype: Dtype = Field("auto", description="number type; auto: bfloat16 where the processor is fast at it")
    device: Device = Field("auto", description="auto: cuda where there is one")
    kv_cache_bytes: int = Field(1 << 30, ge=1 << 16, description="memory for the KV cache, in bytes")
    num_threads: int = Field(1, ge=1, le=1024, description="threads of a forward on the CPU")
    num_helpers: int | None = Field(
        None,
        ge=0,
        le=MAX_HELPERS,
        description="threads of the lowest priority that help a forward while a processor is idle; unset: one for each "
        f"processor that the threads leave, at most {MAX_SPARE}",
    )
    max_batch_tokens: int = Field(2048, ge=1, description="maximum number of tokens in a forward")
    prefill_chunk_tokens: int = Field(
        512, ge=1, description="maximum number of prompt tokens in a forward; beside rounds time limits them too"
    )
    cache_turn_s: float = Field(
        30.0, gt=0, description="seconds that a session keeps its place in a full KV cache while others wait for one"
    )
    stalled_s: float = Field(
        60.0, gt=0, description="seconds after which a forward counts as stuck; after twice as long the worker ends"
    )


class SharedModelSettings(ModelSettings):
    """What a worker has on top whose model may be divided among several processes."""

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=64,
        description="processes that share the weights, by transformers' own plan: on a GPU each, or on the CPU. The "
        "worker starts the others, unless torchrun started all of them; `kv_cache_bytes` is for each",
    )


SettingsT = TypeVar("SettingsT", bound=ProcessSettings)


def load(kind: type[SettingsT], program: str, arguments: Sequence[str] | None = None) -> SettingsT:
    """Read settings from flags and environment, or print one sentence for each that is wrong and exit with 2."""
    flags = list(sys.argv[1:] if arguments is None else arguments)
    try:
        refuse_unknown(flag_names(kind), [flag.split("=")[0] for flag in flags if flag.startswith("--")], "flag")
        refuse_unknown(variable_names(kind), [name for name in os.environ if name.startswith(ENV_PREFIX)], "variable")
        settings = CliApp.run(kind, cli_args=flags)
    except ValidationError as error:
        _stop(program, [_sentence(kind, dict(entry)) for entry in error.errors()])
    except (SettingsError, ValueError) as error:
        _stop(program, [str(error)])
    if problems := list(settings.problems()):
        _stop(program, problems)
    return settings


def flag_names(kind: type[ProcessSettings]) -> list[str]:
    """Return the flags that this service knows, with leading dashes."""
    return [f"--{name.replace('_', '-')}" for name in kind.model_fields] + ["--help"]


def variable_names(kind: type[ProcessSettings]) -> list[str]:
    """Return the environment variables that this service knows."""
    return [f"{ENV_PREFIX}{name.upper()}" for name in kind.model_fields]


def refuse_unknown(known: Sequence[str], given: Sequence[str], what: str) -> None:
    """Raise ValueError for the first given name that is not known, naming the nearest one."""
    for name in given:
        # --no-x is how a boolean x is turned off
        if name not in known and name.replace("--no-", "--", 1) not in known:
            raise ValueError(f"unknown {what} {name}{nearest_hint(name, known)} (all: --help)")


def _sentence(kind: type[ProcessSettings], error: dict[str, Any]) -> str:
    name = str(error["loc"][0]) if error["loc"] else "settings"
    where = f"--{name.replace('_', '-')} (or {ENV_PREFIX}{name.upper()})"
    if error["type"] == "missing":
        return f"{where} is required: {kind.model_fields[name].description}"
    return f"{where} is {error['input']!r}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _stop(program: str, sentences: Sequence[str]) -> NoReturn:
    for sentence in sentences:
        print(f"{program}: {sentence}", file=sys.stderr)
    raise SystemExit(2)


def settings_of(module: str) -> type[ProcessSettings]:
    """Return the settings of the service that `python -m module` runs, from its own `settings.py`."""
    kind: type[ProcessSettings] = import_module(f"{module}.settings").SETTINGS
    return kind
