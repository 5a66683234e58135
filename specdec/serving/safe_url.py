"""URLs whose answers nobody on the way can change."""

from urllib.parse import urlsplit

from specdec.channel import is_loopback


def is_safe_url(url: str) -> bool:
    """Return whether a URL is https, or http on this machine."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:  # half an IPv6 address
        return False
    return bool(host) and (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(host)))
