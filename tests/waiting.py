"""Waiting until something is so. Bounds end a test that would hang; they measure nothing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(happened: Callable[[], Any], seconds: float = 20.0) -> float:
    """Seconds that it took. `happened` runs on the event loop, so it must not block. Raises TimeoutError."""
    began = time.monotonic()
    async with asyncio.timeout(seconds):
        while not happened():
            await asyncio.sleep(0.005)
    return time.monotonic() - began


def wait_until(happened: Callable[[], Any], seconds: float = 30.0, what: object = "") -> None:
    """The same for tests without a loop. `what` is said where it does not happen."""
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline, what or f"not within {seconds} s"
        time.sleep(0.02)
