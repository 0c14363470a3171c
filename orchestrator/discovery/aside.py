"""Blocking calls off the event loop, with a time-out. What blocks in a library cannot be stopped once it runs, so each call has a thread
that nobody waits for: one that hangs keeps neither the loop, nor other calls, nor the end of the process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

T = TypeVar("T")


class TooMany(OSError):
    """Calls that never came back occupy all threads."""


class Aside:
    def __init__(self, name: str, most: int, limit: str) -> None:
        """At most `most` threads at once, those included that nobody waits for any more; `limit` = what that number is called."""
        self._name, self._most, self._limit = name, most, limit
        self._threads = threading.BoundedSemaphore(most)

    async def call(self, function: Callable[[], T], timeout_s: float) -> T:
        """Raises TimeoutError, TooMany, and what `function` raises."""
        if not self._threads.acquire(blocking=False):
            raise TooMany(f"{self._most} calls hang ({self._limit})")
        loop = asyncio.get_running_loop()
        told: asyncio.Future[T] = loop.create_future()

        def tell(act: Callable[[], None]) -> None:
            if not told.done():
                act()

        def run() -> None:
            act: Callable[[], None]
            try:
                act = partial(told.set_result, function())
            except Exception as error:
                act = partial(told.set_exception, error)
            self._threads.release()
            try:
                loop.call_soon_threadsafe(tell, act)
            except RuntimeError:  # the loop is closed
                return

        threading.Thread(target=run, name=self._name, daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await told
