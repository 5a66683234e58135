"""Settings of the gateway."""

from collections.abc import Iterator
from pathlib import Path

from pydantic import Field

from specdec.channel import MAX_REQUEST_BYTES, REQUEST_BYTES, address_problem, is_loopback
from specdec.serving.settings import Port, ProcessSettings
from specdec.tls import TlsFiles


class GatewaySettings(ProcessSettings):
    """The gateway: `python -m gateway`."""

    port: Port = Field(8000, description="port to listen on; 0 takes a free one and logs it")
    coordinator: str = Field(
        "127.0.0.1:50051", description="address of the coordinators, host:port or dns:///host:port"
    )
    coordinator_tls: bool = Field(
        False, description="connect to the coordinators with TLS, and trust the authorities that grpc brings"
    )
    coordinator_tls_ca: Path | None = Field(
        None, description="PEM file of authorities; coordinators need a certificate of one of them"
    )
    coordinator_tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate to show the coordinators, where they ask for one"
    )
    coordinator_tls_key: Path | None = Field(None, description="PEM file with its key")
    tokenizer: str | None = Field(
        None,
        description="hub id or folder of the target model, for the texts of tokens in log probabilities; unset: "
        "requests for log probabilities are refused",
    )
    model_name: str | None = Field(
        None, description="name under which requests ask for the model; unset: the name that the coordinator gives it"
    )
    timeout_s: float = Field(600.0, gt=0, le=86_400, description="seconds that a request may take in all")
    patience_s: float = Field(
        30.0, ge=0, description="seconds that a request waits for a coordinator before its first token"
    )
    read_timeout_s: float = Field(
        30.0, gt=0, description="seconds that the head of a request may take to arrive, and then its body"
    )
    keep_alive_s: float = Field(
        15.0, gt=0, description="seconds of silence after which a stream gets a comment, so that proxies keep it open"
    )
    max_body_bytes: int = Field(
        REQUEST_BYTES, ge=1024, le=4 * MAX_REQUEST_BYTES, description="maximum size of a request's body"
    )
    max_header_bytes: int = Field(16 << 10, ge=1024, le=1 << 20, description="maximum size of a request's head")
    max_connections: int = Field(4096, ge=1, description="maximum number of connections at once; more get status 503")
    max_choices: int = Field(
        16, ge=1, le=128, description="maximum number of choices of a request (n, times its prompts), each a session"
    )

    @property
    def coordinator_tls_files(self) -> TlsFiles | None:
        """The files for TLS to the coordinators; None: plain text."""
        files = (self.coordinator_tls_ca, self.coordinator_tls_certificate, self.coordinator_tls_key)
        return TlsFiles(*files) if self.coordinator_tls or any(files) else None

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        yield from super().problems()
        if (self.coordinator_tls_certificate is None) != (self.coordinator_tls_key is None):
            yield "--coordinator-tls-certificate and --coordinator-tls-key belong together; give both or neither"
            return
        if problem := address_problem(self.coordinator):
            yield f"--coordinator {problem}"
        elif self.coordinator_tls_files is None and not self.insecure and not is_loopback(self.coordinator):
            remedy = "give --coordinator-tls or --coordinator-tls-ca, or say --insecure"
            yield f"--coordinator is {self.coordinator}, where others can read and change plain text; {remedy}"


SETTINGS = GatewaySettings
