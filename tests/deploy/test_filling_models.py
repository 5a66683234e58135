"""The job that fills the volume: complete models alone get their names, and what broke off goes on."""

import hashlib
import os
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.certificates import Authority
from tests.support.hubs import COMMIT, MODEL, hub
from tests.support.manifests import KUBERNETES, REPOSITORY, of_kind, render
from tests.support.pods import LocalCluster

PROGRAM = REPOSITORY / "deploy/kubernetes/models/fill.py"
WEIGHTS = bytes(range(256)) * 400
FILES = {"config.json": b"{}", "tokenizer.json": b'{"a": 1}', "model.safetensors": WEIGHTS}


@dataclass
class WebServer:
    """A folder over HTTPS, which may break off or change what it sends."""

    files: dict[str, bytes]
    port: int = 0
    breaks_after: dict[str, int] = field(default_factory=dict)  # bytes, each for one answer
    ignores_ranges: bool = False
    ranges: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        return f"https://127.0.0.1:{self.port}/model/"

    def sums(self) -> bytes:
        return "".join(f"{hashlib.sha256(FILES[name]).hexdigest()}  {name}\n" for name in FILES).encode()


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    return written(tmp_path / "tls")


def written(folder: Path) -> Path:
    """Write an authority, and a certificate of it for loopback; return the authority's file."""
    Authority(folder.name).files(folder, "localhost")
    return folder / "ca.pem"


@pytest.fixture
def server(authority: Path) -> Iterator[WebServer]:
    web = WebServer(dict(FILES))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            name = self.path.removeprefix("/model/")
            content = web.sums() if name == "SHA256SUMS" else web.files.get(name)
            if content is None:
                self.send_error(404)
                return
            start = self._start()
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            self.wfile.write(content[start : web.breaks_after.pop(name, len(content))])

        def _start(self) -> int:
            if asked := self.headers["Range"]:
                web.ranges.append(asked)
            return int(asked[6:-1]) if asked and not web.ignores_ranges else 0

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority.parent / "tls.pem", authority.parent / "tls.key")
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.socket = context.wrap_socket(http.socket, server_side=True)
        web.port = http.server_port
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield web
        finally:
            http.shutdown()
            thread.join()


def run(volume: Path, authority: Path | None = None, *, endpoint: str = "", **models: str) -> tuple[int, str]:
    """Run the job's program as the job does; return its exit status and what it said."""
    volume.mkdir(exist_ok=True)
    listed = volume.parent / "models.toml"
    listed.write_text("[models]\n" + "".join(f'{name} = "{source}"\n' for name, source in models.items()))
    variables = {"PATH": os.environ["PATH"], "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(volume.parent / "home")}
    if authority:
        variables["SSL_CERT_FILE"] = str(authority)
    if endpoint:
        variables["HF_ENDPOINT"] = endpoint
    words = [sys.executable, str(PROGRAM), str(listed), str(volume)]
    ended = subprocess.run(words, env=variables, capture_output=True, text=True, check=False)
    return ended.returncode, ended.stdout + ended.stderr


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name not in ("SHA256SUMS", "source.txt")}


def model_folder(folder: Path, **changed: bytes) -> Path:
    folder.mkdir()
    for name, content in (FILES | changed).items():
        (folder / name).write_bytes(content)
    return folder


def test_models_of_a_server_arrive(server: WebServer, authority: Path, tmp_path: Path) -> None:
    assert run(tmp_path / "volume", authority, target=server.source) == (0, "fill: target: complete, 3 files, 0 MiB\n")
    assert contents(tmp_path / "volume/target") == FILES
    assert [path.name for path in (tmp_path / "volume").iterdir()] == ["target"]


def test_a_download_that_broke_off_goes_on(server: WebServer, authority: Path, tmp_path: Path) -> None:
    server.breaks_after["model.safetensors"] = 5000
    status, said = run(tmp_path / "volume", authority, target=server.source)
    assert (status, server.ranges) == (0, ["bytes=5000-"]), said
    assert f"5000 of {len(WEIGHTS)} bytes came" in said
    assert contents(tmp_path / "volume/target") == FILES


def test_a_server_without_ranges_begins_again(server: WebServer, authority: Path, tmp_path: Path) -> None:
    server.breaks_after["model.safetensors"], server.ignores_ranges = 5000, True
    assert run(tmp_path / "volume", authority, target=server.source)[0] == 0
    assert contents(tmp_path / "volume/target") == FILES


def test_a_killed_job_goes_on(server: WebServer, authority: Path, tmp_path: Path) -> None:
    part = tmp_path / "volume/.target.part"
    part.mkdir(parents=True)
    (part / "source.txt").write_text(server.source)
    (part / "model.safetensors.unfinished").write_bytes(WEIGHTS[:7000])
    assert run(tmp_path / "volume", authority, target=server.source)[0] == 0
    assert server.ranges == ["bytes=7000-"]
    assert contents(tmp_path / "volume/target") == FILES


def test_the_rest_of_another_source_is_not_used(server: WebServer, authority: Path, tmp_path: Path) -> None:
    part = tmp_path / "volume/.target.part"
    part.mkdir(parents=True)
    (part / "source.txt").write_text("https://elsewhere/")
    (part / "model.safetensors.unfinished").write_bytes(bytes(7000))
    assert run(tmp_path / "volume", authority, target=server.source)[0] == 0
    assert (server.ranges, contents(tmp_path / "volume/target")) == ([], FILES)


