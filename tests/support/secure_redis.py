"""A real redis-server as operators should run it: TLS alone, one user with a password and the rights of the scripts."""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from specdec.tls import TlsFiles
from tests.support.manifests import REPOSITORY
from tests.support.ports import free_port
from tests.support.redis_server import executable

USER = "specdec"
CONFIGURATION = REPOSITORY / "deploy" / "kubernetes" / "base" / "redis.conf"


@dataclass(frozen=True, slots=True)
class SecureRedis:
    """Where it listens, and how to get in."""

    port: int
    files: TlsFiles
    password: str

    def url(self, password: str = "") -> str:
        """Return the store's URL, with or without the password."""
        login = f"{USER}:{password}" if password else USER
        return f"rediss://{login}@127.0.0.1:{self.port}/0?ssl_ca_certs={self.files.ca}"

    def admin(self) -> redis.Redis:
        """Return a client that may do everything; the caller closes it."""
        login: dict[str, Any] = {"username": "admin", "password": self.password, "retry": Retry(NoBackoff(), 0)}
        return redis.Redis("127.0.0.1", self.port, ssl=True, ssl_ca_certs=str(self.files.ca), **login)


def rights() -> str:
    """Return what the manifests let the coordinator's user do."""
    found = re.search(r"^user default on nopass (.*)$", CONFIGURATION.read_text(), re.MULTILINE)
    assert found
    return found[1]


@contextmanager
def secure_redis(files: TlsFiles, password: str, *more: str) -> Iterator[SecureRedis]:
    """Run it; `more` are lines of its configuration."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="specdec-redis-") as folder:
        lines = [
            *(f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}", 'save ""', "loglevel warning"),
            f"tls-cert-file {files.certificate}\ntls-key-file {files.key}\ntls-ca-cert-file {files.ca}",
            *("tls-auth-clients no", "user default off", f"user admin on >{password} allkeys allcommands"),
            *(f"user {USER} on >{password} {rights()}", *more),
        ]
        file = Path(folder) / "redis.conf"
        file.write_text("\n".join(lines) + "\n")
        with (Path(folder) / "log").open("ab") as log:
            process = subprocess.Popen([executable(), str(file)], stdout=log, stderr=log)
        server = SecureRedis(port, files, password)
        try:
            while not _answers(server):
                assert process.poll() is None, (Path(folder) / "log").read_text()
                time.sleep(0.01)
            yield server
        finally:
            process.kill()
            process.wait()


@contextmanager
def secure_sentinel(master: SecureRedis, service: str, password: str) -> Iterator[int]:
    """Run a Sentinel over a master, with TLS alone and a password of its own; yield its port."""
    port, files = free_port(), master.files
    with tempfile.TemporaryDirectory(prefix="specdec-sentinel-") as folder:
        lines = [
            f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\nloglevel warning\nrequirepass {password}",
            f"tls-cert-file {files.certificate}\ntls-key-file {files.key}\ntls-ca-cert-file {files.ca}",
            f"tls-auth-clients no\ntls-replication yes\nsentinel monitor {service} 127.0.0.1 {master.port} 1",
            f"sentinel auth-user {service} admin\nsentinel auth-pass {service} {master.password}",
        ]
        file = Path(folder) / "sentinel.conf"
        file.write_text("\n".join(lines) + "\n")
        with (Path(folder) / "log").open("ab") as log:
            process = subprocess.Popen([executable(), str(file), "--sentinel"], stdout=log, stderr=log)
        try:
            yield port
        finally:
            process.kill()
            process.wait()


def _answers(server: SecureRedis) -> bool:
    with suppress(redis.RedisError), server.admin() as client:
        return bool(client.ping())
    return False
