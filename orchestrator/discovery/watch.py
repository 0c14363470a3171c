"""The sources of one pool together: the union of what they know, told whenever it changes. Read `known` first."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from orchestrator.discovery.source import Endpoint, Source

DEFECT_PAUSE_S = 5.0
log = logging.getLogger(__name__)


class Watch:
    """`changed` gets full sets, on the event loop; `failed` the kind of a failure that no source caught, for the metric."""

    def __init__(
        self, pool: str, sources: Sequence[Source], changed: Callable[[frozenset[Endpoint]], None], failed: Callable[[str], None]
    ) -> None:
        self._pool, self._sources, self._changed, self._failed = pool, sources, changed, failed
        self._told = self.known
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def known(self) -> frozenset[Endpoint]:
        return frozenset[Endpoint]().union(*(source.known for source in self._sources))

    def run(self) -> None:
        """Needs a running loop."""
        self._tasks = [asyncio.create_task(self._follow(source), name=f"discovery of {self._pool}s") for source in self._sources]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                async for _ in source.changes():
                    if self.known != self._told:
                        self._told = self.known
                        self._changed(self._told)
                return
            except Exception:  # a defect must not freeze the pool for good
                log.exception("discovery failed", extra={"pool": self._pool})
                self._failed("defect")
                await asyncio.sleep(DEFECT_PAUSE_S)
