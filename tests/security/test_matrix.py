"""Every rpc of every service, called by everybody who may not: the right code, and a sentence that helps."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from specdec import AsyncClient, SamplingParams, TlsFiles, UnavailableError
from specdec.channel import open_channel
from specdec.tls import channel_credentials
from tests.support.certificates import Authority
from tests.support.secure_cluster import CLIENT, COORDINATOR, TOKENS, SecureCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEALTH = {
    "/grpc.health.v1.Health/Check": "unary_unary",
    "/grpc.health.v1.Health/List": "unary_unary",
    "/grpc.health.v1.Health/Watch": "unary_stream",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "stream_stream",
}
RPCS = {
    "coordinator": HEALTH
    | {
        "/specdec.v1.GenerationService/Generate": "unary_stream",
        "/specdec.v1.GenerationService/Resume": "unary_stream",
        "/specdec.v1.GenerationService/GetSession": "unary_unary",
        "/specdec.v1.GenerationService/CancelSession": "unary_unary",
        "/specdec.v1.GenerationService/GetModel": "unary_unary",
        "/specdec.v1.StatusService/GetStatus": "unary_unary",
    },
    "target": HEALTH
    | {
        "/specdec.v1.TargetService/GetTarget": "unary_unary",
        "/specdec.v1.TargetService/Score": "stream_stream",
        "/specdec.v1.StatusService/GetStatus": "unary_unary",
    },
    "draft": HEALTH
    | {
        "/specdec.v1.DraftService/GetDraft": "unary_unary",
        "/specdec.v1.DraftService/Propose": "stream_stream",
        "/specdec.v1.StatusService/GetStatus": "unary_unary",
    },
}
EVERY_RPC = [(service, method) for service, methods in RPCS.items() for method in methods]
SHUT = grpc.StatusCode.UNAVAILABLE  # the handshake failed: there is no connection
NO_TOKEN = grpc.StatusCode.UNAUTHENTICATED
DENIED = grpc.StatusCode.PERMISSION_DENIED
LOST_STATUS = "Internal error from Core"  # grpc.aio's own, where a call was refused before its message was written
REFUSALS = {SHUT, NO_TOKEN, DENIED}


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended."""

    code: grpc.StatusCode
    details: str


def address_of(secure: SecureCluster, service: str) -> str:
    """Return where a service listens."""
    return {
        "coordinator": secure.address,
        "target": secure.target_address,
        "draft": secure.draft_address,
    }[service]


@asynccontextmanager
async def channel_to(secure: SecureCluster, service: str, files: TlsFiles | None) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel with these files; without any in plain text."""
    credentials = channel_credentials(files.read()) if files else None
    async with open_channel(address_of(secure, service), credentials) as channel:
        yield channel


async def call(secure: SecureCluster, service: str, method: str, files: TlsFiles | None, token: str | None) -> Answer:
    """Make one call with an empty message; a stream is left after its first answer."""
    while True:
        answer = await _call(secure, service, method, files, token)
        if answer.details != LOST_STATUS:
            return answer


async def _call(secure: SecureCluster, service: str, method: str, files: TlsFiles | None, token: str | None) -> Answer:
    metadata = () if token is None else (("authorization", f"Bearer {token}"),)
    kind = RPCS[service][method]
    async with channel_to(secure, service, files) as channel:
        given: Any = b"" if kind.startswith("unary") else _once()
        calling = getattr(channel, kind)(method)(given, metadata=metadata, timeout=10)
        try:
            if kind == "unary_unary":
                await calling
            elif await calling.read() is not grpc.aio.EOF:
                calling.cancel()
                return Answer(grpc.StatusCode.OK, "")
        except grpc.aio.AioRpcError as error:
            return Answer(error.code(), error.details() or "")
        return Answer(await calling.code(), await calling.details())


async def _once() -> AsyncIterator[bytes]:
    yield b""


@pytest.mark.parametrize(("service", "method"), EVERY_RPC)
async def test_whoever_may_call_is_let_in(service: str, method: str, secure: SecureCluster, tmp_path: Path) -> None:
    """The control: the same calls with everything in order reach the method."""
    caller = CLIENT if service == "coordinator" else COORDINATOR
    files = secure.authority.files(tmp_path, caller)
    token = TOKENS["acme"] if service == "coordinator" else None
    answer = await call(secure, service, method, files, token)
    assert answer.code not in REFUSALS, answer


Files = Callable[[SecureCluster, Path], TlsFiles | None]
CERTIFICATES: dict[str, tuple[Files, grpc.StatusCode]] = {
    "plain text": (lambda secure, folder: None, SHUT),
    "no certificate": (lambda secure, folder: TlsFiles(secure.client.ca), SHUT),
    "another authority's": (
        lambda secure, folder: Authority().files(folder, CLIENT, trusts=secure.authority.pem),
        SHUT,
    ),
    "expired": (lambda secure, folder: secure.authority.files(folder, CLIENT, COORDINATOR, is_expired=True), SHUT),
    "another name": (lambda secure, folder: secure.authority.files(folder, "other.specdec.svc"), DENIED),
}


@pytest.mark.parametrize("certificate", CERTIFICATES)
@pytest.mark.parametrize(("service", "method"), EVERY_RPC)
async def test_wrong_certificates_are_refused(
    service: str, method: str, certificate: str, secure: SecureCluster, tmp_path: Path
) -> None:
    make, code = CERTIFICATES[certificate]
    answer = await call(secure, service, method, make(secure, tmp_path), TOKENS["acme"])
    assert answer.code == code, answer
    if code == DENIED:
        assert "--tls-client-names" in answer.details


@pytest.mark.parametrize("service", ["target", "draft"])
async def test_clients_do_not_reach_workers(service: str, secure: SecureCluster) -> None:
    """A client's certificate is of the right authority, and opens the coordinator alone."""
    for method in RPCS[service]:
        answer = await call(secure, service, method, secure.client, TOKENS["acme"])
        assert answer.code == DENIED, (method, answer)


