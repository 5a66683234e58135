"""Any order of calls to the session store, against a model of it."""

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from coordinator.generation import Round
from coordinator.session_record import Status
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import keys
from coordinator.stores.opening import open_redis
from specdec.errors import AlreadyExistsError, NotFoundError, SpecdecError
from specdec.exact.prefix import chain
from specdec.types import FinishReason
from tests.support.redis_server import RedisServer
from tests.support.stored_sessions import PROMPT, SESSION, TTL_S, OpenStore, commit, create, round_after, tokens_of


class StoreMachine(RuleBasedStateMachine):
    """One session, several owners that may act at any time, a client that cancels, expiry and replays."""

    server: RedisServer

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.store = OpenStore(open_redis(self.server.url), TTL_S)
        self.commits: list[tuple[int, Round]] = []  # accepted: epoch and round
        self.epochs: list[int] = []  # given out
        self.run(self.store.redis.flushall())
        self.born()

    def born(self) -> None:
        self.run(create(self.store))
        self.log: tuple[int, ...] = PROMPT
        self.epoch, self.status = 0, Status.ACTIVE
        self.commits.clear()
        self.epochs.clear()
        self.exists = True

    def run(self, call: Awaitable[Any]) -> Any:
        return self.loop.run_until_complete(call)

    def outcome(self, epoch: int, played: Round) -> str:
        try:
            self.run(commit(self.store, epoch, played))
        except (SpecdecError, SessionCancelled) as error:
            return type(error).__name__
        return "committed"

    def expected(self, epoch: int, played: Round) -> str:
        """The model's outcome of a commit."""
        if not self.exists:
            return "DataLossError"
        if epoch != self.epoch:
            return "FencedError" if epoch < self.epoch else "DataLossError"
        if self.commits and self.commits[-1] == (epoch, played):
            return "committed"
        if played.base_digest != chain(b"", self.log):
            return "DataLossError"
        ends = {Status.ACTIVE: "committed", Status.CANCELLED: "SessionCancelled", Status.FINISHED: "DataLossError"}
        return ends[self.status]

    def try_commit(self, epoch: int, played: Round) -> None:
        outcome = self.outcome(epoch, played)
        assert outcome == self.expected(epoch, played)
        if outcome == "committed" and (epoch, played) not in self.commits:
            self.commits.append((epoch, played))
            self.log += tokens_of(played)
            self.status = Status.FINISHED if played.finish else self.status

    @rule()
    def claim(self) -> None:
        if not self.exists:
            with pytest.raises(NotFoundError):
                self.run(self.store.claim(SESSION))
            return
        session = self.run(self.store.claim(SESSION))
        self.epoch += self.status is Status.ACTIVE
        assert session.epoch == self.epoch
        assert self.status is not Status.ACTIVE or session.epoch > max(self.epochs, default=0)
        self.epochs.append(session.epoch)

    @precondition(lambda self: self.epochs)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3), finish=st.sampled_from([*[None] * 5, FinishReason.EOS]))  # fmt: skip  # noqa: E501
    def commit(self, data: st.DataObject, tokens: list[int], finish: FinishReason | None) -> None:
        """From any epoch that was ever given out."""
        self.try_commit(data.draw(st.sampled_from(self.epochs)), round_after(self.log, tuple(tokens), finish))

    @precondition(lambda self: self.epochs)
    @rule(tokens=st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def commit_as_owner(self, tokens: list[int]) -> None:
        self.try_commit(self.epochs[-1], round_after(self.log, tuple(tokens)))

    @precondition(lambda self: self.commits)
    @rule()
    def replay(self) -> None:
        self.try_commit(*self.commits[-1])

    @precondition(lambda self: self.epochs)
    @rule(cut=st.integers(1, 4), token=st.integers(0, 3))
    def commit_from_the_past(self, cut: int, token: int) -> None:
        """An owner that believes in an older, or in another, log of the same length."""
        past = self.log[:-cut] or (1,)
        self.try_commit(self.epochs[-1], round_after(past, (token,)))
        self.try_commit(self.epochs[-1], round_after((*self.log[:-1], self.log[-1] ^ 1), (token,)))

    @rule()
    def create_again(self) -> None:
        if not self.exists:
            self.born()
        self.run(create(self.store))
        with pytest.raises(AlreadyExistsError):
            self.run(create(self.store, fingerprint=b"other"))

    @precondition(lambda self: self.exists)
    @rule()
    def cancel(self) -> None:
        if self.status is Status.ACTIVE:
            self.status = Status.CANCELLED
        assert self.run(self.store.cancel(SESSION)) is self.status

    @rule(chance=st.integers(0, 9))
    def expire(self, chance: int) -> None:
        if chance == 0:
            self.run(self.store.redis.pexpireat(keys(SESSION)[0], 1))
            self.exists = False

    @invariant()
    def store_is_the_model(self) -> None:
        if not self.exists:
            return
        session = self.run(self.store.read(SESSION))
        log = session.prompt + tuple(entry.token for entry in session.emitted)
        assert (log, session.epoch, session.status) == (self.log, self.epoch, self.status)
        assert session.digest == chain(b"", self.log)

    @invariant()
    def one_commit_a_length(self) -> None:
        lengths = [played.base_length for _, played in self.commits]
        assert len(set(lengths)) == len(lengths)

    def teardown(self) -> None:
        self.run(self.store.close())
        self.loop.close()


def test_any_order_of_calls(redis_server: RedisServer) -> None:
    class Machine(StoreMachine):
        server = redis_server

    checks = [HealthCheck.too_slow, HealthCheck.filter_too_much]
    bounds = settings(
        max_examples=60,
        stateful_step_count=30,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=checks,
    )
    run_state_machine_as_test(Machine, settings=bounds)
