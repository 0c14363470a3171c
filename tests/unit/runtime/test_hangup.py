"""Callers that do not read: who is hung up on, when, and who is not."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
import pytest

from specdec.runtime import hangup
from specdec.runtime.channels import open_channel, server_options
from specdec.runtime.guard import Guard
from specdec.runtime.hangup import HangUp, endpoint_of, fall_silent, patience, shut, stop_listening
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.limits import Limits
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from tests.waiting import until

PIECE = pb.GenerateResponse(delta=pb.Delta(text="x" * 20_000))
# A window that a piece or two fill, and a client that takes nothing out of it unless it is asked.
NARROW = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 16384)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "SWEEP_S", 0.01)
    monkeypatch.setattr(hangup, "STATUS_S", 0.1)


async def test_a_connection_goes_when_all_its_calls_are_stuck_and_another_one_stays() -> None:
    cut: list[set[str]] = []
    table = HangUp(cut.append)
    stuck, read, other = table.opened("a"), table.opened("a"), table.opened("b")
    over = stuck.wait(0.0)
    await until(lambda: stuck.waits)
    await asyncio.sleep(0.05)
    assert not cut, "somebody is served there"
    over()
    read.over()
    await asyncio.sleep(0.05)
    assert not cut, "it reads again"
    stuck.wait(0.0)
    await until(lambda: cut)
    assert cut == [{"a"}]
    for call in (stuck, other):
        call.over()
    assert len(table) == 0
    await asyncio.sleep(0.05)
    assert len(cut) == 1


async def test_a_busy_connection_goes_when_too_many_calls_are_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its place among the calls under way, and a connection that many share may be busy for ever."""
    monkeypatch.setattr(hangup, "MOST_STUCK", 4)
    cut: list[set[str]] = []
    table = HangUp(cut.append)
    served = [table.opened(peer) for peer in ("a", "b")]
    stuck = [table.opened(peer) for peer in ("a", "a", "a", "b")]
    overs = [call.wait(0.0) for call in stuck]
    await until(lambda: all(call.waits for call in stuck))
    await asyncio.sleep(0.05)
    assert not cut, "as many as may be"
    stuck[0].wait(0.0)  # twice, and still one call
    overs[1]()
    stuck.append(table.opened("b"))
    stuck[-1].wait(0.0)
    await until(lambda: stuck[-1].waits)
    await asyncio.sleep(0.05)
    assert not cut, "one of them read again"
    stuck[1].wait(0.0)
    await until(lambda: cut)
    assert cut == [{"a"}], "it has most of them"
    for call in (*served, *stuck):
        call.over()
    assert (len(table), table._num_unread, dict(table._unread)) == (0, 0, {})
    for over in overs:
        over()
    assert (table._num_unread, dict(table._unread)) == (0, {})


async def test_a_call_that_reads_again_in_the_last_moment_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hangup, "SWEEP_S", 0.05)
    cut: list[set[str]] = []
    call = HangUp(cut.append).opened("a")
    over = call.wait(0.0)
    await until(lambda: call.waits)
    over()
    await asyncio.sleep(0.1)
    assert not cut and not call.waits


async def test_outside_a_call_patience_is_endless() -> None:
    with patience(0.0):
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("peer", "endpoint"),
    [
        ("ipv4:1.2.3.4:5", ("1.2.3.4", 5)),
        ("ipv6:%5B::ffff:1.2.3.4%5D:5", ("1.2.3.4", 5)),
        ("ipv6:%5Bfe80::1%25eth0%5D:50", ("fe80::1", 50)),
        ("unix:", None),
        ("unix:/tmp/x:5", None),
        ("ipv4:host:5", None),
        ("", None),
    ],
)
def test_names_of_peers(peer: str, endpoint: object) -> None:
    assert endpoint_of(peer) == endpoint


# ---------------------------------------------------------------- over the wire


@dataclass
class Talker(generation_pb2_grpc.GenerationServiceServicer):
    """Writes `request.text` pieces, and tells what became of its calls."""

    interceptor: CallInterceptor
    ended: list[str] = field(default_factory=list)

    def sentenced(self) -> list[set[str]]:
        """From here on, whom it would have hung up on."""
        doomed: list[set[str]] = []
        self.interceptor.hang_up._cut = doomed.append
        return doomed

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        try:
            for _ in range(int(request.text)):
                with patience(0.1):
                    await context.write(PIECE)
        finally:
            self.ended.append(request.request_id)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        self.ended.append(request.text)
        return pb.TokenizeResponse(token_ids=range(20_000))


