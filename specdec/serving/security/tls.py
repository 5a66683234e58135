"""A server's certificates, read again when their files are replaced: the next connection gets the new ones."""

from typing import Any

import grpc

from specdec.serving.settings import ServiceSettings
from specdec.serving.telemetry import get_logger
from specdec.tls import TlsContents, TlsFiles, watched
from specdec.watched import Watched, WatchedError


def server_credentials(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """Return the credentials of a server; None: it serves plain text. Raises WatchedError for unusable files."""
    if settings.tls_certificate is None:
        return None
    files = TlsFiles(settings.tls_client_ca, settings.tls_certificate, settings.tls_key)
    configurations = _Configurations(watched(files, log_reload))
    fetch: Any = configurations.changed  # None for no change, which its type lacks
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        configurations.first(), fetch, require_client_authentication=settings.tls_client_ca is not None
    )
    return credentials


class _Configurations:
    """The server's configuration, in the forms that grpc asks for. grpc calls `changed` on threads of its own."""

    def __init__(self, contents: Watched[TlsContents]) -> None:
        self._contents = contents
        self._given = contents.value

    def first(self) -> grpc.ServerCertificateConfiguration:
        """Return the configuration at the start."""
        return _configuration(self._given)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration for a new connection; None: as before."""
        contents = self._contents.value
        if contents == self._given:
            return None
        configuration = _configuration(contents)
        self._given = contents
        return configuration


def _configuration(contents: TlsContents) -> grpc.ServerCertificateConfiguration:
    assert contents.key is not None
    assert contents.certificate is not None
    return grpc.ssl_server_certificate_configuration([(contents.key, contents.certificate)], contents.ca)


def log_reload(problem: WatchedError | None) -> None:
    """Log that files were replaced, or why the former ones stay in use."""
    if problem is None:
        get_logger().info("certificates_reloaded")
    else:
        get_logger().error("certificates_refused", problem=str(problem))
