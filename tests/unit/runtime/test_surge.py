"""More calls at once than Python takes: each hears that it is too much, and when to come back. And calls that nobody means."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter

import grpc.aio
import pytest

from specdec.bench.sim.http2 import ACK, END_HEADERS, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, frame, headers
from specdec.errors import Overloaded, SpecdecError
from specdec.runtime import channels
from specdec.runtime.channels import open_channel
from specdec.status import error_from_rpc
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc
from tests.unit.runtime.secured import serving

BURST = 2000


async def test_a_burst_from_one_client_is_refused_by_name_and_not_cancelled() -> None:
    """All of it is at the server before the loop, which is this one, has looked at a single call."""
    async with serving(client_max_open=1) as service, open_channel(service.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        first = stub.Generate(pb.GenerateRequest())
        service.more.put_nowait(True)
        await first.read()

        async def one() -> SpecdecError | None:
            try:
                await stub.GetModelInfo(pb.GetModelInfoRequest())
            except grpc.aio.AioRpcError as failure:
                return error_from_rpc(failure)
            return None

        told = await asyncio.gather(*(one() for _ in range(BURST)))
        kinds = Counter(type(error).__name__ for error in told)
        assert kinds == {"Overloaded": BURST}, kinds
        assert all(isinstance(error, Overloaded) and error.retry_after_ms > 0 for error in told)
        service.more.put_nowait(False)
        assert await first.read() is grpc.aio.EOF


async def test_calls_that_are_reset_at_once_cost_others_time_and_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2023-44487, from one connection: far more than may wait, and all of it is at the server before the loop looks."""
    bounds = {"MAX_CONNECTION_CALLS": 200, "MAX_PENDING_CALLS": 256, "MOST_PENDING_CALLS": 320}
    assert channels.MAX_CONNECTION_CALLS < channels.MAX_PENDING_CALLS, "there is room for others"
    for name, value in bounds.items():
        monkeypatch.setattr(channels, name, value)
    async with serving() as service, open_channel(service.endpoint) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream = stub.Generate(pb.GenerateRequest())
        service.more.put_nowait(True)
        await stream.read()
        with flood(service.port, 2000):
            service.more.put_nowait(True)
            told = await asyncio.gather(*(stub.GetModelInfo(pb.GetModelInfoRequest(), timeout=30) for _ in range(40)), stream.read())
            assert all(answer.ByteSize() for answer in told)


def flood(port: int, calls: int) -> socket.socket:
    """A connection whose calls are begun and reset, once the server has read all of it: its core answers a ping by itself."""
    begun, reset = headers("/specdec.v1.GenerationService/GetModelInfo", f"127.0.0.1:{port}"), struct.pack(">I", 8)
    numbers = range(1, 2 * calls, 2)
    connection = socket.create_connection(("127.0.0.1", port), timeout=20)
    connection.sendall(PREFACE + frame(SETTINGS, 0, 0, b""))
    assert connection.recv(1 << 16), "its settings"
    connection.sendall(frame(SETTINGS, ACK, 0, b""))
    connection.sendall(b"".join(frame(HEADERS, END_HEADERS, n, begun) + frame(RST_STREAM, 0, n, reset) for n in numbers))
    connection.sendall(frame(PING, 0, 0, b"all read"))
    answered = frame(PING, ACK, 0, b"all read")
    heard = b""
    while answered not in heard:
        piece = connection.recv(1 << 16)
        assert piece, "the server hung up"
        heard = heard[-len(answered) :] + piece
    return connection
