"""How a stream between two services begins: its first message says who calls.

A caller that never says it would keep its place among the calls under way for ever: keepalive finds callers that are gone, not those
that are there and silent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from specdec.errors import DeadlineExceeded

HELLO_S = 10.0  # from the beginning of the call; an orchestrator gives its own dialling half of it
M = TypeVar("M")


async def greeted(first: Awaitable[M], field: str) -> M:
    """The stream's first message. Raises DeadlineExceeded when it does not come; `field` = what it must carry."""
    try:
        async with asyncio.timeout(HELLO_S):
            return await first
    except TimeoutError:
        raise DeadlineExceeded(f"{field}: the first message must carry it, and come within {HELLO_S:g} s of the call's beginning") from None