def test_changed_bytes_get_no_name(server: WebServer, authority: Path, tmp_path: Path) -> None:
    server.files["model.safetensors"] = WEIGHTS[:-1] + b"x"
    status, said = run(tmp_path / "volume", authority, target=server.source)
    assert (status, said) == (
        1,
        "fill: model.safetensors did not arrive as published; the next run fetches it again\n",
    )
    assert not (tmp_path / "volume/target").exists()
    server.files["model.safetensors"] = WEIGHTS
    assert run(tmp_path / "volume", authority, target=server.source)[0] == 0
    assert contents(tmp_path / "volume/target") == FILES


def test_an_unknown_server_is_refused(server: WebServer, tmp_path: Path) -> None:
    status, said = run(tmp_path / "volume", written(tmp_path / "other"), target=server.source)
    assert status == 1
    assert "CERTIFICATE_VERIFY_FAILED" in said


def test_missing_files_are_named(server: WebServer, authority: Path, tmp_path: Path) -> None:
    del server.files["tokenizer.json"]
    status, said = run(tmp_path / "volume", authority, target=server.source)
    assert (status, said.count("\n")) == (1, 1)
    assert "tokenizer.json answers 404 Not Found; look at the source's address" in said


def test_a_second_run_only_compares(tmp_path: Path) -> None:
    source = f"file://{model_folder(tmp_path / 'image')}"
    assert run(tmp_path / "volume", target=source)[0] == 0
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "volume/target").iterdir()}
    assert run(tmp_path / "volume", target=source) == (0, "fill: target: is there, and complete\n")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "volume/target").iterdir()} == before


def test_a_folder_in_use_is_never_replaced(tmp_path: Path) -> None:
    assert run(tmp_path / "volume", target=f"file://{model_folder(tmp_path / 'image')}")[0] == 0
    other = model_folder(tmp_path / "other", **{"config.json": b"[]"})
    status, said = run(tmp_path / "volume", target=f"file://{other}")
    assert status == 1
    assert "which workers may be reading; give file://" in said
    assert contents(tmp_path / "volume/target") == FILES
    assert run(tmp_path / "volume", second=f"file://{other}")[0] == 0
    assert contents(tmp_path / "volume/second")["config.json"] == b"[]"


def test_a_folder_that_changed_is_reported(tmp_path: Path) -> None:
    source = f"file://{model_folder(tmp_path / 'image')}"
    assert run(tmp_path / "volume", target=source)[0] == 0
    (tmp_path / "volume/target/config.json").write_bytes(b"[]")
    status, said = run(tmp_path / "volume", target=source)
    assert (status, "config.json in" in said, "has changed; delete the folder" in said) == (1, True, True)


def test_the_job_fills_its_claim(tmp_path: Path) -> None:
    documents = render(KUBERNETES / "models")
    lists = next(each["data"] for each in of_kind(documents, "ConfigMap"))
    lists["models.toml"] = f'[models]\ntarget = "file://{model_folder(tmp_path / "image")}"\n'
    cluster = LocalCluster(documents, tmp_path, REPOSITORY / "models")
    try:
        assert cluster.run_job("fill-models") == (0, "fill: target: complete, 3 files, 0 MiB\n")
        assert contents(cluster.of("fill-models")[0].local("/models/target")) == FILES
    finally:
        cluster.kill()


def test_models_without_all_parts_are_refused(tmp_path: Path) -> None:
    index = b'{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}'
    source = model_folder(tmp_path / "image", **{"model.safetensors.index.json": index, "model-1.safetensors": b"1"})
    status, said = run(tmp_path / "volume", target=f"file://{source}")
    assert (status, said) == (1, "fill: the source has no model-2.safetensors; a model needs them\n")
    assert not (tmp_path / "volume/target").exists()


def test_models_of_a_hub_arrive(tmp_path: Path) -> None:
    others = {"pytorch_model.bin": b"twice the same weights"}
    with hub(FILES | others) as port:
        source = f"hub://{MODEL}@{COMMIT}"
        status, said = run(tmp_path / "volume", endpoint=f"http://127.0.0.1:{port}", target=source)
    assert status == 0, said
    assert contents(tmp_path / "volume/target") == FILES


def test_a_hub_that_breaks_off_gives_no_model(tmp_path: Path) -> None:
    whole = {name: content for name, content in FILES.items() if name != "model.safetensors"}
    with hub(whole, broken=("model.safetensors",)) as port:
        source = f"hub://{MODEL}@{COMMIT}"
        status, said = run(tmp_path / "volume", endpoint=f"http://127.0.0.1:{port}", target=source)
    assert (status, f"the hub does not give {MODEL}" in said) == (1, True), said
    assert not (tmp_path / "volume/target").exists()


@pytest.mark.parametrize(
    "source", ["http://host/model/", "hub://owner/name", "hub://owner/name@main", "s3://bucket/model", "model"]
)
def test_unknown_sources_name_the_known_ones(source: str, tmp_path: Path) -> None:
    status, said = run(tmp_path / "volume", target=source)
    assert (status, said.count("\n")) == (1, 1)
    assert said.startswith(f"fill: the source {source!r} is none; give hub://OWNER/NAME@COMMIT")


def test_a_list_without_models_is_refused(tmp_path: Path) -> None:
    (tmp_path / "volume").mkdir()
    (tmp_path / "models.toml").write_text("target = 'hub://a/b'")
    words = [sys.executable, str(PROGRAM), str(tmp_path / "models.toml"), str(tmp_path / "volume")]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert (ended.returncode, "needs a table [models]" in ended.stderr) == (1, True)
