"""A model hub on loopback, which may break off its downloads, and an address where no hub is."""

import hashlib
import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, file_download

MODEL = "nobody/nothing"
COMMIT = "a" * 40
PROMISED_BYTES = 1000  # of a file that breaks off


def ask_hub_at(port: int, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the hub's library ask this port of loopback, with an empty cache, and not wait between its attempts."""
    endpoint = f"http://127.0.0.1:{port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(file_download, "time", SimpleNamespace(sleep=lambda _: None))


def unused_port() -> int:
    """Return a port where nothing listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def blob_id(content: bytes) -> str:
    """Return the hash by which git, and so a hub, knows a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def hub(whole: Mapping[str, bytes], broken: tuple[str, ...] = ()) -> Iterator[int]:
    """Serve one model, some of whose files break off; give the port."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            name = self.path.rsplit("/", 1)[-1]
            if name in whole or name in broken:
                self._begin(len(whole.get(name, bytes(PROMISED_BYTES))), name)
            else:
                self.send_response(404)
                self.send_header("X-Error-Code", "EntryNotFound")
                self.end_headers()

        def do_GET(self) -> None:
            content = self._listing() if "/api/" in self.path else whole.get(self.path.rsplit("/", 1)[-1])
            self._begin(PROMISED_BYTES if content is None else len(content), "any")
            self.wfile.write(content or b"x")

        def _begin(self, num_bytes: int, etag: str) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(num_bytes))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag}"')
            self.end_headers()

        def _listing(self) -> bytes:
            if "/tree/" not in self.path:
                return json.dumps({"id": MODEL, "sha": COMMIT, "siblings": []}).encode()
            files = dict(whole) | dict.fromkeys(broken, bytes(PROMISED_BYTES))
            return json.dumps(
                [
                    {"type": "file", "path": name, "size": len(content), "oid": blob_id(content)}
                    for name, content in files.items()
                ]
            ).encode()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()
