"""Packed forwards equal transformers' own; what cannot be served exactly is refused in a sentence."""

import json
import random
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine import CacheFull, EngineError, Feed, LanguageModel, ModelRefused, SequenceTooLong
from specdec.engine import fused as fused
from specdec.engine.attention import AttentionOptions, PackedAttention, Segment
from specdec.engine.loading import choose_dtype, looks_like_path
from specdec.engine.model import BLOCK_TOKENS
from tests.support import architectures

KV_CACHE_BYTES = 1 << 20
LEAN = ["llama", "mistral", "qwen2", "qwen3"]
LENGTHS = (40, 25, 17)  # all longer than the tiny models' sliding windows


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return architectures.build("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return load(folder)


def load(folder: Path, **options: object) -> LanguageModel:
    return LanguageModel.load(
        str(folder), **{"device": "cpu", "dtype": "float32", "kv_cache_bytes": KV_CACHE_BYTES, **options}
    )


def own_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    """What transformers itself computes, [tokens, vocab]."""
    own = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    with torch.inference_mode():
        return own(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


def texts() -> list[list[int]]:
    chooser = random.Random(1)
    return [[chooser.randrange(architectures.VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


def feed_in_pieces(model: LanguageModel, tokens: list[list[int]], chooser: random.Random) -> list[torch.Tensor]:
    """Feed all texts side by side in uneven pieces, with rejected tokens in between; return their logits."""
    sequences = [model.cache.open(f"text {index}") for index in range(len(tokens))]
    rows: list[list[torch.Tensor]] = [[] for _ in tokens]
    while any(sequence.length < len(text) for sequence, text in zip(sequences, tokens, strict=True)):
        feeds, growing = [], []
        for index, (sequence, text) in enumerate(zip(sequences, tokens, strict=True)):
            piece = text[sequence.length : sequence.length + chooser.randint(1, 9)]
            if piece and chooser.random() < 0.8:
                feeds.append(Feed(sequence, piece, len(piece)))
                growing.append(index)
        if feeds:
            logits = model.forward(feeds)
            for index, part in zip(growing, torch.split(logits, [feed.num_rows for feed in feeds]), strict=True):
                rows[index].append(part)
                reject_some(model, sequences[index], chooser)
    return [torch.cat(part) for part in rows]


def reject_some(model: LanguageModel, sequence: object, chooser: random.Random) -> None:
    """Append tokens that do not belong to the text, and take them back."""
    kept = sequence.length
    model.forward([Feed(sequence, [chooser.randrange(model.vocab_size) for _ in range(5)], 1)])
    sequence.truncate(kept)


@pytest.mark.parametrize("name", architectures.SERVED)
def test_packed_logits_equal_the_models_own(name: str, tmp_path: Path) -> None:
    folder = architectures.build(name, tmp_path)
    assert_served_exactly(folder, load(folder))


@pytest.mark.parametrize("name", LEAN)
def test_lean_models_are_served_through_transformers_forward_too(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specdec.engine.model.has_fused_forward", lambda model: False)
    folder = architectures.build(name, tmp_path)
    assert_served_exactly(folder, load(folder))


@pytest.mark.parametrize("name", LEAN)
def test_a_lean_decoder_that_disagrees_is_not_used(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = architectures.build(name, tmp_path)
    assert load(folder)._fused is not None
    turn = fused._Angles.at
    monkeypatch.setattr(fused._Angles, "at", lambda self, positions: turn(self, [at + (at > 9) for at in positions]))
    model = load(folder)
    assert model._fused is None
    assert "the fused decoder does not serve" in caplog.text
    assert_served_exactly(folder, model)


def assert_served_exactly(folder: Path, model: LanguageModel) -> None:
    for text, logits in zip(texts(), feed_in_pieces(model, texts(), random.Random(2)), strict=True):
        own = own_logits(folder, text)
        assert own.std() > 0.3, "the tiny model is too flat to show a mistake"
        assert (logits - own).abs().max() <= 1e-4 * max(1.0, float(own.std()))


@pytest.mark.parametrize("name", architectures.REFUSED)
def test_other_architectures_are_refused(name: str, tmp_path: Path) -> None:
    reason = "rolled back" if name in architectures.RECURRENT else "attention interface"
    with pytest.raises(ModelRefused, match=rf"{reason}.*; choose (one|a model)"):
        load(architectures.build(name, tmp_path))


def test_a_sliding_window_hides_what_is_older(tmp_path: Path) -> None:
    model = load(architectures.build("mistral", tmp_path))
    ending = list(range(40, 40 + 4 * architectures.SLIDING_WINDOW))
    last_rows = []
    for beginning in (1, 2):
        sequence = model.cache.open(str(beginning))
        last_rows.append(model.forward([Feed(sequence, [beginning, *ending], 1)]))
    assert torch.equal(*last_rows)  # three layers of seven tokens do not reach the first


def test_only_wanted_rows_reach_the_head(model: LanguageModel) -> None:
    seen: list[int] = []
    head = model._model.get_output_embeddings()
    head.register_forward_hook(lambda module, arguments, output: seen.append(output.shape[-2]))
    one, two = model.cache.open("one"), model.cache.open("two")
    assert model.forward([Feed(one, [1] * 20, 2), Feed(two, [2] * 30, 0)]).shape == (2, model.vocab_size)
    assert model.forward([Feed(one, [1], 0)]).shape == (0, model.vocab_size)
    assert seen == [2, 1]


def test_logits_are_float32_in_bfloat16_too(folder: Path) -> None:
    model = load(folder, dtype="bfloat16")
    assert model.forward([Feed(model.cache.open("a"), [1, 2], 2)]).dtype == torch.float32
    assert model.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("tokens", "num_rows", "error"),
    [
        ([], 0, EngineError),
        ([1], 2, EngineError),
        ([1], -1, EngineError),
        ([-1], 1, EngineError),
        ([architectures.VOCAB_SIZE], 1, EngineError),
        ([1] * (architectures.CONTEXT_LENGTH - 3), 1, SequenceTooLong),
    ],
)
def test_a_bad_feed_leaves_every_sequence_as_it_was(
    model: LanguageModel, tokens: list[int], num_rows: int, error: type[Exception]
) -> None:
    bystander, sequence = model.cache.open("bystander"), model.cache.open("bad")
    model.forward([Feed(bystander, [1, 2, 3], 0), Feed(sequence, [4, 5, 6, 7], 0)])
    held = model.cache.num_free_blocks
    with pytest.raises(error):
        model.forward([Feed(bystander, [8] * 90, 1), Feed(sequence, tokens, num_rows)])
    assert (bystander.length, sequence.length, model.cache.num_free_blocks) == (3, 4, held)


def test_a_failing_forward_leaves_every_sequence_as_it_was(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    sequence = model.cache.open("a")
    model.forward([Feed(sequence, [1, 2, 3], 0), Feed(model.cache.open("b"), [3], 0)])
    free = model.cache.num_free_blocks

    attend = PackedAttention.attend

    def fail_in_the_last_layer(self: PackedAttention, *arguments: object) -> torch.Tensor:
        if self.num_layers_done == model.num_layers - 1:
            raise RuntimeError("out of memory")
        return attend(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PackedAttention, "attend", fail_in_the_last_layer)
        with pytest.raises(RuntimeError, match="out of memory"):
            model.forward([Feed(sequence, [9] * 90, 1)])
    assert (sequence.length, model.cache.num_free_blocks) == (3, free)
    expected = model.forward([Feed(model.cache.open("fresh"), [1, 2, 3, 4], 1)])
    assert torch.allclose(model.forward([Feed(sequence, [4], 1)]), expected, atol=1e-4)


def test_a_cache_too_small_for_the_batch_is_full(folder: Path) -> None:
    model = load(folder, kv_cache_bytes=3 * 2 * 2 * 12 * 4 * BLOCK_TOKENS * 2)  # two blocks
    assert model.cache.num_blocks == 2
    one, two = model.cache.open("one"), model.cache.open("two")
    one.pin()
    model.forward([Feed(one, [1] * BLOCK_TOKENS, 0)])
    with pytest.raises(CacheFull, match="more bytes"):
        model.forward([Feed(two, [1] * (BLOCK_TOKENS + 1), 1)])
    assert (one.length, two.length) == (BLOCK_TOKENS, 0)


def test_batch_mates_do_not_evict_one_another(folder: Path) -> None:
    model = load(folder, kv_cache_bytes=3 * 2 * 2 * 12 * 4 * BLOCK_TOKENS * 2)  # two blocks
    one, two = model.cache.open("one"), model.cache.open("two")
    model.forward([Feed(one, [1] * 5, 0)])
    with pytest.raises(CacheFull):
        model.forward([Feed(one, [1], 1), Feed(two, [1] * (BLOCK_TOKENS + 1), 1)])
    assert (one.length, two.length, one.num_pins) == (5, 0, 0)


def test_a_sequence_is_fed_once(model: LanguageModel) -> None:
    sequence = model.cache.open("a")
    with pytest.raises(EngineError, match="fed twice"):
        model.forward([Feed(sequence, [1], 1), Feed(sequence, [2], 1)])


class TestSelfCheck:
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_forgotten_mask_is_refused(self, folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Segment, "mask", lambda *arguments: None)
        with pytest.raises(ModelRefused, match="other logits"):
            load(folder, dtype=dtype)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_a_slightly_wrong_scaling_is_refused(
        self, folder: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        init = AttentionOptions.__init__
        monkeypatch.setattr(
            AttentionOptions, "__init__", lambda self, scaling, *others: init(self, scaling * 1.01, *others)
        )
        with pytest.raises(ModelRefused, match="other logits"):
            load(folder, dtype=dtype)

    def test_it_can_be_left_out(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Segment, "mask", lambda *arguments: None)
        assert load(folder, self_check=False).num_layers == 3

    def test_it_leaves_the_cache_empty(self, model: LanguageModel) -> None:
        assert (model.cache.usage, model.cache.sequences) == (0.0, [])


class TestRefusals:
    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(ModelRefused, match="does not exist; give"):
            load(tmp_path / "absent")

    def test_pickled_weights(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        torch.save({}, tmp_path / "pytorch_model.bin")
        with pytest.raises(ModelRefused, match=r"no \*\.safetensors file.*convert"):
            load(tmp_path)

    def test_pickled_weights_next_to_other_safetensors(self, folder: Path, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        own = AutoModelForCausalLM.from_pretrained(folder)
        torch.save(own.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "other.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
        with pytest.raises(ModelRefused, match="cannot be loaded"):
            load(tmp_path)

    @pytest.mark.parametrize(
        ("key", "value", "says"),
        [
            ("auto_map", {"AutoModelForCausalLM": "own_code.Model"}, "its own code"),
            ("quantization_config", {"quant_method": "gptq", "bits": 4}, "quantised"),
            ("is_encoder_decoder", True, "encoder-decoder"),
            ("model_type", "no_such_model", "configuration"),
        ],
    )
    def test_a_config_that_asks_for_more(
        self, folder: Path, tmp_path: Path, key: str, value: object, says: str
    ) -> None:
        for file in folder.iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
        with pytest.raises(ModelRefused, match=says):
            load(tmp_path)

    def test_a_hub_out_of_reach(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(ModelRefused, match=r"nobody/nothing .no folder here, so taken as a hub id. cannot be read"):
            LanguageModel.load("nobody/nothing", device="cpu", kv_cache_bytes=KV_CACHE_BYTES)

    @pytest.mark.parametrize(("key", "value"), [("device", "tpu"), ("dtype", "int3")])
    def test_unknown_words(self, folder: Path, key: str, value: str) -> None:
        with pytest.raises(ModelRefused, match="is unknown; use"):
            load(folder, **{key: value})

    def test_a_cache_of_no_block(self, folder: Path) -> None:
        with pytest.raises(CacheFull, match="holds not one block"):
            load(folder, kv_cache_bytes=100)


@pytest.mark.parametrize(
    ("word", "width", "has_bfloat16", "chosen"),
    [
        ("auto", 256, True, torch.bfloat16),
        ("auto", 128, True, torch.float32),
        ("auto", 256, False, torch.float32),
        ("bfloat16", 128, False, torch.bfloat16),
        ("float32", 256, True, torch.float32),
    ],
)
def test_auto_takes_the_faster_type(
    word: str, width: int, has_bfloat16: bool, chosen: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": has_bfloat16})
    assert choose_dtype(word, torch.device("cpu"), width) is chosen


def test_paths_are_told_from_hub_ids(tmp_path: Path) -> None:
    paths = ["./a", "../a/b", "/a", "~/a", "a/b/c", str(tmp_path)]
    assert all(looks_like_path(path) for path in paths)
    assert not any(looks_like_path(hub_id) for hub_id in ("gpt2", "org/name-of-no-folder"))
