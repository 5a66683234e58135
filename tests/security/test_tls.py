"""Files of certificates, channels that follow them, and where plain text is refused."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from coordinator.settings import CoordinatorSettings
from specdec import AsyncClient, Client, InvalidArgumentError
from specdec.channel import is_loopback, open_channel
from specdec.reloading_channel import ReloadingChannel
from specdec.serving.process import CannotServe
from specdec.serving.security.tls import server_credentials
from specdec.serving.server import Server, serving
from specdec.serving.settings import ServiceSettings, load
from specdec.tls import TlsError, TlsFiles
from specdec.watched import Watched, WatchedError
from target_service.settings import TargetSettings
from tests.support.certificates import Authority
from tests.support.secure_cluster import server_settings

SERVICE = "specdec.v1.TargetService"


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


def unhurried(files: TlsFiles, problems: list[Any]) -> Watched[Any]:
    """Look at the files each time."""
    return Watched(files.signature, files.read, problems.append, period_s=0.0)


def test_a_key_that_does_not_fit_is_refused(authority: Authority, tmp_path: Path) -> None:
    """As in the middle of a replacement: the former pair stays in use, and that is said once."""
    files = authority.files(tmp_path, "a.b")
    problems: list[WatchedError | None] = []
    watched = unhurried(files, problems)
    first = watched.value
    other = Authority().issue("a.b")
    Path(str(files.certificate)).write_bytes(other[0])
    assert watched.value == watched.value == first
    assert [str(problem) for problem in problems] == [
        f"the certificate {files.certificate} cannot be used with the key {files.key} (KEY_VALUES_MISMATCH); "
        "give PEM files"
    ]
    Path(str(files.key)).write_bytes(other[1])
    assert watched.value.certificate == other[0]
    assert problems[1:] == [None]


@pytest.mark.parametrize("name", ["ca", "certificate", "key"])
def test_unusable_files_are_named(name: str, authority: Authority, tmp_path: Path) -> None:
    files = authority.files(tmp_path, "a.b")
    path = Path(getattr(files, name))
    path.write_text("not a certificate")
    with pytest.raises(TlsError, match=rf"{path}.*give PEM files"):
        files.read()
    path.unlink()
    with pytest.raises(WatchedError, match=f"cannot read {path}: No such file"):
        files.read()
    with pytest.raises(InvalidArgumentError, match=f"cannot read {path}"):
        AsyncClient("127.0.0.1:1", tls=files)


@asynccontextmanager
async def echo(files: TlsFiles, gate: asyncio.Event) -> AsyncIterator[str]:
    """Serve a call that answers with the caller's certificate once the gate is open."""

    async def answer(request: bytes, context: Any) -> bytes:
        await gate.wait()
        certificate: bytes = context.auth_context()["x509_pem_cert"][0]
        return certificate

    settings = TargetSettings.model_validate({"model": "none", **server_settings(files, "*")})
    server = grpc.aio.server()
    handlers: dict[str, Any] = {"Echo": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", handlers),))
    credentials = server_credentials(settings)
    assert credentials
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def test_a_channel_shows_its_new_certificate(authority: Authority, tmp_path: Path) -> None:
    """The next call shows it; a call that runs ends on the old connection, which is then closed."""
    files, gate = authority.files(tmp_path / "client", "a.b"), asyncio.Event()
    async with echo(authority.files(tmp_path / "server", "a.b"), gate) as address:
        opened: list[grpc.aio.Channel] = []

        def open_one(credentials: grpc.ChannelCredentials) -> grpc.aio.Channel:
            opened.append(open_channel(address, credentials))
            return opened[-1]

        async with ReloadingChannel(unhurried(files, []), open_one) as channel:
            call = channel.unary_unary("/test/Echo")
            first = files.read().certificate
            running = asyncio.ensure_future(call(b""))
            await asyncio.sleep(0.1)
            authority.files(tmp_path / "client", "a.b")
            later = asyncio.ensure_future(call(b""))
            gate.set()
            assert serial(await running) == serial(first)
            assert serial(await later) == serial(files.read().certificate) != serial(first)
            assert len(opened) == 2
            async with asyncio.timeout(5):
                while opened[0].get_state() is not grpc.ChannelConnectivity.SHUTDOWN:  # noqa: ASYNC110  # grpc closes it
                    await asyncio.sleep(0.01)


def serial(pem: bytes | None) -> int:
    assert pem
    return x509.load_pem_x509_certificate(pem).serial_number


LOOPBACK = [
    *("127.0.0.1:5", "localhost:5", "[::1]:5", "127.9.9.9", "::1", "[::1]", "localhost"),
    *("unix:/run/x", "ipv4:127.0.0.1:1,127.0.0.2:2", "ipv6:[::1]:5", "dns:///localhost:5"),
]
ELSEWHERE = [
    *("0.0.0.0", "[::]", "::", "10.0.0.1:5", "example.org:443", "[fe80::1]:5", "localhost.example.org:5", ""),
    *("ipv4:127.0.0.1:1,10.0.0.1:2", "dns:///target.specdec.svc:50053", "dns://127.0.0.1/example.org:5", "xds:///x"),
]


def test_loopback_is_recognised() -> None:
    assert [address for address in LOOPBACK if not is_loopback(address)] == []
    assert [address for address in ELSEWHERE if is_loopback(address)] == []


REFUSED: dict[str, tuple[dict[str, object], str]] = {
    "plain text": ({"host": "0.0.0.0"}, "--host is 0.0.0.0.*say --insecure"),
    "plain text to targets": ({"target": "dns:///t.svc:1"}, "--target is dns:///t.svc:1.*--worker-tls-ca.*--insecure"),
    "plain text to drafts": ({"draft": "10.0.0.7:1"}, "--draft is 10.0.0.7:1"),
    "plain text to Redis": ({"store": "redis://u:secret@r.svc/0"}, "give rediss://"),
    "a certificate alone": ({"tls_certificate": "x"}, "--tls-certificate and --tls-key belong together"),
    "callers without TLS": ({"tls_client_ca": "x", "tls_client_names": "a"}, "needs --tls-certificate"),
    "callers without names": (
        {"tls_certificate": "x", "tls_key": "x", "tls_client_ca": "x"},
        r"--tls-client-ca and --tls-client-names belong together; --tls-client-names '\*'",
    ),
    "half an issuer": ({"jwt_issuer": "x"}, "--jwt-issuer and --jwt-audience belong together"),
    "an issuer in plain text": (
        {"jwt_issuer": "http://issuer.example", "jwt_audience": "x"},
        "--jwt-issuer is no https URL.*give --jwt-keys",
    ),
    "keys over http": (
        {"jwt_issuer": "x", "jwt_audience": "x", "jwt_keys": "http://example.org/keys"},
        "--jwt-keys is no https URL.*give https",
    ),
    "operators without tokens": ({"operators": "acme"}, "--operators names tenants.*give --tokens-file"),
    "no endpoint of traces": ({"otlp_endpoint": "localhost:4317"}, "--otlp-endpoint is 'localhost:4317'; give http://"),
    "half a client certificate": ({"worker_tls_key": "x"}, "--worker-tls-certificate and --worker-tls-key"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_insecure_settings_are_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    given, sentence = REFUSED[name]
    flags = [word for key, value in given.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    with pytest.raises(SystemExit):
        load(CoordinatorSettings, "coordinator", ["--tokenizer", "x", *flags])
    said = capsys.readouterr().err
    assert "secret" not in said
    assert re.search(sentence, said), said


def test_insecure_is_said_once_for_all_hops() -> None:
    flags = ["--insecure", "--host", "0.0.0.0", "--target", "t:1", "--draft", "d:1", "--store", "redis://r/0"]
    assert load(CoordinatorSettings, "coordinator", ["--tokenizer", "x", *flags]).insecure


async def test_a_worker_with_tls_knows_its_callers(authority: Authority, tmp_path: Path) -> None:
    """TLS alone would let in everybody who reaches the port; and nothing listens in plain text by mistake."""
    files = authority.files(tmp_path, "a.b")
    settings = TargetSettings(model="none", tls_certificate=files.certificate, tls_key=files.key)
    with pytest.raises(CannotServe, match="--tls-client-ca is missing"):
        await Server(settings, SERVICE).listen()
    with pytest.raises(CannotServe, match=r"--host is 0\.0\.0\.0"):
        await Server(TargetSettings(model="none", host="0.0.0.0", port=0), SERVICE).listen()


@pytest.mark.parametrize("kind", [AsyncClient, Client])
def test_clients_refuse_plain_text_elsewhere(kind: type) -> None:
    with pytest.raises(InvalidArgumentError, match=r"address is 'example\.org:443'.*connect with TLS"):
        kind("example.org:443", token="t")
    with pytest.raises(InvalidArgumentError, match="beside credentials"):
        kind("example.org:443", tls=TlsFiles(), credentials=grpc.ssl_channel_credentials())


async def test_probes_have_a_port_of_their_own(authority: Authority, tmp_path: Path) -> None:
    """Without certificate or token, in plain text, and nothing but health."""
    files = server_settings(authority.files(tmp_path, "a.b"), "a.b")
    settings = ServiceSettings.model_validate({"port": 0, "health_port": 0, "drain_s": 0, **files})

    @asynccontextmanager
    async def nothing(_: Server) -> AsyncIterator[None]:
        yield

    async with (
        serving(settings, SERVICE, nothing) as server,
        open_channel(f"127.0.0.1:{server.health_port}") as channel,
    ):
        check = health_pb2_grpc.HealthStub(channel).Check
        for service in ("", SERVICE):
            answer = await check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        call: Any = channel.unary_unary(f"/{SERVICE}/GetTarget")
        other = call(b"")
        assert await other.code() == grpc.StatusCode.UNIMPLEMENTED


async def test_reflection_is_off_unless_asked_for() -> None:
    for asked, code in ((False, grpc.StatusCode.UNIMPLEMENTED), (True, grpc.StatusCode.OK)):
        server = Server(ServiceSettings(port=0, reflection=asked), SERVICE)
        await server.listen()
        async with open_channel(f"127.0.0.1:{server.port}") as channel:
            path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
            begin: Any = channel.stream_stream(path)
            call = begin()
            await call.done_writing()
            assert await call.code() == code
        await server.close()
