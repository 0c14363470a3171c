"""A peer and its connections, one after the other, without a server: streams are played by hand, pauses are written down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator import peers
from orchestrator.peers import FIRST_BACKOFF_S, LAST_BACKOFF_S, TARGET, Heard, Peer
from specdec import terms, wire
from specdec.errors import Mismatch, Unavailable
from specdec.v1 import target_pb2
from tests.fakes_driver import model_info
from tests.unit.orchestrator.test_peers import BEAT, Ears, step
from tests.waiting import until

pytestmark = pytest.mark.timeout(30)


class Call:
    """A target's stream. Writes go through while `open_` is set."""

    def __init__(self) -> None:
        self.written: list[Any] = []
        self.replies = asyncio.Queue[Any]()
        self.open_ = asyncio.Event()
        self.open_.set()
        self.cancelled = False

    async def write(self, message: Any) -> None:
        await self.open_.wait()
        self.written.append(message)

    async def read(self) -> Any:
        return await self.replies.get()

    def cancel(self) -> None:
        self.cancelled = True

    def says(self, *answers: terms.Answer, beat: terms.TargetBeat | None = None) -> None:
        self.replies.put_nowait(wire.verify_response_to_wire(answers, beat=beat))


def made(call: Call, ears: Ears | None = None) -> Peer:
    async def info(stub: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(model_info()))

    return Peer("h:1", replace(TARGET, ask_info=info, open_stream=lambda stub: call), "o", ears or Ears())


@contextlib.asynccontextmanager
async def dialled(peer: Peer) -> AsyncIterator[asyncio.Task[None]]:
    connection = asyncio.create_task(peer._connection())
    try:
        yield connection
    finally:
        connection.cancel()
        await asyncio.gather(connection, return_exceptions=True)


async def test_what_a_replica_said_before_it_was_dialled_again_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine hung and the process was started again: it may take its time for its first word."""
    monkeypatch.setattr(peers, "TICK_S", 0.01)
    peer = made(call := Call())
    peer.beat = replace(BEAT, running_step_ms=60_000)
    async with dialled(peer) as connection:
        await asyncio.wait([connection], timeout=3 * peers.TICK_S)
        assert not connection.done() and peer.beat is None
        call.says(beat=BEAT)
        await until(lambda: peer.connected)
        assert peer.beat == BEAT


async def test_what_is_sent_waits_for_the_socket_and_is_lost_with_it() -> None:
    peer = made(call := Call())
    peer.send(step("nobody"))
    await asyncio.wait_for(peer.flushed(), 5)  # nobody is there to hear it
    async with dialled(peer):
        call.says(beat=BEAT)
        await until(lambda: peer.connected)
        assert len(call.written) == 1, "the Hello alone"
        call.open_.clear()
        for name in "ab":
            peer.send(step(name))
        flushed = asyncio.create_task(peer.flushed())
        await asyncio.sleep(0.01)
        assert not flushed.done()
        call.open_.set()
        await asyncio.wait_for(flushed, 5)
        assert [item.session_id for item in wire.verify_request_from_wire(call.written[1]).items] == ["a", "b"]
        call.open_.clear()
        peer.send(step("c"))
        await asyncio.sleep(0.01)
        peer.send(step("d"))
        peer._overflow.set()
    assert not peer.connected and peer._outbox == [] and not peer._overflow.is_set() and call.cancelled
    await asyncio.wait_for(peer.flushed(), 5)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_answer_without_a_beat_says_nothing_of_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target is read as fast as it speaks."""
    monkeypatch.setattr(peers, "Toll", lambda: None)
    heard: list[Any] = []
    ears = Ears(answer=lambda peer, told: heard.append((told.items, peer.beat)))
    peer = made(call := Call(), ears)
    async with dialled(peer):
        call.says(beat=BEAT)
        call.says(terms.Answer("a", 1, 1, terms.Expired()))
        await until(lambda: len(heard) == 2)
    assert [beat for _, beat in heard] == [BEAT, BEAT] and len(heard[1][0]) == 1


async def test_who_does_not_take_the_hello_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "DIAL_TIMEOUT_S", 0.01)
    peer = made(call := Call())
    call.open_.clear()
    async with dialled(peer) as connection:
        await asyncio.wait([connection], timeout=5)
        assert isinstance(connection.exception(), TimeoutError)
    assert call.cancelled and call.written == []


