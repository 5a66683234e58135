"""Retrieval: the session, finished sessions, a corpus; what is shared with whom, what is evicted, what is refused."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer
from tokenizers.pre_tokenizers import WhitespaceSplit

from draft_service.corpus import MAX_CORPUS_BYTES
from draft_service.drafters.suffix import SuffixDrafter
from draft_service.finished_texts import FinishedTexts
from draft_service.registry import registered
from draft_service.settings import SETTINGS as DraftSettings
from draft_service.settings import chosen_kinds
from specdec.drafting.request import DraftRequest
from specdec.exact.tree import children_of
from specdec.exact.values import Proposal
from specdec.serving.session_stream import WorkerSession
from specdec.types import SamplingParams
from tests.support.cluster import save_tokenizer, serving_draft
from tests.support.worker_streams import DraftStream

FAR = list(range(100, 120))


def session(name: str, seed: int = 1, target: str = "target", temperature: float = 1.0) -> WorkerSession:
    """Return a session."""
    return WorkerSession(name, 1, SamplingParams(seed=seed, temperature=temperature), 0, target)


async def ask(
    drafter: SuffixDrafter, asking: WorkerSession, start: int, tokens: Sequence[int], count: int = 4
) -> Proposal:
    """Play one round."""
    return (await drafter.propose(asking, DraftRequest(start, tokens, count), match=False)).proposal


@asynccontextmanager
async def indexing(finished: FinishedTexts) -> AsyncIterator[None]:
    """Index finished texts meanwhile."""
    task = asyncio.create_task(finished.keep_indexing())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def finish(drafter: SuffixDrafter, name: str, tokens: Sequence[int], **values: object) -> None:
    """Play a session to its end, and let its text be indexed."""
    owner = session(name, **({"seed": 7} | values))  # type: ignore[arg-type]
    await ask(drafter, owner, 0, tokens, 0)
    drafter.forget(owner)
    for _ in range(2 + len(tokens) // 50):
        await asyncio.sleep(0)


async def test_the_session_itself_is_searched() -> None:
    drafter = SuffixDrafter(FinishedTexts(0))
    proposal = await ask(drafter, session("s"), 0, [1, 2, 3, *FAR, 1, 2, 3], 8)
    assert list(proposal.tokens) == FAR[:8]
    assert (await ask(drafter, session("s"), 20, [55], 8)) == Proposal(), "after a rollback nothing ends like this"


@pytest.mark.parametrize(
    ("teacher", "learner", "finds"),
    [
        ({}, {}, True),
        ({"target": "other"}, {}, False),
        ({"target": ""}, {"target": ""}, False),
        ({"seed": 1}, {}, False),
        ({"seed": 1, "temperature": 0.0}, {}, True),
        ({"seed": 1}, {"temperature": 0.0}, True),
    ],
    ids=["shared", "another target", "an unknown target", "the same draws", "from a greedy text", "for a greedy text"],
)
async def test_finished_sessions_are_searched(
    teacher: dict[str, object], learner: dict[str, object], finds: bool
) -> None:
    finished = FinishedTexts(10_000)
    drafter = SuffixDrafter(finished)
    async with indexing(finished):
        await ask(drafter, session("teacher", seed=7), 0, [1, 2, *FAR], 0)
        assert await ask(drafter, session("s"), 0, [1, 2]) == Proposal(), "running sessions are private"
        await finish(drafter, "teacher", [1, 2, *FAR], **teacher)
        asking = session("s", **learner)  # type: ignore[arg-type]
        assert list((await ask(drafter, asking, 0, [1, 2])).tokens) == (FAR[:4] if finds else [])


async def test_sharing_can_be_switched_off() -> None:
    finished = FinishedTexts(0)
    drafter = SuffixDrafter(finished)
    async with indexing(finished):
        await finish(drafter, "teacher", [1, 2, *FAR])
        assert (await ask(drafter, session("s"), 0, [1, 2]), finished.num_tokens) == (Proposal(), 0)


async def test_the_oldest_texts_are_dropped() -> None:
    """Memory is bounded whatever comes, and what finished last stays."""
    finished = FinishedTexts(400)
    drafter = SuffixDrafter(finished)
    async with indexing(finished):
        for number in range(30):
            await finish(drafter, f"t{number}", [1000 + number] * 3 + list(range(70)))
            assert finished.num_tokens <= 400
        found = [
            bool((await ask(drafter, session(f"s{number}"), 0, [1000 + number], 1)).tokens) for number in range(30)
        ]
        assert found == sorted(found), "first in, first out"
        assert found[-2:] == [True, True]
        assert not any(found[:25])
        await finish(drafter, "long", list(range(5000)))
        assert finished.num_tokens <= 400
        assert list((await ask(drafter, session("s"), 0, [4989, 4990], 1)).tokens) == [4991], "a long text's end"


async def test_what_waits_is_bounded() -> None:
    finished = FinishedTexts(400)
    for number in range(50):
        finished.add(session("s", seed=number), range(60))
    assert finished.num_tokens <= 100


async def test_frequent_texts_decide() -> None:
    """Of equally long matches the continuation that more texts have is first."""
    finished = FinishedTexts(10_000)
    drafter = SuffixDrafter(finished)
    async with indexing(finished):
        for name, token in (("a", 50), ("b", 60), ("c", 60), ("d", 70)):
            await finish(drafter, name, [1, 2, 3, token])
        proposal = await ask(drafter, session("s"), 0, [1, 2, 3], 8)
        roots = [proposal.tokens[child] for child in children_of(proposal.tree)[0]]
        assert roots[0] == 60
        assert set(roots) == {50, 60, 70}


# ---- the corpus


async def test_a_corpus_is_searched(tmp_path: Path) -> None:
    """A folder of files, through a worker; special tokens and hidden files are no part of it."""
    tokenizer = save_tokenizer(tmp_path, 300) / "tokenizer.json"
    words = Tokenizer.from_file(str(tokenizer))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(tokenizer))
    corpus = tmp_path / "corpus"
    (corpus / "deeper").mkdir(parents=True)
    (corpus / "a.txt").write_text("t1 t2 t3 t4 t5")
    (corpus / "deeper" / "b.txt").write_text("t7 t8 t9")
    (corpus / ".hidden").write_bytes(b"\xff\xfe")
    worker = {"drafters": "suffix", "suffix_corpus": corpus, "suffix_tokenizer": str(tmp_path)}
    async with serving_draft(None, **worker) as address, grpc.aio.insecure_channel(address) as channel:
        assert list((await DraftStream(channel, "s", drafter="").propose(0, [250, 2, 3], 2)).tokens) == [4, 5]
        assert list((await DraftStream(channel, "t", drafter="").propose(0, [251, 7, 8], 2)).tokens) == [9]


def nothing(place: Path) -> None:
    """Leave the place empty."""


def write_bytes(place: Path) -> None:
    """Write what is not UTF-8."""
    place.write_bytes(b"caf\xe9 \xff")


def write_utf16(place: Path) -> None:
    """Write text in another encoding."""
    place.write_text("text", "utf-16")


def write_bytes_among_texts(place: Path) -> None:
    """Write a folder in which one file is not text."""
    place.mkdir()
    (place / "a.txt").write_text("text")
    write_bytes(place / "picture.png")


def write_zeros(place: Path) -> None:
    """Write what is no text."""
    place.write_bytes(b"PK\x00\x03")


def write_much(place: Path) -> None:
    """Write a sparse file that is too large."""
    with place.open("wb") as file:
        file.truncate(MAX_CORPUS_BYTES + 1)


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (nothing, "there is no file or folder"),
        (Path.mkdir, "holds no files"),
        (write_much, "the maximum is"),
        (write_bytes, "is not text in UTF-8"),
        (write_zeros, "zero bytes"),
        (write_utf16, "is not text in UTF-8"),
        (write_bytes_among_texts, r"picture\.png is not text in UTF-8"),
    ],
)
async def test_unusable_corpora_are_refused(prepare: Callable[[Path], None], words: str, tmp_path: Path) -> None:
    prepare(tmp_path / "corpus")
    worker = {"drafters": "suffix", "suffix_corpus": tmp_path / "corpus"}
    with pytest.raises(ValueError, match=words):
        async with serving_draft(None, **worker, suffix_tokenizer=str(save_tokenizer(tmp_path, 10))):
            pass


async def test_a_corpus_needs_the_target_s_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    worker = {"drafters": "suffix", "suffix_corpus": tmp_path / "a.txt", "suffix_tokenizer": str(tmp_path)}
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        async with serving_draft(None, **worker):
            pass


def test_a_corpus_needs_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="--suffix-tokenizer"):
        chosen_kinds(DraftSettings.model_validate({"drafters": "suffix", "suffix_corpus": tmp_path}), registered())
