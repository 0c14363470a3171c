"""What this orchestrator knows of the pools' load, looked at again and again, and shown as metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from orchestrator.scaling.activity import Activity
from orchestrator.scaling.signals import Key, Replica, Signals
from specdec.runtime.telemetry import Telemetry

if TYPE_CHECKING:
    from orchestrator.driver import Driver

TICK_S = 0.25
Readings = list[tuple[float, Mapping[str, str]]]
log = logging.getLogger(__name__)


class Board:
    def __init__(self, driver: Driver, telemetry: Telemetry, queue_ms: float) -> None:
        """`queue_ms`: see signals.py."""
        self._driver = driver
        self.orchestrator_id = driver.orchestrator_id
        self.signals = Signals([Key(pool.name, name) for pool in driver.pools for name in pool.pool_names], queue_ms)
        self._activity = {key: Activity() for key in self.signals.pools}
        self._loads: Readings = []  # replaced as a whole: another thread reads them
        self._waiting: Readings = []
        telemetry.gauge("specdec.scaling.load", lambda: self._loads)
        telemetry.gauge("specdec.scaling.waiting", lambda: self._waiting)
        self.look()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.look()
            except Exception:  # a defect must not freeze what the pools are scaled by
                log.exception("the pools' load cannot be read")

    def look(self) -> None:
        now_s = time.monotonic()
        self.signals.look(self._replicas(), now_s)
        waiting = {pool.name: self._driver.waiting_for(pool) for pool in self._driver.pools}
        loads, waits = Readings(), Readings()
        for key, activity in self._activity.items():
            labels = {"pool": key.pool, "pool_name": key.pool_name}
            activity.note(waiting[key.pool], self.signals.sessions(key), now_s)
            waits.append((float(waiting[key.pool]), labels))
            loads += [(value, {**labels, "signal": signal}) for signal, value in (self.signals.load(key) or {}).items()]
        self._loads, self._waiting = loads, waits

    def waiting(self) -> dict[Key, int]:
        """The most of our calls that waited at once within the last HOLD_S, by pool."""
        now_s = time.monotonic()
        return {key: activity.waiting(now_s) for key, activity in self._activity.items()}

    def active(self, key: Key, elsewhere: int) -> bool:
        """Whether a pool needs a replica. `elsewhere` = calls of other orchestrators that wait for it."""
        return self._activity[key].active(elsewhere, time.monotonic())

    def _replicas(self) -> Iterator[Replica]:
        for pool in self._driver.pools:
            for peer in pool:
                yield Replica(peer.name, Key(pool.name, peer.pool_name), peer.beat if peer.connected else None)
