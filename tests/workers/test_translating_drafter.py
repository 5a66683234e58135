"""Drafts from a model of another tokenizer, through a real server."""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import pytest_asyncio
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from specdec.exact import codec
from specdec.exact.race import Race, likely_winners
from specdec.exact.randomness import Key, Purpose, uniform
from specdec.exact.sampling import SamplingContext, draw, next_token_distributions, sparse_distributions
from specdec.exact.values import Proposal, SparseDistribution, one_hot
from specdec.serving.tokenizer import fingerprint
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.support.cluster import save_tokenizer
from tests.support.other_tokenizer import DEMO_DRAFT, save_draft_of_other_tokenizer
from tests.support.worker_streams import DraftStream, connected_draft
from tests.workers.conftest import Forwards

NUM_TARGET_IDS = 4096
CONTENT = "def heappush(heap, item):\n    heap.append(item)\n    _siftdown(heap, 0, len(heap)-1)\n\ndef heappop(heap):"
PLAIN = SamplingParams(seed=7)
in_module_loop = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_draft_of_other_tokenizer(tmp_path_factory.mktemp("other"))


@pytest.fixture(scope="module")
def target() -> Tokenizer:
    return Tokenizer.from_file(str(DEMO_DRAFT / "tokenizer.json"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def channel(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with connected_draft(folder, drafters="model", target_tokenizer=str(DEMO_DRAFT)) as connected:
        yield connected


@pytest.fixture(scope="module")
def expected(folder: Path, target: Tokenizer) -> Any:
    """Draft by a plain loop: the text encoded whole, transformers' forward, shared tokens by their written form."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draft = Tokenizer.from_file(str(folder / "tokenizer.json"))
    own_ids = {target.token_to_id(text): token for text, token in draft.get_vocab().items()}
    others = [token for token in range(NUM_TARGET_IDS) if token not in own_ids]

    @torch.no_grad()
    def drafted(text: Sequence[int], count: int, sampling: SamplingParams) -> Proposal:
        assert sampling.seed is not None
        own = draft.encode(target.decode(list(text), skip_special_tokens=False)).ids
        tokens: list[int] = []
        distributions: list[SparseDistribution] = []
        for index in range(count):
            logits = model(torch.tensor([[*own, *map(own_ids.__getitem__, tokens)]])).logits[0, -1]
            row = torch.stack([logits[own_ids.get(token, 0)] for token in range(NUM_TARGET_IDS)])
            row[others] = -torch.inf
            context = SamplingContext(sampling, text[:6], [*text[6:], *tokens])
            dense = next_token_distributions(row[None], [context], NUM_TARGET_IDS)
            distributions += sparse_distributions(dense, 0.99, 64)
            tokens.append(draw(distributions[-1], uniform(sampling.seed, Key(len(text), index, Purpose.DRAFT))))
        return Proposal(tuple(tokens), tuple(distributions))

    return drafted


def decoded(answer: draft_pb2.ProposeResponse, count: int) -> Proposal:
    """Check and unpack an answer as the coordinator does."""
    return codec.proposal_from_proto(answer, count, NUM_TARGET_IDS)


def assert_same(actual: Proposal, wanted: Proposal) -> None:
    """Equal tokens and supports, and probabilities within rounding."""
    assert actual.tokens == wanted.tokens
    for found, other in zip(actual.distributions, wanted.distributions, strict=True):
        assert dict(zip(found.token_ids, found.probs, strict=True)) == pytest.approx(
            dict(zip(other.token_ids, other.probs, strict=True)), abs=1e-4
        )


@pytest.mark.parametrize(
    "sampling",
    [
        PLAIN,
        SamplingParams(seed=1, temperature=0),
        SamplingParams(seed=2, temperature=0.7, top_k=20, top_p=0.9),
        SamplingParams(seed=3, frequency_penalty=2.0, repetition_penalty=1.2, logit_bias={300: 8.0, 4000: 50.0}),
    ],
    ids=["plain", "greedy", "truncated", "penalties"],
)
@in_module_loop
async def test_drafts_equal_a_plain_loop(
    sampling: SamplingParams, channel: grpc.aio.Channel, names: Iterator[str], target: Tokenizer, expected: Any
) -> None:
    """Over rounds with rejections, full acceptance and rollbacks; penalties and bias count the target's tokens."""
    stream, ids = DraftStream(channel, next(names), sampling), target.encode(CONTENT).ids
    text: list[int] = []
    for start, tokens in ((0, ids[:20]), (20, ids[20:21]), (21, ids[21:]), (30, ids[3:9]), (36, ids[36:])):
        text = [*text[:start], *tokens]
        answer = await stream.propose(start, tokens, 4)
        assert_same(decoded(answer, 4), expected(text, 4, sampling))
        assert answer.cached_len == len(text)


@in_module_loop
async def test_drafts_are_drawn_from_the_shipped_distributions(
    channel: grpc.aio.Channel, names: Iterator[str], target: Tokenizer
) -> None:
    stream, text = (
        DraftStream(channel, next(names), SamplingParams(seed=9, temperature=1.5)),
        target.encode(CONTENT).ids,
    )
    proposal = decoded(await stream.propose(0, text, 8), 8)
    again = [
        draw(each, uniform(9, Key(len(text), at, Purpose.DRAFT))) for at, each in enumerate(proposal.distributions)
    ]
    assert again == list(proposal.tokens)


@in_module_loop
async def test_in_a_matched_session_the_first_token_is_who_most_likely_wins(
    channel: grpc.aio.Channel, names: Iterator[str], target: Tokenizer, expected: Any
) -> None:
    """By the race of its place in the target's text, which has another number of tokens than the draft's."""
    text = target.encode(CONTENT).ids
    tokens = set[int]()
    for seed in range(5):
        sampling = SamplingParams(seed=seed, temperature=2)
        stream = DraftStream(channel, next(names), sampling, is_matched=True)
        proposal = decoded(await stream.propose(0, text, 1), 1)
        ((row,), race) = expected(text, 1, sampling).distributions, Race(seed, len(text))
        ((winner,),), _ = likely_winners(np.array([row.probs]), [race], 1, np.array(row.token_ids))
        assert proposal == Proposal((winner,), (one_hot(winner),))
        tokens.add(winner)
    assert len(tokens) > 1


@in_module_loop
async def test_rounds_feed_what_is_new(
    channel: grpc.aio.Channel, names: Iterator[str], target: Tokenizer, forwards: Forwards
) -> None:
    """A later round, a repeated one and a takeover feed a short tail; a closed session is read again."""
    name, text = next(names), target.encode(CONTENT).ids
    first = DraftStream(channel, name)
    whole = decoded(await first.propose(0, text[:-2], 1), 1)
    assert forwards.by_session[name][0] > 30
    forwards.by_session[name].clear()
    await first.propose(len(text) - 2, text[-2:], 1)
    assert decoded(await first.propose(0, text[:-2], 1), 1).tokens == whole.tokens
    assert max(forwards.by_session[name]) < 12
    await first.abandon()
    second = DraftStream(channel, name, epoch=2)
    await second.propose(0, text, 1)
    assert max(forwards.by_session[name]) < 12
    await second.close()
    assert (await DraftStream(channel, name, epoch=3).propose(len(text), [5], 1)).cached_len == 0


@in_module_loop
async def test_worker_describes_itself_by_the_targets_tokenizer(channel: grpc.aio.Channel, target: Tokenizer) -> None:
    (offered,) = (await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(draft_pb2.GetDraftRequest())).drafters
    assert offered.model.tokenizer_fingerprint == fingerprint(target)
    assert offered.model.vocab_size == NUM_TARGET_IDS


async def test_drafts_end_with_the_drafts_context(folder: Path, target: Tokenizer) -> None:
    """A longer text is followed without drafts, and drafted for again once it is shorter."""
    async with connected_draft(folder, drafters="model", target_tokenizer=str(DEMO_DRAFT)) as channel:
        stream, text = DraftStream(channel, "s"), (target.encode(CONTENT).ids * 40)[:1020]
        answer = await stream.propose(0, text, 4)
        assert (len(answer.tokens), answer.cached_len) == (0, len(text))
        assert len((await stream.propose(50, text[50:60], 4)).tokens) == 4


async def test_own_tokenizer_needs_no_translation(names: Iterator[str]) -> None:
    async with connected_draft(DEMO_DRAFT, drafters="model", target_tokenizer=str(DEMO_DRAFT)) as channel:
        (offered,) = (await draft_pb2_grpc.DraftServiceStub(channel).GetDraft(draft_pb2.GetDraftRequest())).drafters
        assert offered.model.context_length == 1024


async def test_unusable_target_tokenizers_stop_the_start(folder: Path, tmp_path: Path) -> None:
    words = save_tokenizer(tmp_path, 30)
    for name, sentence in ((str(words), "neither byte-level nor"), (str(tmp_path / "absent"), "does not exist")):
        with pytest.raises(ValueError, match=sentence):
            async with connected_draft(folder, drafters="model", target_tokenizer=name):
                pass
