"""Metrics for clients: read on a thread of their own, at most one reading in GAP_S however many ask.

Who asks meanwhile gets what is read next, never what was read before: no answer is older than its call. So a crowd costs as much as one
scraper, and nobody can watch the rounds of somebody else's answer one by one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from specdec.errors import Overloaded, PermissionDenied

GAP_S = 0.25  # between two readings
MAX_SHOWN_BYTES = 2 << 20  # half of what gRPC takes in other languages without being told
RETRY_AFTER_MS = 60_000  # what has grown so large stays so


class Showing:
    """`read` None = clients may not see them."""

    def __init__(self, read: Callable[[], bytes] | None) -> None:
        self._read = read
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")  # so that no two readings overlap
        self._next: asyncio.Task[str] | None = None  # not begun yet; everybody who asks waits for it
        self._running = set[asyncio.Task[str]]()
        self._due = 0.0  # loop time

    async def text(self) -> str:
        """Raises PermissionDenied, and Overloaded where they do not fit into an answer."""
        if self._read is None:
            raise PermissionDenied(
                "this service does not show its metrics to clients: set SPECDEC_SHOW_METRICS=true on the orchestrator, or read its "
                "metrics port (SPECDEC_METRICS_PORT)"
            )
        if self._next is None:
            self._next = asyncio.create_task(self._reading(self._read))
            self._running.add(self._next)
            self._next.add_done_callback(self._over)
        return await asyncio.shield(self._next)  # who leaves takes nothing from the others

    async def _reading(self, read: Callable[[], bytes]) -> str:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        self._next, self._due = None, loop.time() + GAP_S
        told = await loop.run_in_executor(self._thread, read)
        if len(told) > MAX_SHOWN_BYTES:
            raise Overloaded(
                f"the metrics are {len(told)} bytes, more than {MAX_SHOWN_BYTES} (MAX_SHOWN_BYTES); read them at the metrics port",
                RETRY_AFTER_MS,
            )
        return told.decode()

    def _over(self, task: asyncio.Task[str]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # told to those who waited, if anybody still did

    def close(self) -> None:
        for task in self._running:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)
