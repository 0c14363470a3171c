"""specdec.v1.TargetService: converts, calls, converts. The rules are in verifier.py, the engine's turn in loop.py."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import grpc.aio

from specdec import wire
from specdec.errors import InternalFault, InvalidRequest, Overloaded, SpecdecError
from specdec.runtime.greeting import greeted
from specdec.runtime.hangup import STATUS_S, patience
from specdec.terms import ModelInfo, TargetBeat
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service.loop import EngineLoop
from target_service.outlet import RETRY_AFTER_MS, Batch, Outlet
from target_service.tracing import Tracing

BEAT_S = 0.25
MAX_STREAMS = 256
log = logging.getLogger(__name__)
Context = grpc.aio.ServicerContext[Any, Any]


class TargetServicer(target_pb2_grpc.TargetServiceServicer):
    def __init__(self, loop: EngineLoop, info: ModelInfo, tracing: Tracing | None = None) -> None:
        self._loop, self._info, self._tracing = loop, info, tracing

    def add_to(self, server: Any) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    async def GetModelInfo(self, request: Any, context: Context) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(self._info))

    async def Verify(self, requests: Any, context: Context) -> None:
        """One stream: Hello, then items in and answers out until either side ends it. A fault becomes the call's status outside."""
        self._check_room()  # also here: who is turned away need not say who it is
        first = await greeted(_next(context), "hello")
        if first is None:
            return
        hello = wire.verify_request_from_wire(first)
        if hello.orchestrator_id is None:
            raise InvalidRequest("hello", "the first message must carry it")
        self._check_room()
        stream, outlet = self._loop.attach(hello.orchestrator_id, hello.link)
        reader = asyncio.create_task(self._read(context, stream, outlet), name=f"read stream {stream}")
        writer = asyncio.create_task(self._write(context, outlet), name=f"write stream {stream}")
        failed = asyncio.create_task(outlet.failed(), name=f"watch stream {stream}")
        try:
            self._submit(stream, hello)
            await asyncio.wait((writer, failed), return_when=asyncio.FIRST_COMPLETED)
            self._loop.silence(stream)
            reader.cancel()
            with patience(STATUS_S):
                await writer  # one that waits for a slow reader can only tell the fault once the reader is there again
        finally:
            self._loop.detach(stream)
            if self._tracing is not None:
                self._tracing.gone(stream)
            for task in (reader, writer, failed):
                task.cancel()
            await asyncio.gather(reader, writer, failed, return_exceptions=True)

    def _check_room(self) -> None:
        if self._loop.num_streams >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} streams are open, the most this server keeps", RETRY_AFTER_MS)

    async def _read(self, context: Context, stream: int, outlet: Outlet) -> None:
        """Items until the caller has no more. What is wrong with a message as a whole ends the stream."""
        try:
            while (message := await _next(context)) is not None:
                request = wire.verify_request_from_wire(message)
                if request.orchestrator_id is not None:
                    raise InvalidRequest("hello", "belongs into the first message only")
                self._submit(stream, request)
            outlet.end()
        except SpecdecError as error:
            outlet.fail(error)
        except Exception as error:
            log.exception("a defect: the stream ends")
            outlet.fail(InternalFault(f"{type(error).__name__}: {error}"))

    def _submit(self, stream: int, request: wire.VerifyRequest) -> None:
        if self._tracing is not None:
            self._tracing.asked(stream, request.items)
        self._loop.submit(stream, request.items, request.rejected)

    async def _write(self, context: Context, outlet: Outlet) -> None:
        """A message per batch, and a beat at least every BEAT_S."""
        now = asyncio.get_running_loop().time
        beat_at = now()
        while (batch := await outlet.take(beat_at)) is not None:
            beat = None
            if now() >= beat_at:
                beat, beat_at = self._loop.beat(), now() + BEAT_S
            if self._tracing is not None:
                self._tracing.told(batch.answers)
            await context.write(_message(batch, beat))


async def _next(context: Context) -> target_pb2.VerifyRequest | None:
    """None when the caller will send no more, or is gone."""
    try:
        message = await context.read()
    except (grpc.aio.UsageError, grpc.aio.InternalError, grpc.aio.AbortError) as error:
        log.info("stream lost: %s", error)
        return None
    return None if message is grpc.aio.EOF else message


def _message(batch: Batch, beat: TargetBeat | None) -> target_pb2.VerifyResponse:
    return wire.verify_response_to_wire(batch.answers, rows=batch.rows, engine_us=batch.engine_us, beat=beat)
