"""The notice of an outage: once, only after a silence, and with what the user can do."""

import asyncio
from datetime import datetime

from specdec.errors import UnavailableError
from specdec.outage import SILENCE, OutageNotice, sentence
from specdec.retry import Retry

RETRY = Retry(UnavailableError("no specdec answers on h:1; session s can be resumed"), "s", pause_s=0.1, left_s=90)


async def test_each_outage_is_announced_once() -> None:
    said: list[str] = []
    notice = OutageNotice(said.append, quiet_s=0.0)
    for _ in range(2):
        for _ in range(3):
            notice.retrying(RETRY)
            await asyncio.sleep(0.001)
        notice.progress()
    assert len(said) == 2


async def test_short_outage_is_not_announced() -> None:
    said: list[str] = []
    notice = OutageNotice(said.append, quiet_s=0.0)
    notice.retrying(RETRY)
    notice.progress()
    await asyncio.sleep(0.001)
    assert said == []


def test_sentence_says_until_when_and_how_to_leave() -> None:
    assert sentence(RETRY, datetime(2026, 1, 1, 23, 59, 0)) == (
        "no specdec answers on h:1; trying again until 00:00:30; Ctrl-C leaves, `specdec session resume s` continues"
    )


def test_unknown_session_is_not_named() -> None:
    retry = Retry(UnavailableError("gone"), None, pause_s=0.1, left_s=0)
    assert sentence(retry, datetime(2026, 1, 1)) == "gone; trying again until 00:00:00; Ctrl-C leaves"


async def test_each_silence_is_announced_once() -> None:
    said: list[str] = []
    notice = OutageNotice(said.append, silent_s=0.0)
    notice.waiting()
    for _ in range(2):
        await asyncio.sleep(0.001)
        notice.progress()
    notice.ended()
    await asyncio.sleep(0.001)
    assert said == [SILENCE.format(silent_s=0.0)] * 2


async def test_an_outage_is_no_silence_as_well() -> None:
    said: list[str] = []
    notice = OutageNotice(said.append, quiet_s=0.0, silent_s=0.0)
    notice.waiting()
    notice.retrying(RETRY)
    await asyncio.sleep(0.001)
    notice.ended()
    assert [words.partition(";")[0] for words in said] == ["no specdec answers on h:1"]
