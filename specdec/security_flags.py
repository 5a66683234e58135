"""How the command connects: TLS, its token, and plain text. Secrets come from files: every user sees command lines."""

import argparse
import hashlib
import secrets
from pathlib import Path
from typing import Any

from specdec.errors import InvalidArgumentError
from specdec.tls import TlsError, TlsFiles

TOKEN_BYTES = 32


def add_security_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags."""
    group = command.add_argument_group("Security")
    group.add_argument(
        "--tls", action="store_true", help="connect with TLS, and trust the authorities that grpc brings"
    )
    group.add_argument("--tls-ca", metavar="FILE", help="connect with TLS, and trust the authorities in this PEM file")
    group.add_argument("--tls-certificate", metavar="FILE", help="PEM file with the certificate to show the service")
    group.add_argument("--tls-key", metavar="FILE", help="PEM file with its key")
    group.add_argument("--token-file", metavar="FILE", help="file with the bearer token to send")
    group.add_argument(
        "--insecure", action="store_true", help="allow plain text off loopback, where others can read it"
    )


def security_of(flags: argparse.Namespace) -> dict[str, Any]:
    """Return what the client needs for the flags. Raises InvalidArgumentError."""
    has_tls = flags.tls or flags.tls_ca or flags.tls_certificate or flags.tls_key
    try:
        tls = TlsFiles(flags.tls_ca, flags.tls_certificate, flags.tls_key) if has_tls else None
    except TlsError as error:
        raise InvalidArgumentError({"tls": str(error)}) from None
    token = None
    if flags.token_file:
        _read_token(flags.token_file)
        token = lambda: _read_token(flags.token_file)  # noqa: E731  # the file may be replaced while it runs
    return {"tls": tls, "token": token, "insecure": flags.insecure}


def _read_token(path: str) -> str:
    try:
        token = Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise InvalidArgumentError({"--token-file": f"{path} cannot be read ({reason})"}) from None
    if not token or not token.isascii() or not token.isprintable():
        raise InvalidArgumentError({"--token-file": f"{path} does not hold one token; give one line of ASCII"})
    return token


def print_new_token(_: argparse.Namespace) -> None:
    """Print a new token, and its hash as the tokens file has it."""
    token = secrets.token_urlsafe(TOKEN_BYTES)
    print(f"token: {token}")
    print(f"hash:  sha256:{hashlib.sha256(token.encode()).hexdigest()}")
