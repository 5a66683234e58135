"""Settings of the coordinator."""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from pydantic import Field

from coordinator.canary import Canary
from coordinator.detached import DETACHED_PATIENCE_S, DetachedRule
from coordinator.sessions import LEASE_S
from coordinator.stores.client import PATIENCE_S
from specdec.channel import MAX_REQUEST_BYTES, REQUEST_BYTES, SLACK_BYTES, Pings, is_loopback
from specdec.serving.settings import ClientFacingSettings
from specdec.serving.store_url import OWN_STORES, StoreUrl
from specdec.tls import TlsFiles
from specdec.types import MAX_DRAFT_TOKENS, DetachedPolicy


class CoordinatorSettings(ClientFacingSettings):
    """The coordinator: `python -m coordinator`."""

    target: str = Field("127.0.0.1:50053", description="address of the target workers, host:port or dns:///host:port")
    draft: str | None = Field("127.0.0.1:50052", description="address of the draft workers; empty: plain decoding")
    tokenizer: str = Field(..., description="hub id or folder of the target model; only its tokenizer is read")
    store: str = Field(
        "embedded",
        description="embedded: a redis-server of this process, where the machine has one; memory: nothing outlives "
        "this process; or an address: redis://, rediss:// (TLS), redis+sentinel://, redis+cluster:// or unix://",
    )
    store_password_file: Path | None = Field(
        None, description="file with the password of the store's user; read again for each connection"
    )
    store_replicas: int = Field(
        0, ge=0, description="replicas that must have a commit before a client sees it (WAIT); 0: the master alone"
    )
    store_patience_s: float = Field(PATIENCE_S, ge=0, description="seconds that a call waits for the store to be back")
    state_dir: Path | None = Field(
        None, description="folder of the embedded store; unset: $XDG_STATE_HOME/specdec or ~/.local/state/specdec"
    )
    session_ttl_s: float = Field(
        3600.0, ge=10, description="seconds that a session is kept after its last commit; a running one is kept"
    )
    lease_s: float = Field(
        LEASE_S,
        ge=0.5,
        le=60,
        description="seconds for which a session is left to the coordinator that runs it, after its last sign of life",
    )
    detached: Literal["park", "finish", "cancel"] = Field(
        "park",
        description="what becomes of a session that no client follows any more, unless its request says so; park: it "
        "waits to be resumed; finish: it runs to its end; cancel: it is ended after --detached-patience-s",
    )
    detached_patience_s: float = Field(
        DETACHED_PATIENCE_S, ge=0, description="seconds that a client has to come back before its session is cancelled"
    )
    max_sessions: int = Field(
        1024, ge=1, description="maximum number of sessions generated at once; more: RESOURCE_EXHAUSTED"
    )
    quotas_file: Path | None = Field(
        None, description="TOML file with what each tenant may take of this coordinator; a replaced file counts at once"
    )
    max_request_bytes: int = Field(
        REQUEST_BYTES,
        ge=SLACK_BYTES,
        le=MAX_REQUEST_BYTES,
        description="maximum size of a request, nearly all of which is its prompt; larger: RESOURCE_EXHAUSTED. Models "
        "with very long contexts need more; every call at once may make the coordinator hold that much",
    )
    max_new_tokens: int = Field(
        4096, ge=1, description="maximum number of tokens a request may generate; also the default"
    )
    max_draft_tokens: int = Field(
        MAX_DRAFT_TOKENS, ge=0, le=MAX_DRAFT_TOKENS, description="maximum draft tokens a round, automatic or asked for"
    )
    draft_timeout_s: float = Field(
        2.0, gt=0, description="maximum seconds that a proposal is waited for; less where the last ones were quick"
    )
    score_timeout_s: float = Field(
        60.0,
        gt=0,
        description="maximum seconds that scores are waited for, before another worker is asked; more for prompts",
    )
    target_patience_s: float = Field(
        30.0, ge=0, description="seconds that a session waits while no target worker is in service"
    )
    canary_model: str | None = Field(
        None, description="name of a target model that gets a share of the new sessions; others serve the rest"
    )
    canary_share: float = Field(0.0, ge=0, le=1, description="that share: 0 none of them, 1 all")
    ping_period_s: float = Field(
        0.75, ge=0.5, description="seconds of silence after which a connection to a worker with running calls is tested"
    )
    ping_timeout_s: float = Field(
        1.25, ge=0.1, description="seconds that a worker has to answer such a test; then its connection counts as lost"
    )
    worker_tls_ca: Path | None = Field(
        None, description="PEM file of authorities; workers need a certificate of one of them. Unset: plain text"
    )
    worker_tls_certificate: Path | None = Field(
        None, description="PEM file with the certificate that workers are shown; unset: --tls-certificate"
    )
    worker_tls_key: Path | None = Field(None, description="PEM file with its key; unset: --tls-key")
    target_tls_name: str | None = Field(
        None, description="name in the target workers' certificates; unset: the host of --target"
    )
    draft_tls_name: str | None = Field(
        None, description="name in the draft workers' certificates; unset: the host of --draft"
    )

    @property
    def message_limit_bytes(self) -> int:
        """Of a message that it receives."""
        return self.max_request_bytes

    @property
    def detached_rule(self) -> DetachedRule:
        """What becomes of sessions that nobody follows."""
        return DetachedRule(DetachedPolicy[self.detached.upper()], self.detached_patience_s)

    @property
    def canary(self) -> Canary | None:
        """The model that gets a share of the new sessions."""
        return Canary(self.canary_model, self.canary_share) if self.canary_model else None

    @property
    def pings(self) -> Pings:
        """How soon a worker is noticed that has stopped."""
        return Pings(self.ping_period_s, self.ping_timeout_s)

    @property
    def worker_tls(self) -> TlsFiles | None:
        """The files for TLS to the workers. Raises TlsError for a certificate without its key."""
        if self.worker_tls_ca is None:
            return None
        own = self.worker_tls_certificate is None and self.worker_tls_key is None
        certificate, key = (
            (self.tls_certificate, self.tls_key) if own else (self.worker_tls_certificate, self.worker_tls_key)
        )
        return TlsFiles(self.worker_tls_ca, certificate, key)

    def problems(self) -> Iterator[str]:
        """Give a sentence for each combination of settings that is refused."""
        yield from super().problems()
        if (self.worker_tls_certificate is None) != (self.worker_tls_key is None):
            yield "--worker-tls-certificate and --worker-tls-key belong together; give both or neither"
        if self.quotas_file and not (self.tokens_file or self.jwt):
            yield "--quotas-file needs --tokens-file or --jwt-issuer: without tokens all clients are one tenant"
        if self.canary_share and not self.canary_model:
            yield "--canary-share needs --canary-model, the name of the model that gets it"
        yield from self._store_problems()
        if self.insecure:
            return
        if self.worker_tls_ca is None:
            for flag, address in (("--target", self.target), ("--draft", self.draft)):
                if address and not is_loopback(address):
                    remedy = "give --worker-tls-ca, or say --insecure"
                    yield f"{flag} is {address}, where others can read and change plain text; {remedy}"

    def _store_problems(self) -> Iterator[str]:
        if self.store in OWN_STORES:
            if self.store_replicas:
                yield f"--store-replicas needs a Redis that has replicas; --store is {self.store}"
            return
        try:
            store = StoreUrl.parse(self.store)
        except ValueError as error:
            yield str(error)
            return
        if store.is_exposed and not self.insecure:
            yield "--store is on another machine, in plain text; give rediss://, or say --insecure"


SETTINGS = CoordinatorSettings
