"""More calls at once than Python takes: each hears that it is too much, and when to come back."""

from __future__ import annotations

import asyncio
from collections import Counter

import grpc.aio

from specdec.errors import Overloaded, SpecdecError
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
