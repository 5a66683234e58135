"""The invariants, checked at every change of a store and at every chunk that a client gets.

1. A session's log only grows, is chained by its digest, and its epoch only rises.
2. What a client gets is committed, and is a prefix of the log as it finally is; no token ever changes. Where a store
   lost tokens by a fault, that holds for those that a living coordinator, or a client that comes back, has had.
3. A session changes hands only once its owner has released it, or its lease has lapsed; while its owner runs it and the
   store is well, that does not happen: followers never cost epochs.
4. Every round builds on a text that a target scored as it is, and greedy text is the target's own.
5. No client fails, but for what a fault really took away.
6. In the end nothing is left: no task, no call, no running session, no key after its time.
"""

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from coordinator.registry import RunningGenerations
from coordinator.running import RunningGeneration
from coordinator.session_record import unpack_tokens
from coordinator.sessions import LEASE_S
from specdec.completion import Chunk
from specdec.errors import SpecdecError
from specdec.exact.prefix import chain
from tests.simulation.loop import Process
from tests.simulation.store import SimulatedRedis

TICK_S = 0.001  # of the clock that leases go by: its times are cut to whole milliseconds
CALM_S = 2 * LEASE_S  # an owner that was not disturbed for so long has renewed its leases
NEW_S = LEASE_S / 2  # one that runs a session for less may have had it from the store so late that its lease lapsed


