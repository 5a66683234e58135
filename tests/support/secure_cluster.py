"""All three services with mutual TLS on every hop, and tokens for clients; real servers on loopback."""

import hashlib
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec

from specdec.tls import TlsFiles
from tests.support.certificates import Authority
from tests.support.cluster import serving_coordinator, serving_draft, serving_target

ISSUER, AUDIENCE = "https://issuer.example", "specdec"
COORDINATOR, CLIENT = "coordinator.specdec.svc", "spiffe://example/client"
TOKENS = {"acme": "a-token-of-acme", "example": "a-token-of-example"}  # by tenant
EXPIRED_TOKEN = "an-expired-token"


class Issuer:
    """Signs tokens, and publishes its keys in a file."""

    def __init__(self, keys: Path) -> None:
        self._file = keys
        self._published: list[dict[str, Any]] = []
        self.publish()
        self.switch()

    def publish(self) -> None:
        """Publish a new key beside the last one; tokens are signed with it after `switch`."""
        self._next = f"key-{time.monotonic_ns()}", ec.generate_private_key(ec.SECP256R1())
        public = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(self._next[1].public_key())) | {"kid": self._next[0]}
        self._published = [public, *self._published[:1]]
        replace(self._file, json.dumps({"keys": self._published}))

    def switch(self) -> None:
        """Sign with the key that was published last."""
        self._id, self._key = self._next

    def sign(self, key: ec.EllipticCurvePrivateKey | None = None, **claims: Any) -> str:
        """Return a token; claims that are None are left out."""
        now = time.time()
        given = {"iss": ISSUER, "aud": AUDIENCE, "exp": now + 600, "sub": "acme"} | claims
        kept = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(kept, key or self._key, algorithm="ES256", headers={"kid": self._id})


@dataclass(frozen=True, slots=True)
class SecureCluster:
    """Where the services listen, and what opens them."""

    address: str
    target_address: str
    draft_address: str
    authority: Authority
    client: TlsFiles
    folder: Path
    issuer: Issuer


def replace(file: Path, text: str) -> None:
    """Replace a file at once, as a mounted Secret is."""
    new = file.with_suffix(".new")
    new.write_text(text)
    new.rename(file)


def write_tokens(file: Path, tokens: Mapping[str, list[str]], more: str = "") -> Path:
    """Write a tokens file."""
    tables = [f"[{tenant}]\ntokens = {list(map(hash_of, given))}\n" for tenant, given in tokens.items()]
    replace(file, "".join(tables) + more)
    return file


def expired(token: str) -> str:
    """Return the table of a tenant whose only token has expired."""
    return f'[former]\ntokens = [{{ hash = "{hash_of(token)}", expires = 2020-01-01T00:00:00Z }}]\n'


def hash_of(token: str) -> str:
    """Return a token's hash as the tokens file has it."""
    return f"sha256:{hashlib.sha256(token.encode()).hexdigest()}"


@asynccontextmanager
async def secure_cluster(
    target: Path, draft: Path, folder: Path, **coordinator: object
) -> AsyncIterator[SecureCluster]:
    """Serve the pair; every service has a certificate, workers let in the coordinator alone."""
    authority = Authority()
    worker = server_settings(authority.files(folder / "worker", "worker.specdec.svc"), COORDINATOR)
    own = server_settings(authority.files(folder / "coordinator", COORDINATOR), CLIENT)
    issuer = Issuer(folder / "keys.json")
    tokens = write_tokens(
        folder / "tokens.toml", {tenant: [token] for tenant, token in TOKENS.items()}, expired(EXPIRED_TOKEN)
    )
    security = own | {
        "worker_tls_ca": own["tls_client_ca"],
        "target_tls_name": "worker.specdec.svc",
        "draft_tls_name": "worker.specdec.svc",
        "tokens_file": tokens,
        "operators": "acme",
        "jwt_issuer": ISSUER,
        "jwt_audience": AUDIENCE,
        "jwt_keys": str(folder / "keys.json"),
    }
    async with (
        serving_target(target, **worker) as target_address,
        serving_draft(draft, drafters="model,ngram", **worker) as draft_address,
        serving_coordinator(
            **security, target=target_address, draft=draft_address, tokenizer=str(target), **coordinator
        ) as address,
    ):
        client = authority.files(folder / "client", CLIENT)
        yield SecureCluster(address, target_address, draft_address, authority, client, folder, issuer)


def server_settings(files: TlsFiles, *names: str) -> dict[str, object]:
    """Return the settings of a server with these files that lets in callers with one of the names."""
    paths = {"tls_certificate": files.certificate, "tls_key": files.key, "tls_client_ca": files.ca}
    return {**paths, "tls_client_names": ",".join(names), "reflection": True}
