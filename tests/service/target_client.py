"""The other end of a Verify stream, as far as tests need it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specdec import wire
from specdec.runtime.channels import open_channel
from specdec.terms import Answer, Close, Step, TargetBeat
from specdec.v1 import target_pb2_grpc


class Stream:
    """A client of one Verify stream."""

    def __init__(self, call: Any) -> None:
        self.call = call
        self.beats: list[TargetBeat] = []
        self._answers: list[Answer] = []

    async def send(self, *items: Step | Close, hello: str | None = None, link: str = "") -> None:
        await self.call.write(wire.verify_request_to_wire(items, hello, link))

    async def answer(self, seconds: float = 5.0) -> Answer:
        async with asyncio.timeout(seconds):
            while not self._answers:
                await self.listen()
            return self._answers.pop(0)

    async def listen(self) -> wire.VerifyResponse:
        """The next message."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            raise EOFError(await self.call.code())
        response = wire.verify_response_from_wire(message)
        self._answers += response.answers
        if response.beat is not None:
            self.beats.append(response.beat)
        return response

    async def status(self, seconds: float = 5.0) -> tuple[grpc.StatusCode, str]:
        """How the call ended; what is still to be read is skipped."""
        async with asyncio.timeout(seconds):
            try:
                while await self.call.read() is not grpc.aio.EOF:
                    pass
            except grpc.aio.AioRpcError:
                pass
            return await self.call.code(), await self.call.details()


@asynccontextmanager
async def verify_stream(port: int, orchestrator_id: str | None = "orch", *, narrow: bool = False, link: str = "") -> AsyncIterator[Stream]:
    """`narrow`: a receive window of 64 KB that never grows, so that a server soon feels that nobody reads."""
    endpoint = f"127.0.0.1:{port}"
    window = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1 << 16)]
    async with grpc.aio.insecure_channel(endpoint, options=window) if narrow else open_channel(endpoint) as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify()
        made = Stream(call)
        if orchestrator_id is not None:
            await made.send(hello=orchestrator_id, link=link)
        try:
            yield made
        finally:
            call.cancel()