@dataclass(slots=True)
class Trace:
    """What happened, in order, with virtual times."""

    now_s: Callable[[], float]
    entries: list[tuple[float, str, str]] = field(default_factory=list)

    def note(self, who: str, what: str) -> None:
        """Add an event."""
        self.entries.append((self.now_s(), who, what))

    def lines(self) -> list[str]:
        """Return a line an event."""
        return [f"{at_s:11.6f}  {who:<14} {what}" for at_s, who, what in self.entries]

    def digest(self) -> str:
        """Return a hash of all events: equal for equal runs."""
        return hashlib.blake2b("\n".join(self.lines()).encode(), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class Owner:
    """A coordinator as its process, by which leases know it."""

    process: Process
    running: RunningGenerations

    def runs(self, session_id: str, now_s: float) -> bool:
        """Whether it runs a session, and could have renewed its lease."""
        process, generation = self.process, self.running.get(session_id)
        is_well = process.is_alive and not process.is_stopped and now_s - process.went_on_at_s > CALM_S
        is_here = isinstance(generation, RunningGeneration) and generation.is_running and generation.running_s > NEW_S
        return is_well and is_here


@dataclass(frozen=True, slots=True)
class Lease:
    """A session's lease as the store has it."""

    owner: str = ""
    leased_at: bytes = b""  # empty: released, or never leased
    seen_at_s: float = 0.0  # when it was there first

    @classmethod
    def of(cls, meta: dict[bytes, bytes], seen_at_s: float) -> "Lease":
        """Return the lease in a session's fields."""
        return cls(meta.get(b"owner", b"").decode(), meta.get(b"leased_at", b""), seen_at_s)


@dataclass(slots=True)
class Log:
    """A session as its store has it, and what clients were shown of it."""

    prompt: tuple[int, ...]
    greedy: tuple[tuple[int, ...], ...]  # the targets' own texts, of which it is one; none: sampled
    tokens: tuple[int, ...] = ()  # prompt and completion; empty: not in the store
    digest: bytes = b""
    epoch: int = 0
    lease: Lease = field(default_factory=Lease)
    shown: list[int] = field(default_factory=list)  # the longest text that any client has seen
    known: dict[Process, int] = field(default_factory=dict)  # how many of its tokens coordinators and clients have had
    unknown: list[int] = field(default_factory=list)  # the longest text of which the end was lost with all who knew it
    is_lost: bool = False  # the store lost at least a part of it, by a fault
    is_behind: bool = False  # so that it had less than clients were shown
    is_forgotten: bool = False  # the store lost all of it: the same request begins another session
    scored: set[tuple[int, ...]] = field(default_factory=set)  # the texts after which a target gave scores

    def may_be(self, text: tuple[int, ...], begin: int, tokens: tuple[int, ...]) -> bool:
        """Whether these tokens, and those that were shown before them, are of this text."""
        is_same = self.is_forgotten or tuple(self.shown[:begin]) == text[: len(self.shown[:begin])]
        return is_same and text[begin : begin + len(tokens)] == tokens

    @property
    def has_all(self) -> bool:
        """Whether the store has all that clients have seen."""
        return all(list(self.completion[: len(text)]) == text for text in (self.shown, self.unknown))

    def lose_unknown(self) -> None:
        """Give up the end of what was shown if the store has lost it, and nobody is left who could bring it back."""
        common = min(len(self.completion), len(self.shown))
        if not self.is_lost or list(self.completion[:common]) != self.shown[:common]:
            return  # two texts that differ stay a violation, whoever dies later
        known = max([common, *(length for process, length in self.known.items() if process.is_alive)])
        if known < len(self.shown):
            self.unknown = max(self.unknown, self.shown, key=len)
            self.shown = self.shown[:known]

    @property
    def completion(self) -> tuple[int, ...]:
        """The committed completion."""
        return self.tokens[len(self.prompt) :]


@dataclass(slots=True)
class Ledger:
    """Checks the invariants of one world; `violations` says which were broken, and how."""

    trace: Trace
    violations: list[str] = field(default_factory=list)
    logs: dict[tuple[str, str], Log] = field(default_factory=dict)  # by store and session
    endings: Counter[str] = field(default_factory=Counter)  # how clients ended
    accepted_failures: tuple[str, ...] = ()  # reasons for which clients may fail in this world
    owners: dict[str, Owner] = field(default_factory=dict)  # by their names in leases

    def expect(self, store: str, session_id: str, prompt: Sequence[int], greedy: Sequence[Sequence[int]]) -> None:
        """Announce a session; `greedy` are its texts by each model that is served, none if it is sampled."""
        self.logs[store, session_id] = Log(tuple(prompt), tuple(map(tuple, greedy)))

    def violated(self, what: str) -> None:
        """Record that an invariant is broken."""
        self.trace.note("LEDGER", f"VIOLATION: {what}")
        self.violations.append(what)

    # ---- the store

    def store_changed(self, store: SimulatedRedis) -> None:
        """Check what a command may have changed."""
        for session_id in store.session_ids():
            self._check(self.logs[store.name, session_id], store, session_id)

    def store_lost(self, store: SimulatedRedis) -> None:
        """Take the store as it is: a fault took a part of it away."""
        held = store.session_ids()
        for (name, session_id), log in self.logs.items():
            if name == store.name:
                tokens = unpack_tokens(store.tokens(session_id)) if session_id in held else ()
                log.is_lost = log.is_lost or len(tokens) < len(log.tokens)
                log.is_behind = log.is_behind or len(tokens) < len(log.prompt) + len(log.shown) > len(log.prompt)
                log.is_forgotten = log.is_forgotten or (bool(log.tokens) and not tokens)
                log.tokens = tokens
                log.digest = store.meta(session_id)[b"digest"] if tokens else b""
                log.epoch = int(store.meta(session_id)[b"epoch"]) if tokens else 0
                log.lease = _lease_of_old(store, session_id) if tokens else Lease()
                log.lose_unknown()

    def died(self) -> None:
        """Take note that a coordinator is dead, or a client gone for good."""
        for log in self.logs.values():
            log.lose_unknown()

    def store_failed_over(self, store: SimulatedRedis) -> None:
        """Take the store as it is: what its replica lacked was not acknowledged. What was shown must be there."""
        held = store.session_ids()
        for (name, session_id), log in self.logs.items():
            if name != store.name:
                continue
            log.tokens = unpack_tokens(store.tokens(session_id)) if session_id in held else ()
            log.digest = store.meta(session_id)[b"digest"] if log.tokens else b""
            log.epoch = int(store.meta(session_id)[b"epoch"]) if log.tokens else 0
            log.lease = _lease_of_old(store, session_id) if log.tokens else Lease()
            if list(log.completion[: len(log.shown)]) != log.shown:
                self.violated(f"session {session_id[:4]}: the replica lacks what was shown")

    def _check(self, log: Log, store: SimulatedRedis, session_id: str) -> None:
        meta, packed = store.meta(session_id), store.tokens(session_id)
        self._check_lease(log, store, session_id, meta)
        epoch = int(meta[b"epoch"])
        if epoch != log.epoch:
            self.trace.note(store.name, f"{session_id[:4]} epoch {epoch}")
            if epoch < log.epoch:
                self.violated(f"session {session_id[:4]}: its epoch fell from {log.epoch} to {epoch}")
            log.epoch = epoch
        if len(packed) == 4 * len(log.tokens) and meta[b"digest"] == log.digest:
            return
        tokens = unpack_tokens(packed)
        news = tokens[len(log.tokens) :]
        self.trace.note(store.name, f"{session_id[:4]} commits {len(log.tokens)} + {list(news)}")
        if tokens[: len(log.tokens)] != log.tokens or int(meta[b"length"]) != len(tokens):
            self.violated(f"session {session_id[:4]}: its log was rewritten at length {len(log.tokens)}")
        if log.tokens and log.tokens not in log.scored:
            self.violated(f"session {session_id[:4]}: no target has scored the {len(log.tokens)} tokens before a round")
        if meta[b"digest"] != chain(log.digest, news):
            self.violated(f"session {session_id[:4]}: its digest is not that of its {len(tokens)} tokens")
        log.tokens, log.digest = tokens, meta[b"digest"]
        if owner := self.owners.get(log.lease.owner):
            log.known[owner.process] = len(log.completion)

    def _check_lease(self, log: Log, store: SimulatedRedis, session_id: str, meta: dict[bytes, bytes]) -> None:
        """Check that a session changes hands only where it may."""
        before, now_s = log.lease, self.trace.now_s()
        lease = Lease.of(meta, now_s)
        if (lease.owner, lease.leased_at) == (before.owner, before.leased_at):
            return
        log.lease = lease
        if not lease.owner or not before.leased_at or lease.owner == before.owner:
            return
        former = self.owners.get(before.owner)
        if now_s - before.seen_at_s <= LEASE_S - TICK_S and store.calm_s > now_s - before.seen_at_s:
            self.violated(f"session {session_id[:4]}: claimed while its owner's lease lasts")
        elif former and former.runs(session_id, now_s) and store.calm_s > CALM_S:
            self.violated(f"session {session_id[:4]}: taken from {former.process.name}, which runs it")

    def scored(self, key: str, tokens: tuple[int, ...]) -> None:
        """Record that a target gave scores after these tokens, which it holds under a session's key."""
        for (_, name), log in self.logs.items():
            if name == key.rpartition("/")[2]:
                log.scored.add(tokens)

    # ---- clients

    def observed(self, store: str, client: Process, server: Process, chunk: Chunk) -> None:
        """Check a chunk at the moment when a client gets it from a coordinator."""
        log = self.logs[store, chunk.session_id]
        begin, end = chunk.offset, chunk.offset + len(chunk.tokens)
        name = f"session {chunk.session_id[:4]}: {client.name}"
        self.trace.note(client.name, f"got {begin} + {list(chunk.tokens)}")
        if log.greedy and not any(log.may_be(text, begin, tuple(chunk.tokens)) for text in log.greedy):
            self.violated(f"{name} got tokens {begin} to {end} that are not the target's greedy text")
        if log.is_forgotten:
            return
        if not log.is_lost and log.completion[begin:end] != chunk.tokens:
            self.violated(f"{name} got tokens {begin} to {end} that are not committed")
        common = log.shown[begin:end]
        if list(chunk.tokens[: len(common)]) != common:
            self.violated(f"{name} got other tokens from {begin} to {end} than were shown before")
        if end > len(log.shown):
            log.shown[begin:] = chunk.tokens
        log.known[client] = log.known[server] = end

    def failed(self, store: str, client: str, session_id: str, error: SpecdecError) -> None:
        """Judge the error that ended a client's stream."""
        log = self.logs[store, session_id]
        self.endings[error.reason] += 1
        self.trace.note(client, f"failed: {error.reason}: {error.message}")
        is_lost = log.is_lost and error.reason in ("STORE_ROLLED_BACK", "SESSION_NOT_FOUND")
        if not is_lost and error.reason not in self.accepted_failures:
            self.violated(f"session {session_id[:4]}: {client} failed with {error.reason}: {error.message}")

    # ---- the end

    def went_back(self) -> Counter[str]:
        """Return what became of the sessions of which a store lost what was shown."""
        behind = [log for log in self.logs.values() if log.is_behind]
        return Counter("healed" if log.has_all else "lost" for log in behind)

    def close(self) -> None:
        """Compare what was shown with the logs as they finally are."""
        for (_, session_id), log in self.logs.items():
            common = len(log.shown) if not log.is_lost else min(len(log.shown), len(log.completion))
            if not log.is_forgotten and list(log.completion[:common]) != log.shown[:common]:
                self.violated(f"session {session_id[:4]}: its log is not what was shown")


def _lease_of_old(store: SimulatedRedis, session_id: str) -> Lease:
    """Return a lease of a store that went back in time: nobody knows when it was renewed."""
    return Lease.of(store.meta(session_id), -math.inf)
