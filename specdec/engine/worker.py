"""The thread that owns the engine. The event loop hands it one call at a time and is never blocked by it.

Everything that touches an engine, loading included, goes through `run`: torch keeps its thread settings per thread, and K/V has no locks.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class EngineThread:
    """One dedicated thread. `clock`: seconds, never going back."""

    def __init__(self, name: str = "engine", clock: Callable[[], float] = time.monotonic) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._clock = clock
        self._running_since: float | None = None

    @property
    def running_since(self) -> float | None:
        """When the call now running began, by the clock; None when idle. A watcher tells a long step from a hung one by it."""
        return self._running_since

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """fn(*args, **kwargs) on the thread; calls queue in order, and what fn raises is raised here.

        Cancelling the caller drops a queued call; a running one finishes on the thread and its result is lost.
        """
        return await asyncio.wrap_future(self._executor.submit(self._timed, fn, *args, **kwargs))

    def _timed(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._running_since = self._clock()
        try:
            return fn(*args, **kwargs)
        finally:
            self._running_since = None

    def close(self, wait: bool = True) -> None:
        """No more calls; queued ones are cancelled. With `wait`, returns after the running one."""
        self._executor.shutdown(wait=wait, cancel_futures=True)
