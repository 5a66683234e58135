"""The page at /: its files, their headers, and what they may name. What it does in a browser: test_page.py."""

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gateway.page_files import page_files
from tests.gateway.test_keys import guarded  # noqa: F401  # a fixture
from tests.support.gateway import COMPLETION, Answer, asked, connected, request
from tests.support.scripted import TEXT, WHOLE, Service, sends

PAGE = Path(__file__).parents[2] / "gateway" / "page"
KINDS = {"css": "text/css; charset=utf-8", "js": "text/javascript; charset=utf-8", "svg": "image/svg+xml"}
NAMES = sorted(path.name for path in PAGE.iterdir())
SCRIPTS = {path.name: path.read_text() for path in PAGE.glob("*.js")}
HTML = (PAGE / "index.html").read_text()


async def get(port: int, path: str, **headers: str) -> Answer:
    return await asked(port, path, None, "GET", **headers)


def check_headers(answer: Answer, kind: str) -> None:
    assert answer.status == 200
    assert answer.headers["content-type"] == kind
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-content-type-options"] == "nosniff"
    policy = answer.headers["content-security-policy"].split("; ")
    assert policy[0] == "default-src 'self'"
    assert "unsafe" not in answer.headers["content-security-policy"]


async def test_page_is_at_the_root(port: int) -> None:
    answer = await get(port, "/")
    check_headers(answer, "text/html; charset=utf-8")
    assert answer.body.decode() == HTML


@pytest.mark.parametrize("name", [name for name in NAMES if name != "index.html"])
async def test_files_have_their_types(port: int, name: str) -> None:
    answer = await get(port, f"/page/{name}")
    check_headers(answer, KINDS[name.rpartition(".")[2]])
    assert answer.body == (PAGE / name).read_bytes()


async def test_files_need_no_key(guarded: int) -> None:  # noqa: F811
    assert (await get(guarded, "/")).status == 200
    assert (await get(guarded, "/page/page.js")).status == 200
    assert (await get(guarded, "/v1/models")).status == 401


@pytest.mark.parametrize("path", ["/", "/page/page.js"])
async def test_known_files_are_not_sent_again(port: int, path: str) -> None:
    etag = (await get(port, path)).headers["etag"]
    for known in (etag, f'"other", W/{etag}'):
        answer = await get(port, path, if_none_match=known)
        assert (answer.status, answer.body, answer.headers["etag"]) == (304, b"", etag)
    assert (await get(port, path, if_none_match='"other"')).status == 200


@pytest.mark.parametrize("path", ["/", "/page/page.css"])
async def test_head_has_no_body(port: int, path: str) -> None:
    length = len((await get(port, path)).body)
    async with connected(port) as connection:
        await connection.send(request(path, None, "HEAD", connection="close"))
        head, _, body = (await connection.rest()).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert f"content-length: {length}".encode() in head
    assert body == b""


@pytest.mark.parametrize(
    "path",
    [
        "/page",
        "/page/",
        "/page/nothing.js",
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/%2e%2e/app.py",
        "/page/..%5capp.py",
        "/page//etc/passwd",
        "/page/%2fetc%2fpasswd",
        "/page/page.js%00.css",
        "/index.html",
        "/favicon.ico",
    ],
)
async def test_other_paths_are_refused(port: int, path: str) -> None:
    answer = await get(port, path)
    assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_url")


async def test_page_takes_no_other_method(port: int) -> None:
    answer = await asked(port, "/", {})
    assert (answer.status, answer.json["error"]["code"]) == (405, "method_not_allowed")


async def test_other_routes_are_unchanged(service: Service, port: int) -> None:
    service.handlers = [sends(*WHOLE)]
    assert (await asked(port, "/v1/completions", COMPLETION)).json["choices"][0]["text"] == TEXT
    assert (await get(port, "/healthz")).json == {"status": "ok"}
    assert (await get(port, "/v1")).json["error"]["code"] == "unknown_url"


def test_every_file_is_read() -> None:
    assert sorted(page_files()) == NAMES


# ---- what the files name


class Elements(HTMLParser):
    """The elements of a page: names with attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, Any]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def values(self, name: str) -> list[str]:
        return [attributes[name] for _, attributes in self.found if name in attributes]


ELEMENTS = Elements(HTML)


def test_ids_are_unique() -> None:
    ids = ELEMENTS.values("id")
    assert len(ids) == len(set(ids))


def test_ids_that_scripts_use_exist() -> None:
    used = {found for text in SCRIPTS.values() for found in re.findall(r'\b(?:part|number)\("([\w-]+)"\)', text)}
    used |= {f"{name}-{kind}" for name in ("speculative", "plain") for kind in ("bar", "speed")}
    assert len(used) > 25
    assert used <= set(ELEMENTS.values("id"))


def test_ids_that_attributes_name_exist() -> None:
    named = {name for kind in ("for", "aria-describedby", "aria-labelledby") for name in ELEMENTS.values(kind)}
    assert named <= set(ELEMENTS.values("id"))


def test_files_that_are_named_exist() -> None:
    linked = {name.removeprefix("page/") for kind in ("href", "src") for name in ELEMENTS.values(kind)}
    imported = {name for text in SCRIPTS.values() for name in re.findall(r'from "\./([\w.]+)"', text)}
    assert linked | imported | {"index.html"} == set(NAMES)


def test_nothing_is_inline_or_of_another_origin() -> None:
    assert not [name for _, attributes in ELEMENTS.found for name in attributes if name == "style" or name[:2] == "on"]
    assert [attributes["type"] for tag, attributes in ELEMENTS.found if tag == "script"] == ["module"]
    texts = [HTML, (PAGE / "page.css").read_text(), *SCRIPTS.values()]
    assert not [text for text in texts if re.search(r"https?:|url\(|@import|<style", text)]


def test_texts_are_never_markup() -> None:
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|setHTML|eval\("
    assert not [name for name, text in SCRIPTS.items() if re.search(forbidden, text)]


def test_every_field_has_a_label() -> None:
    fields = [attributes for tag, attributes in ELEMENTS.found if tag in ("input", "select", "textarea")]
    assert len(fields) == 10
    labelled = set(ELEMENTS.values("for"))
    within = {
        name for block in re.findall(r"<label.*?</label>", HTML, re.S) for name in re.findall(r'id="([^"]+)"', block)
    }
    assert {field["id"] for field in fields} <= labelled | within
