"""The page at /: a few files beside this module, read once, which a browser asks about again each time.

They are the same for everybody, so they need no key; what the page asks of /v1 does.
"""

import hashlib
from dataclasses import dataclass
from importlib.resources import files
from pathlib import PurePath
from typing import Self

from gateway.exchange import Exchange
from gateway.problems import HttpProblem

INDEX = "index.html"
CONTENT_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "cache-control": "no-cache",  # kept, and used after asking whether it has changed
    # nothing of another origin, nothing inline: a model's text could at worst be shown
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """A file as it is sent."""

    content: bytes
    headers: dict[str, str]

    @classmethod
    def of(cls, name: str, content: bytes) -> Self:
        """Return a file with its headers. Raises KeyError for a kind of file that the page does not have."""
        kind = CONTENT_TYPES[PurePath(name).suffix]
        etag = f'"{hashlib.blake2b(content, digest_size=16).hexdigest()}"'
        return cls(content, {**HEADERS, "content-type": kind, "etag": etag})


def page_files() -> dict[str, PageFile]:
    """Read the files of the page, by their names."""
    folder = files("gateway") / "page"
    return {entry.name: PageFile.of(entry.name, entry.read_bytes()) for entry in folder.iterdir()}


class Page:
    """Answers with the page, and with the files that it names."""

    def __init__(self) -> None:
        self._files = page_files()

    async def index(self, exchange: Exchange) -> None:
        """Answer with the page."""
        await _send(exchange, self._files[INDEX])

    async def file(self, exchange: Exchange) -> None:
        """Answer with the file that the path names. Raises HttpProblem."""
        name = exchange.scope["path_params"]["name"]
        if name not in self._files:
            raise HttpProblem(404, f"the page has no file {name!r}", code="unknown_url")
        await _send(exchange, self._files[name])


async def _send(exchange: Exchange, file: PageFile) -> None:
    known = [tag.strip().removeprefix("W/") for tag in exchange.headers.get("if-none-match", "").split(",")]
    if file.headers["etag"] in known:
        await exchange.send_bytes(304, b"", file.headers)
    else:
        await exchange.send_bytes(200, file.content, {**file.headers, "content-length": str(len(file.content))})
