"""What waits for one stream's writer."""

from __future__ import annotations

import asyncio

import pytest

from specdec.errors import InternalFault, Overloaded
from specdec.terms import Answer, Closed
from target_service.outlet import Batch, Outlet


def batch(count: int) -> Batch:
    return Batch([Answer("s", 1, i, Closed()) for i in range(count)], rows=3, engine_us=20)


def now() -> float:
    return asyncio.get_running_loop().time()


async def test_batches_come_in_order_and_whole() -> None:
    outlet = Outlet(10)
    offered = [batch(1), batch(2), batch(3)]
    for each in offered:
        outlet.offer(each)
    assert [await outlet.take(now() + 1) for _ in offered] == offered


async def test_what_was_taken_is_not_unread() -> None:
    outlet = Outlet(4)
    for _ in range(100):
        outlet.offer(batch(4))
        assert await outlet.take(now() + 1)
    outlet.offer(batch(3))
    outlet.offer(batch(2))
    with pytest.raises(Overloaded, match="more than 4 results"):
        await outlet.take(now() + 1)


async def test_an_empty_batch_is_time_for_a_beat() -> None:
    begun = now()
    assert await Outlet(1).take(begun + 0.02) == Batch()
    assert now() - begun >= 0.015


async def test_the_end_comes_after_what_waits_and_a_fault_before() -> None:
    outlet = Outlet(10)
    outlet.offer(batch(1))
    outlet.end()
    assert await outlet.take(now() + 1) == batch(1)
    assert await outlet.take(now() + 1) is None
    outlet.offer(batch(1))
    outlet.fail(InternalFault("first"))
    outlet.fail(InternalFault("second"))
    await asyncio.wait_for(outlet.failed(), 1)
    with pytest.raises(InternalFault, match="first"):
        await outlet.take(now() + 1)
