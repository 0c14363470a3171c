"""Timers that are moved far more often than they ring."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.alarms import Alarms
from orchestrator.events import Event, Timer, TimerFired

pytestmark = pytest.mark.unit


class Bell:
    def __init__(self) -> None:
        self.alarms, self.rung = Alarms(), list[tuple[Timer, float]]()
        self.began = asyncio.get_running_loop().time()
        self._wake = asyncio.Event()

    def start(self, timer: Timer, after_ms: float) -> None:
        self.alarms.start(timer, after_ms, self._ring, "s")

    def _ring(self, session_id: str, event: Event) -> None:
        assert session_id == "s" and isinstance(event, TimerFired)
        self.rung.append((event.timer, asyncio.get_running_loop().time() - self.began))
        self._wake.set()

    async def wait(self) -> tuple[Timer, float]:
        async with asyncio.timeout(10):
            await self._wake.wait()
        return self.rung[0]


async def test_one_that_is_put_off_rings_once_and_late() -> None:
    bell = Bell()
    for after_ms in (20, 40, 80):
        bell.start(Timer.STEP, after_ms)
    timer, at = await bell.wait()
    assert timer is Timer.STEP and at >= 0.078
    await asyncio.sleep(0.05)
    assert len(bell.rung) == 1


async def test_one_that_is_brought_forward_rings_early() -> None:
    bell = Bell()
    bell.start(Timer.STEP, 30_000)
    bell.start(Timer.STEP, 10)
    assert (await bell.wait())[0] is Timer.STEP


async def test_one_that_was_stopped_does_not_ring_and_can_be_started_again() -> None:
    bell = Bell()
    bell.start(Timer.GRACE, 5)
    bell.start(Timer.STEP, 30)
    bell.alarms.stop(Timer.GRACE)
    assert (await bell.wait())[0] is Timer.STEP and len(bell.rung) == 1
    bell.start(Timer.GRACE, 1)
    async with asyncio.timeout(10):
        while len(bell.rung) < 2:
            await asyncio.sleep(0.005)
    assert bell.rung[1][0] is Timer.GRACE


async def test_nothing_is_left_behind() -> None:
    bell = Bell()
    for timer in Timer:
        bell.start(timer, 1)
    bell.alarms.clear()
    await asyncio.sleep(0.03)
    assert not bell.rung
