"""Requests on their way. A call begins with its headers, and gRPC lets its client take as long as it likes for the message. Meanwhile the
call has its place among those under way, and what there is of the message its memory: a client that says nothing, or never the end of it,
could have all of both.

Of the calls that wait for their requests, from the beginning of each
- the MAX_SLOW that began last have REQUEST_S;
- of the others, the MAX_UNSENT that began last have CROWDED_S;
- the rest have YOUNG_S: in a burst many begin at once, and their messages are already here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc.aio

from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded

MAX_SLOW, MAX_UNSENT = 64, 1024  # calls of one kind; the first are a gigabyte at most, of clients
REQUEST_S, CROWDED_S, YOUNG_S = 30.0, 5.0, 1.0
RETRY_MS = 1000
Context = grpc.aio.ServicerContext[Any, Any]


class Arriving:
    def __init__(self, most: Sequence[int] = (MAX_SLOW, MAX_UNSENT), seconds: Sequence[float] = (REQUEST_S, CROWDED_S, YOUNG_S)) -> None:
        """`seconds` has one more: of who is not among so many."""
        self._most, self._seconds = most, seconds
        self._waiting: list[dict[asyncio.Timeout, float]] = [{} for _ in most]  # the eldest first, with when it began

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    async def request(self, context: Context) -> Any:
        """The call's one message. Raises InvalidRequest when there is none, DeadlineExceeded and Overloaded."""
        now = asyncio.get_running_loop().time()
        limit = asyncio.timeout_at(until := now + self._seconds[0])
        try:
            async with limit:
                self._put(0, limit, now)
                try:
                    message = await context.read()
                finally:
                    for few in self._waiting:
                        few.pop(limit, None)
        except TimeoutError:
            if limit.when() != until:
                words = f"{self._most[0]} calls that began later wait for their requests (MAX_SLOW)"
                raise Overloaded(f"{words}; send it faster, or come back", RETRY_MS) from None
            raise DeadlineExceeded(f"request: must come within {self._seconds[0]:g} s of the call's beginning (REQUEST_S)") from None
        if message is grpc.aio.EOF:
            raise InvalidRequest("request", "must be one message; the call ended without any")
        return message

    def _put(self, place: int, limit: asyncio.Timeout, began: float) -> None:
        """Among those of this place, where the eldest makes way."""
        if place == len(self._waiting):
            return
        here = self._waiting[place]
        if len(here) >= self._most[place]:
            eldest = next(iter(here))
            since = here.pop(eldest)
            if not eldest.expired():
                eldest.reschedule(since + self._seconds[place + 1])
                self._put(place + 1, eldest, since)
        here[limit] = began
