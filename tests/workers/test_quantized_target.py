"""A target in int8 is another model than the same weights in float32, and says so."""

from pathlib import Path

import grpc
import pytest

from specdec.errors import ModelMismatchError, from_rpc_error
from specdec.serving.settings import load
from specdec.v1 import target_pb2, target_pb2_grpc, types_pb2
from target_service.settings import TargetSettings
from tests.support.worker_streams import PROMPT, TargetStream, connected_target

DEMO_TARGET = Path(__file__).parents[2] / "models" / "target"


async def served_model(channel: grpc.aio.Channel) -> types_pb2.ModelInfo:
    return (await target_pb2_grpc.TargetServiceStub(channel).GetTarget(target_pb2.GetTargetRequest())).model


async def test_sessions_stay_with_their_kind_of_weights() -> None:
    """A session of the float32 model is refused by a worker in int8, and one of its own is served."""
    async with connected_target(DEMO_TARGET) as channel:
        plain = await served_model(channel)
    async with connected_target(DEMO_TARGET, quantization="int8") as channel:
        rounded = await served_model(channel)
        assert (plain.quantization, rounded.quantization) == ("", "int8")
        own = TargetStream(channel, "own", model_fingerprint=rounded.fingerprint)
        assert (await own.score(0, PROMPT)).cached_len == len(PROMPT)
        other = TargetStream(channel, "other", model_fingerprint=plain.fingerprint)
        error = from_rpc_error(await other.refused())
    assert isinstance(error, ModelMismatchError)


@pytest.mark.parametrize("value", ["int4", "8", ""])
def test_unknown_quantisations_are_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(TargetSettings, "target_service", ["--model", "m", "--quantization", value])
    sentences = capsys.readouterr().err.splitlines()
    assert len(sentences) == 1
    assert "--quantization" in sentences[0]
    assert "'none' or 'int8'" in sentences[0]
