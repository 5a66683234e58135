"""The status of a service is for its operators."""

import pytest

from specdec import AsyncClient
from specdec.errors import PermissionDeniedError
from specdec.process_status import WorkerState
from tests.support.secure_cluster import TOKENS, SecureCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_an_operator_sees_all_processes(secure: SecureCluster) -> None:
    async with AsyncClient(secure.address, tls=secure.client, token=TOKENS["acme"]) as client:
        own, *workers = await client.get_status()
    assert (own.kind, own.address, own.state) == ("coordinator", "", None)
    assert {worker.kind for worker in workers} == {"target", "draft"}
    assert {worker.state for worker in workers} == {WorkerState.IN_SERVICE}
    assert all(worker.samples for worker in workers), "the coordinator's certificate does not open them"


async def test_other_tenants_do_not(secure: SecureCluster) -> None:
    async with AsyncClient(secure.address, tls=secure.client, token=TOKENS["example"]) as client:
        with pytest.raises(PermissionDeniedError, match="add it to the coordinator's --operators"):
            await client.get_status()


async def test_signed_tokens_of_operators_count(secure: SecureCluster) -> None:
    async with AsyncClient(secure.address, tls=secure.client, token=secure.issuer.sign(sub="acme")) as client:
        assert await client.get_status()
