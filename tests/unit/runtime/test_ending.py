"""The end of a server, step by step and without a network."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from specdec.runtime import server
from specdec.runtime.health import READINESS, Health


class Server:
    def __init__(self, order: list[str]) -> None:
        self.order = order

    async def stop(self, grace_s: float) -> None:
        self.order.append("it stops")


async def test_watchers_hear_the_end_of_their_calls_before_the_server_falls_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has not heard it by then takes the end of the process for a fault; and nobody waits for a watcher."""
    order: list[str] = []
    monkeypatch.setattr(server, "HEALTH_STOP_S", 4.0)
    monkeypatch.setattr(server, "stop_listening", lambda port: order.append("it listens no more"))
    monkeypatch.setattr(server, "fall_silent", lambda port: order.append("it is silent"))
    host: Any = server._Host("draft", None, None)  # type: ignore[type-var, arg-type]
    host.runtime, host.interceptor, host.health = SimpleNamespace(reason=""), SimpleNamespace(hang_up=()), Health()
    heard: list[int] = []

    async def watch() -> None:
        request = health_pb2.HealthCheckRequest(service=READINESS)
        heard.extend([reply.status async for reply in host.health.Watch(request, None)])
        order.append("a watcher is done")

    host.health.set(READINESS, True)
    watching = asyncio.create_task(watch())
    while not host.health.watched:
        await asyncio.sleep(0)
    host.health.set(READINESS, False)
    await host._end(Server(order), 1)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert order == ["it listens no more", "a watcher is done", "it is silent", "it stops"]
    assert heard[-1] == health_pb2.HealthCheckResponse.NOT_SERVING
