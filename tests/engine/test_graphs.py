"""Recorded forwards give what plain ones give, whatever was in their buffers before, and disturb no other sequence.

On a CPU nothing can be recorded: `Repeater` runs the same function on the same buffers again, so that buckets, padding
and buffers are tested, and CUDA's part is not.
"""

import logging
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec.engine import Feed, LanguageModel
from specdec.engine.attention import Segment
from specdec.engine.decoder import DecoderOutput
from specdec.engine.graphs import EACH, SEQUENCES, TOKENS, Bucket, Graphs, Repeater, Run, bucket_for
from specdec.engine.paged import PagedBackend
from specdec.engine.paged_pool import PagedPool
from specdec.engine.paged_row import PagedRow
from specdec.engine.pool import LayerShape
from tests.engine.scenarios import check_tree_rounds
from tests.engine.test_forward import check_pieces
from tests.engine.tiny_models import ReferenceModel, assert_close, load, random_tokens
from tests.support import architectures

PAGE_TOKENS = 4
NAMES = ["llama", "mistral", "gemma2", "gpt2", "gpt_oss"]  # fused and not, with windows, soft caps and sinks


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def recorded(folder: Path, recorder: Repeater | None = None) -> tuple[LanguageModel, Graphs]:
    model = load(folder, new_backend=PagedBackend, block_tokens=PAGE_TOKENS)
    assert isinstance(model.backend, PagedBackend)
    graphs = Graphs(model.decoder, model.backend, recorder or Repeater(), model.context_length)
    model.replay(graphs)
    return model, graphs


