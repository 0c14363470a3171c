"""The endpoints of a Kubernetes Service: list its EndpointSlices, watch from the version of that list, begin again whenever the watch ends.

A watch is short (`Pace.watch_s`), so what is known is at most that old: an event that was lost, or a connection that died without a word,
costs a minute and not a day. A list is a few kilobytes, which the API server has in memory. What cannot be asked changes nothing: the last
set stands, however long that lasts.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

from orchestrator.discovery.aside import Aside
from orchestrator.discovery.backoff import Backoff
from orchestrator.discovery.cluster import Cluster, Refused
from orchestrator.discovery.names import Service
from orchestrator.discovery.slices import Slices
from orchestrator.discovery.source import Endpoint, Trouble

MAX_CALLS = 4  # of one source at once, those included that nobody waits for any more
JITTER = 0.2  # share of the life of a watch; all orchestrators of a release start at once


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds. What no watch tells is found after a watch, its jitter, its margin and a list: within a minute."""

    watch_s: float = 35.0
    margin_s: float = 5.0  # so late the server may end it
    connect_s: float = 5.0
    list_s: float = 10.0
    first_pause_s: float = 0.2
    last_pause_s: float = 10.0
    calm_s: float = 10.0  # a watch that lived so long was a good one


DEFAULT_PACE = Pace()


class Kubernetes:
    """Implements Source."""

    def __init__(self, service: Service, trouble: Trouble, pace: Pace = DEFAULT_PACE) -> None:
        self._service, self._trouble, self._pace = service, trouble, pace
        self._slices = Slices(service)
        self._aside = Aside(f"watch {service.service}", MAX_CALLS, "MAX_CALLS")
        self._backoff = Backoff(pace.first_pause_s, pace.last_pause_s, pace.calm_s)
        self._cluster: Cluster | None = None
        self._renewed = False  # the credentials, since something went well
        self.answered_s: float | None = time.monotonic()

    @property
    def known(self) -> frozenset[Endpoint]:
        return self._slices.endpoints

    async def changes(self) -> AsyncIterator[frozenset[Endpoint]]:
        told, loop = self.known, asyncio.get_running_loop()
        try:
            while True:
                began, failed = loop.time(), False
                try:
                    await self._list()
                    ends, watching = loop.time() + self._watch_s(), True
                    while watching:
                        if self.known != told:
                            told = self.known
                            yield told
                        watching = await self._event(ends - loop.time())
                except (Refused, OSError) as error:
                    self._hang_up()
                    if isinstance(error, Refused) and error.stale and not self._renewed:
                        self._renewed = True
                        continue
                    failed = True
                    self._failed(error)
                await asyncio.sleep(self._backoff.pause(loop.time() - began, failed, random.random()))
        finally:
            self._hang_up()

    def _watch_s(self) -> float:
        return self._pace.watch_s * (1 + JITTER * (2 * random.random() - 1))

    async def _list(self) -> None:
        pace = self._pace
        if self._cluster is None:
            self._cluster = await self._aside.call(partial(Cluster, self._service, pace.connect_s), pace.list_s)
        found, version = await self._aside.call(partial(self._cluster.listing, pace.list_s), pace.connect_s + 2 * pace.list_s)
        self.answered_s = time.monotonic()
        for error in self._slices.listed(found, version):
            self._trouble.failed("malformed", f"an EndpointSlice cannot be read: {error!r}")
        kind, what = self._slices.problem
        if kind:
            self._trouble.failed(kind, what, stands=False)

    async def _event(self, left_s: float) -> bool:
        """False: the watch is over. `left_s` = until the server should have ended it."""
        assert self._cluster is not None
        latest_s = left_s + self._pace.margin_s
        if latest_s <= 0:
            return False  # it went on telling all the time
        event = await self._aside.call(partial(self._cluster.event, max(0.0, left_s), latest_s), latest_s)
        if event is not None:
            try:
                self._slices.event(event["type"], event["object"])
            except Exception as error:  # whatever it is, the next event is another one, and the next list mends it
                self._trouble.failed("malformed", f"an event cannot be read: {error!r}")
                return True
        self._renewed = False
        if not self._slices.problem[0]:
            self._trouble.over()
        return event is not None

    def _failed(self, error: Exception) -> None:
        kind = error.kind if isinstance(error, Refused) else "timeout" if isinstance(error, TimeoutError) else "error"
        self._trouble.failed(kind, f"Service {self._service.service}: {error or type(error).__name__}")

    def _hang_up(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.hang_up()
