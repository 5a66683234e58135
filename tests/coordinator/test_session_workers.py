"""Which sessions' draft tokens are matched with what the target draws."""

from typing import Any, cast
from unittest.mock import Mock

import pytest

from coordinator.session_workers import SessionWorkers, Workers
from coordinator.streams import SessionOpening
from specdec.types import AcceptanceRuleName, ModelInfo, SamplingParams, SpeculationParams

RULE = AcceptanceRuleName.TOKEN


@pytest.mark.parametrize(
    ("temperature", "speculation", "is_matched"),
    [
        (1, {}, True),
        (1, {"drafter": "model"}, True),
        (1, {"num_draft_tokens": 4}, False),
        (1, {"acceptance_rule": RULE}, False),
        (1, {"drafter": "model", "acceptance_rule": RULE, "num_draft_tokens": 4}, False),
        (0, {}, False),  # nothing is drawn
    ],
)
def test_drafts_are_matched_where_the_service_chooses_all(
    temperature: float, speculation: dict[str, Any], is_matched: bool
) -> None:
    """A rule that a session names tests its drafts, also where their number is left to the service."""
    target = Mock()
    workers = SessionWorkers(Workers(target, draft=None, capabilities=Mock()), max_draft_tokens=8)
    session = SessionOpening("a", 1, SamplingParams(seed=1, temperature=temperature), 2, lambda length: b"")
    workers.open(session, ModelInfo("target", vocab_size=10), SpeculationParams(**speculation))
    assert cast(SessionOpening, target.open.call_args.args[0]).is_matched == is_matched