@pytest.mark.parametrize("name", NAMES)
def test_recorded_forwards_match_the_reference(name: str, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    (model, graphs), reference = recorded(folder), ReferenceModel(folder)
    check_pieces(model, reference)
    assert len(graphs.buckets) > 3
    check_tree_rounds(model, reference)  # trees are not recorded, and go on beside what is


@pytest.mark.parametrize("name", NAMES)
def test_recorded_hidden_states_match_the_reference(name: str, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    (model, graphs), reference = recorded(folder), ReferenceModel(folder)
    layers = tuple(range(model.num_layers + 1))
    for number in range(3):
        texts = random_tokens(number, 11), random_tokens(9 + number, 7)
        feeds = [
            Feed(model.cache.open(f"{number} {index}"), text, 1, hidden_layers=layers[index:], num_observed=3 + index)
            for index, text in enumerate(texts)
        ]
        for index, states in enumerate(model.forward(feeds).hidden_states):
            assert states is not None
            assert_close(states, reference.outputs(texts[index])[1][-3 - index :, index:])
    assert len(graphs.buckets) == 1


def test_batches_of_every_size_match_the_reference(tmp_path: Path) -> None:
    folder = architectures.build("llama", tmp_path)
    check_batches(*recorded(folder), ReferenceModel(folder))


def check_batches(model: LanguageModel, graphs: Graphs, reference: ReferenceModel) -> None:
    """Replay one graph after the other, each several times, with other sequences, lengths and rows each time."""
    rng = random.Random(5)
    texts = [random_tokens(number, 100) for number in range(9)]
    expected = [reference.logits(text) for text in texts]
    for each in (1, 6, 1, 9) * 4:
        feeds, rows = [], []
        for number in rng.sample(range(9), rng.randint(1, 9)):
            sequence = model.cache.open(str(number))
            if sequence.length + each > len(texts[number]):
                sequence.truncate(rng.randint(0, 50))
            fed = texts[number][sequence.length : sequence.length + each]
            wanted = rng.randint(0, each)
            feeds.append(Feed(sequence, fed, wanted))
            rows.append(expected[number][sequence.length + each - wanted : sequence.length + each])
        logits = model.forward(feeds).logits
        if len(logits):
            assert_close(logits, torch.cat(rows))
    assert {bucket.max_each for bucket in graphs.buckets} == set(EACH)


def test_outputs_outlive_the_next_forward(tmp_path: Path) -> None:
    model, graphs = recorded(architectures.build("llama", tmp_path))
    sequence = model.cache.open("a")
    options = {"hidden_layers": (1,), "num_observed": 1}
    first = model.forward([Feed(sequence, [5], 1, **options)])  # type: ignore[arg-type]
    logits, states = first.logits.clone(), first.hidden_states[0]
    assert states is not None
    states = states.clone()
    model.forward([Feed(sequence, [9], 1, **options)])  # type: ignore[arg-type]
    assert len(graphs.buckets) == 1
    assert torch.equal(first.logits, logits)
    assert first.hidden_states[0] is not None
    assert torch.equal(first.hidden_states[0], states)


def test_padding_writes_to_no_sequences_pages(tmp_path: Path) -> None:
    model, graphs = recorded(architectures.build("llama", tmp_path))
    others = [model.cache.open(str(number)) for number in range(3)]
    model.forward([Feed(other, random_tokens(number, 70), 0) for number, other in enumerate(others)])
    assert isinstance(model.backend, PagedBackend)
    pool = model.backend.pool
    before = [tensor.clone() for layer in pool.layers for tensor in (layer.keys, layer.values)]
    new = model.cache.open("new")
    model.forward([Feed(new, [1, 2, 3], 1)])
    assert [bucket.num_tokens for bucket in graphs.buckets] == [4]
    touched = {*pool.pages("new"), pool.scratch_page}
    kept = [page for page in range(pool.num_blocks) if page not in touched]
    after = [tensor for layer in pool.layers for tensor in (layer.keys, layer.values)]
    assert all(torch.equal(old[kept], now[kept]) for old, now in zip(before, after, strict=True))
    assert not torch.equal(before[0][pool.scratch_page], after[0][pool.scratch_page])


def test_failed_recording_leaves_plain_forwards(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Refuses(Repeater):
        def record(self, run: Run) -> Run:
            raise RuntimeError("operation not permitted when stream is capturing")

    folder = architectures.build("llama", tmp_path)
    model, graphs = recorded(folder, Refuses())
    text = random_tokens(1, 10)
    rows = [model.forward([Feed(model.cache.open("a"), [token], 1)]).logits for token in text]
    assert_close(torch.cat(rows), ReferenceModel(folder).logits(text))
    assert graphs.buckets == []
    (record,) = [record for record in caplog.records if record.getMessage() == "graphs_refused"]
    assert (record.levelno, record.__dict__["error"]) == (logging.WARNING, "RuntimeError")


@pytest.mark.parametrize("limit", ["failure", "number"])
def test_what_was_recorded_is_replayed_still(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class RefusesChains(Repeater):
        def record(self, run: Run) -> Run:
            if graphs.buckets and limit == "failure":
                raise RuntimeError("out of memory")
            replay = super().record(run)

            def counted() -> DecoderOutput:
                replays.append(1)
                return replay()

            return counted

    if limit == "number":
        monkeypatch.setattr("specdec.engine.graphs.MAX_GRAPHS", 1)
    replays: list[int] = []
    folder = architectures.build("llama", tmp_path)
    model, graphs = recorded(folder, RefusesChains())
    text = random_tokens(1, 8)
    rows = [
        model.forward([Feed(model.cache.open("a"), piece, len(piece))]).logits
        for piece in (text[:1], text[1:4], text[4:5], text[5:])
    ]
    assert_close(torch.cat(rows), ReferenceModel(folder).logits(text))
    assert (len(graphs.buckets), len(replays)) == (1, 2)


def test_repeated_function_fills_the_same_tensors() -> None:
    number = torch.zeros(1)

    def run() -> DecoderOutput:
        return number + 1, None

    repeat = Repeater().record(run)
    first = repeat()[0]
    number += 5
    assert repeat()[0] is first
    assert first.item() == 6


class TestBuckets:
    def row(self, counts: list[int], past: int = 0, parents: tuple[int, ...] = ()) -> PagedRow:
        pool = PagedPool([LayerShape(1, 2, 2)], num_bytes=1 << 16, block_tokens=PAGE_TOKENS)
        row = PagedRow(PAGE_TOKENS)
        for number, count in enumerate(counts):
            pool.resize(str(number), -(-(past + count) // PAGE_TOKENS))
            row.add(Segment(str(number), past, count, parents), pool)
        return row

    @pytest.mark.parametrize(
        ("counts", "past", "bucket"),
        [
            ([1], 0, Bucket(1, 1, 1, 4, ())),
            ([1, 1, 1], 15, Bucket(4, 4, 1, 4, ())),
            ([1, 1, 1], 16, Bucket(4, 4, 1, 8, ())),
            ([6], 0, Bucket(8, 2, 8, 4, ())),
            ([8], 0, Bucket(8, 1, 8, 4, ())),
            ([6, 6, 1], 0, Bucket(16, 4, 8, 4, ())),
            ([9, 3], 0, Bucket(16, 4, 64, 16, ())),
        ],
    )
    def test_smallest_shapes_are_chosen(self, counts: list[int], past: int, bucket: Bucket) -> None:
        assert bucket_for(self.row(counts, past), ()) == bucket

    @pytest.mark.parametrize(
        ("counts", "parents"), [([65], ()), ([64] * 9, ()), ([4], (0, 0)), ([1] * (TOKENS[-1] + 1), ())]
    )
    def test_other_forwards_have_no_bucket(self, counts: list[int], parents: tuple[int, ...]) -> None:
        assert bucket_for(self.row(counts, parents=parents), ()) is None

    def test_padding_fills_every_bucket(self) -> None:
        """Every token has a row, no padding sequence has too many, and where each has one, padding does too."""
        for num_sequences in range(1, 60):
            for each in (1, 2, 6, 8):
                row = self.row([each] * num_sequences)
                bucket = bucket_for(row, ())
                if bucket is None:
                    assert num_sequences * each > TOKENS[-1]
                    continue
                row.pad(bucket.num_tokens, bucket.num_sequences, bucket.max_each, 99)
                assert (len(row.slots), len(row.chains)) == (bucket.num_tokens, bucket.num_sequences)
                assert max(len(entry.rows) for entry in row.chains) <= bucket.max_each
                assert each > 1 or {len(entry.rows) for entry in row.chains} == {1}
                assert [row for entry in row.chains for row in entry.rows] == list(range(bucket.num_tokens))
                assert row.max_pages <= bucket.num_pages
                assert min(entry.num_seen for entry in row.chains) >= 1

    def test_sizes_ascend_and_leave_room_for_padding(self) -> None:
        assert list(TOKENS) == sorted(set(TOKENS))
        assert list(SEQUENCES) == sorted(set(SEQUENCES))
        assert SEQUENCES[-1] >= SEQUENCES[-2] + TOKENS[-1] // EACH[1]
