"""Training heads: what is sampled, what is predicted from what, and the whole from nothing to a served folder."""

import asyncio
import json
from collections.abc import Callable
from itertools import islice, repeat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.judging import agreement_of_counts
from coordinator.chat import ChatTemplate
from models.heads import dflash, eagle3, medusa
from models.heads.batches import Batch, Samples
from models.heads.collecting import _in_slots
from models.heads.kinds import KINDS
from models.heads.own_instructions import OwnInstructions
from models.heads.prompts import from_grammar, from_texts, mixed, read_texts
from models.heads.samples import Answering, Facts, Instruction, Sampler, SampleStore
from models.heads.slots import SlotSampler
from models.heads.target import TargetParts, TargetStates, load_parts, state_layers
from models.train_head import main, plan_of
from specdec import AsyncClient, SamplingParams, SpeculationParams
from specdec.engine import EngineError, load_language_model
from specdec.heads.dflash import DFlashHead
from specdec.heads.eagle3 import Eagle3Head
from specdec.heads.formats.dflash import load_dflash
from specdec.heads.formats.eagle3 import load_eagle3
from specdec.heads.formats.medusa import load_medusa
from specdec.heads.layers import attend
from specdec.heads.medusa import MedusaHead
from specdec.serving.tokenizer import load_tokenizer
from tests.support.architectures import build
from tests.support.cluster import cluster, save_tokenizer

DEMO_TARGET = Path(__file__).parents[2] / "models" / "target"
NUM_DRAFT_TOKENS = 24  # of a reduced vocabulary


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny target with a tokenizer."""
    folder = build("llama", tmp_path_factory.mktemp("target"))
    return save_tokenizer(folder, json.loads((folder / "config.json").read_text())["vocab_size"])


@pytest.fixture(scope="module")
def parts(target: Path) -> TargetParts:
    """Return what heads take from the target."""
    return load_parts(target, "tiny", state_layers(3))


@pytest.fixture
def batch(parts: TargetParts) -> Batch:
    """Return random tokens and states of two samples, the second one padded."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(parts.vocab_size, (2, 14), generator=generator)
    states = torch.randn(2, 14, len(parts.layers), parts.hidden_size, generator=generator)
    is_answer = torch.zeros(2, 14, dtype=torch.bool)
    is_answer[0, 4:14] = True
    is_answer[1, 5:11] = True
    return Batch(tokens, states, is_answer)


def stirred(head: torch.nn.Module) -> torch.nn.Module:
    """Give every trained weight random values, so that each of them matters."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in head.parameters():
            if weight.requires_grad:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.3)
    return head


def draft_tokens(parts: TargetParts) -> torch.Tensor:
    """Return the tokens of a reduced vocabulary."""
    return torch.arange(0, parts.vocab_size, 2)[:NUM_DRAFT_TOKENS]


# ---- sampling


def greedy(count: int) -> list[Instruction]:
    """Return some prompts to be continued greedily."""
    return [Instruction("text", 0.0, [1 + number, 7, 3]) for number in range(count)]


def test_greedy_answers_equal_generate(target: Path) -> None:
    model = load_language_model(str(target), dtype="float32", kv_cache_bytes=1 << 22)
    sampler = Sampler(model, (1, 3), (), 9, seed=0)
    reference: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for instruction, tokens, _ in sampler.answers(iter(greedy(5)), num_at_once=2):
        expected = reference.generate(
            torch.tensor([instruction.tokens]), max_new_tokens=9, do_sample=False, eos_token_id=None
        )
        assert tokens == expected[0].tolist()


def test_states_are_those_of_transformers(target: Path) -> None:
    model = load_language_model(str(target), dtype="float32", kv_cache_bytes=1 << 22)
    reference = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for _, tokens, states in Sampler(model, (1, 3), (), 6, seed=0).answers(iter(greedy(3)), num_at_once=3):
        found = torch.from_numpy(np.frombuffer(states, "<i2").copy()).view(torch.bfloat16).view(len(tokens), 2, -1)
        with torch.no_grad():
            hidden = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        torch.testing.assert_close(found.float(), torch.stack((hidden[1][0], hidden[3][0]), 1), rtol=2e-2, atol=2e-2)


# ---- sampling in slots, as on a GPU


def transformers_model(folder: Path) -> Any:
    """Return the target as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def mixed_lengths(count: int, temperature: float = 0.0) -> list[Instruction]:
    """Return prompts of different lengths."""
    return [Instruction("text", temperature, [1 + number, 7, *[3] * (number % 5)]) for number in range(count)]


