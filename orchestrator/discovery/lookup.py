"""One look-up of a name, off the event loop, with a time-out. The resolver of the C library cannot be stopped once it runs, so each
look-up has a thread that nobody waits for: a resolver that hangs keeps neither the loop, nor other names, nor the end of the process."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

MAX_RUNNING = 32  # look-ups at once, those included that nobody waits for any more; both pools' names fit

Resolve = Callable[..., list[tuple[Any, ...]]]  # as socket.getaddrinfo


class TooMany(OSError):
    """Look-ups that never came back occupy all MAX_RUNNING threads."""


class Lookups:
    def __init__(self, resolve: Resolve | None = None) -> None:
        """None = the operating system's."""
        self._resolve = resolve or socket.getaddrinfo
        self._threads = threading.BoundedSemaphore(MAX_RUNNING)

    async def records(self, host: str, port: int, timeout_s: float) -> list[str]:
        """Numeric addresses of all A and AAAA records. Raises TimeoutError, OSError (socket.gaierror among them)."""
        if not self._threads.acquire(blocking=False):
            raise TooMany(f"{MAX_RUNNING} look-ups hang (MAX_RUNNING)")
        loop = asyncio.get_running_loop()
        told: asyncio.Future[list[str]] = loop.create_future()

        def tell(found: list[str] | Exception) -> None:
            if told.done():
                return
            if isinstance(found, Exception):
                told.set_exception(found)
            else:
                told.set_result(found)

        def look() -> None:
            found: list[str] | Exception
            try:
                entries = self._resolve(host, port, type=socket.SOCK_STREAM)
                found = list(dict.fromkeys(str(entry[4][0]) for entry in entries))
            except Exception as error:
                found = error
            self._threads.release()
            try:
                loop.call_soon_threadsafe(tell, found)
            except RuntimeError:  # the loop is closed
                return

        threading.Thread(target=look, name=f"look up {host}", daemon=True).start()
        async with asyncio.timeout(timeout_s):
            return await told
