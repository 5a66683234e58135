"""Valid calls, before they are mutated: which method, which messages, and how the caller leaves."""

import random
from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto

from google.protobuf.message import Message

from specdec.exact import codec
from specdec.exact.prefix import chain
from specdec.exact.values import SparseDistribution
from specdec.messages import sampling_to_proto
from specdec.serving.session_stream import open_session
from specdec.types import SamplingParams
from specdec.v1 import draft_pb2, generation_pb2, target_pb2, types_pb2
from tests.support.architectures import VOCAB_SIZE

PACKAGE = "/specdec.v1."
NUM_NAMES = 50  # of sessions and request ids: some calls meet the state of others
KEPT_CHUNKS = 200


class Leaving(Enum):
    """What a caller does after its last message."""

    HALF_CLOSE = auto()  # as a caller should
    CANCEL = auto()
    STAY = auto()  # the stream stays half open for a moment, then it is cancelled


@dataclass(frozen=True, slots=True)
class Script:
    """One call."""

    method: str
    messages: tuple[Message, ...]
    leaving: Leaving = Leaving.HALF_CLOSE


@dataclass(slots=True)
class Seen:
    """Chunks that the coordinator sent: what a client knows of its sessions."""

    chunks: deque[generation_pb2.GenerateResponse] = field(default_factory=lambda: deque(maxlen=KEPT_CHUNKS))

    def note(self, method: str, answer: bytes) -> None:
        """Take note of an answer."""
        if method.endswith("/Generate"):
            self.chunks.append(generation_pb2.GenerateResponse.FromString(answer))


def coordinator_script(rng: random.Random, seen: Seen) -> Script:
    """Return a call of GenerationService."""
    chunk = rng.choice(seen.chunks) if seen.chunks else generation_pb2.GenerateResponse(session_id="none")
    name = rng.choice(
        ("Generate", "Generate", "Generate", "Resume", "Resume", "GetSession", "CancelSession", "GetModel")
    )
    message: Message
    if name == "Generate":
        message = _generate(rng)
    elif name == "Resume":
        end = chunk.offset + len(chunk.tokens)
        message = generation_pb2.ResumeRequest(
            session_id=chunk.session_id, offset=end, digest=chunk.digest, proof=chunk.proof,
            tokens=chunk.tokens, origins=chunk.origins,
        )  # fmt: skip
    elif name == "GetModel":
        message = generation_pb2.GetModelRequest()
    else:
        message = getattr(generation_pb2, f"{name}Request")(session_id=chunk.session_id)
    messages = (message,) * rng.choice((1,) * 50 + (0, 2))  # a call has exactly one
    return Script(f"{PACKAGE}GenerationService/{name}", messages, _leaving(rng))


def target_script(rng: random.Random, _: Seen) -> Script:
    """Return a stream of a session at a target worker, or the question for its model."""
    if rng.random() < 0.05:
        return Script(f"{PACKAGE}TargetService/GetTarget", (target_pb2.GetTargetRequest(),))
    rounds = [target_pb2.ScoreRequest(score=score) for score in _scores(rng)]
    opening = target_pb2.ScoreRequest(
        open=target_pb2.OpenTarget(
            session=_session(rng),
            matches_chosen=rng.random() < 0.7,
            observations=types_pb2.ObservationRequest(hidden_layers=[1, 3], num_top_tokens=4)
            if rng.random() < 0.3
            else None,
        )
    )
    closing = target_pb2.ScoreRequest(close=types_pb2.CloseSession())
    return Script(f"{PACKAGE}TargetService/Score", _disordered(rng, (opening, *rounds, closing)), _leaving(rng))


def draft_script(rng: random.Random, _: Seen) -> Script:
    """Return a stream of a session at a draft worker, or the question for its drafters."""
    if rng.random() < 0.05:
        return Script(f"{PACKAGE}DraftService/GetDraft", (draft_pb2.GetDraftRequest(),))
    drafter = rng.choice(("", "model", "ngram", "suffix", "recycle"))
    opening = draft_pb2.ProposeRequest(
        open=draft_pb2.OpenDraft(
            session=_session(rng), drafter=drafter, model_fingerprint=rng.choice(("", "one", "two"))
        )
    )
    rounds, start, text = [], 0, list[int]()
    for tokens in _texts(rng):
        propose = draft_pb2.Propose(
            start=start, tokens=tokens, num_draft_tokens=rng.randint(0, 6), prefix_digest=chain(b"", text),
            stop_below=rng.choice((0.0, 0.3)), observations=_observations(rng, start, len(tokens)),
        )  # fmt: skip
        rounds.append(draft_pb2.ProposeRequest(propose=propose))
        text, start = text + tokens, start + len(tokens)
    closing = draft_pb2.ProposeRequest(close=types_pb2.CloseSession())
    return Script(f"{PACKAGE}DraftService/Propose", _disordered(rng, (opening, *rounds, closing)), _leaving(rng))


