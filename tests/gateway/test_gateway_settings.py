"""Settings of the gateway: what is refused, each with a sentence."""

import os

import pytest

from gateway.settings import GatewaySettings
from specdec.serving.settings import load


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("SPECDEC_")]:
        monkeypatch.delenv(name)


def test_defaults_serve_one_machine() -> None:
    settings = load(GatewaySettings, "gateway", [])
    assert (settings.host, settings.port, settings.coordinator) == ("127.0.0.1", 8000, "127.0.0.1:50051")
    assert settings.coordinator_tls_files is None
    assert load(GatewaySettings, "gateway", ["--coordinator-tls"]).coordinator_tls_files is not None


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--host", "0.0.0.0"], "--host is 0.0.0.0, where others can read and change plain text"),
        (["--coordinator", "far:50051"], "--coordinator is far:50051, where others can read and change plain text"),
        (["--coordinator", "http://far:1"], "--coordinator is 'http://far:1'; give host:port without http://"),
        (["--tls-certificate", "x"], "--tls-certificate and --tls-key belong together"),
        (["--coordinator-tls-key", "x"], "--coordinator-tls-certificate and --coordinator-tls-key belong together"),
        (["--target", "x"], "unknown flag --target"),
        (["--max-choices", "0"], "--max-choices (or SPECDEC_MAX_CHOICES) is '0'"),
        (["--keep-alive-s", "0"], "--keep-alive-s (or SPECDEC_KEEP_ALIVE_S) is '0'"),
    ],
)
def test_wrong_settings_do_not_start(capsys: pytest.CaptureFixture[str], flags: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as end:
        load(GatewaySettings, "gateway", flags)
    assert end.value.code == 2
    assert f"gateway: {sentence}" in capsys.readouterr().err


def test_remote_coordinators_may_have_tls() -> None:
    assert load(GatewaySettings, "gateway", ["--coordinator", "far:1", "--coordinator-tls-ca", "ca.pem"])
    assert load(GatewaySettings, "gateway", ["--coordinator", "far:1", "--host", "0.0.0.0", "--insecure"])