@pytest.mark.parametrize("num_at_once", [1, 4, 30])
def test_greedy_answers_in_slots_equal_generate(target: Path, num_at_once: int) -> None:
    sampler = SlotSampler(transformers_model(target), (), 9, 64, seed=0)
    reference = transformers_model(target)
    answers = list(sampler.answers(iter(mixed_lengths(13)), num_at_once))
    assert sorted(asked.tokens for asked, _, _ in answers) == sorted(asked.tokens for asked in mixed_lengths(13))
    for asked, tokens, states in answers:
        prompt = torch.tensor([asked.tokens])
        expected = reference.generate(prompt, max_new_tokens=9, do_sample=False, eos_token_id=None)
        assert tokens == expected[0].tolist()
        assert states == b""


def test_answers_in_slots_end_with_the_end_token_or_with_the_slot(target: Path) -> None:
    prompts = mixed_lengths(3)
    free = {tuple(asked.tokens): tokens for asked, tokens, _ in slot_answers(target, prompts, ends=(), max_tokens=64)}
    end = free[tuple(prompts[0].tokens)][6]
    for asked, tokens, _ in slot_answers(target, prompts, ends=(end, 10**6), max_tokens=64):
        whole, begin = free[tuple(asked.tokens)], len(asked.tokens)
        assert tokens == (whole[: whole.index(end, begin) + 1] if end in whole[begin:] else whole)
    for asked, tokens, _ in slot_answers(target, prompts, ends=(), max_tokens=8):
        assert tokens == free[tuple(asked.tokens)][:8]
    assert not slot_answers(target, [Instruction("text", 0.0, [5] * 8)], ends=(), max_tokens=8), "no room for an answer"


def slot_answers(
    target: Path, prompts: list[Instruction], ends: tuple[int, ...], max_tokens: int
) -> list[tuple[Instruction, list[int], bytes]]:
    """Return the answers to prompts, two at once."""
    return list(SlotSampler(transformers_model(target), ends, 9, max_tokens, seed=0).answers(iter(prompts), 2))


def test_sampled_tokens_in_slots_have_the_targets_distribution(target: Path) -> None:
    model = transformers_model(target)
    prompt = Instruction("text", 1.0, [5, 7, 3])
    answers = SlotSampler(model, (), 1, 8, seed=1).answers(iter([prompt] * 4000), 500)
    with torch.no_grad():
        reference = transformers_model(target)(torch.tensor([prompt.tokens])).logits[0, -1]
    probs = reference.double().softmax(dim=-1).numpy()
    counts = np.bincount([tokens[-1] for _, tokens, _ in answers], minlength=len(probs)).astype(float)
    assert counts.sum() == 4000
    assert agreement_of_counts(counts, probs).p_value > 1e-4


@pytest.mark.parametrize("architecture", ["gemma2", "gpt_oss"])
def test_models_that_do_not_attend_to_everything_are_not_sampled_in_slots(architecture: str, tmp_path: Path) -> None:
    model = transformers_model(build(architecture, tmp_path))
    with pytest.raises(EngineError, match="cannot be sampled in slots"):
        SlotSampler(model, (), 9, 64, seed=0)


def test_a_slot_holds_no_more_than_the_targets_context(target: Path, tmp_path: Path) -> None:
    def in_slots(folder: Path) -> Any:
        return _in_slots(plan_of(["--target", str(folder), "--kind", "medusa", "--device", "cpu"]))

    context_length = json.loads((target / "config.json").read_text())["max_position_embeddings"]
    ((_, tokens, _),) = in_slots(target)("", 2 * context_length, 0).answers(iter(mixed_lengths(1)), 1)
    assert len(tokens) <= context_length
    assert in_slots(build("gemma2", tmp_path)) is None


