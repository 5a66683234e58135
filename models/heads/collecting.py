"""Sampling for a head: the target answers instructions until its store has enough."""

import multiprocessing
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice

import torch
from tqdm import tqdm

from coordinator.chat import load_chat_template
from models.heads.own_instructions import KIND as OWN_KIND
from models.heads.own_instructions import OwnInstructions
from models.heads.plan import SEED, Plan
from models.heads.prompts import from_grammar, from_texts, mixed, read_texts
from models.heads.samples import Answering, Facts, Instruction, Sampler, SampleStore
from models.heads.slots import SlotSampler
from models.heads.target import state_layers
from specdec.engine import EngineError, load_language_model
from specdec.engine.pretrained import choose_dtype, load_pretrained, text_config
from specdec.serving.model_fingerprint import model_fingerprint
from specdec.serving.model_worker import eos_token_ids
from specdec.serving.tokenizer import load_tokenizer

BY_THE_ENGINE, IN_SLOTS = 96, 2048  # answers under way at once
CACHE_BYTES = 3 << 30  # on a CPU
GPU_SHARE = 0.6  # of a GPU's memory, for the engine's cache where slots cannot be
MAX_PROMPT_TOKENS = 256  # of what is asked in slots: with the answer, what a slot holds
PASSAGE_TOKENS = (32, 256)
MAX_OWN_TOKENS = 160  # of an instruction that the target writes
NO_STATES = ()
ANSWER, INSTRUCTION = "answer", "instruction"  # what a sampler writes


def collect(plan: Plan) -> SampleStore:
    """Let the target answer until the store has enough samples, or the time is up; return it.

    Raises EngineError, ValueError.
    """
    facts = _facts(plan)
    store = _store(plan, facts)
    if store.num_tokens < plan.num_tokens and plan.sampling_minutes > 0:
        if plan.device.type == "cpu":
            _sample(plan, facts)
        else:
            _sample_aside(plan, facts)
    return _store(plan, facts)


def _facts(plan: Plan) -> Facts:
    config = text_config(str(plan.target))
    dtype = choose_dtype("auto", plan.device, config.hidden_size)
    fingerprint = model_fingerprint(plan.target, {"dtype": str(dtype), "quantisation": "none"})
    layers = () if plan.computes_states else state_layers(config.num_hidden_layers)
    return Facts(fingerprint, layers, config.hidden_size)


def _store(plan: Plan, facts: Facts) -> SampleStore:
    return SampleStore(plan.work / f"{'samples' if facts.layers else 'texts'}-{facts.fingerprint[:16]}", facts)


def _sample_aside(plan: Plan, facts: Facts) -> None:
    """Sample in a process of its own, which leaves a GPU's memory behind when it ends; none outlives a fork."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
        processes.submit(_sample, plan, facts).result()


def _sample(plan: Plan, facts: Facts) -> None:
    """Let the target answer in this process until the store has enough, or the time is up."""
    torch.set_num_threads(plan.num_threads)
    store = _store(plan, facts)
    end_s = time.monotonic() + 60 * plan.sampling_minutes
    in_slots = _in_slots(plan) if plan.device.type == "cuda" and not facts.layers else None
    answering = in_slots or _by_the_engine(plan, facts)
    num_at_once = plan.num_at_once or (IN_SLOTS if in_slots else BY_THE_ENGINE)
    instructions = _instructions(plan, answering, store, num_at_once)
    sampler = answering(ANSWER, plan.max_new_tokens, SEED + len(store.entries))
    with tqdm(total=plan.num_tokens, initial=store.num_tokens, unit="tokens", desc="the target answers") as bar:
        for instruction, tokens, states in sampler.answers(instructions, num_at_once):
            store.append(instruction.kind, instruction.temperature, len(instruction.tokens), tokens, states)
            bar.update(len(tokens))
            if store.num_tokens >= plan.num_tokens or time.monotonic() > end_s:
                return


MakeSampler = Callable[[str, int, int], Answering]
"""Gives what answers, by a name, the most new tokens of an answer, and a seed."""


def _in_slots(plan: Plan) -> MakeSampler | None:
    """Answer in slots; None where the target's layers do not fit there."""
    model = load_pretrained(str(plan.target), plan.device, "auto")
    ends, context_length = eos_token_ids(plan.target), text_config(str(plan.target)).max_position_embeddings

    def made(_name: str, max_new_tokens: int, seed: int) -> Answering:
        max_tokens = min(MAX_PROMPT_TOKENS + max_new_tokens, context_length)
        return SlotSampler(model, ends, max_new_tokens, max_tokens, seed)

    try:
        made(ANSWER, plan.max_new_tokens, SEED)
    except EngineError as error:
        tqdm.write(f"{error}; the engine samples instead, which takes longer")
        return None
    return made


def _by_the_engine(plan: Plan, facts: Facts) -> MakeSampler:
    """Answer by the engine that serves the target, which gives its states too."""
    cache_bytes = CACHE_BYTES
    if plan.device.type == "cuda":
        cache_bytes = int(GPU_SHARE * torch.cuda.get_device_properties(plan.device).total_memory)
    model = load_language_model(str(plan.target), device=plan.device.type, kv_cache_bytes=cache_bytes)
    ends = eos_token_ids(plan.target)

    def made(name: str, max_new_tokens: int, seed: int) -> Answering:
        layers = facts.layers if name == ANSWER else NO_STATES
        return Sampler(model, layers, ends, max_new_tokens, seed, name)

    return made


def _instructions(plan: Plan, answering: MakeSampler, store: SampleStore, num_at_once: int) -> Iterator[Instruction]:
    """Yield what is asked, endlessly, after what the store has answers to."""
    tokenizer, template = load_tokenizer(str(plan.target)), load_chat_template(plan.target)
    num_ours = sum(entry.kind != OWN_KIND for entry in store.entries)
    if plan.texts:
        return islice(from_texts(tokenizer, read_texts(plan.texts), *PASSAGE_TOKENS, SEED), num_ours, None)
    ours = islice(from_grammar(tokenizer, template, SEED), num_ours, None)
    if template is None or plan.own == 0:
        return ours
    seed = random.getrandbits(32)  # so that it does not write what it wrote before an interruption
    sampler = answering(INSTRUCTION, MAX_OWN_TOKENS, seed)
    return mixed(ours, OwnInstructions(tokenizer, template).written(sampler, num_at_once), plan.own)
