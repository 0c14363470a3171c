"""The shell of every process: calls, faults, health, reflection, trace context, the start and the end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from specdec import status
from specdec.errors import InternalFault, InvalidRequest, SpecdecError, Unavailable
from specdec.runtime import channels, server
from specdec.runtime.health import Health
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.listening import Listening, joined
from specdec.runtime.security import FrontSettings
from specdec.runtime.settings import CommonSettings
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.certificates import LOOPBACK, Authority
from tests.unit.runtime.shell import NOT_SERVING, SERVING, Process, ask, begun, connected, end_all, health

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


@pytest.fixture(scope="module", autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    yield
    end_all()


@pytest.fixture(scope="module")
def service() -> Iterator[str]:
    process = Process(DRAIN_MS="500", PRE_DRAIN_MS="0")
    yield f"127.0.0.1:{process.ready()[1]}"
    process.popen.send_signal(signal.SIGTERM)
    code, output, errors = process.end()
    assert (code, output) == (0, ""), errors


def test_an_ipv6_address_is_listened_on_as_it_is_given() -> None:
    assert [joined(host, 1) for host in ("0.0.0.0", "::", "[::1]", "name")] == ["0.0.0.0:1", "[::]:1", "[::1]:1", "name:1"]


async def test_calls_and_names(service: str) -> None:
    async with connected(service) as channel:
        assert await ask(channel, "echo") == "echo"
        for name in ("", "liveness", "readiness", "specdec.v1.DraftService"):
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
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "cancel-inside")
        assert caught.value.code() is grpc.StatusCode.INTERNAL, "not the caller's own deadline"


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


@pytest.mark.parametrize(("role", "settings", "fine"), [("orchestrator", FrontSettings(), False), ("target", CommonSettings(), True)])
async def test_a_client_may_send_less_than_another_service(role: str, settings: CommonSettings, fine: bool) -> None:
    """A message that is read takes several times its size."""

    async def measure(request: bytes, context: Any) -> bytes:
        return str(len(request)).encode()

    host, telemetry = bare_host(role, settings)
    host.methods, host.health, host.listening = server._Methods(), Health(), Listening(settings, telemetry)
    host.methods.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("t.T", {"Measure": grpc.unary_unary_rpc_method_handler(measure)}),)
    )
    listens = host._main_server(telemetry)
    port = listens.add_insecure_port("127.0.0.1:0")
    await listens.start()
    try:
        async with connected(f"127.0.0.1:{port}") as channel:
            ask_size = channel.unary_unary("/t.T/Measure")
            assert await ask_size(bytes(channels.MAX_CALL_BYTES), timeout=20) == b"%d" % channels.MAX_CALL_BYTES
            code = grpc.StatusCode.OK
            try:
                await ask_size(bytes(channels.MAX_CALL_BYTES + 1), timeout=20)
            except grpc.aio.AioRpcError as failure:
                code = failure.code()
            assert code is (grpc.StatusCode.OK if fine else grpc.StatusCode.RESOURCE_EXHAUSTED)
    finally:
        await listens.stop(0)


def bare_host(role: str, settings: CommonSettings) -> tuple[Any, Telemetry]:
    """What a process has before it listens."""
    telemetry = Telemetry(role)
    host: Any = server._Host(role, settings, lambda settings, runtime: asyncio.sleep(0, None))  # type: ignore[arg-type]
    host.runtime = server.Runtime(role, telemetry)
    return host, telemetry


def test_f132_the_pair_of_keepalive_options_fits() -> None:
    """A client of ours never pings faster than a server of ours allows, with or without calls, and both ends carry the same size."""
    client, server = dict(channels.channel_options()), dict(channels.server_options())
    assert client["grpc.keepalive_time_ms"] >= server["grpc.http2.min_ping_interval_without_data_ms"]
    assert client["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    for end in (client, server):
        assert end["grpc.keepalive_time_ms"] + end["grpc.http2.ping_timeout_ms"] <= 40_000, "what the documents say of a dead connection"
    for size in ("grpc.max_send_message_length", "grpc.max_receive_message_length"):
        assert client[size] == server[size] == 64 << 20


async def test_f132_an_idle_connection_at_the_fastest_allowed_rate_gets_no_goaway() -> None:
    """The same pair with its times 30 times shorter; the broken twin leaves the server's tolerance at Python's default."""

    fast = {"grpc.keepalive_time_ms": channels.MIN_PING_INTERVAL_MS // 30}
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
        assert await health(channel, "readiness") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await ask(channel, "echo")
        assert isinstance(status.error_from_rpc(caught.value), Unavailable) and "starting" in str(caught.value.details())
    process.popen.send_signal(signal.SIGTERM)  # F141: also while loading
    began = time.monotonic()
    code, output, _ = process.end()
    assert (code, output) == (0, "") and time.monotonic() - began < 10.0, "it would have loaded for half a minute"


async def test_f142_sigterm_readiness_first_then_refusals_then_the_end() -> None:
    """F142, F140: what comes while the world learns of it is served, what comes later refused, what runs ends as it would have."""
    process = Process(DRAIN_MS="5000", PRE_DRAIN_MS="600", HEALTH_PORT="0")
    ready = process.ready()
    async with connected(f"127.0.0.1:{ready[1]}") as channel, connected(f"127.0.0.1:{ready[4]}") as probes:
        assert await health(probes, "readiness") == SERVING
        running = asyncio.ensure_future(ask(channel, "slow"))
        faulty = asyncio.ensure_future(ask(channel, "late-fault"))
        assert await ask(channel, "echo") == "echo"  # by then those before it have begun
        process.popen.send_signal(signal.SIGTERM)
        while await health(probes, "readiness") == SERVING:
            await asyncio.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        assert await ask(channel, "echo") == "echo" and await health(probes, "liveness") == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while True:
                await ask(channel, "echo")
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "another" in str(caught.value.details())
        assert not running.done() and await running == "slow,slow,slow"
        with pytest.raises(grpc.aio.AioRpcError) as fault:
            await faulty
        assert fault.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    code, _, errors = await asyncio.to_thread(process.end)
    assert code == 0 and errors.count("draining ") == 1


async def test_nobody_is_cancelled_by_a_service_that_stops() -> None:
    """Calls reach it until its last moment. Left to itself, gRPC cancels about one of each of these callers'."""
    process = Process(DRAIN_MS="500", PRE_DRAIN_MS="0", ECHO_CALLS="400")
    endpoint = f"127.0.0.1:{process.ready()[1]}"
    told: Counter[grpc.StatusCode] = Counter()
    over = asyncio.Event()

    async def caller() -> None:
        """On a fresh connection after each refusal."""
        while not over.is_set():
            async with connected(endpoint) as channel:
                stub: Any = draft_pb2_grpc.DraftServiceStub(channel)  # type: ignore[no-untyped-call]
                code = grpc.StatusCode.INVALID_ARGUMENT
                while code is grpc.StatusCode.INVALID_ARGUMENT and not over.is_set():
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=20)
                    code = caught.value.code()
                    told[code] += 1

    async with connected(endpoint) as channel:
        running = await begun(channel, "for-ever")
        callers = [asyncio.create_task(caller()) for _ in range(16)]
        while not told:
            await asyncio.sleep(0.01)
        process.popen.send_signal(signal.SIGTERM)
        code, _, errors = await asyncio.to_thread(process.end)
        over.set()
        await asyncio.gather(*callers)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await running.read()
    assert code == 0 and set(told) == {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAVAILABLE}, told
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE and "accept" not in errors


