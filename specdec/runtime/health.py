"""grpc.health.v1 for one process: what is set is what is answered, at once, to any number of callers.

`set` never waits for anybody, unlike the servicer of grpcio-health-checking, where a watcher that does not read holds up whoever sets.
Names: `liveness` (restart this process when it is not SERVING), `readiness` (send it sessions while it is SERVING), "" and the full names
of the gRPC services (the process takes calls). An unknown name is NOT_FOUND for Check and SERVICE_UNKNOWN for Watch, as the protocol says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import status
from specdec.errors import NotFound, Overloaded

LIVENESS, READINESS = "liveness", "readiness"
MAX_WATCHERS = 128  # over both ports; more are RESOURCE_EXHAUSTED, so that Check always finds a place
RETRY_MS = 1000
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    def __init__(self) -> None:
        self._states: dict[str, int] = {}
        self._changed: set[asyncio.Event] = set()  # one for each watcher
        self._ended = False
        self._watching: set[asyncio.Task[Any]] = set()  # whose status is not out

    @property
    def watched(self) -> bool:
        """Whether a watcher has not heard the end of its call."""
        return bool(self._watching)

    def set(self, name: str, serving: bool) -> None:
        state = SERVING if serving else NOT_SERVING
        if self._states.get(name) != state:
            self._states[name] = state
            self._wake()

    def serving(self, name: str) -> bool:
        return self._states.get(name) == SERVING

    def end(self) -> None:
        """Watchers hear the present state and their calls end: nobody waits for them."""
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        for changed in self._changed:
            changed.set()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        state = self._states.get(request.service)
        if state is None:
            await status.abort(context, NotFound(f"service {request.service!r}; known are {', '.join(map(repr, self._states))}"))
        return health_pb2.HealthCheckResponse(status=state)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        if len(self._changed) >= MAX_WATCHERS:
            await status.abort(context, Overloaded(f"{MAX_WATCHERS} calls watch already; use Check", RETRY_MS))
        task = asyncio.current_task()
        assert task is not None
        self._watching.add(task)
        task.add_done_callback(self._watching.discard)
        changed, told = asyncio.Event(), None
        self._changed.add(changed)
        try:
            while True:
                changed.clear()
                state = self._states.get(request.service, UNKNOWN)
                if state != told:
                    yield health_pb2.HealthCheckResponse(status=state)
                    told = state
                if changed.is_set():
                    continue
                if self._ended:
                    return
                await changed.wait()
        finally:
            self._changed.discard(changed)
