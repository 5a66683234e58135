"""An Open with an absurd epoch locks nobody out: strangers cannot open, and no epoch beyond the store's is recorded."""

import grpc
import pytest

from specdec.channel import open_channel
from specdec.errors import InvalidArgumentError
from specdec.serving.session_stream import MAX_EPOCH, check_open, open_session
from specdec.tls import channel_credentials
from specdec.types import SamplingParams
from specdec.v1 import target_pb2_grpc
from tests.support.secure_cluster import SecureCluster

pytestmark = pytest.mark.asyncio(loop_scope="module")

SAMPLING = SamplingParams(seed=1)


async def test_strangers_open_nothing(secure: SecureCluster) -> None:
    """The certificate is of the right authority, and its name is not the coordinator's."""
    credentials = channel_credentials(secure.client.read())
    async with open_channel(secure.target_address, credentials) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Score()
        # refused before it has sent its opening: a message that is written now may meet a call that is over
        assert await call.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("epoch", [0, MAX_EPOCH + 1, 2**63, 2**64 - 1])
async def test_epochs_of_no_store_are_refused(epoch: int) -> None:
    """Before they are recorded: the session's own epochs still count."""
    with pytest.raises(InvalidArgumentError, match=f"an epoch from 1 to {MAX_EPOCH}"):
        check_open(open_session("victim", epoch, SAMPLING, 1), None)
    check_open(open_session("victim", MAX_EPOCH, SAMPLING, 1), None)
