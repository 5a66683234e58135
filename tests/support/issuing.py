"""cert-manager's part: the Secrets that rendered Certificates ask for."""

from collections.abc import Mapping, Sequence

from tests.support.certificates import Authority
from tests.support.manifests import Document, of_kind

Secrets = Mapping[str, Mapping[str, bytes]]
"""By name, then by file."""


def issued_secrets(documents: Sequence[Document], authority: Authority) -> Secrets:
    """Issue every Certificate that is not an authority's own, for the names that it lists and no others."""
    wanted = [each["spec"] for each in of_kind(documents, "Certificate") if not each["spec"].get("isCA")]
    return {spec["secretName"]: secret_for(authority, *spec["dnsNames"]) for spec in wanted}


def secret_for(authority: Authority, *names: str) -> Mapping[str, bytes]:
    """Return the files of a Secret as cert-manager writes them."""
    certificate, key = authority.issue(*names)
    return {"ca.crt": authority.pem, "tls.crt": certificate, "tls.key": key}
