"""What waits for one stream's writer."""

from __future__ import annotations

import asyncio

import pytest

from specdec.errors import InternalFault, Overloaded
from specdec.terms import Answer, Closed, Result, TokenLogprobs
from target_service.outlet import MAX_BATCH_LOGPROBS, Batch, Outlet, packed


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


def test_answers_of_a_step_are_one_batch_unless_long_prompts_come_together() -> None:
    entry = TokenLogprobs(-1.0, tuple(range(9)), (-1.0,) * 9)
    long = Result(1, 1, 0, 0, (5,), prompt_logprobs=(entry,) * (MAX_BATCH_LOGPROBS // 40))  # a quarter of the most
    short = Answer("short", 1, 1, Closed())
    answers = [short, *(Answer(f"s{i}", 1, 1, long) for i in range(9)), short]
    batches = list(packed(answers, 7, 20))
    assert [len(each.answers) for each in batches] == [5, 4, 2]
    assert [answer for each in batches for answer in each.answers] == answers
    assert all((each.rows, each.engine_us) == (7, 20) for each in batches)
    assert list(packed([short] * 500, 7, 20)) == [Batch([short] * 500, 7, 20)]
    assert list(packed([], 0, 0)) == [Batch([], 0, 0)]
