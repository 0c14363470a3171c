"""What wakes a client's task, and what waits for it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import events as ev
from orchestrator.handle import Handle, Undelivered, Wake
from orchestrator.output import TokensDecided
from orchestrator.tally import Tally
from specdec import terms

PLAIN, KEPT = terms.Origin.PLAIN, terms.Origin.ACCEPTED
ENTRY = terms.TokenLogprobs(-0.5)


class Nobody:
    def feed(self, session_id: str, event: ev.Event | None) -> None:
        pass


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