SignToken = Callable[[SecureCluster], str | None]
BAD_TOKENS: dict[str, tuple[SignToken, str]] = {
    "none": (lambda secure: None, "carries no token; send the metadata `authorization: Bearer TOKEN`"),
    "unknown": (lambda secure: "a-token-of-nobody", "unknown, or was withdrawn; ask the operator"),
    "empty": (lambda secure: "", "is not a bearer token|unknown"),
    "withdrawn": (lambda secure: "an-expired-token", "has expired; ask the operator"),
    "signed, expired": (lambda secure: secure.issuer.sign(exp=1), "has expired; get a new one"),
    "signed, not yet valid": (lambda secure: secure.issuer.sign(nbf=4e9), "not valid yet"),
    "signed for another service": (lambda secure: secure.issuer.sign(aud="other"), "another audience"),
    "signed by another issuer": (lambda secure: secure.issuer.sign(iss="https://other"), "another issuer"),
    "signed for ever": (lambda secure: secure.issuer.sign(exp=None), "lacks a claim"),
    "signed without tenant": (lambda secure: secure.issuer.sign(sub=None), "lacks a claim"),
    "signed for an odd tenant": (lambda secure: secure.issuer.sign(sub="a\nb"), "names no tenant"),
    "signed with another key": (
        lambda secure: secure.issuer.sign(ec.generate_private_key(ec.SECP256R1())),
        "not valid",
    ),
    "unsigned": (
        lambda secure: "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhY21lIn0.e30",
        "key that its issuer does not publish|not valid",
    ),
}


@pytest.mark.parametrize("token", BAD_TOKENS)
@pytest.mark.parametrize("method", RPCS["coordinator"])
async def test_wrong_tokens_are_refused(method: str, token: str, secure: SecureCluster) -> None:
    make, words = BAD_TOKENS[token]
    answer = await call(secure, "coordinator", method, secure.client, make(secure))
    assert answer.code == NO_TOKEN, answer
    assert any(word in answer.details for word in words.split("|")), answer


async def test_signed_tokens_name_their_tenant(secure: SecureCluster) -> None:
    """A signed token and a static one of the same tenant reach the same sessions."""
    sampling = SamplingParams(temperature=0, max_new_tokens=4, ignore_eos=True)
    async with (
        AsyncClient(secure.address, tls=secure.client, token=TOKENS["acme"]) as static,
        AsyncClient(secure.address, tls=secure.client, token=lambda: secure.issuer.sign(sub="acme")) as signed,
    ):
        completion = await static.complete(prompt_token_ids=[5, 6, 7], sampling=sampling)
        assert (await signed.get_session(completion.session_id)).tokens == completion.tokens


HANDSHAKES: dict[str, tuple[Callable[[SecureCluster, Path], dict[str, Any]], str]] = {
    "plain text": (lambda secure, folder: {}, "Socket closed.*; give --tls or --tls-ca"),
    "no certificate": (lambda secure, folder: {"tls": TlsFiles(secure.client.ca)}, "Socket closed.*--tls-certificate"),
    "another authority": (
        lambda secure, folder: {"tls": Authority().files(folder, CLIENT)},
        "an authority that is not trusted.*--tls-ca FILE",
    ),
}


@pytest.mark.parametrize("name", HANDSHAKES)
async def test_a_failed_handshake_is_explained(name: str, secure: SecureCluster, tmp_path: Path) -> None:
    make, words = HANDSHAKES[name]
    arguments: dict[str, Any] = make(secure, tmp_path)
    async with AsyncClient(secure.address, connect_timeout_s=1, token="t", **arguments) as client:
        with pytest.raises(UnavailableError, match=words):
            await client.get_model(timeout_s=3)
