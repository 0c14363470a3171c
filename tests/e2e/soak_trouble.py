"""Trouble of the soak: on the wires at any phase of a round, and with the processes themselves.

The first process of each pool is a witness: it is stopped now and then and its wires are cut, but it lives through, so that its memory can
be watched.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.e2e.fault_phases import CLIENT, Trigger, rows
from tests.e2e.network import Link
from tests.e2e.stack import Process, Stack, wait_ready

ARM_S = 2.0
HALF_S = 3.0  # how long who was left with half a connection goes without knowing
KILL_EVERY_S = (3.0, 9.0)
STOP_EVERY_S = (2.0, 6.0)
WEATHER_EVERY_S = (3.0, 10.0)


@dataclass
class Trouble:
    """`links` by kind of hop. Runs until `over`; then every wire is whole and every process up."""

    stack: Stack
    links: Sequence[tuple[str, Link, Trigger]]
    draw: random.Random
    over: asyncio.Event = field(default_factory=asyncio.Event)
    done: Counter[str] = field(default_factory=Counter)

    def roles(self) -> list[Coroutine[Any, Any, None]]:
        wires = [self._faults(kind, link, trigger) for kind, link, trigger in self.links]
        return [*wires, self._kills(), self._stops(), self._weather()]

    @property
    def faults(self) -> int:
        return self.done.total() - self.done["kill"]

    async def _faults(self, kind: str, link: Link, trigger: Trigger) -> None:
        """One row after the other on one wire."""
        table = rows(kind)
        while not self.over.is_set():
            await self._rest(0.1, 1.0 if kind == CLIENT else 3.0)
            trigger.arm(self.draw.choice(table))
            if (struck := await trigger.strikes(ARM_S)) is None:
                continue
            row, connection = struck
            self.done[row.fault] += 1
            if row.fault not in ("stall", "deaf"):
                asyncio.get_running_loop().call_later(HALF_S, connection.cut)

    async def _kills(self) -> None:
        pools = (self.stack.targets, self.stack.drafts, self.stack.orchestrators)
        while not self.over.is_set():
            await self._rest(*KILL_EVERY_S)
            pool = self.draw.choice(pools)
            which = self.draw.randrange(1, len(pool))
            await asyncio.to_thread(pool[which].kill, self.draw.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)))
            self.done["kill"] += 1
            await self._rest(0.0, 2.0)
            await asyncio.to_thread(self._again, pool, which)

    def _again(self, pool: list[Process], which: int) -> None:
        """On the same port, with the same neighbours."""
        old = pool[which]
        if old.role == "target":
            self.stack.begin_target(PORT=str(old.port))
        elif old.role == "draft":
            self.stack.begin_draft(PORT=str(old.port))
        else:
            self.stack.add_orchestrator(PORT=str(old.port))
        pool[which] = wait_ready(pool.pop())

    async def _stops(self) -> None:
        while not self.over.is_set():
            await self._rest(*STOP_EVERY_S)
            process = self.draw.choice([*self.stack.targets, *self.stack.drafts, *self.stack.orchestrators])
            process.kill(signal.SIGSTOP)
            self.done["stop"] += 1
            await asyncio.sleep(self.draw.choice((0.3, 1.6, 3.0)))
            process.kill(signal.SIGCONT)

    async def _weather(self) -> None:
        """Long, narrow, parted, and fair again."""
        while not self.over.is_set():
            await self._rest(*WEATHER_EVERY_S)
            _, link, _ = self.draw.choice(self.links)
            kind = self.draw.choice(("delay", "narrow", "part", "refuse"))
            self.done[kind] += 1
            if kind == "delay":
                link.there.delay_s = link.back.delay_s = self.draw.choice((0.05, 0.2))
            elif kind == "narrow":
                link.there.bytes_per_s = link.back.bytes_per_s = 30_000
            elif kind == "part":
                link.partition()
            else:
                link.refuse()
            await self._rest(0.5, 3.0)
            clear(link)

    async def _rest(self, least: float, most: float) -> None:
        try:
            await asyncio.wait_for(self.over.wait(), self.draw.uniform(least, most))
        except TimeoutError:
            return

    def clear(self) -> None:
        for _, link, trigger in self.links:
            trigger.arm()
            clear(link)


def clear(link: Link) -> None:
    for way in (link.there, link.back):
        way.delay_s, way.bytes_per_s = 0.0, None
    link.heal()
