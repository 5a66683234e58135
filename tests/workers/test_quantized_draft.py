"""A draft model with rounded weights, through a real server."""

from pathlib import Path

import pytest

from draft_service.settings import SETTINGS as DraftSettings
from specdec.exact import codec
from specdec.serving.settings import load
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.support.worker_streams import PROMPT, DraftStream, connected_draft

DEMO_DRAFT = Path(__file__).parents[2] / "models" / "draft"


async def test_workers_say_how_their_draft_is_rounded() -> None:
    fingerprints = {}
    for quantization in ("none", "int8", "int4"):
        async with connected_draft(DEMO_DRAFT, drafters="model", draft_quantization=quantization) as channel:
            (offered,) = (await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(draft_pb2.GetDraftRequest())).drafters
            stream = DraftStream(channel, "s", SamplingParams(seed=3))
            proposal = codec.proposal_from_proto(await stream.propose(0, PROMPT, 4), 4, 4096)
        assert len(proposal) == 4
        fingerprints[offered.model.quantization] = offered.model.fingerprint
    assert set(fingerprints) == {"", "int8", "int4"}
    assert len(set(fingerprints.values())) == 3


def test_unknown_quantisations_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(DraftSettings, "draft_service", ["--draft-quantization", "int2"])
    sentences = capsys.readouterr().err.splitlines()
    assert len(sentences) == 1
    assert "--draft-quantization" in sentences[0]
    assert "'none', 'int8' or 'int4'" in sentences[0]
