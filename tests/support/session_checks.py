"""What every session store must do, as checks that mutants of its scripts must fail."""

from dataclasses import replace

import pytest

from coordinator.session_record import Status
from coordinator.session_replies import SessionCancelled
from coordinator.sessions import keys
from specdec.errors import DataLossError, FencedError
from specdec.exact.prefix import chain
from specdec.types import FinishReason
from tests.support.stored_sessions import LOGPROBS, PROMPT, SESSION, TTL_S, OpenStore, commit, create, round_after


async def check_zombies_are_fenced(store: OpenStore) -> None:
    await create(store)
    zombie = await store.claim(SESSION)
    owner = await store.claim(SESSION)
    with pytest.raises(FencedError) as fenced:
        await commit(store, zombie.epoch, round_after(PROMPT, (1,)))
    assert fenced.value.metadata == {"epoch": str(owner.epoch)}
    assert (await store.read(SESSION)).emitted == ()


async def check_zombies_are_fenced_even_where_they_repeat(store: OpenStore) -> None:
    await create(store)
    zombie = await store.claim(SESSION)
    await commit(store, zombie.epoch, round_after(PROMPT, (1,)))
    await store.claim(SESSION)
    with pytest.raises(FencedError):
        await commit(store, zombie.epoch, round_after(PROMPT, (1,)))


async def check_a_repeated_commit_adds_nothing(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1, 2), logprobs=LOGPROBS)
    await commit(store, epoch, played)
    await commit(store, epoch, played)
    assert (await store.claim(SESSION)).emitted == played.emitted


async def check_a_repeated_last_commit_adds_nothing(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1,), FinishReason.EOS)
    await commit(store, epoch, played)
    await commit(store, epoch, played)
    assert (await store.read(SESSION)).status is Status.FINISHED


async def check_a_commit_repeated_after_a_cancellation_is_recognised(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    played = round_after(PROMPT, (1, 2))
    await commit(store, epoch, played)
    await store.cancel(SESSION)
    await commit(store, epoch, played)
    with pytest.raises(SessionCancelled):
        await commit(store, epoch, round_after((*PROMPT, 1, 2), (3,)))


async def check_another_length_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for before in (PROMPT[:-1], (*PROMPT, 1)):
        with pytest.raises(DataLossError, match="new session"):
            await commit(store, epoch, round_after(before, (9, 9)))
    assert (await store.read(SESSION)).emitted == ()


async def check_another_length_with_the_right_digest_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for base_length in (len(PROMPT) - 1, len(PROMPT) + 1):
        with pytest.raises(DataLossError):
            await commit(store, epoch, replace(round_after(PROMPT, (1,)), base_length=base_length))


async def check_another_digest_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    with pytest.raises(DataLossError, match="new session"):
        await commit(store, epoch, round_after((1, 1, 1), (1,)))
    assert (await store.read(SESSION)).emitted == ()


async def check_other_tokens_of_the_same_length_are_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2)))
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after(PROMPT, (1, 3)))


async def check_a_claim_raises_the_epoch(store: OpenStore) -> None:
    await create(store)
    assert (await store.claim(SESSION)).epoch < (await store.claim(SESSION)).epoch


async def check_all_keys_live_as_long(store: OpenStore) -> None:
    """Every commit gives all four keys the full time to live again."""
    await create(store)
    client = store.redis
    assert all([await client.pttl(key) > 0 for key in keys(SESSION)[:2]])
    epoch = (await store.claim(SESSION)).epoch
    before: tuple[int, ...] = PROMPT
    for token in (1, 2):
        for key in keys(SESSION):
            await client.pexpire(key, 60_000)
        await commit(store, epoch, round_after(before, (token,), logprobs=LOGPROBS))
        before = (*before, token)
        left_s = [await client.pttl(key) / 1000 for key in keys(SESSION)]
        assert all(TTL_S - 500 < left <= TTL_S for left in left_s)


async def check_remains_of_an_expired_session_are_swept(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2), logprobs=LOGPROBS))
    await store.redis.delete(keys(SESSION)[0])
    await create(store)
    assert (await store.read(SESSION)).emitted == ()


async def check_an_epoch_that_went_back_is_data_loss(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    with pytest.raises(DataLossError):
        await commit(store, epoch + 1, round_after(PROMPT, (1,)))


async def check_a_heartbeat_sees_what_the_store_lacks(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1, 2)))
    text = (*PROMPT, 1, 2)
    await store.heartbeat(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))  # a commit may be under way
    await store.heartbeat(SESSION, epoch, len(text), chain(b"", text))
    for wrong in ((*text, 3), (*PROMPT, 1, 3)):
        with pytest.raises(DataLossError):
            await store.heartbeat(SESSION, epoch, len(wrong), chain(b"", wrong))


async def check_a_comparison_leaves_the_expiry_as_it_is(store: OpenStore) -> None:
    """A session that was left expires when it was to: comparing it, again and again, does not keep it."""
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    for key in keys(SESSION)[:2]:
        await store.redis.pexpire(key, 60_000)
    await store.compare(SESSION, epoch, len(PROMPT), chain(b"", PROMPT))
    assert all([0 < await store.redis.pttl(key) <= 60_000 for key in keys(SESSION)[:2]])
    with pytest.raises(DataLossError):
        await store.compare(SESSION, epoch, len(PROMPT) + 1, chain(b"", (*PROMPT, 3)))


async def check_finished_sessions_take_no_round(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,), FinishReason.EOS))
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after((*PROMPT, 1), (2,)))


async def check_only_what_was_read_is_restored(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,), logprobs=LOGPROBS))
    read = await store.claim(SESSION)
    assert await store.restore(replace(read, epoch=9), read)
    restored = await store.claim(SESSION)
    assert restored == replace(read, epoch=10), "with log probabilities"
    assert not await store.restore(replace(read, epoch=20), read), "others have changed it"
    assert not await store.restore(replace(read, epoch=20), None)
    await store.redis.flushall()
    assert await store.restore(restored, None)
    assert await store.claim(SESSION) == replace(restored, epoch=11)
    assert all([await store.redis.pttl(key) > 0 for key in keys(SESSION)])


async def check_lost_sessions_stay_lost(store: OpenStore) -> None:
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await store.lose(SESSION)
    for call in (store.claim(SESSION), store.read(SESSION), store.cancel(SESSION)):
        with pytest.raises(DataLossError, match="begin a new session"):
            await call
    with pytest.raises(FencedError):
        await commit(store, epoch, round_after(PROMPT, (1,)))
    found = await store.find(SESSION)
    assert found
    assert found.status is Status.LOST
    await create(store)
    with pytest.raises(DataLossError):
        await store.claim(SESSION)


async def check_tokens_that_vanished_are_data_loss(store: OpenStore) -> None:
    """What Redis evicts key by key."""
    await create(store)
    epoch = (await store.claim(SESSION)).epoch
    await commit(store, epoch, round_after(PROMPT, (1,)))
    await store.redis.delete(keys(SESSION)[1])
    with pytest.raises(DataLossError):
        await commit(store, epoch, round_after((*PROMPT, 1), (2,)))


CHECKS = [value for name, value in list(globals().items()) if name.startswith("check_")]
