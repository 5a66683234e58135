"""Planted mistakes: production code with one place changed. The simulation must find each of them.

`rewritten` changes the source of one function, `script` that of one Lua script: what was there is named, so that a
mistake that no longer fits the code fails instead of passing by.
"""

import importlib
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from coordinator.stores import scripts


@dataclass(frozen=True, slots=True)
class Change:
    """One place of production code, and what is there instead."""

    place: str  # a function as module:qualified.name, or a Lua script
    old: str
    new: str

    @contextmanager
    def made(self) -> Iterator[None]:
        """Change it while the context lasts."""
        change = script if self.place.endswith(".lua") else rewritten
        with change(self.place, self.old, self.new):
            yield


@dataclass(frozen=True, slots=True)
class Mistake:
    """A place that was changed; `also` lists what else guards against the same fault, and must be missing too."""

    name: str
    place: str
    old: str
    new: str
    seed: int  # one that finds it, not always the first one
    hazards: frozenset[str] = frozenset()
    hole: str = ""  # of the second look, that this opens again
    also: tuple[Change, ...] = ()

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Let the mistake be made while the context lasts."""
        with ExitStack() as stack:
            for change in (Change(self.place, self.old, self.new), *self.also):
                stack.enter_context(change.made())
            yield


@contextmanager
def rewritten(place: str, old: str, new: str) -> Iterator[None]:
    """Replace a part of one function's source."""
    module_name, _, qualified = place.partition(":")
    module = importlib.import_module(module_name)
    owner: Any = module
    *path, name = qualified.split(".")
    for part in path:
        owner = getattr(owner, part)
    found: Any = inspect.getattr_static(owner, name)
    function: Any = found.fget if isinstance(found, property) else found
    source = replaced(textwrap.dedent(inspect.getsource(function)), old, new)
    made: dict[str, Any] = {}
    exec(source, function.__globals__, made)  # the same source, but for one place
    with mock.patch.object(owner, name, made[name]):
        yield


@contextmanager
def script(place: str, old: str, new: str) -> Iterator[None]:
    """Replace a part of one Lua script."""
    read = scripts.read_script

    def changed(name: str) -> str:
        text = read(name)
        return replaced(text, old, new) if f"{name}.lua" == place else text

    with mock.patch.object(scripts, "read_script", changed):
        yield


def replaced(text: str, old: str, new: str) -> str:
    """Return the text with its one occurrence of `old` replaced."""
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


TWO_STORES, TWO_MODELS = frozenset({"two stores"}), frozenset({"two models"})
FAILOVER = frozenset({"failover"})

NO_PROOF = Change(
    "specdec.exact.prefix:PrefixChain.proves",
    "return digest is None or self.digest(tokens, length) == digest",
    "return True",
)
NO_INCARNATION = Change(
    "specdec.serving.session_stream:WorkerSession.key",
    'return f"{self.incarnation}/{self.session_id}" if self.incarnation else self.session_id',
    "return self.session_id",
)
NO_HEALING = Change(
    "coordinator.running:RunningGeneration._publish",
    "raise told(await heal(self._store, self.shown)) from refusal",
    "raise",
)
NO_COMPARISON = Change(
    "coordinator.sessions:SessionStore.tail",
    "if (news.length, news.digest) != (end.length, end.digest):",
    "if False:",
)
ROLLBACK, STOPPED = frozenset({"rollback"}), frozenset({"stop"})

