"""One look-up of a name, off the event loop, with a time-out."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from orchestrator.discovery.aside import Aside

MAX_RUNNING = 32  # look-ups at once, those included that nobody waits for any more; both pools' names fit

Resolve = Callable[..., list[tuple[Any, ...]]]  # as socket.getaddrinfo


class Lookups:
    def __init__(self, resolve: Resolve | None = None) -> None:
        """None = the operating system's."""
        self._resolve = resolve or socket.getaddrinfo
        self._aside = Aside("look up", MAX_RUNNING, "MAX_RUNNING")

    async def records(self, host: str, port: int, timeout_s: float) -> list[str]:
        """Numeric addresses of all A and AAAA records. Raises TimeoutError, OSError (socket.gaierror, aside.TooMany among them)."""

        def look() -> list[str]:
            entries = self._resolve(host, port, type=socket.SOCK_STREAM)
            return list(dict.fromkeys(str(entry[4][0]) for entry in entries))

        return await self._aside.call(look, timeout_s)
