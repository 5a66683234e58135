"""Sampling for a head: the target answers in one process or in several, each of which fills a store of its own."""

import multiprocessing
import random
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice, repeat
from pathlib import Path

import torch
from tqdm import tqdm

from coordinator.chat import load_chat_template
from models.heads.own_instructions import KIND as OWN_KIND
from models.heads.own_instructions import OwnInstructions
from models.heads.plan import SEED, Plan
from models.heads.prompts import from_grammar, from_texts, mixed, read_texts
from models.heads.samples import Facts, Instruction, Sampler, SampleStore
from models.heads.target import state_layers
from specdec.engine import LanguageModel, load_language_model
from specdec.engine.pretrained import choose_dtype, text_config
from specdec.serving.model_fingerprint import model_fingerprint
from specdec.serving.model_worker import eos_token_ids
from specdec.serving.tokenizer import load_tokenizer

CACHE_BYTES = 3 << 30  # on a CPU
GPU_SHARE = 0.75  # of a GPU's memory, for weights and caches of all that sample at once
MIN_CACHE_BYTES = 1 << 28
PASSAGE_TOKENS = (32, 256)
MAX_OWN_TOKENS = 160  # of an instruction that the target writes
NO_STATES = ()


def collect(plan: Plan) -> list[SampleStore]:
    """Let the target answer until there are enough samples, or the time is up; return all stores of this target.

    Raises EngineError, ValueError.
    """
    facts = _facts(plan)
    missing = plan.num_tokens - sum(store.num_tokens for store in _stores(plan, facts))
    if missing > 0 and plan.sampling_minutes > 0:
        share = -(-missing // plan.num_samplers)
        if plan.num_samplers == 1 and plan.device.type == "cpu":
            _sample(plan, facts, share, SEED)
        else:
            _sample_aside(plan, facts, share)
    return _stores(plan, facts)


def _facts(plan: Plan) -> Facts:
    config = text_config(str(plan.target))
    dtype = choose_dtype("auto", plan.device, config.hidden_size)
    fingerprint = model_fingerprint(plan.target, {"dtype": str(dtype), "quantisation": "none"})
    layers = () if plan.computes_states else state_layers(config.num_hidden_layers)
    return Facts(fingerprint, layers, config.hidden_size)


def _folder(plan: Plan, facts: Facts) -> Path:
    """Return the folder of the first store; the others have its name and their seed."""
    return plan.work / f"{'samples' if facts.layers else 'texts'}-{facts.fingerprint[:16]}"


def _stores(plan: Plan, facts: Facts) -> list[SampleStore]:
    """Open every store that there is, also those of processes that sampled before."""
    first = _folder(plan, facts)
    return [SampleStore(folder, facts) for folder in sorted(plan.work.glob(f"{first.name}*"))]


def _sample_aside(plan: Plan, facts: Facts, num_tokens: int) -> None:
    """Sample in processes of their own, which leave a GPU's memory behind when they end; none outlives a fork."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.num_samplers, context) as processes:
        list(processes.map(_sample, repeat(plan), repeat(facts), repeat(num_tokens), plan.seeds))


def _sample(plan: Plan, facts: Facts, num_tokens: int, seed: int) -> None:
    """Let the target answer in this process until its store has so many tokens more, or the time is up."""
    torch.set_num_threads(plan.num_threads)
    first = _folder(plan, facts)
    store = SampleStore(first if seed == SEED else first.with_name(f"{first.name}-{seed}"), facts)
    end_s = time.monotonic() + 60 * plan.sampling_minutes
    model = load_language_model(str(plan.target), device=plan.device.type, kv_cache_bytes=_cache_bytes(plan))
    sampler = Sampler(model, facts.layers, eos_token_ids(plan.target), plan.max_new_tokens, seed + len(store.entries))
    instructions = _instructions(plan, model, seed, store)
    wanted = store.num_tokens + num_tokens
    with tqdm(total=wanted, initial=store.num_tokens, unit="tokens", desc="the target answers") as bar:
        for instruction, tokens, states in sampler.answers(instructions, plan.num_at_once):
            store.append(instruction.kind, instruction.temperature, len(instruction.tokens), tokens, states)
            bar.update(len(tokens))
            if store.num_tokens >= wanted or time.monotonic() > end_s:
                return


def _cache_bytes(plan: Plan) -> int:
    """Return the bytes of one process's cache; the model's files are about as large as its weights are there."""
    if plan.device.type == "cpu":
        return CACHE_BYTES
    total = torch.cuda.get_device_properties(plan.device).total_memory
    weights = sum(file.stat().st_size for file in plan.target.glob("*.safetensors"))
    return max(MIN_CACHE_BYTES, int(GPU_SHARE * total) // plan.num_samplers - weights)


def _instructions(plan: Plan, model: LanguageModel, seed: int, store: SampleStore) -> Iterator[Instruction]:
    """Yield what is asked, endlessly, after what the store has answers to."""
    tokenizer, template = load_tokenizer(str(plan.target)), load_chat_template(plan.target)
    num_ours = sum(entry.kind != OWN_KIND for entry in store.entries)
    if plan.texts:
        return islice(from_texts(tokenizer, read_texts(plan.texts), *PASSAGE_TOKENS, seed), num_ours, None)
    ours = islice(from_grammar(tokenizer, template, seed), num_ours, None)
    if template is None or plan.own == 0:
        return ours
    seed = random.getrandbits(32)  # so that it does not write what it wrote before an interruption
    sampler = Sampler(model, NO_STATES, eos_token_ids(plan.target), MAX_OWN_TOKENS, seed, "instruction")
    return mixed(ours, OwnInstructions(tokenizer, template).written(sampler, plan.num_at_once), plan.own)