# ---- stores


def test_answers_end_with_the_end_token(target: Path) -> None:
    model = load_language_model(str(target), dtype="float32", kv_cache_bytes=1 << 22)
    [(_, free, _)] = Sampler(model, (1,), (), 9, seed=0).answers(iter(greedy(1)), num_at_once=1)
    end = free[5]
    [(_, ended, _)] = Sampler(model, (1,), (end,), 9, seed=0).answers(iter(greedy(1)), num_at_once=1)
    assert ended == free[: free.index(end, 3) + 1]


def test_interrupted_sample_is_dropped(tmp_path: Path) -> None:
    facts = Facts("f", (1,), 2)
    store = SampleStore(tmp_path, facts)
    store.append("chat", 0.0, 1, [5, 6, 7], np.arange(6, dtype="<u2").tobytes())
    with (tmp_path / "index.jsonl").open("a") as index:
        index.write('{"kind": "cha')
    with (tmp_path / "tokens.bin").open("ab") as tokens:
        tokens.write(b"rest")
    again = SampleStore(tmp_path, facts)
    again.append("code", 1.0, 1, [8, 9], np.arange(4, dtype="<u2").tobytes())
    reader = SampleStore(tmp_path, facts).reader()
    assert [reader[index].tokens.tolist() for index in range(len(reader))] == [[5, 6, 7], [8, 9]]
    assert reader[1].states.view(torch.int16).flatten().tolist() == [0, 1, 2, 3]


def test_samples_of_other_targets_are_refused(tmp_path: Path) -> None:
    SampleStore(tmp_path, Facts("one", (1,), 2))
    with pytest.raises(ValueError, match="another target"):
        SampleStore(tmp_path, Facts("other", (1,), 2))


def test_held_out_samples_are_never_trained_on(tmp_path: Path) -> None:
    store = SampleStore(tmp_path, Facts("f", (1,), 2))
    for number in range(120):
        store.append("text", number % 2, 1, [number, number, number], bytes(12))
    samples = Samples([store.reader()], max_tokens=8)
    held_out = {int(token) for t in (0.0, 1.0) for batch in samples.of_held_out(30, t) for token in batch.tokens[:, 0]}
    trained = {int(token) for batch in islice(samples.endless(30, seed=0), 60) for token in batch.tokens[:, 0]}
    assert held_out == set(range(0, 120, 23))
    assert trained == set(range(120)) - held_out


def test_states_are_computed_where_none_were_kept(target: Path, parts: TargetParts, tmp_path: Path) -> None:
    model = load_language_model(str(target), kv_cache_bytes=1 << 22)
    kept = SampleStore(tmp_path / "kept", Facts("f", tuple(parts.layers), parts.hidden_size))
    texts = SampleStore(tmp_path / "texts", Facts("f", (), parts.hidden_size))
    asked = [Instruction("text", 0.0, [1 + number, *[7] * (number % 4)]) for number in range(30)]
    for store in (kept, texts):
        sampler = Sampler(model, store.facts.layers, (), 9, seed=0)
        for instruction, tokens, states in sampler.answers(iter(asked), num_at_once=4):
            store.append(instruction.kind, instruction.temperature, len(instruction.tokens), tokens, states)
    states_of = TargetStates(target, parts.layers, parts.device).of
    one = Samples([kept.reader()], max_tokens=11)
    other = Samples([texts.reader()], max_tokens=11, device=parts.device, states_of=states_of)
    for expected, found in zip(islice(one.endless(60, 0), 6), islice(other.endless(60, 0), 6), strict=True):
        assert torch.equal(found.tokens, expected.tokens)
        assert torch.equal(found.is_answer, expected.is_answer)
        is_text = expected.states.abs().sum(dim=(2, 3)) > 0  # what was kept is padded with zeros
        torch.testing.assert_close(found.states[is_text], expected.states[is_text], rtol=2e-2, atol=2e-2)


