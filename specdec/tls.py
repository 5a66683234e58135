"""Certificates and keys in files, as channels and servers need them: read together, and checked to fit together."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from specdec.watched import Signature, Watched, WatchedError, signature_of


class TlsError(WatchedError):
    """Certificates cannot be used. The message names the files and the remedy."""


@dataclass(frozen=True, slots=True)
class TlsContents:
    """PEM texts. `certificate` may be a chain; with it comes its `key`. `ca` None: the machine's authorities."""

    ca: bytes | None
    certificate: bytes | None
    key: bytes | None


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files: whom to trust (`ca`; None: the authorities that grpc brings), and one's own certificate and key."""

    ca: str | Path | None = None
    certificate: str | Path | None = None
    key: str | Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise TlsError(f"the {missing} is missing; give certificate and key together")

    def signature(self) -> Signature:
        """Return what changes when a file is replaced. Raises TlsError for a file that is not there."""
        return signature_of(path for path in (self.ca, self.certificate, self.key) if path is not None)

    def read(self) -> TlsContents:
        """Return the contents. Raises TlsError if they cannot be used, or if they change meanwhile."""
        before = self._contents()
        if self.certificate is not None:
            _check("certificate", self.certificate, self.key, self._check_pair)
        if self.ca is not None:
            _check("ca", self.ca, None, self._check_ca)
        if before != self._contents():
            raise TlsError(f"{self.certificate or self.ca} changes at this moment; try again")
        return before

    def _contents(self) -> TlsContents:
        return TlsContents(*map(_read, (self.ca, self.certificate, self.key)))

    def _check_pair(self) -> None:
        assert self.certificate is not None
        # grpc takes a key that belongs to another certificate, and then every handshake fails
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(self.certificate, self.key, password="")

    def _check_ca(self) -> None:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(self.ca)


def _check(what: str, path: str | Path, key: str | Path | None, load: Callable[[], None]) -> None:
    try:
        load()
    except (OSError, ValueError) as error:
        problem = f"the {what} {path} cannot be used" + (f" with the key {key}" if key else "")
        raise TlsError(f"{problem} ({getattr(error, 'reason', None) or 'not PEM'}); give PEM files") from None


def _read(path: str | Path | None) -> bytes | None:
    try:
        return None if path is None else Path(path).read_bytes()
    except OSError as error:
        raise TlsError(f"cannot read {path}: {error.strerror}") from None


def watched(
    files: TlsFiles, on_reload: Callable[[WatchedError | None], None] = lambda problem: None
) -> Watched[TlsContents]:
    """Return the last usable contents of the files. Raises WatchedError if there are none now."""
    return Watched(files.signature, files.read, on_reload)


def channel_credentials(contents: TlsContents) -> grpc.ChannelCredentials:
    """Return grpc's credentials."""
    return grpc.ssl_channel_credentials(contents.ca, contents.key, contents.certificate)


@dataclass(frozen=True, slots=True)
class HandshakeProblem:
    """Why a handshake failed: what grpc and BoringSSL say then, what it means, and what the caller can do."""

    words: str
    meaning: str
    remedy: str


_UNTRUSTED = (
    "its certificate is of an authority that is not trusted here",
    "give the authority's certificate (--tls-ca FILE, or tls=TlsFiles(ca=FILE))",
)
HANDSHAKE_PROBLEMS = (
    HandshakeProblem(
        "certificate has expired", "its certificate has expired", "the service's operator can give it a new one"
    ),
    HandshakeProblem("certificate signature failure", *_UNTRUSTED),
    HandshakeProblem("CERTIFICATE_VERIFY_FAILED", *_UNTRUSTED),
    HandshakeProblem(
        "Hostname Verification Check failed",
        "its certificate is for another name",
        "give the address with a name that the certificate has",
    ),
    HandshakeProblem(
        "WRONG_VERSION_NUMBER",
        "it speaks plain text, and TLS was asked for",
        "leave TLS out, or give the port that has it",
    ),
    HandshakeProblem(
        "Socket closed",
        "Socket closed, as by a server that wants TLS or another certificate of ours",
        "give --tls or --tls-ca FILE, and where it asks for one --tls-certificate and --tls-key (tls= of the client)",
    ),
)


def handshake_problem(details: str) -> HandshakeProblem | None:
    """Return why a handshake failed, from the details of its status; None for anything else."""
    return next((problem for problem in HANDSHAKE_PROBLEMS if problem.words in details), None)
