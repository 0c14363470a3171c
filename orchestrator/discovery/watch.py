"""The sources of one pool together: the union of what they know, told whenever it changes. Read `known` first."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from orchestrator.discovery.source import Endpoint, Source

DEFECT_PAUSE_S = 5.0
log = logging.getLogger(__name__)


class Watch:
    """`changed` gets full sets, on the event loop; `failed` the kind of a failure that no source caught, for the metric."""

    def __init__(
        self, pool: str, sources: Sequence[Source], changed: Callable[[frozenset[Endpoint]], None], failed: Callable[[str], None]
    ) -> None:
        self.pool, self._sources, self._changed, self._failed = pool, sources, changed, failed
        self._told = self.known
        self._tasks: list[asyncio.Task[None]] = []
        self._retry: asyncio.TimerHandle | None = None

    @property
    def known(self) -> frozenset[Endpoint]:
        return frozenset[Endpoint]().union(*(source.known for source in self._sources))

    def age_s(self) -> float | None:
        """How old the oldest answer is that membership depends on. None: nobody is asked. From any thread."""
        answered = [at for source in self._sources if (at := source.answered_s) is not None]
        return time.monotonic() - min(answered) if answered else None

    def run(self) -> None:
        """Needs a running loop."""
        self._tasks = [asyncio.create_task(self._follow(source), name=f"discovery of {self.pool}s") for source in self._sources]

    async def close(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                async for _ in source.changes():
                    self._tell()
                return
            except Exception:  # a defect must not freeze the pool for good
                log.exception("discovery failed", extra={"pool": self.pool})
                self._failed("defect")
                await asyncio.sleep(DEFECT_PAUSE_S)

    def _tell(self) -> None:
        """A set that cannot be applied is told again, or the one that has come meanwhile."""
        known = self.known
        if known == self._told:
            return
        try:
            self._changed(known)
            self._told = known
        except Exception:
            log.exception("a change of the pool failed", extra={"pool": self.pool})
            self._failed("defect")
            if self._retry is not None:
                self._retry.cancel()
            self._retry = asyncio.get_running_loop().call_later(DEFECT_PAUSE_S, self._tell)