def test_prompts_are_endless_and_alternate(target: Path) -> None:
    tokenizer = load_tokenizer(str(target))
    instructions = list(islice(from_grammar(tokenizer, None, seed=0), 24))
    assert {instruction.temperature for instruction in instructions} == {0.0, 1.0}
    passages = list(islice(from_texts(tokenizer, ["t1 t2 t3 t4 t5 t6"], 1, 3, seed=0), 10))
    assert {passage.temperature for passage in passages} == {0.0, 1.0}


def test_instructions_are_mixed_evenly() -> None:
    one, other = (repeat(Instruction(kind, 0.0, [1])) for kind in ("grammar", "own"))
    kinds = [instruction.kind for instruction in islice(mixed(one, other, 0.75), 40)]
    assert kinds == ["grammar", "own", "own", "own"] * 10
    assert {instruction.kind for instruction in islice(mixed(one, other, 0.0), 9)} == {"grammar"}
    assert {instruction.kind for instruction in islice(mixed(one, other, 1.0), 9)} == {"own"}


@pytest.fixture
def own() -> OwnInstructions:
    """Return what the demo target may ask itself."""
    template = ChatTemplate("# question: {{ messages[-1].content }}\n# answer:", {})
    return OwnInstructions(load_tokenizer(str(DEMO_TARGET)), template)


@pytest.mark.parametrize("in_slots", [False, True])
def test_a_target_writes_its_own_instructions(own: OwnInstructions, in_slots: bool) -> None:
    tokenizer = load_tokenizer(str(DEMO_TARGET))
    sampler: Answering
    if in_slots:
        sampler = SlotSampler(transformers_model(DEMO_TARGET), [0], 12, 64, seed=1)
    else:
        model = load_language_model(str(DEMO_TARGET), kv_cache_bytes=1 << 26)
        sampler = Sampler(model, (0,), [0], 12, seed=1, name="instruction")
    written = list(islice(own.written(sampler, 4), 20))
    assert {instruction.temperature for instruction in written} == {0.0, 1.0}
    texts = {tokenizer.decode(instruction.tokens) for instruction in written}
    assert len(texts) == 20
    assert all(text.startswith("# question: ") and text.endswith("\n# answer:") for text in texts)


@pytest.mark.parametrize(
    ("message", "is_taken"),
    [
        ("How do I boil an egg?", True),
        ("Why?", False),
        ("word " * 200, False),
        ("Hello there, <|im_start|> system", False),
        ("I roll two fair dice. What is the probability that the difference of the two numbers is three?", False),
    ],
)
def test_odd_and_held_out_messages_are_dropped(own: OwnInstructions, message: str, is_taken: bool) -> None:
    assert own.takes(message) == is_taken
    assert not own.takes(message), "each is asked once"


def test_unreadable_texts_are_refused(tmp_path: Path) -> None:
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\xff\xfe")
    with pytest.raises(ValueError, match=r"picture\.png cannot be read as text"):
        read_texts([str(tmp_path)])


# ---- what is predicted from what


def test_eagle3_trains_what_drafting_computes(parts: TargetParts, batch: Batch) -> None:
    head = stirred(eagle3.new_head(parts, draft_tokens(parts)))
    assert isinstance(head, Eagle3Head)
    objective = eagle3.Eagle3Objective(head, parts)
    length = batch.tokens.shape[1]
    with torch.no_grad():
        for step, (logits, last, counts) in enumerate(objective._steps(batch)):
            for row in counts.nonzero().flatten().tolist():
                sample, place = divmod(int(last[row]), length)
                expected = drafted(head, batch.tokens[sample], batch.states[sample, :, :-1], place - step - 1, step)
                torch.testing.assert_close(logits[row], expected, rtol=1e-4, atol=1e-4)


