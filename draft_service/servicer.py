"""DraftService over gRPC: a reader and a writer per stream. The wire stops here. Faults that are raised become the call's status."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_service.drafter import RETRY_MS
from draft_service.metrics import Metrics
from draft_service.outbox import Outbox
from draft_service.tracing import Tracing
from draft_service.worker import Worker
from specdec import wire
from specdec.errors import InternalFault, InvalidRequest, Overloaded, SpecdecError, Unsupported
from specdec.runtime.greeting import greeted
from specdec.runtime.hangup import STATUS_S, patience
from specdec.terms import MAX_ID_BYTES, ModelInfo
from specdec.v1 import draft_pb2, draft_pb2_grpc

BEAT_S = 0.25
log = logging.getLogger("draft")

Context = grpc.aio.ServicerContext[Any, Any]


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, worker: Worker, info: ModelInfo, tracing: Tracing | None = None) -> None:
        self._worker, self._info, self._tracing = worker, info, tracing

    def add_to(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def GetModelInfo(
        self, request: draft_pb2.DraftServiceGetModelInfoRequest, context: Context
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        return draft_pb2.DraftServiceGetModelInfoResponse(info=wire.model_info_to_wire(self._info))

    async def Draft(self, requests: AsyncIterator[draft_pb2.DraftRequest], context: Context) -> None:
        """The handler itself writes, so that a fault of the reader ends the call between two writes: gRPC cannot send a status while a
        message is on its way."""
        stream, outbox = self._worker.attach()
        reader = asyncio.create_task(self._read(stream, outbox, requests), name=f"draft-reader-{stream}")
        try:
            while await outbox.wait():
                events, load = outbox.take(wire.MAX_ITEMS)
                if self._tracing is not None:
                    self._tracing.told(events)
                with patience(STATUS_S):
                    await context.write(wire.draft_response_to_wire(events, load))
        finally:
            self._worker.detach(stream)
            if self._tracing is not None:
                self._tracing.gone(stream)
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, stream: int, outbox: Outbox, requests: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        """Until the other side is done, or says what makes the whole stream meaningless. Its sessions go at once, however long the
        writer may still be stuck."""
        try:
            await self._obey(stream, outbox, requests)
            outbox.end()
        except SpecdecError as error:
            outbox.end(error)
        except Exception as error:
            log.exception("a defect: the stream ends")
            outbox.end(InternalFault(f"{type(error).__name__}: {error}"))
        finally:
            self._worker.detach(stream)

    async def _obey(self, stream: int, outbox: Outbox, requests: AsyncIterator[draft_pb2.DraftRequest]) -> None:
        named, messages = False, aiter(requests)
        request = await greeted(anext(messages, None), "orchestrator_id")
        while request is not None:
            if outbox.ended:
                return
            if request.HasField("orchestrator_id") == named:
                remedy = "belongs to the first message only" if named else "must be in the first message"
                raise InvalidRequest("orchestrator_id", remedy)
            if request.HasField("link") and named:
                raise InvalidRequest("link", "belongs to the first message only")
            if not named:
                self._greet(stream, request)
                named = True
            wire.bounded(request.commands, wire.MAX_ITEMS, "commands", "MAX_ITEMS")
            for message in request.commands:
                self._apply(stream, message)
            self._worker.wake()
            if outbox.overflowing:
                raise Overloaded("the events of this stream are not read", RETRY_MS)
            request = await anext(messages, None)

    def _greet(self, stream: int, request: draft_pb2.DraftRequest) -> None:
        orchestrator_id = wire.name_from_wire(request.orchestrator_id, "orchestrator_id")
        if link := wire.link_from_wire(request.link, "link"):
            self._worker.named(stream, orchestrator_id, link)

    def _apply(self, stream: int, message: draft_pb2.DraftCommand) -> None:
        """A command that cannot be read costs its session, not the stream, when it says which session that is."""
        try:
            command = wire.draft_command_from_wire(message)
            if self._tracing is not None:
                self._tracing.obeyed(stream, command)
            self._worker.apply(stream, command)
        except (InvalidRequest, Unsupported) as error:
            kind = message.WhichOneof("command")
            inner = getattr(message, kind) if kind else None
            if inner is None or not 0 < len(inner.session_id.encode()) <= MAX_ID_BYTES:
                raise
            self._worker.reject(stream, inner.session_id, getattr(inner, "epoch", 0), str(error))


async def beats(worker: Worker, metrics: Metrics) -> None:
    """Load reports, until cancelled."""
    while True:
        await asyncio.sleep(BEAT_S)
        worker.beat()
        metrics.report()
