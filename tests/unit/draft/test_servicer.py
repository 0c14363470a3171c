"""The stream's two sides when one of them misbehaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from draft_service.outbox import MAX_PENDING
from draft_service.servicer import DraftServicer
from draft_service.worker import Worker
from specdec import wire
from specdec.errors import DeadlineExceeded, InternalFault, InvalidRequest, Overloaded, Unavailable
from specdec.runtime import greeting
from specdec.runtime.channels import open_channel, server_options
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.telemetry import Telemetry
from specdec.terms import ModelInfo, Pause
from specdec.v1 import draft_pb2, draft_pb2_grpc
from tests.unit.draft.rig import Rig
from tests.unit.draft.test_limits import GOOD
from tests.unit.draft.test_worker import Silent, Thread

INFO = ModelInfo("m", 31, b"f", (), 200, "b", "n", True, "float64", 10_000, 16, 64)


class Context:
    """Takes messages while `open`; a write waits otherwise, as under flow control."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.messages: list[draft_pb2.DraftResponse] = []

    async def write(self, message: draft_pb2.DraftResponse) -> None:
        await self.open.wait()
        self.messages.append(message)


class Call:
    """`beside`: another stream to the same draft."""

    def __init__(self, beside: Call | None = None) -> None:
        self.rig, self.context = beside.rig if beside else Rig(), Context()
        self.worker = beside.worker if beside else Worker(self.rig.drafter, self.rig.stepper, Thread(), Silent())
        self.requests: asyncio.Queue[draft_pb2.DraftRequest | Exception | None] = asyncio.Queue()
        servicer: Any = DraftServicer(self.worker, INFO)
        self.task = asyncio.create_task(servicer.Draft(self._requests(), self.context))

    async def _requests(self) -> AsyncIterator[draft_pb2.DraftRequest]:
        while (request := await self.requests.get()) is not None:
            if isinstance(request, Exception):
                raise request
            yield request

    async def settle(self) -> None:
        for _ in range(50):
            await asyncio.sleep(0)


async def test_a_reader_that_is_stuck_loses_its_sessions_now_and_its_stream_when_it_wakes() -> None:
    call = Call()
    call.requests.put_nowait(wire.draft_request_to_wire([GOOD], "deaf"))
    await call.settle()
    assert call.rig.drafter.num_sessions == 1
    for start in range(0, MAX_PENDING + 1, 1000):
        commands = [Pause(f"unknown {start + i}") for i in range(1000)]
        call.requests.put_nowait(wire.draft_request_to_wire(commands))
    await call.settle()
    assert call.rig.drafter.num_sessions == 0 and not call.task.done()
    call.context.open.set()
    with pytest.raises(Overloaded):
        await call.task
    assert len(call.context.messages) == 1  # the one that was on its way; no status may be sent before it is through


async def test_a_bad_message_ends_the_stream_after_the_write_that_is_on_its_way() -> None:
    call = Call()
    call.requests.put_nowait(draft_pb2.DraftRequest())
    await call.settle()
    assert not call.task.done()
    call.context.open.set()
    with pytest.raises(InvalidRequest, match="orchestrator_id"):
        await call.task


async def test_a_defect_while_reading_is_told_as_internal() -> None:
    call = Call()
    call.context.open.set()
    call.requests.put_nowait(ZeroDivisionError("oops"))
    with pytest.raises(InternalFault):
        await call.task


async def test_a_peer_that_is_done_ends_the_stream_well() -> None:
    call = Call()
    call.context.open.set()
    call.requests.put_nowait(wire.draft_request_to_wire([GOOD], "x"))
    call.requests.put_nowait(None)
    await call.task
    assert call.rig.drafter.num_sessions == 0


async def test_a_caller_that_never_says_who_it_is_is_ended_and_one_that_said_it_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.05)
    mute = Call()
    polite = Call(mute)
    polite.requests.put_nowait(wire.draft_request_to_wire([GOOD], "x"))
    for call in (mute, polite):
        call.context.open.set()
    with pytest.raises(DeadlineExceeded, match=r"^orchestrator_id: .* within 0\.05 s"):
        await asyncio.wait_for(mute.task, 5.0)
    polite.requests.put_nowait(wire.draft_request_to_wire([Pause("s")]))
    await polite.settle()
    assert not polite.task.done() and mute.rig.drafter.num_sessions == len(mute.worker._outboxes) == 1
    polite.requests.put_nowait(None)
    await polite.task


async def test_over_the_wire_its_status_names_what_was_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.05)
    rig = Rig()
    worker = Worker(rig.drafter, rig.stepper, Thread(), Silent())
    server = grpc.aio.server(interceptors=[CallInterceptor(Telemetry("draft"))], options=server_options())
    DraftServicer(worker, INFO).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=10.0)
            with pytest.raises(grpc.aio.AioRpcError, match="orchestrator_id: .* within 0.05 s") as ended:
                while await call.read() is not grpc.aio.EOF:
                    pass
            assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        await server.stop(0)


async def test_a_fresh_stream_ends_the_older_one_of_its_link_although_that_is_stuck() -> None:
    """Half-open: nobody reads, nobody hangs up. Other links and other orchestrators keep their sessions."""
    first = Call()
    others = [Call(first), Call(first), Call(first)]
    greetings = [("x", "1"), ("x", "2"), ("y", "1"), ("x", "")]
    for call, (orchestrator_id, link) in zip((first, *others), greetings, strict=True):
        call.requests.put_nowait(wire.draft_request_to_wire([GOOD], orchestrator_id, link))
    await first.settle()
    assert first.rig.drafter.num_sessions == 4
    fresh = Call(first)
    fresh.requests.put_nowait(wire.draft_request_to_wire([], "x", "1"))
    await first.settle()
    assert first.rig.drafter.num_sessions == 3 and not first.task.done(), "its writer is stuck"
    first.requests.put_nowait(wire.draft_request_to_wire([GOOD]))
    await first.settle()
    assert first.rig.drafter.num_sessions == 3, "what still arrives on it is nobody's"
    for call in (first, *others, fresh):
        call.context.open.set()
        call.requests.put_nowait(None)
    with pytest.raises(Unavailable, match="again"):
        await first.task
    await asyncio.gather(*(call.task for call in (*others, fresh)))
    assert first.rig.drafter.num_sessions == 0 and not first.worker._links


async def test_a_link_belongs_to_the_first_message() -> None:
    call = Call()
    call.context.open.set()
    call.requests.put_nowait(wire.draft_request_to_wire([], "x"))
    call.requests.put_nowait(draft_pb2.DraftRequest(link="1"))
    with pytest.raises(InvalidRequest, match="link"):
        await call.task
