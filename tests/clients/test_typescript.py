"""The TypeScript client against real services: the Python client's texts, also after a killed coordinator."""

import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from specdec import AsyncClient, Completion, SpeculationParams
from tests.support.architectures import VOCAB_SIZE, build
from tests.support.certificates import Authority
from tests.support.cluster import save_tokenizer
from tests.support.node import following, missing, output_of
from tests.support.running_up import Up, up
from tests.support.secure_cluster import TOKENS, SecureCluster, secure_cluster

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "clients" / "typescript"
PROMPT = "def main("
NUM_TOKENS = 200
REASON = missing(FOLDER)
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.skipif(REASON is not None, reason=REASON or "")]


@dataclass(frozen=True, slots=True)
class Services:
    """A running `specdec up`, and where its coordinator listens."""

    running: Up
    address: str


@pytest.fixture(scope="module")
def folder() -> Path:
    """Build the client."""
    built = subprocess.run(["npm", "run", "build"], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return FOLDER


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def services(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Services]:
    models = ("--target", str(ROOT / "models/target"), "--draft", str(ROOT / "models/draft"))
    async with up(*models, "--state-dir", str(tmp_path_factory.mktemp("state"))) as running:
        yield Services(running, await running.ready())


def wanted(seed: int, **options: Any) -> dict[str, Any]:
    """Return a call of the program; a seed, a drafter and a draft length that is fixed make the text repeat."""
    fixed = {"maxNewTokens": NUM_TOKENS, "ignoreEos": True, "seed": str(seed)}
    speculation = {"numDraftTokens": 4, "drafter": "model"}
    return {"prompt": PROMPT, "options": fixed | {"speculation": speculation} | options}


async def expected(address: str, seed: int, **parameters: Any) -> Completion:
    """Return what the Python client gets."""
    speculation = SpeculationParams(num_draft_tokens=4, drafter="model")
    fixed: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "seed": seed}
    async with AsyncClient(address) as client:
        return await client.complete(PROMPT, speculation=speculation, **(fixed | parameters))


def assert_same(lines: list[dict[str, Any]], last: dict[str, Any], own: Completion) -> None:
    """Compare a completion and the chunks that it came in with what the Python client got."""
    completion = last.get("completion")
    assert completion, last
    assert (completion["text"], tuple(completion["tokens"])) == (own.text, own.tokens)
    assert completion["digest"] == own.digest.hex()
    chunks = [line["chunk"] for line in lines if "chunk" in line]
    assert "".join(chunk["text"] for chunk in chunks) == own.text
    assert "".join(piece for chunk in chunks for piece in chunk["pieces"]) == own.text
    ends = [chunk["offset"] + len(chunk["tokens"]) for chunk in chunks]
    assert [chunk["offset"] for chunk in chunks] == [0, *ends[:-1]]


async def test_its_own_tests_pass(folder: Path, services: Services) -> None:
    """Those against a scripted server, and the examples of its README against these services."""
    code, said = await output_of("npm", "test", folder=folder, environment={"SPECDEC_ADDRESS": services.address})
    failed = [line for line in said.splitlines() if re.match(r"\s*(not ok|error:|stderr:)", line)]
    assert (code, failed) == (0, [])
    assert re.search(r"^\S+ skipped 0$", said, re.M)


@pytest.mark.parametrize("seed", [7, 2**53 + 1, 2**64 - 1])
async def test_text_is_the_python_clients(folder: Path, services: Services, seed: int) -> None:
    own = await expected(services.address, seed)
    async with following(folder, services.address) as follower:
        await follower.ask(**wanted(seed))
        assert_same(*await follower.rest(), own)


async def test_request_id_is_the_same_in_both_languages(folder: Path, services: Services) -> None:
    """The same request attaches to the session that the Python client made."""
    own = await expected(services.address, 5, request_id="shared", temperature=0.75, stop=["\0"])
    async with following(folder, services.address) as follower:
        await follower.ask(**wanted(5, requestId="shared", temperature=0.75, stop="\0"))
        _, last = await follower.rest()
        assert last["completion"]["sessionId"] == own.session_id
        await follower.ask(**wanted(6, requestId="shared"))
        _, last = await follower.rest()
        assert (last["error"]["name"], last["error"]["reason"]) == ("AlreadyExistsError", "REQUEST_ID_REUSED")