MISTAKES = [
    Mistake(
        "a resume is judged by the memory of a former owner",
        "coordinator.service:Coordinator._is_current",
        "session = await self._store.read(followed.session_id)\n",
        "session = await self._store.read(followed.session_id)\n"
        "    from specdec.errors import DataLossError\n"
        "    raise DataLossError('past what this coordinator holds')\n",
        5,
        hole="H2",
    ),
    Mistake(
        "streams of an older epoch go on at a worker",
        "specdec.serving.session_stream:EpochFence.check",
        "if claim.epoch < epoch:",
        "if False:",
        3,
        TWO_STORES,
        also=(NO_PROOF, NO_INCARNATION),
    ),
    Mistake(
        "older streams of the same epoch go on at a worker",
        "specdec.serving.session_stream:EpochFence.check",
        "if claim.epoch == epoch and claim.stream_number < latest:",
        "if False:",
        1,
        TWO_STORES,
        hole="H3",
        also=(NO_PROOF, NO_INCARNATION),
    ),
    Mistake(
        "a worker serves sessions of another model",
        "target_service.servicer:TargetServicer._check_model",
        'if fingerprint not in ("", self._model.fingerprint):',
        "if False:",
        55,
        TWO_MODELS,
        hole="H5",
    ),
    Mistake(
        "an answer that cannot be parsed is used",
        "coordinator.streams:WorkerStream._answer",
        "if reply is None:",
        "if False:",
        57,
        hole="H6",
    ),
    Mistake(
        "a commit does not compare epochs",
        "commit.lua",
        "if tonumber(meta[1]) > tonumber(ARGV[1]) then",
        "if false then",
        3,
        ROLLBACK | STOPPED,
        also=(NO_HEALING,),
    ),
    Mistake(
        "a commit does not recognise its replay",
        "commit.lua",
        "if tonumber(meta[2]) == length and meta[3] == ARGV[4] then",
        "if false then",
        5,
        also=(NO_HEALING,),
    ),
    Mistake(
        "a commit appends without comparing what it builds on",
        "commit.lua",
        "if meta[2] ~= ARGV[2] or meta[3] ~= ARGV[3] or redis.call('STRLEN', KEYS[2]) ~= 4 * tonumber(meta[2]) then",
        "if false then",
        5,
        ROLLBACK,
    ),
    Mistake(
        "a takeover keeps the epoch",
        "claim.lua",
        "redis.call('HINCRBY', KEYS[1], 'epoch', 1)",
        "redis.call('HSET', KEYS[1], 'epoch', 1)",
        6,
    ),
    Mistake(
        "a commit does not keep all of the session's keys alive",
        "commit.lua",
        "redis.call('PEXPIRE', key, ARGV[8])",
        "",
        0,
    ),
    Mistake(
        "uncommitted tokens are shown",
        "coordinator.running:RunningGeneration._publish",
        "await self._store.commit(self.session_id, self.epoch, played, statistics)",
        "asyncio.ensure_future(self._store.commit(self.session_id, self.epoch, played, statistics))",
        0,
    ),
    Mistake(
        "a commit counts that too few replicas have",
        "coordinator.stores.client:RedisClient._execute",
        "if num_reached < num_replicas:",
        "if False:",
        3,
        FAILOVER,
    ),
    Mistake(
        "replicas are not waited for",
        "coordinator.stores.client:RedisClient._execute",
        "num_replicas = self._num_replicas if script else 0",
        "num_replicas = 0",
        0,
        FAILOVER,
    ),
    Mistake(
        "commits of one session overlap",
        "coordinator.rounds:Commits.begin",
        "    await asyncio.shield(self._in_flight)\n",
        "",
        22,
    ),
    Mistake(
        "cached tokens are kept without comparing them",
        "specdec.engine.sequence:Sequence._path",
        "num_matching = num_equal(self._tokens[start:base], tokens)",
        "num_matching = min(len(self._tokens[start:base]), len(tokens))",
        1,
        TWO_STORES,
        also=(NO_INCARNATION,),
    ),
    Mistake(
        "a cache is not truncated where a round fails to keep its draft",
        "specdec.engine.sequence:Sequence.resume",
        "self.truncate(kept)",
        "self.truncate(kept + (kept < self.length))",
        0,
    ),
    Mistake(
        "a worker claims to hold what it lost",
        "specdec.engine.sequence:Sequence.resume",
        "if start > (self.num_linear if on_draft else verified):",
        "if False:",
        123,
        also=(NO_PROOF,),
    ),
    Mistake(
        "a finished session is not closed at its workers",
        "coordinator.running:RunningGeneration._run",
        "await workers.close()",
        "pass",
        34,
    ),
    Mistake(
        "a finished session is closed only at its last worker",
        "coordinator.streams:WorkerStream.close",
        "if known.get(worker.address) is worker]",
        "if worker is self._worker]",
        250,
    ),
    Mistake(
        "a session without followers keeps its place",
        "coordinator.registry:RunningGenerations._remove",
        "del self._entries[session_id]",
        "pass",
        0,
    ),
    Mistake(
        "a follower misses a token",
        "coordinator.followed:FollowedGeneration.follow",
        "yield self.generation.chunk(offset, end), ending",
        "yield self.generation.chunk(min(end, offset + (offset == 5)), end), ending",
        0,
    ),
    Mistake(
        "a session counts as finished before its last commit",
        "coordinator.followed:FollowedGeneration._is_complete",
        "return self.generation.done and self._num_published == len(self.generation.emitted)",
        "return self.generation.done",
        14,
    ),
    Mistake(
        "a session that the store lost is not brought back",
        "coordinator.running:RunningGeneration._publish",
        "raise told(await heal(self._store, self.shown)) from refusal",
        "raise",
        281,
        ROLLBACK,
        hole="H4",
    ),
    Mistake(
        "sessions go on at once after a store has broken its connections",
        "coordinator.starting:SessionStarts._claimed_settled",
        "while self._store.unbroken_s < SETTLED_S:",
        "while False:",
        3762,
        ROLLBACK,
        hole="H4",
    ),
    Mistake(
        "sessions that were left are not compared",
        "coordinator.upkeep:Upkeep._check_left",
        "await heal(self._store, shown)",
        "pass",
        271,
        ROLLBACK,
        hole="H4",
    ),
    Mistake(
        "a healed session keeps an epoch that others may have",
        "coordinator.healing:_above",
        "above = replace(shown, epoch=max(shown.epoch, stored.epoch) + 1)",
        "above = replace(shown, epoch=shown.epoch - 1)",
        5,
        ROLLBACK,
    ),
    Mistake(
        "a worker that did not answer is not probed again",
        "coordinator.pool.watching:PoolWatch._watch",
        "num_failures = 0 if await worker.probe() else",
        "num_failures = 0 if not num_failures and await worker.probe() else",
        58,
    ),
    Mistake(
        "a stream that ends still counts at its worker",
        "coordinator.streams:WorkerStream.abandon",
        "self._worker.num_streams -= 1",
        "pass",
        0,
    ),
    Mistake(
        "a new stream takes its worker to hold what the last one held",
        "coordinator.streams:WorkerStream.abandon",
        "self._stream, self._worker, self._held = None, None, 0",
        "self._stream, self._worker = None, None",
        4,
        TWO_STORES,
        also=(NO_PROOF, NO_INCARNATION),
    ),
    Mistake(
        "a claim ignores the owner's lease",
        "claim.lua",
        "if lease_left_ms(KEYS[1]) > 0 and redis.call('HGET', KEYS[1], 'owner') ~= ARGV[4] then",
        "if false then",
        2,
        hole="H9",
    ),
    Mistake(
        "a lease is not renewed during long rounds",
        "heartbeat.lua",
        "if redis.call('HEXISTS', KEYS[1], 'leased_at') == 1 then",
        "if false then",
        53,
        hole="H9",
    ),
    Mistake(
        "a tail shows tokens that the log does not have",
        "tail.lua",
        "tokens = redis.call('GETRANGE', KEYS[2], 4 * known, -1)",
        "tokens = redis.call('GETRANGE', KEYS[2], 4 * (known - 1), -5)",
        3,
        also=(NO_COMPARISON,),
    ),
    Mistake(
        "a tail never takes over",
        "coordinator.tailing:TailedGeneration._read_on",
        "if news.status is Status.ACTIVE and not news.lease_left_s:",
        "if False:",
        10,
    ),
    Mistake(
        "a round is scored ahead after another token than was drawn",
        "target_service.scorer:ScoreTask.score_instead",
        "self.append_instead(given.start, [*given.tokens, *given.draft_tokens]",
        "self.append_instead(given.start, [*(0 for _ in given.tokens), *given.draft_tokens]",
        1,
    ),
]
