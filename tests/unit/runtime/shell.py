"""An echo service in a process of its own, and how to talk to it and to its health."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.runtime import channels
from specdec.v1 import draft_pb2, draft_pb2_grpc

SERVICE = Path(__file__).with_name("echo_service.py")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
WRITTEN_TO_NOBODY = "Internal error from Core"  # what grpc.aio makes of a refusal that comes before the request is written
STARTED: list[Process] = []


def end_all() -> None:
    """Whatever a test left behind."""
    while STARTED:
        process = STARTED.pop()
        process.popen.kill()
        process.popen.communicate()


class Process:
    def __init__(self, **settings: str) -> None:
        environment = {**os.environ, **{name if name == "ECHO_CALLS" else f"SPECDEC_{name}": value for name, value in settings.items()}}
        self.popen = subprocess.Popen(
            [sys.executable, str(SERVICE)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

        STARTED.append(self)

    def ready(self) -> re.Match[str]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        match = re.fullmatch(r"ready role=draft host=127\.0\.0\.1 port=(\d+) metrics_port=(-?\d+) pid=(\d+) health_port=(-?\d+)\n", line)
        assert match and int(match[3]) == self.popen.pid, line
        return match

    def end(self) -> tuple[int, str, str]:
        output, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, output, errors


@contextlib.asynccontextmanager
async def connected(endpoint: str) -> AsyncIterator[grpc.aio.Channel]:
    async with channels.open_channel(endpoint) as channel:
        yield channel


async def health(channel: grpc.aio.Channel, name: str) -> int:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(reply.status)


async def ask(channel: grpc.aio.Channel, what: str, header: str = "") -> str:
    """The echo service does what the orchestrator_id says; the answer names what it saw."""
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
    request = draft_pb2.DraftRequest(orchestrator_id=what)
    metadata = (("traceparent", header),) if header else ()
    while True:
        call = stub.Draft(iter([request]), timeout=10, metadata=metadata)
        try:
            return ",".join([reply.events[0].refused.reason async for reply in call])
        except grpc.aio.AioRpcError as failure:
            if failure.details() != WRITTEN_TO_NOBODY:
                raise


async def begun(channel: grpc.aio.Channel, what: str) -> Any:
    """A call whose first message is here."""
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
    call = stub.Draft(iter([draft_pb2.DraftRequest(orchestrator_id=what)]), timeout=20)
    assert (await call.read()).events[0].refused.reason == what
    return call


async def watched(channel: grpc.aio.Channel, name: str) -> list[int]:
    """The states that a watcher hears of, to the end of its call."""
    call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name), timeout=20)
    return [int(reply.status) async for reply in call]