def drafted(
    head: Eagle3Head, tokens: torch.Tensor, states: torch.Tensor, last_pair: int, num_steps: int
) -> torch.Tensor:
    """Return the logits after `num_steps` tokens were drafted, given the target's states up to a pair: pair by pair."""
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    logits = torch.zeros(0)
    own = torch.zeros(0)
    for pair in range(last_pair + num_steps + 1):
        state = head.joined(states[pair].float()) if pair <= last_pair else own
        angles = head.rotary(torch.tensor(pair + 1))
        projected, residual = head.layer.project_pair(head.embed_tokens(tokens[pair + 1]), state, angles)
        keys.append(projected.key)
        values.append(projected.value)
        attended = attend(projected.query[None], torch.stack(keys), torch.stack(values), None)[0]
        logits, own = head.predict(head.layer.finish(residual, attended))
    return logits


def test_dflash_blocks_see_only_what_precedes(parts: TargetParts, batch: Batch) -> None:
    head = stirred(dflash.new_head(parts, draft_tokens(parts), 0))
    assert isinstance(head, DFlashHead)
    with torch.no_grad():
        logits, last, counts = dflash.DFlashObjective(head, parts)._predicted(batch)
        assert counts.any()
        for block, place in counts.nonzero().tolist():
            sample, after = divmod(int(last[block, place]), batch.tokens.shape[1])
            anchor = after - place
            context = head.offered(batch.states[sample, :anchor, :-1].float(), torch.arange(anchor))
            expected = head.predict(batch.tokens[sample, anchor], torch.tensor(anchor), context, None)
            torch.testing.assert_close(logits[block, place], expected[place], rtol=1e-4, atol=1e-4)


def test_medusa_heads_look_further_each(parts: TargetParts, batch: Batch) -> None:
    head = stirred(medusa.new_head(parts, draft_tokens(parts)))
    assert isinstance(head, MedusaHead)
    with torch.no_grad():
        predicted = medusa.MedusaObjective(head, parts)._predicted(batch)
        for depth, (logits, finals, tokens) in enumerate(predicted):
            places = [(n, t) for n, t in batch.is_answer.nonzero().tolist() if t >= depth + 2]
            assert tokens.tolist() == [int(batch.tokens[place]) for place in places]
            for row, (sample, place) in enumerate(places):
                state = batch.states[sample, place - depth - 2, -1].float()
                torch.testing.assert_close(logits[row], head(state)[depth], rtol=1e-4, atol=1e-4)
                assert torch.equal(finals[row], batch.states[sample, place - 1, -1].float())


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa"])
def test_shared_weights_are_not_trained(parts: TargetParts, kind: str) -> None:
    head = KINDS[kind].begin(parts, draft_tokens(parts)).head
    frozen = {name for name, weight in head.named_parameters() if not weight.requires_grad}
    assert frozen == ({"lm_heads.0.weight"} if kind == "medusa" else {"embed_tokens.weight", "lm_head.weight"})


# ---- the whole


SMALL = ("--tokens", "3000", "--draft-vocabulary", "40", "--at-once", "16", "--max-new-tokens", "20")


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "medusa", "draft"])
def test_training_exports_a_head(kind: str, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--target", str(target), "--kind", kind, "--out", str(out), "--work", str(tmp_path / "work")]
    main([*arguments, "--minutes", "0.02", *SMALL])
    assert "held out, temperature 1: first choice" in capsys.readouterr().out
    assert "held out, temperature 1: first choice" in (out / "README.md").read_text()
    if kind == "draft":
        AutoModelForCausalLM.from_pretrained(out)
        assert (out / "tokenizer.json").exists()
        return
    load: dict[str, Callable[[Path, Path], Any]] = {"eagle3": load_eagle3, "dflash": load_dflash, "medusa": load_medusa}
    assert len(load[kind](out, target).vocabulary.target_ids) == 40


async def test_trained_head_drafts_for_its_target(target: Path, tmp_path: Path) -> None:
    head = tmp_path / "head"
    arguments = ["--target", str(target), "--kind", "eagle3", "--out", str(head), "--work", str(tmp_path / "work")]
    await asyncio.to_thread(main, [*arguments, "--minutes", "0.02", *SMALL])
    settings = {"eagle3_head": str(head), "head_target": str(target)}
    sampling = SamplingParams(temperature=0.0, max_new_tokens=24, ignore_eos=True)
    async with (
        cluster(target, drafters="eagle3", draft_settings=settings) as running,
        AsyncClient(running.address) as client,
    ):
        drafted = await client.complete(
            prompt_token_ids=[1, 2, 3], sampling=sampling, speculation=SpeculationParams(num_draft_tokens=4)
        )
        plain = await client.complete(
            prompt_token_ids=[1, 2, 3], sampling=sampling, speculation=SpeculationParams(num_draft_tokens=0)
        )
    assert drafted.tokens == plain.tokens
    assert drafted.statistics.num_draft_tokens > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash"])
def test_exported_heads_are_trained_further(kind: str, parts: TargetParts, target: Path, tmp_path: Path) -> None:
    first = stirred(KINDS[kind].begin(parts, draft_tokens(parts)).head)
    KINDS[kind].save(first, tmp_path, parts, False)
    others = draft_tokens(parts) + 1
    resume = KINDS[kind].resume
    assert resume
    objective = resume(tmp_path, parts, others)
    found, expected = objective.head.state_dict(), first.state_dict()
    assert torch.equal(objective.head.vocabulary.target_ids, others)  # type: ignore[union-attr, arg-type]
    assert torch.equal(found["lm_head.weight"], parts.head[others])
    trained = {name for name, weight in objective.head.named_parameters() if weight.requires_grad}
    assert trained == {name for name, weight in first.named_parameters() if weight.requires_grad}
    for name in trained:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-2, atol=1e-2, msg=name)


