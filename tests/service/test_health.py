"""What health says, and what it does not wait for: a process that has work, watchers, large messages, a hung engine, or an end to come."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import status
from specdec.errors import Overloaded
from specdec.runtime.health import MAX_WATCHERS
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.unit.runtime.shell import NOT_SERVING, SERVING, Process, ask, begun, connected, end_all, health, watched

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    end_all()


async def test_a_failure_in_the_middle_of_a_drain_ends_it() -> None:
    """F170"""
    process = Process(DRAIN_MS="60000", PRE_DRAIN_MS="60000")
    async with connected(f"127.0.0.1:{process.ready()[1]}") as channel:
        running = await begun(channel, "for-ever")
        process.popen.send_signal(signal.SIGTERM)
        while await health(channel, "readiness") == SERVING:
            await asyncio.sleep(0.01)
        assert await ask(channel, "break") == "break"
        code, _, errors = await asyncio.to_thread(process.end)
        assert code == 1 and errors.splitlines()[-1] == "draft: the engine is broken"
        with pytest.raises(grpc.aio.AioRpcError):
            await running.read()


async def test_f144_f146_f170_health_of_its_own_port() -> None:
    """At the limit of calls, beside watchers, with the engine hung and not ready: each name tells its own, at once."""
    process = Process(HEALTH_PORT="0", PRE_DRAIN_MS="0", OTLP_ENDPOINT="http://127.0.0.1:9", ECHO_CALLS="4")
    ready = process.ready()
    async with connected(f"127.0.0.1:{ready[1]}") as channel, connected(f"127.0.0.1:{ready[4]}") as probes:
        changes = [asyncio.ensure_future(watched(c, name)) for c in (channel, probes) for name in ("liveness", "readiness", "what")]
        calls = [await begun(channel, "for-ever") for _ in range(3)]
        for what in ("unready", "hang"):
            assert await ask(channel, what) == what
        calls.append(await begun(channel, "for-ever"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "echo")
        assert isinstance(status.error_from_rpc(caught.value), Overloaded)
        for where in (channel, probes):
            while SERVING in {await health(where, name) for name in ("liveness", "readiness")}:
                await asyncio.sleep(0.01)
            assert await health(where, "") == SERVING
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await health(where, "what")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # nothing else is served there
            await ask(probes, "echo")
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        calls.pop().cancel()
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert await ask(channel, "wake") == "wake"
                break
        while await health(probes, "liveness") == NOT_SERVING:
            await asyncio.sleep(0.01)
        for call in calls:
            call.cancel()
        process.popen.send_signal(signal.SIGTERM)
        unknown = int(health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
        want = [[SERVING, NOT_SERVING, SERVING], [SERVING, NOT_SERVING], [unknown]]
        assert await asyncio.gather(*changes) == want + want, "watchers do not hold up the end"
    code, _, errors = await asyncio.to_thread(process.end)
    assert code == 0 and "BlockingIOError" not in errors, errors  # F147
    messages = Counter(json.loads(line)["message"].partition(":")[0] for line in errors.splitlines() if line.startswith("{"))
    told = {words: messages[words] for words in ("takes calls", "not alive", "alive again", "not ready", "ready", "stopping")}
    assert told == {"takes calls": 1, "not alive": 1, "alive again": 1, "not ready": 1, "ready": 0, "stopping": 1}, "each change is a line"


async def test_f146_too_many_watchers_are_refused_and_check_answers() -> None:
    process = Process(PRE_DRAIN_MS="0")
    async with connected(f"127.0.0.1:{process.ready()[1]}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Watch(health_pb2.HealthCheckRequest(service="liveness"), timeout=20) for _ in range(MAX_WATCHERS)]
        assert [(await call.read()).status for call in calls] == [SERVING] * MAX_WATCHERS
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await watched(channel, "liveness")
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await health(channel, "liveness") == SERVING
        for call in calls:
            call.cancel()


async def test_f143_health_beside_large_messages() -> None:
    """Four callers send 3 MB again and again: reading them is the loop's work, and health must not wait long for it."""
    process = Process(HEALTH_PORT="0", PRE_DRAIN_MS="0")
    ready = process.ready()
    async with connected(f"127.0.0.1:{ready[1]}") as channel, connected(f"127.0.0.1:{ready[4]}") as probes:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        large = draft_pb2.DraftRequest(orchestrator_id="x" * (3 << 20))

        async def flood() -> None:
            for _ in range(10):
                assert [r async for r in stub.Draft(iter([large]), timeout=20)]

        floods = asyncio.gather(*(flood() for _ in range(4)))
        took = []
        while not floods.done():
            began = time.monotonic()
            assert await health(probes, "liveness") == SERVING
            took.append(time.monotonic() - began)
            await asyncio.sleep(0.01)
        await floods
        assert len(took) > 5 and sorted(took)[len(took) // 2] < 0.25, took
    process.popen.send_signal(signal.SIGTERM)
    assert (await asyncio.to_thread(process.end))[0] == 0