async def test_a_service_takes_nobody_in_while_it_answers_the_last_and_falls_silent_before_it_stops() -> None:
    """One after the other, since a server of gRPC that stops cancels whatever reaches it."""
    host, telemetry = bare_host("draft", CommonSettings())
    host.interceptor, host.health = CallInterceptor(telemetry, 8), Health()
    seen: dict[str, tuple[bool, bool]] = {}  # when -> whether somebody else gets in, whether who was in has heard the end

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        with socket.create_connection(address) as client, listener.accept()[0]:

            def look(when: str, wait_s: float = 0.0) -> None:
                try:
                    socket.create_connection(address, 5).close()
                    others = True
                except ConnectionRefusedError:
                    others = False
                client.settimeout(wait_s)
                try:
                    seen[when] = others, client.recv(1) == b""
                except (BlockingIOError, TimeoutError):
                    seen[when] = others, False

            class Stopping:
                async def stop(self, grace: float) -> None:
                    look("stops", 5.0)

            def answered() -> None:
                look("answers")
                last.over()

            last = host.interceptor.hang_up.opened("somebody")
            look("before")
            asyncio.get_running_loop().call_later(0.02, answered)
            await host._end(Stopping(), address[1])
    assert seen == {"before": (True, False), "answers": (False, False), "stops": (False, True)}


async def test_a_stream_that_never_ends_is_cut_after_the_drain() -> None:
    process = Process(DRAIN_MS="400", PRE_DRAIN_MS="0")
    async with connected(f"127.0.0.1:{process.ready()[1]}") as channel:
        running, began = await begun(channel, "for-ever"), time.monotonic()
        process.popen.send_signal(signal.SIGTERM)
        code, _, _ = await asyncio.to_thread(process.end)
        assert code == 0 and 0.3 < time.monotonic() - began < 10.0
        with pytest.raises(grpc.aio.AioRpcError):
            await running.read()


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
    for name in ("PORT", "HEALTH_PORT"):
        code, _, errors = Process(**{name: port}).end()
        assert code == 1 and f"draft: cannot listen on 127.0.0.1:{port} (SPECDEC_{name})" in errors
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


async def test_mutual_tls_and_a_plaintext_port_for_health_together(tmp_path: Path) -> None:
    """Probes without a certificate reach the one and not the other."""
    authority = Authority(tmp_path)
    server, caller = authority.issue("server", *LOOPBACK), authority.issue("caller")
    process = Process(TLS_CERT=str(server.cert), TLS_KEY=str(server.key), TLS_CLIENT_CA=str(authority.ca), HEALTH_PORT="0")
    ready = process.ready()
    endpoint = f"127.0.0.1:{ready[1]}"
    own = grpc.ssl_channel_credentials(authority.ca.read_bytes(), caller.key.read_bytes(), caller.cert.read_bytes())
    nobody = grpc.ssl_channel_credentials(authority.ca.read_bytes())
    async with connected(f"127.0.0.1:{ready[4]}") as probes:
        assert await health(probes, "readiness") == SERVING
    async with channels.open_channel(endpoint, own) as channel:
        assert await health(channel, "readiness") == SERVING
    for wrong in (nobody, None):
        async with channels.open_channel(endpoint, wrong) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health(channel, "readiness")
    process.popen.send_signal(signal.SIGTERM)
    assert process.end()[0] == 0