def test_heads_that_cannot_go_on_are_refused(target: Path, tmp_path: Path) -> None:
    arguments = ["--target", str(target), "--kind", "medusa", "--work", str(tmp_path), "--minutes", "0.01", *SMALL]
    with pytest.raises(SystemExit, match="medusa cannot be trained further"):
        main([*arguments, "--further", str(tmp_path)])
    with pytest.raises(SystemExit):
        main([*arguments, "--own", "1.5"])


def test_training_continues_where_it_stopped(target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--target", str(target), "--kind", "medusa", "--work", str(tmp_path), *SMALL]
    steps = []
    for minutes in ("0.01", "0.03"):
        main([*arguments, "--minutes", minutes])
        steps.append(int(capsys.readouterr().out.split("step ")[-1].split(",")[0]))
    assert 0 < steps[0] < steps[1]
    assert len(list(tmp_path.glob("samples-*/index.jsonl"))) == 1


def test_nothing_is_kept_of_states_that_are_computed(target: Path, tmp_path: Path) -> None:
    arguments = ["--target", str(target), "--kind", "eagle3", "--work", str(tmp_path), "--minutes", "0.01", *SMALL]
    main([*arguments, "--states", "computed"])
    [states] = tmp_path.glob("texts-*/states.bin")
    assert states.stat().st_size == 0
    assert "first choice" in next(tmp_path.glob("*-eagle3/README.md")).read_text()


def test_sampling_ends_when_its_time_is_over(target: Path, tmp_path: Path) -> None:
    arguments = ["--target", str(target), "--kind", "medusa", "--work", str(tmp_path), *SMALL, "--at-once", "1"]
    with pytest.raises(SystemExit, match=r"0 answers are too few to train on; raise --tokens or --sampling-minutes"):
        main([*arguments, "--sampling-minutes", "0"])
    with pytest.raises(SystemExit, match=r"1 answers are too few"):
        main([*arguments, "--sampling-minutes", "1e-9"])


def test_processes_that_read_a_store_change_nothing_in_it(tmp_path: Path) -> None:
    facts = Facts("f", (1,), 2)
    SampleStore(tmp_path, facts).append("text", 0.0, 1, [1, 2], bytes(8))
    before = (tmp_path / "index.jsonl").stat()
    assert len(SampleStore(tmp_path, facts).entries) == 1
    after = (tmp_path / "index.jsonl").stat()
    assert (after.st_mtime_ns, after.st_ino) == (before.st_mtime_ns, before.st_ino)


def test_missing_target_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"does not exist; give one that does"):
        main(["--target", str(tmp_path / "none"), "--kind", "medusa", "--work", str(tmp_path)])
