"""Clients whose sessions go to workers that lie."""

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec import AsyncClient, SamplingParams, SpecdecError, SpeculationParams
from specdec.errors import DeadlineExceededError, FencedError, InternalError, UnavailableError
from tests.fuzz.liars import Liar
from tests.fuzz.services import MAX_NEW_TOKENS, Services
from tests.support.architectures import VOCAB_SIZE

NUM_CLIENTS = 16  # most of them wait for what a lie has cost
TIMEOUT_S = 60.0
NUM_RESUMES = 30
PROMPTS = [[number, 2 * number, 7] for number in range(1, 17)]
DRAFTERS = ("model", "ngram", "suffix", "recycle", "model+recycle", None)
PASSING = (UnavailableError, FencedError)  # the session can be resumed
PLAIN = SpeculationParams(num_draft_tokens=0)


@dataclass(slots=True)
class Sessions:
    """How sessions ended."""

    codes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


async def expected_texts(services: Services) -> list[tuple[int, ...]]:
    """Return what greedy plain decoding makes of the prompts, while nobody lies."""
    async with AsyncClient(services.address, timeout_s=TIMEOUT_S) as client:
        return [
            (await client.complete(prompt_token_ids=prompt, sampling=_greedy(0), speculation=PLAIN)).tokens
            for prompt in PROMPTS
        ]


async def use(
    services: Services, liar: Liar, num_lies: int, seed: int, texts: Sequence[tuple[int, ...]] | None
) -> Sessions:
    """Complete sessions until so many lies were told. `texts`: what they must be; None: as a target says."""
    sessions, told = Sessions(), liar.num_lies + num_lies
    async with asyncio.TaskGroup() as group:
        for number in range(NUM_CLIENTS):
            rng = random.Random(f"{seed} {number}")
            group.create_task(_use(services, liar, told, rng, texts, sessions))
    return sessions


async def _use(
    services: Services,
    liar: Liar,
    told: int,
    rng: random.Random,
    texts: Sequence[tuple[int, ...]] | None,
    sessions: Sessions,
) -> None:
    async with AsyncClient(services.address, timeout_s=TIMEOUT_S) as client:
        while liar.num_lies < told:
            number = rng.randrange(len(PROMPTS))
            try:
                tokens = await _completed(client, rng, PROMPTS[number])
            except SpecdecError as error:
                sessions.codes[type(error).__name__] += 1
                if not isinstance(error, PASSING) or isinstance(error, DeadlineExceededError | InternalError):
                    sessions.wrong.append(f"a session ended with {type(error).__name__}: {error}")
                continue
            sessions.codes["OK"] += 1
            if texts is not None and tokens != texts[number]:
                sessions.wrong.append(f"the text after {PROMPTS[number]} was {tokens}, not {texts[number]}")
            if not all(token < VOCAB_SIZE for token in tokens):
                sessions.wrong.append(f"a text has tokens that no model has: {tokens}")


async def _completed(client: AsyncClient, rng: random.Random, prompt: list[int]) -> tuple[int, ...]:
    speculation = SpeculationParams(num_draft_tokens=rng.choice((None, 1, 4, 8)), drafter=rng.choice(DRAFTERS))
    if rng.random() < 0.3:  # left to the service, so that the target's offers are lies, too
        speculation = SpeculationParams()
    completion = await client.complete(
        prompt_token_ids=prompt, sampling=_greedy(rng.getrandbits(31)), speculation=speculation
    )
    return completion.tokens


def _greedy(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_new_tokens=MAX_NEW_TOKENS, ignore_eos=True, seed=seed)
