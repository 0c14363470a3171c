"""The shell of every process: calls, faults, health, reflection, trace context, the start and the end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec import status
from specdec.errors import InternalFault, InvalidRequest, SpecdecError, Unavailable
from specdec.runtime import channels
from specdec.v1 import draft_pb2, draft_pb2_grpc

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]
SERVICE = Path(__file__).with_name("echo_service.py")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


STARTED: list[Process] = []


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    for process in STARTED:
        process.popen.kill()
        process.popen.communicate()


class Process:
    def __init__(self, **settings: str) -> None:
        environment = {**os.environ, **{f"SPECDEC_{name}": value for name, value in settings.items()}}
        self.popen = subprocess.Popen(
            [sys.executable, str(SERVICE)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

        STARTED.append(self)

    def ready(self) -> re.Match[str]:
        assert self.popen.stdout is not None
        line = self.popen.stdout.readline()
        match = re.fullmatch(r"ready role=draft host=127\.0\.0\.1 port=(\d+) metrics_port=(-?\d+) pid=(\d+)\n", line)
        assert match and int(match[3]) == self.popen.pid, line
        return match

    def end(self) -> tuple[int, str, str]:
        output, errors = self.popen.communicate(timeout=20)
        return self.popen.returncode, output, errors


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    process = Process(DRAIN_MS="500")
    yield f"127.0.0.1:{process.ready()[1]}"
    process.popen.send_signal(signal.SIGTERM)
    code, output, errors = process.end()
    assert (code, output) == (0, ""), errors


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
    call = stub.Draft(iter([request]), timeout=10, metadata=metadata)
    replies = [reply.events[0].refused.reason async for reply in call]
    return ",".join(replies)


async def test_calls_and_names(service: str) -> None:
    async with connected(service) as channel:
        assert await ask(channel, "echo") == "echo"
        for name in ("", "liveness", "specdec.v1.DraftService"):
            assert await health(channel, name) == SERVING
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        listing = [r async for r in stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5)]
        names = {entry.name for entry in listing[0].list_services_response.service}
        assert {"specdec.v1.DraftService", "grpc.health.v1.Health"} <= names


async def test_a_fault_raised_in_a_handler_reaches_the_caller_as_itself(service: str) -> None:
    async with connected(service) as channel:
        for what, kind in (("invalid", InvalidRequest), ("overload", SpecdecError), ("defect", InternalFault)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await ask(channel, what)
            assert isinstance(status.error_from_rpc(caught.value), kind)
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # a coroutine handler beside the generator
            await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=5)
        assert status.error_from_rpc(caught.value).args == ("model: there is none",)


async def test_f139_a_cancellation_from_inside_is_answered(service: str) -> None:
    async with connected(service) as channel:
        began = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "cancel-inside")
        assert caught.value.code() is grpc.StatusCode.INTERNAL and time.monotonic() - began < 1.0


async def test_trace_context_reaches_the_handler(service: str) -> None:
    header = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with connected(service) as channel:
        assert await ask(channel, "trace", header) == header
        assert await ask(channel, "trace", "rubbish") == ""
        assert await ask(channel, "trace") == ""


async def test_messages_up_to_the_limit_and_not_beyond(service: str) -> None:
    async with connected(service) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
        for size, fine in ((channels.MAX_MESSAGE_BYTES - 4096, True), (channels.MAX_MESSAGE_BYTES + 4096, False)):
            call = stub.Draft(iter([draft_pb2.DraftRequest(orchestrator_id="x" * size)]), timeout=20)
            try:
                assert [r async for r in call] and fine
            except grpc.aio.AioRpcError as failure:
                assert failure.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not fine


def test_f132_the_pair_of_keepalive_options_fits() -> None:
    """A client of ours never pings faster than a server of ours allows, with or without calls, and both ends carry the same size."""
    client, server = dict(channels.channel_options()), dict(channels.server_options())
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    for size in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert client[size] == server[size] == 64 << 20


async def test_f132_an_idle_connection_at_the_fastest_allowed_rate_gets_no_goaway() -> None:
    """The same pair with its times 30 times shorter; the broken twin leaves the server's tolerance at Python's default."""

    fast = {name: value // 90 for name, value in channels.channel_options() if name == "grpc.keepalive_time_ms"}
    keepalive = [("grpc.keepalive_permit_without_calls", 1), ("grpc.http2.max_pings_without_data", 0)]

    async def survives(tolerance: bool) -> bool:
        scaled = {name: value // 30 for name, value in channels.server_options() if "ping_interval" in name}
        server = grpc.aio.server(options=[*scaled.items(), *keepalive] if tolerance else [])

        async def wait(request: bytes, context: Any) -> bytes:
            await asyncio.sleep(4.5)
            return b"fine"

        handlers = {"Wait": grpc.unary_unary_rpc_method_handler(wait)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[*fast.items(), *keepalive]) as channel:
                return bool(await channel.unary_unary("/t.T/Wait")(b"", timeout=20) == b"fine")
        except grpc.aio.AioRpcError as failure:
            assert failure.details() == "Too many pings"
            return False
        finally:
            await server.stop(0)

    assert await asyncio.gather(survives(True), survives(False)) == [True, False]


# ---------------------------------------------------------------- start and end


async def test_while_loading_health_answers_and_calls_are_unavailable() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = Process(PORT=str(port), BUDGET_TOKENS="30000")  # this fake loads for so many milliseconds
    async with connected(f"127.0.0.1:{port}") as channel:
        await asyncio.wait_for(channel.channel_ready(), 20)
        assert await health(channel, "liveness") == SERVING
        assert await health(channel, "specdec.v1.DraftService") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "echo")
        assert isinstance(status.error_from_rpc(caught.value), Unavailable)
    process.popen.send_signal(signal.SIGTERM)  # F141: also while loading
    began = time.monotonic()
    code, output, _ = process.end()
    assert (code, output) == (0, "") and time.monotonic() - began < 2.0


async def test_f142_sigterm_lets_running_streams_finish_and_refuses_new_ones() -> None:
    process = Process(DRAIN_MS="5000")
    async with connected(f"127.0.0.1:{process.ready()[1]}") as channel:
        running = asyncio.ensure_future(ask(channel, "slow"))
        await asyncio.sleep(0.3)
        process.popen.send_signal(signal.SIGTERM)
        process.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.2)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "echo")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert await running == "slow,slow,slow"
    code, _, _ = await asyncio.to_thread(process.end)
    assert code == 0


async def test_a_stream_that_never_ends_is_cut_after_the_drain() -> None:
    process = Process(DRAIN_MS="400")
    async with connected(f"127.0.0.1:{process.ready()[1]}") as channel:
        running = asyncio.ensure_future(ask(channel, "for-ever"))
        await asyncio.sleep(0.3)
        began = time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        code, _, _ = await asyncio.to_thread(process.end)
        assert code == 0 and 0.3 < time.monotonic() - began < 3.0
        with pytest.raises(grpc.aio.AioRpcError):
            await running


def test_f170_fail_ends_the_process_with_a_reason() -> None:
    process = Process()
    port = process.ready()[1]

    async def poke() -> None:
        async with connected(f"127.0.0.1:{port}") as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await ask(channel, "die")

    asyncio.run(poke())
    code, _, errors = process.end()
    assert code == 1 and errors.splitlines()[-1] == "draft: the engine is gone"


def test_settings_that_are_wrong() -> None:
    code, output, errors = Process(PORT="x", DRAIN="1").end()
    assert code == 2 and output == "" and "SPECDEC_PORT='x'" in errors and "did you mean SPECDEC_DRAIN_MS" in errors


def test_a_port_in_use() -> None:
    first = Process()
    port = first.ready()[1]
    code, _, errors = Process(PORT=port).end()
    assert code == 1 and f"draft: cannot listen on 127.0.0.1:{port}" in errors
    first.popen.send_signal(signal.SIGINT)
    assert first.end()[0] == 0


def test_cpus_that_are_not_there() -> None:
    code, _, errors = Process(CPU_AFFINITY="4000").end()
    assert code == 2 and "this process may use" in errors


def test_logs_are_json_lines(service: str) -> None:
    import json
    import logging

    from specdec.runtime.logs import JsonFormatter

    record = logging.makeLogRecord({"msg": "hello %s", "args": ("you",), "levelname": "INFO", "name": "n", "session_id": "s"})
    entry = json.loads(JsonFormatter("draft").format(record))
    assert (entry["message"], entry["level"], entry["role"], entry["session_id"]) == ("hello you", "info", "draft", "s")