def _generate(rng: random.Random) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest(sampling=sampling_to_proto(_sampling(rng)))
    request.request_id = rng.choice(("", "", f"name-{rng.randrange(NUM_NAMES)}"))
    kind = rng.random()
    if kind < 0.6:
        request.tokens.ids.extend(_tokens(rng, rng.randint(1, 20)))
    elif kind < 0.8:
        request.text = " ".join(f"t{token}" for token in _tokens(rng, 5))
    else:
        request.chat.messages.add(role="user", content="t1 t2")
    if rng.random() < 0.5:
        request.speculation.num_draft_tokens = rng.randint(0, 6)
        request.speculation.drafter = rng.choice(("", "model", "ngram", "suffix", "recycle", "model+recycle"))
        request.speculation.acceptance_rule = types_pb2.AcceptanceRule.ValueType(rng.randrange(3))
        if not request.speculation.drafter:
            request.speculation.ClearField("drafter")
    return request


def _sampling(rng: random.Random) -> SamplingParams:
    if rng.random() < 0.4:
        return SamplingParams(temperature=0, max_new_tokens=rng.randint(1, 12), seed=1)
    return SamplingParams(
        temperature=rng.choice((0.5, 1.0, 2.0)), top_k=rng.choice((0, 5)), top_p=rng.choice((1.0, 0.9)),
        min_p=rng.choice((0.0, 0.05)), repetition_penalty=rng.choice((1.0, 1.3)),
        presence_penalty=rng.choice((0.0, 0.5)), frequency_penalty=rng.choice((0.0, 0.5)), seed=rng.getrandbits(32),
        max_new_tokens=rng.randint(1, 12), num_logprobs=rng.choice((None, 0, 5)), logit_bias=rng.choice(({}, {3: 5.0})),
        stop=rng.choice(((), ("t7",))), stop_token_ids=rng.choice(((), (9,))), ignore_eos=rng.random() < 0.5,
    )  # fmt: skip


def _session(rng: random.Random) -> types_pb2.OpenSession:
    name, incarnation = f"fuzz-{rng.randrange(NUM_NAMES)}", rng.choice(("", "a", "b"))
    return open_session(name, rng.randint(1, 5), _sampling(rng), rng.randint(0, 10), incarnation)


def _scores(rng: random.Random) -> list[target_pb2.Score]:
    scores, start, text = [], 0, list[int]()
    for tokens in _texts(rng):
        num_drafted = rng.randint(0, 5)
        drafted = _tokens(rng, num_drafted)
        supports = [SparseDistribution((token, (token + 1) % VOCAB_SIZE), (0.5, 0.5)) for token in drafted]
        parents = [rng.randint(0, number) for number in range(num_drafted)] if rng.random() < 0.4 else []
        scores.append(
            target_pb2.Score(
                start=start,
                tokens=tokens,
                draft_tokens=drafted,
                parents=parents,
                prefix_digest=chain(b"", text),
                supports=codec.distributions_to_proto(supports, with_probs=False),
                next_round=_next_round(rng),
            )
        )
        text, start = text + tokens, start + len(tokens)
    return scores


def _next_round(rng: random.Random) -> target_pb2.NextRound | None:
    if rng.random() < 0.5:
        return None
    return target_pb2.NextRound(
        draft_lengths=[rng.randint(0, 4) for _ in range(rng.randint(0, 15))],
        plain=rng.random() < 0.7,
        max_length=rng.choice((0, 5, 40, 1 << 31)),
        num_offered=rng.randint(0, 8),
        learns=rng.random() < 0.5,
        stop_below=rng.choice((0.0, 0.2)),
    )


def _observations(rng: random.Random, start: int, count: int) -> types_pb2.Observations | None:
    if rng.random() < 0.7:
        return None
    return types_pb2.Observations(start=start, count=count, top_tokens=rng.randbytes(4 * 8 * count))


def _texts(rng: random.Random) -> list[list[int]]:
    """Return a prompt and what follows it, round after round."""
    return [_tokens(rng, rng.randint(1, 20)), *(_tokens(rng, rng.randint(1, 4)) for _ in range(rng.randint(0, 4)))]


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) for _ in range(count)]


def _disordered(rng: random.Random, messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Return them in order more often than not; else one is missing, comes twice, or they come in any order."""
    given = list(messages)
    what = rng.random()
    if what < 0.1:
        rng.shuffle(given)
    elif what < 0.2:
        del given[rng.randrange(len(given))]
    elif what < 0.3:
        given.insert(rng.randrange(len(given)), rng.choice(given))
    return tuple(given)


def _leaving(rng: random.Random) -> Leaving:
    return rng.choices(list(Leaving), (0.8, 0.15, 0.05))[0]
