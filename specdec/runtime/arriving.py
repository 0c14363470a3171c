"""Requests on their way. A call begins with its headers, and gRPC lets its client take as long as it likes for the message. Meanwhile the
call has its place among those under way: a client that says nothing could hold them all.

Rules
1. A request has REQUEST_S to come, whole.
2. MAX_UNSENT calls may wait for theirs. For each one more the one that began first has until YOUNG_S after its beginning: in a burst many
   begin at once, and their messages are already here.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio

from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded

REQUEST_S = 30.0  # from the beginning of a call
YOUNG_S = 1.0
MAX_UNSENT = 1024  # calls of one kind
RETRY_MS = 1000
Context = grpc.aio.ServicerContext[Any, Any]


class Arriving:
    def __init__(self, most: int = MAX_UNSENT, seconds: float = REQUEST_S, young_s: float = YOUNG_S) -> None:
        self._most, self._seconds, self._young_s = most, seconds, young_s
        self._waiting: dict[asyncio.Timeout, float] = {}  # the eldest first, with when it began

    def __len__(self) -> int:
        return len(self._waiting)

    async def request(self, context: Context) -> Any:
        """The call's one message. Raises InvalidRequest when there is none, DeadlineExceeded and Overloaded."""
        now, crowded = asyncio.get_running_loop().time(), False
        limit = asyncio.timeout_at(now + self._seconds)
        try:
            async with limit:
                self._make_room()
                self._waiting[limit] = now
                try:
                    message = await context.read()
                finally:
                    crowded = self._waiting.pop(limit, None) is None
        except TimeoutError:
            if crowded:
                raise Overloaded(
                    f"{self._most} calls wait for their requests (MAX_UNSENT), and this one waited longest", RETRY_MS
                ) from None
            raise DeadlineExceeded(f"request: must come within {self._seconds:g} s of the call's beginning (REQUEST_S)") from None
        if message is grpc.aio.EOF:
            raise InvalidRequest("request", "must be one message; the call ended without any")
        return message

    def _make_room(self) -> None:
        if len(self._waiting) >= self._most:
            eldest = next(iter(self._waiting))
            began = self._waiting.pop(eldest)
            eldest.reschedule(began + self._young_s)
