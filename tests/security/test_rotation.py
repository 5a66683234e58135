"""Certificates, authorities, tokens and signing keys are replaced while sessions run: none fails."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import pytest_asyncio

from specdec import AsyncClient, SamplingParams, UnauthenticatedError
from specdec.watched import CHECK_PERIOD_S
from tests.support.certificates import Authority
from tests.support.secure_cluster import CLIENT, COORDINATOR, SecureCluster, secure_cluster, write_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUM_ROUNDS = int(os.environ.get("SECURITY_ROTATIONS", "1"))
NUM_CLIENTS = 4
NOTICED_S = 1.5 * CHECK_PERIOD_S  # files are looked at once in CHECK_PERIOD_S
SAMPLING = SamplingParams(temperature=0, max_new_tokens=24, ignore_eos=True)


@pytest_asyncio.fixture(loop_scope="module")
async def rotated(pair: Path, tmp_path: Path) -> AsyncIterator[SecureCluster]:
    """Services of this test alone: it leaves other files behind."""
    async with secure_cluster(pair, pair, tmp_path) as running:
        yield running


class Load:
    """Clients that complete one session after the other, each on new connections half of the time."""

    def __init__(self, secure: SecureCluster) -> None:
        self._secure = secure
        self.token = "a-token-of-acme"
        self.num_done_by = [0] * NUM_CLIENTS
        self.failures: list[str] = []

    @property
    def num_done(self) -> int:
        """Sessions that are complete."""
        return sum(self.num_done_by)

    async def run(self, number: int) -> None:
        """Complete sessions until cancelled; every other client signs its tokens."""
        secure = self._secure
        while True:
            token = (lambda: self.token) if number % 2 else secure.issuer.sign
            async with AsyncClient(secure.address, tls=secure.client, token=token, max_retries=3) as client:
                for _ in range(2):
                    await self._complete(client, number)

    async def _complete(self, client: AsyncClient, number: int) -> None:
        try:
            completion = await client.complete(prompt_token_ids=[5, 6, 7], sampling=SAMPLING, timeout_s=20)
            assert len(completion.tokens) == SAMPLING.max_new_tokens
            self.num_done_by[number] += 1
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")


async def test_rotation_under_load_fails_no_session(rotated: SecureCluster) -> None:
    """A new authority is trusted beside the old one, then certificates change, then the old one goes."""
    load, old = Load(rotated), rotated.authority
    async with AsyncExitStack() as stack:
        tasks = [asyncio.create_task(load.run(number)) for number in range(NUM_CLIENTS)]
        stack.callback(lambda: [task.cancel() for task in tasks])
        for number in range(NUM_ROUNDS):
            new = Authority(f"authority {number}")
            for signer, trusted in ((old, old.pem + new.pem), (new, old.pem + new.pem), (new, new.pem)):
                issue(rotated.folder, signer, trusted)
                await asyncio.sleep(NOTICED_S)
            await rotate_tokens(rotated, load, number)
            old = new
        before = load.num_done
        await until_more(load, before + 2 * NUM_CLIENTS)
    print(f"{load.num_done} sessions, {3 * NUM_ROUNDS} rotations of certificates, {NUM_ROUNDS} of tokens and keys")
    assert load.failures == []


def issue(folder: Path, authority: Authority, trusted: bytes) -> None:
    """Replace everybody's certificates."""
    for name, identity in (("worker", "worker.specdec.svc"), ("coordinator", COORDINATOR), ("client", CLIENT)):
        authority.files(folder / name, identity, trusts=trusted)


async def rotate_tokens(secure: SecureCluster, load: Load, number: int) -> None:
    """Let in a new token beside the old one, use it, withdraw the old one; and sign with a new key."""
    old, new = load.token, f"a-new-token-{number}"
    write_tokens(secure.folder / "tokens.toml", {"acme": [old, new]})
    secure.issuer.publish()
    await asyncio.sleep(NOTICED_S)
    load.token = new
    secure.issuer.switch()
    await until_each_has_more(load)  # what began with the old token is over
    write_tokens(secure.folder / "tokens.toml", {"acme": [new]})
    await asyncio.sleep(NOTICED_S)
    async with AsyncClient(secure.address, tls=secure.client, token=old) as client:
        with pytest.raises(UnauthenticatedError, match="withdrawn"):
            await client.get_model()


async def until_more(load: Load, count: int) -> None:
    """Wait until so many sessions are done, or one has failed."""
    async with asyncio.timeout(30):
        while load.num_done < count and not load.failures:  # noqa: ASYNC110  # other tasks count
            await asyncio.sleep(0.05)


async def until_each_has_more(load: Load) -> None:
    """Wait until every client has completed a session, or one has failed."""
    before = list(load.num_done_by)
    async with asyncio.timeout(30):
        while any(map(int.__le__, load.num_done_by, before)) and not load.failures:  # noqa: ASYNC110  # as above
            await asyncio.sleep(0.05)
