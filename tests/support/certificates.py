"""Authorities, and certificates of theirs, made in a moment and valid for as long as a test needs."""

from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from specdec.tls import TlsFiles

DAY = timedelta(days=1)


class Authority:
    """An authority that signs certificates."""

    def __init__(self, name: str = "authority") -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        basic = x509.BasicConstraints(ca=True, path_length=0)
        certificate = _builder(self._name, self._name, self._key, datetime.now(UTC) + DAY).add_extension(basic, True)
        self.pem = _pem(certificate.sign(self._key, hashes.SHA256()))

    def issue(self, *names: str, is_expired: bool = False) -> tuple[bytes, bytes]:
        """Return a certificate for DNS names and URIs, and for loopback, with its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "service")])
        end = datetime.now(UTC) + (-DAY if is_expired else DAY)
        general = [x509.UniformResourceIdentifier(name) if "://" in name else x509.DNSName(name) for name in names]
        alternatives = x509.SubjectAlternativeName([*general, x509.IPAddress(ip_address("127.0.0.1"))])
        builder = _builder(subject, self._name, key, end).add_extension(alternatives, False)
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return _pem(builder.sign(self._key, hashes.SHA256())), private

    def files(self, folder: Path, *names: str, is_expired: bool = False, trusts: bytes | None = None) -> TlsFiles:
        """Write a certificate, its key and the authority to a folder; those that are there are replaced."""
        folder.mkdir(parents=True, exist_ok=True)
        certificate, key = self.issue(*names, is_expired=is_expired)
        contents = {"ca.pem": trusts or self.pem, "tls.pem": certificate, "tls.key": key}
        for name, content in contents.items():
            (folder / f"{name}.new").write_bytes(content)
        for name in contents:
            (folder / f"{name}.new").rename(folder / name)
        return TlsFiles(folder / "ca.pem", folder / "tls.pem", folder / "tls.key")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    return builder.not_valid_before(end - 3 * DAY).not_valid_after(end)


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)