async def test_a_draft_is_up_at_once_and_read_as_fast_as_it_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it says costs our time, and broken items more than others. While it waits for that it is not silent."""
    tolls: list[tuple[int, bool]] = []
    waits = asyncio.Event()

    class Toll:
        def pause_s(self, seconds: float, size: int, faulty: bool, now_s: float) -> float:
            tolls.append((size, faulty))
            return 30.0 if faulty else 0.0

    async def sleep(seconds: float) -> None:
        await (waits.wait() if seconds == 30.0 else real_sleep(seconds))

    real_sleep = asyncio.sleep
    monkeypatch.setattr(peers, "Toll", Toll)
    monkeypatch.setattr(peers.asyncio, "sleep", sleep)
    ears, call = Ears(), Call()
    peer = made(call, ears)
    peer.dialect = replace(peers.DRAFT, ask_info=peer.dialect.ask_info, open_stream=lambda stub: call, decode=lambda message: message.heard)
    async with dialled(peer):
        await until(lambda: peer.connected)
        assert ears.told == ["up"]
        for size, faults in ((7, 0), (8, 2), (9, 0)):
            call.replies.put_nowait(SimpleNamespace(ByteSize=lambda size=size: size, heard=Heard((), faults=faults)))
        await until(lambda: len(tolls) == 2)
        assert peer._unread and call.replies.qsize() == 1
        waits.set()
        await until(lambda: len(tolls) == 3)
        assert tolls == [(7, False), (8, True), (9, False)] and not peer._unread


async def test_how_a_call_ended_is_told() -> None:
    ears = Ears()
    peer = made(Call(), ears)
    refused = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "gone")

    async def info(stub: Any) -> Any:
        raise refused

    peer.dialect = replace(peer.dialect, ask_info=info)
    with pytest.raises(grpc.aio.AioRpcError):
        await peer._connection()
    peer = made(call := Call(), ears)
    async with dialled(peer):
        call.says(beat=BEAT)
        call.replies.put_nowait(grpc.aio.EOF)
        await until(lambda: len(ears.calls) == 3)
    peer = made(call := Call(), ears)
    async with dialled(peer):
        call.says(beat=BEAT)
        await until(lambda: peer.connected)
    info_, verify = "specdec.v1.TargetService/GetModelInfo", "specdec.v1.TargetService/Verify"
    assert ears.calls == [(info_, "UNAVAILABLE"), (info_, "OK"), (verify, "OK"), (info_, "OK"), (verify, "CANCELLED")]


async def test_replicas_are_dialled_past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Any] = []
    monkeypatch.setattr(peers, "open_channel", lambda *args, **more: opened.append((args, more)))
    await Peer("h:1", TARGET, "o", Ears())._channel()
    dialler: Any = SimpleNamespace(credentials=lambda: "ours", tls=SimpleNamespace(server_name="theirs"))
    await Peer("h:1", TARGET, "o", Ears(), dialler)._channel()
    assert opened == [(("h:1",), {"direct": True}), (("h:1", "ours", "theirs"), {"direct": True})]


async def test_pauses_between_connections_and_what_is_told_of_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each streak of one kind of trouble is told once. The pauses grow until a connection has lasted."""
    ears, pauses, asked = Ears(), list[float](), list[str]()
    peer = Peer("h:1", TARGET, "o", ears)
    lost, ended = Unavailable("gone"), asyncio.InvalidStateError()
    other, defect = Mismatch("another model"), RuntimeError("a defect")
    script: list[tuple[Exception | None, float]] = [
        *((error, 0.0) for error in (lost, lost, other, other)),
        (None, 0.1),
        *((error, 0.0) for error in (lost, lost, None, ended, defect)),
        (grpc.aio.UsageError("odd"), LAST_BACKOFF_S + 0.1),
        (lost, 0.0),
        (None, 0.1),
        (lost, 0.0),
    ]

    async def connection() -> None:
        if not script:
            raise asyncio.CancelledError
        error, lasted_s = script.pop(0)
        if lasted_s:
            peer._up_since = asyncio.get_running_loop().time() - lasted_s
        if error is not None:
            raise error

    async def why(name: str, tls: Any) -> str:
        asked.append(name)
        return "nobody answers" if len(asked) == 1 else ""

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(peer, "_connection", connection)
    monkeypatch.setattr(peers, "why", why)
    monkeypatch.setattr(peers.random, "random", lambda: 1.0)
    monkeypatch.setattr(peers.asyncio, "sleep", sleep)
    with caplog.at_level(logging.ERROR), pytest.raises(asyncio.CancelledError):
        await peer.run()
    assert ears.told == [
        "trouble: nobody answers",
        "trouble: another model",
        "down: the peer ended the stream",
        "trouble: gone",
        "trouble: the peer ended the stream",
        "trouble: a defect",
        "down: odd",
        "trouble: gone",
        "down: the peer ended the stream",
        "trouble: gone",
    ]
    assert asked == ["h:1"] * 4, "whoever told us why it does not want us is not asked again"
    grown = [FIRST_BACKOFF_S * 2**power for power in range(5)]
    wrong = [peers.MISMATCH_BACKOFF_S] * 2
    assert pauses == [*grown[:2], *wrong, grown[4], *[LAST_BACKOFF_S] * 5, *grown[:4]]
    assert [record.getMessage() for record in caplog.records] == ["a connection failed"]