async def test_logprobs_are_the_python_clients(folder: Path, services: Services) -> None:
    own = await expected(services.address, 3, num_logprobs=2)
    async with following(folder, services.address) as follower:
        await follower.ask(**wanted(3, numLogprobs=2))
        _, last = await follower.rest()
    entries = last["completion"]["logprobs"]
    assert [entry["logprob"] for entry in entries] == [entry.logprob for entry in own.logprobs]
    tops = [tuple((top["token"], top["logprob"]) for top in entry["top"]) for entry in entries]
    assert tops == [entry.top for entry in own.logprobs]
    assert last["completion"]["origins"] == [origin.name.lower() for origin in own.origins]


@pytest.mark.parametrize("seed", [11, 12])
async def test_text_is_whole_after_a_killed_coordinator(folder: Path, services: Services, seed: int) -> None:
    """The target waits while its coordinator is killed, so that the stream is in its middle for certain."""
    own = await expected(services.address, seed)
    running = services.running
    async with following(folder, services.address) as follower:
        await follower.ask(**wanted(seed))
        first = await follower.line()
        children, lost = running.children, len(running.matching("service_lost.*coordinator"))
        os.kill(children["target_service"], signal.SIGSTOP)
        os.kill(children["coordinator"], signal.SIGKILL)
        await running.logged("service_lost.*coordinator", lost + 1)
        os.kill(children["target_service"], signal.SIGCONT)
        lines, last = await follower.rest()
    assert {"retry": True} in lines
    assert_same([first, *lines], last, own)


async def test_resumed_stream_has_the_rest(folder: Path, services: Services) -> None:
    own = await expected(services.address, 21)
    async with following(folder, services.address) as follower:
        await follower.ask(sessionId=own.session_id, offset=17)
        _, last = await follower.rest()
    assert tuple(last["completion"]["tokens"]) == own.tokens[17:]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secure(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SecureCluster]:
    model = save_tokenizer(build("llama", tmp_path_factory.mktemp("model")), VOCAB_SIZE)
    async with secure_cluster(model, model, tmp_path_factory.mktemp("secure")) as running:
        yield running


def files_of(secure: SecureCluster) -> dict[str, str]:
    """Return the client's files as the TypeScript client takes them."""
    return {name: str(getattr(secure.client, name)) for name in ("ca", "certificate", "key")}


def write(path: str, content: bytes) -> None:
    """Replace a file's content."""
    Path(path).write_bytes(content)


async def test_replaced_certificates_count_for_the_next_call(folder: Path, secure: SecureCluster) -> None:
    files = files_of(secure)
    call: dict[str, Any] = {"prompt": "t5", "options": {"maxNewTokens": 4}}
    async with following(folder, secure.address, tls=files, token=TOKENS["acme"]) as follower:
        await follower.ask(**call)
        _, last = await follower.rest()
        assert len(last["completion"]["tokens"]) == 4
        write(files["ca"], Authority("another").pem)
        await follower.ask(**call | {"options": {"timeoutS": 2}})
        _, last = await follower.rest()
        assert "not trusted here" in last["error"]["message"]
        write(files["ca"], secure.authority.pem)
        await follower.ask(**call)
        _, last = await follower.rest()
        assert len(last["completion"]["tokens"]) == 4


@pytest.mark.parametrize(
    ("changes", "name", "sentence"),
    [
        ({"token": "another"}, "UnauthenticatedError", "token"),
        ({"tls": {}}, "UnavailableError", "not trusted here"),
        ({"tls": None}, "UnavailableError", "wants TLS"),
    ],
)
async def test_who_is_not_let_in_is_told_why(
    folder: Path, secure: SecureCluster, changes: dict[str, Any], name: str, sentence: str
) -> None:
    given: dict[str, Any] = {"tls": files_of(secure), "token": TOKENS["acme"], "connectTimeoutS": 0.5} | changes
    async with following(folder, secure.address, **given) as follower:
        await follower.ask(prompt="t5", options={"maxNewTokens": 4})
        _, last = await follower.rest()
    assert last["error"]["name"] == name
    assert sentence in last["error"]["message"]


async def test_missing_certificate_is_named(folder: Path, secure: SecureCluster) -> None:
    tls = {"ca": files_of(secure)["ca"]}
    async with following(folder, secure.address, tls=tls, token=TOKENS["acme"], connectTimeoutS=0.5) as follower:
        await follower.ask(prompt="t5", options={"maxNewTokens": 4})
        _, last = await follower.rest()
    assert "another certificate of ours" in last["error"]["message"]
