"""What wakes a client's task, and what waits for it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import events as ev
from orchestrator.handle import MAX_UNDELIVERED, Handle, Undelivered, Wake
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.tally import Tally
from specdec import terms
from specdec.errors import DeadlineExceeded

PLAIN, KEPT = terms.Origin.PLAIN, terms.Origin.ACCEPTED
ENTRY = terms.TokenLogprobs(-0.5)


class Nobody:
    """In a driver's place."""

    def __init__(self) -> None:
        self.fed: list[ev.Event | None] = []

    def feed(self, session_id: str, event: ev.Event | None) -> None:
        self.fed.append(event)


def some(count: int) -> ev.Deliver:
    return ev.Deliver((7,) * count, (), (PLAIN,) * count)


async def waits(wake: Wake) -> None:
    while not wake.take():
        await wake.waiter()


async def test_it_is_taken_once() -> None:
    wake = Wake()
    wake.set()
    wake.set()
    assert wake.take() and not wake.take()


async def test_who_waits_is_woken_and_who_comes_later_finds_it_set() -> None:
    wake = Wake()
    task = asyncio.create_task(waits(wake))
    await asyncio.sleep(0)
    wake.set()
    wake.set()  # before the task ran: its future is done already
    await asyncio.wait_for(task, 5)
    assert not wake.take()
    wake.set()
    await asyncio.wait_for(waits(wake), 5)


async def test_who_stops_waiting_leaves_nothing_that_breaks() -> None:
    wake = Wake()
    task = asyncio.create_task(waits(wake))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    wake.set()
    await asyncio.wait_for(waits(wake), 5)


async def test_what_waits_together_comes_out_as_one_in_order() -> None:
    wake = Wake()
    answer = Undelivered(Nobody(), "s", Tally(3), wake)
    answer.deliver(ev.Deliver((1,), (ENTRY,), (PLAIN,), (ENTRY, ENTRY)))
    answer.deliver(ev.Deliver((2, 3), (ENTRY, ENTRY), (KEPT, PLAIN)))
    assert answer.waiting == [1, 2, 3]
    events = aiter(Handle([answer], wake))
    assert await anext(events) == (0, TokensDecided((1, 2, 3), (ENTRY,) * 3, (PLAIN, KEPT, PLAIN), (ENTRY, ENTRY)))
    answer.deliver(ev.Deliver((), (), (), (ENTRY,)))
    assert await anext(events) == (0, TokensDecided((), (), (), (ENTRY,)))
    assert answer.waiting == []


async def test_a_reader_is_behind_by_tokens_and_told_so_once_until_it_has_taken_them() -> None:
    driver = Nobody()
    answer = Undelivered(driver, "s", Tally(3), Wake())
    for _ in range(2):
        driver.fed.clear()
        answer.deliver(some(MAX_UNDELIVERED - 2))
        answer.deliver(some(2))
        assert driver.fed == [], "so many may wait"
        answer.deliver(some(1))
        answer.deliver(some(5))
        assert driver.fed == [ev.ReaderBehind()]
        taken = answer.take()
        assert isinstance(taken, TokensDecided) and len(taken.tokens) == MAX_UNDELIVERED + 6
        assert driver.fed == [ev.ReaderBehind(), ev.ReaderCaughtUp()]
        answer.deliver(some(MAX_UNDELIVERED))
        assert len(driver.fed) == 2 and answer.take() is not None and len(driver.fed) == 2


async def test_who_never_reads_hears_how_much_waited() -> None:
    driver, wake = Nobody(), Wake()
    answer = Undelivered(driver, "s", Tally(3), wake, max_unread_ms=1.0)
    answer.deliver(some(MAX_UNDELIVERED))
    answer.deliver(some(3))
    async with asyncio.timeout(20):
        while answer.ending is None:
            await asyncio.sleep(0.001)
    assert isinstance(answer.ending, DeadlineExceeded) and f"while {MAX_UNDELIVERED + 3} tokens waited" in str(answer.ending)
    assert driver.fed == [ev.ReaderBehind(), ev.Cancelled()]


async def test_the_end_follows_the_last_tokens_without_another_event() -> None:
    """Both wait when the client comes back: nothing else will wake it."""
    wake, stats = Wake(), GenerationStats()
    one, other = (Undelivered(Nobody(), name, Tally(3), wake) for name in "ab")
    for answer in (one, other):
        answer.deliver(some(1))
        answer.end(Ended(terms.FinishReason.LENGTH, None, stats))
    async with asyncio.timeout(20):
        got = [(index, type(event)) async for index, event in Handle([one, other], wake)]
    assert got == [(0, TokensDecided), (1, TokensDecided), (0, Ended), (1, Ended)]
