"""Rounds of the target's own between the event loop and a reader: engine steps follow one another, and nothing is lost on a late reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from specdec.terms import Result
from target_service.loop import EngineLoop
from target_service.outlet import Batch, Outlet
from tests.fakes import hashed_script
from tests.unit.target.harness import VOCAB, Bench, first_step, next_step, reference

PROMPT = [3, 1, 4]
REF = reference(hashed_script(VOCAB), PROMPT, 70)


class Inline:
    running_since: float | None = None

    async def run(self, fn: Callable[..., Any], /, *args: Any) -> Any:
        await asyncio.sleep(0)
        return fn(*args)


class Counting:
    def __init__(self) -> None:
        self.steps = 0

    def stepped(self, rows: int, engine_us: int, sample_us: int, answers: object) -> None:
        self.steps += 1


@asynccontextmanager
async def looping(max_unread: int, observer: Counting | None = None) -> AsyncIterator[tuple[Bench, EngineLoop]]:
    bench = Bench()
    loop = EngineLoop(bench.verifier, bench.executor.execute, Inline(), observer or Counting(), bench.compile_grammar, max_unread)
    running = asyncio.create_task(loop.run())
    try:
        yield bench, loop
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def tokens(outlet: Outlet, count: int) -> list[int]:
    read: list[int] = []
    async with asyncio.timeout(5):
        while len(read) < count:
            batch = await outlet.take(asyncio.get_running_loop().time() + 5)
            assert isinstance(batch, Batch)
            for answer in batch.answers:
                assert isinstance(answer.outcome, Result)
                read += answer.outcome.tokens
    return read


async def settled(bench: Bench) -> int:
    """Engine steps, once there come no more of them."""
    steps = -1
    while steps != len(bench.engine.log):
        steps = len(bench.engine.log)
        await asyncio.sleep(0.03)
    return steps


async def test_every_step_is_counted_the_last_one_too() -> None:
    counting = Counting()
    async with looping(1024, counting) as (bench, loop):
        stream, outlet = loop.attach("orch")
        loop.submit(stream, [replace(first_step(PROMPT), run_ahead=5)])
        assert await tokens(outlet, 6) == REF[:6]
        assert counting.steps == await settled(bench)


async def test_steps_follow_one_another() -> None:
    async with looping(1024) as (bench, loop):
        stream, outlet = loop.attach("orch")
        loop.submit(stream, [replace(first_step(PROMPT), run_ahead=64)])
        assert await tokens(outlet, 65) == REF[:65]
        assert await settled(bench) == 65


async def test_a_late_reader_keeps_its_stream_and_loses_nothing() -> None:
    """F80: what nobody asked for waits while half of what may be unread is."""
    async with looping(16) as (bench, loop):
        slow, outlet = loop.attach("slow")
        quick, other = loop.attach("quick")
        loop.submit(slow, [replace(first_step(PROMPT), run_ahead=64)])
        assert await settled(bench) == 9
        loop.submit(quick, [replace(first_step(PROMPT), run_ahead=3)])
        assert await tokens(other, 4) == REF[:4], "others go on"
        assert await tokens(outlet, 65) == REF[:65]


async def test_a_late_readers_steps_are_served() -> None:
    async with looping(16) as (bench, loop):
        stream, outlet = loop.attach("orch")
        loop.submit(stream, [replace(first_step(PROMPT), run_ahead=64)])
        assert await settled(bench) == 9
        loop.submit(stream, [next_step([*PROMPT, REF[0]], round_=2)])
        assert await settled(bench) == 10
        assert await tokens(outlet, 10) == REF[:10]
        assert await settled(bench) == 10, "and take the place of what waited"


async def test_an_outlet_says_when_its_reader_caught_up() -> None:
    said: list[int] = []
    outlet = Outlet(4, lambda: said.append(len(said)))
    for _ in range(4):
        outlet.offer(Batch([object()]))  # type: ignore[list-item]
    assert outlet.behind
    for left in (3, 2, 1, 0):
        await outlet.take(asyncio.get_running_loop().time() + 1)
        assert outlet.behind == (left > 2) and len(said) == (left <= 2)