@contextlib.asynccontextmanager
async def talking(at_once: int = 0) -> AsyncIterator[tuple[Talker, int]]:
    telemetry = Telemetry("orchestrator")
    interceptor = CallInterceptor(telemetry, guard=Guard(telemetry, limits=Limits(0.0, at_once)))
    server = grpc.aio.server(interceptors=[interceptor], options=server_options())
    talker = Talker(interceptor)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(talker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield talker, port
    finally:
        await server.stop(0)


@contextlib.asynccontextmanager
async def connected(port: int) -> AsyncIterator[Any]:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=[*NARROW, ("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
        stub.channel = channel
        yield stub


def unread(stub: Any, request: pb.TokenizeRequest) -> Any:
    """A unary call whose caller asks for no message: gRPC's own stub would take it at once."""
    tokenize = stub.channel.unary_stream("/specdec.v1.GenerationService/Tokenize", request_serializer=pb.TokenizeRequest.SerializeToString)
    return tokenize(request)


def asked(stub: Any, name: str, pieces: int) -> Any:
    return stub.Generate(pb.GenerateRequest(request_id=name, text=str(pieces)))


async def read(call: Any) -> grpc.StatusCode:
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()  # type: ignore[no-any-return]


async def test_F80_a_call_that_nobody_reads_ends_and_so_its_client_may_call_again() -> None:
    """Its window is closed, its connection is alive: neither a status nor keepalive gets it out."""
    async with talking(at_once=1) as (talker, port), connected(port) as ask, connected(port) as again:
        silent, doomed = asked(ask, "silent", 1000), talker.sentenced()
        await until(lambda: doomed)
        assert await read(asked(again, "refused", 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        shut(*doomed)
        await until(lambda: talker.ended == ["silent"] and not len(talker.interceptor.hang_up))
        assert await read(asked(again, "next", 1)) is grpc.StatusCode.OK
        assert await read(silent) is grpc.StatusCode.UNAVAILABLE


async def test_F80_an_answer_that_nobody_reads_counts_as_its_call_does() -> None:
    """The handler is through at once; what it said, and the status, lie in gRPC's memory."""
    async with talking(at_once=1) as (talker, port), connected(port) as ask, connected(port) as again:
        silent, doomed = unread(ask, pb.TokenizeRequest(text="silent")), talker.sentenced()
        await until(lambda: doomed)
        assert talker.ended == ["silent"]
        assert await read(asked(again, "refused", 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
        shut(*doomed)
        await until(lambda: not len(talker.interceptor.hang_up))
        assert await read(asked(again, "next", 1)) is grpc.StatusCode.OK
        silent.cancel()


async def test_who_is_served_on_the_same_connection_is_not_cut_off() -> None:
    async with talking() as (talker, port), connected(port) as ask:
        silent, served = asked(ask, "silent", 1000), asked(ask, "served", 40)
        await silent.initial_metadata()
        pieces = 0
        while await served.read() is not grpc.aio.EOF:
            pieces += 1
            await asyncio.sleep(0.01)
        assert pieces == 40 and await served.code() is grpc.StatusCode.OK
        await until(lambda: not len(talker.interceptor.hang_up))
        assert talker.ended == ["served", "silent"]
        assert await read(silent) is grpc.StatusCode.UNAVAILABLE


async def test_F81_calls_that_are_answered_or_refused_leave_no_cycles_behind() -> None:
    """What the collector has to find stays until it looks at old objects, which may be long."""
    async with talking(at_once=1) as (talker, port), connected(port) as ask:
        talker.sentenced()  # nobody is hung up on
        silent = asked(ask, "silent", 1000)
        await silent.initial_metadata()
        gc.collect()
        gc.disable()
        try:
            for _ in range(20):
                assert await read(asked(ask, "refused", 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
            silent.cancel()
            await until(lambda: not len(talker.interceptor.hang_up))
            for _ in range(20):
                assert await read(asked(ask, "answered", 0)) is grpc.StatusCode.OK
            await until(lambda: not len(talker.interceptor.hang_up))
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            kinds = Counter(type(found).__name__ for found in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert max(kinds[name] for name in ("OpenCall", "AbortError", "frame", "Overloaded", "RPCState")) < 10, kinds


# ---------------------------------------------------------------- the end of a service


async def test_who_is_connected_is_served_when_nobody_else_is_listened_to_and_then_hears_the_end() -> None:
    """Another port of the same process goes on."""

    async def echo(request: bytes, context: Any) -> bytes:
        return request

    handlers = {"Echo": grpc.unary_unary_rpc_method_handler(echo)}

    async def ask(channel: grpc.aio.Channel) -> str:
        try:
            return str(await channel.unary_unary("/t.T/Echo")(b"fine", timeout=20), "ascii")
        except grpc.aio.AioRpcError as failure:
            return failure.code().name

    async with contextlib.AsyncExitStack() as exit:
        ports, inside, late = [], [], []
        for _ in range(2):
            server = grpc.aio.server()
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
            ports.append(server.add_insecure_port("127.0.0.1:0"))
            await server.start()
            exit.push_async_callback(server.stop, 0)
        for channels in (inside, late):
            channels += [await exit.enter_async_context(open_channel(f"127.0.0.1:{port}")) for port in ports]
        assert [await ask(channel) for channel in inside] == ["fine", "fine"]
        stop_listening(ports[0])
        assert [await ask(channel) for channel in (*inside, *late)] == ["fine", "fine", "UNAVAILABLE", "fine"]
        fall_silent(ports[0])
        assert [await ask(channel) for channel in (*inside, *late)] == ["UNAVAILABLE", "fine", "UNAVAILABLE", "fine"]
