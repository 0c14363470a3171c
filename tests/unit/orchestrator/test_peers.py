"""A peer against real gRPC servers in this process: batching, silence, stalls, dialling, refusals, bounds. Times are shortened."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc.aio
import pytest

from orchestrator import peers
from orchestrator.peers import TARGET, Dialect, Heard, Peer
from orchestrator.toll import BURST_S, FAIR
from specdec import terms, wire
from specdec.errors import Mismatch, Unavailable
from specdec.runtime.channels import server_options
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.fakes_driver import model_info
from tests.waiting import until

pytestmark = pytest.mark.timeout(30)
TICK_S = 0.05
BEAT = terms.TargetBeat(0, 0, 0, 100, 0, 1)
BEGIN = terms.Begin(prompt_length=1, sampling=terms.SamplingParams(max_tokens=5), seed=1)


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "TICK_S", TICK_S)
    monkeypatch.setattr(peers, "MISMATCH_BACKOFF_S", 0.02)


@dataclass
class Server(target_pb2_grpc.TargetServiceServicer):
    """A target that greets with a beat, beats on, and answers every Step with one token."""

    info: terms.ModelInfo = field(default_factory=model_info)
    beat: terms.TargetBeat = BEAT
    mute: bool = False  # no beats after the first
    hangs_up: bool = False  # after the first
    deaf: bool = False  # reads the Hello and nothing more
    dials: int = 0
    messages: list[wire.VerifyRequest] = field(default_factory=list)
    greetings: list[wire.VerifyRequest] = field(default_factory=list)

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[int]:
        server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        port = server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(self.info))

    async def Verify(self, requests: Any, context: Any) -> None:
        self.dials += 1
        self.greetings.append(wire.verify_request_from_wire(await context.read()))
        await context.write(wire.verify_response_to_wire((), beat=self.beat))
        if self.hangs_up:
            return
        lock = asyncio.Lock()

        async def beats() -> None:
            while True:
                await asyncio.sleep(TICK_S / 2)
                if not self.mute:
                    async with lock:
                        await context.write(wire.verify_response_to_wire((), beat=self.beat))

        task = asyncio.create_task(beats())
        try:
            while self.deaf or (message := await context.read()) is not grpc.aio.EOF:
                if self.deaf:
                    await asyncio.sleep(1)
                    continue
                request = wire.verify_request_from_wire(message)
                self.messages.append(request)
                answers = [
                    terms.Answer(i.session_id, i.epoch, i.round, terms.Result(len(i.tokens), len(i.tokens), 0, 0, (7,)))
                    for i in request.items
                    if isinstance(i, terms.Step)
                ]
                async with lock:
                    await context.write(wire.verify_response_to_wire(answers))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@dataclass
class Ears:
    """A listener that writes down what it hears."""

    told: list[str] = field(default_factory=list)
    calls: list[tuple[str, str]] = field(default_factory=list)
    answer: Callable[[Peer, Heard], None] = lambda peer, heard: None

    def accept(self, peer: Peer, info: terms.ModelInfo) -> None:
        if info.model != "scripted":
            raise Mismatch(f"{info.model} is another model")

    def up(self, peer: Peer) -> None:
        self.told.append("up")

    def down(self, peer: Peer, reason: str) -> None:
        self.told.append(f"down: {reason}")

    def called(self, method: str, seconds: float, code: str) -> None:
        self.calls.append((method, code))

    def trouble(self, peer: Peer, reason: str) -> None:
        self.told.append(f"trouble: {reason}")

    def heard(self, peer: Peer, heard: Heard) -> None:
        self.answer(peer, heard)


@contextlib.asynccontextmanager
async def dialled(port: int, ears: Ears, dialect: Dialect = TARGET) -> AsyncIterator[Peer]:
    peer = Peer(f"127.0.0.1:{port}", dialect, "o", ears)
    task = asyncio.create_task(peer.run())
    try:
        yield peer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def step(name: str, round_: int = 1, length: int = 1) -> terms.Step:
    return terms.Step(name, 1, round_, 0, 0, (1,) * length, 0, 1000, begin=BEGIN)


# --- batching ---------------------------------------------------------------------------------------------------------


async def test_what_one_turn_sends_travels_together() -> None:
    """Eight answers in one message, a Step for each in one message back; round after round."""
    server, ears = Server(), Ears()

    def next_round(peer: Peer, heard: Heard) -> None:
        for answer in heard.items:
            peer.send(step(answer.session_id, answer.round + 1))

    ears.answer = next_round
    async with server.serving() as port, dialled(port, ears) as peer:
        await until(lambda: peer.connected)
        for i in range(8):
            peer.send(step(f"s{i}"))
        await until(lambda: len(server.messages) >= 20)
    assert ears.calls == [("specdec.v1.TargetService/GetModelInfo", "OK"), ("specdec.v1.TargetService/Verify", "CANCELLED")]
    assert [len(message.items) for message in server.messages[:20]] == [8] * 20


async def test_a_link_keeps_its_name_when_it_is_dialled_again_and_no_two_have_the_same() -> None:
    server = Server(hangs_up=True)
    async with server.serving() as port, dialled(port, Ears()):
        await until(lambda: len(server.greetings) >= 2)
        server.hangs_up = False
        await until(lambda: len(server.greetings) >= 3)
        async with dialled(port, Ears()) as other:
            await until(lambda: other.connected)
    names = [greeting.link for greeting in server.greetings]
    assert names[0] and names[:-1] == names[:1] * (len(names) - 1) and names[-1] not in ("", names[0])


async def test_messages_stay_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "MAX_REQUEST_BYTES", 1000)
    server = Server()
    async with server.serving() as port, dialled(port, Ears()) as peer:
        await until(lambda: peer.connected)
        for i in range(16):
            peer.send(step(f"s{i}", length=2000 if i == 5 else 200))
        await asyncio.wait_for(peer.flushed(), 5)
        await until(lambda: sum(len(m.items) for m in server.messages) == 16)
    assert [item.session_id for m in server.messages for item in m.items] == [f"s{i}" for i in range(16)]
    assert max(len(m.items) for m in server.messages) <= 4


async def test_a_message_holds_so_many_items(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_ITEMS", 3)
    server = Server()
    async with server.serving() as port, dialled(port, Ears()) as peer:
        await until(lambda: peer.connected)
        for i in range(8):
            peer.send(step(f"s{i}"))
        await until(lambda: sum(len(m.items) for m in server.messages) == 8)
    assert [len(m.items) for m in server.messages] == [3, 3, 2]


async def test_a_peer_that_does_not_read_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """It beats on, so it is not silent; what waits for it is bounded all the same."""
    monkeypatch.setattr(peers, "MAX_OUTBOX", 50)
    server, ears, most = Server(deaf=True), Ears(), 0
    async with server.serving() as port, dialled(port, ears) as peer:
        await until(lambda: peer.connected)
        for i in range(3000):
            peer.send(step(f"s{i}", length=20_000))
            most = max(most, len(peer._outbox))
            await asyncio.sleep(0)
            if len(ears.told) > 1:
                break
        assert not peer._outbox and not peer._overflow.is_set(), "the next connection is no part of it"
    assert "MAX_OUTBOX" in ears.told[1] and most <= 50


# --- a share of our time -----------------------------------------------------------------------------------------------


async def test_who_is_not_trusted_waits_for_its_next_message_and_is_not_taken_for_silent() -> None:
    """Each answer takes us long and asks for another. What is left unread for longer than a silence ends nothing."""
    server, ears, work_s, begun = Server(), Ears(), 0.5, 0.0
    took: list[float] = []

    def dear(peer: Peer, heard: Heard) -> None:
        if heard.items:
            time.sleep(work_s)  # noqa: ASYNC251 - work, not a wait
            took.append(time.monotonic() - begun)
            peer.send(step("a", len(took) + 1))

    ears.answer = dear
    async with server.serving() as port, dialled(port, ears, replace(TARGET, trusted=False)) as peer:
        await until(lambda: peer.connected)
        begun = time.monotonic()
        peer.send(step("a"))
        await until(lambda: len(took) == 3)
    assert work_s > peers.SILENCE_TICKS * TICK_S
    assert ears.told == ["up"]
    assert took[-1] >= (len(took) - 1) * work_s * FAIR + work_s - BURST_S


# --- life and death ---------------------------------------------------------------------------------------------------


async def test_silence_is_told_after_some_ticks() -> None:
    server, ears = Server(), Ears()
    async with server.serving() as port, dialled(port, ears) as peer:
        await until(lambda: peer.connected)
        await asyncio.sleep(8 * TICK_S)
        assert ears.told == ["up"]
        server.mute = True
        began = time.monotonic()
        await until(lambda: len(ears.told) > 1)
        assert (peers.SILENCE_TICKS - 1) * TICK_S < time.monotonic() - began < 20 * TICK_S
    assert "silent" in ears.told[1]


async def stalls(peer: Peer) -> None:
    """Many ticks of silence in which this very loop is stuck."""
    tick_s = peers.TICK_S = 0.02
    watching = asyncio.create_task(peer._watch())
    try:
        for _ in range(2 * peers.SILENCE_TICKS + 2):
            peer._heard_in_tick = False
            await asyncio.sleep(0)
            time.sleep(2.2 * tick_s)  # noqa: ASYNC251
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        if watching.done():
            watching.result()
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def test_our_own_stalls_accuse_nobody() -> None:
    await stalls(Peer("h:1", TARGET, "o", Ears()))


async def test_twin_a_watch_that_believes_its_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    class Never:
        def time(self) -> float:
            return 0.0

    monkeypatch.setattr(peers.asyncio, "get_running_loop", Never)
    with pytest.raises(Unavailable, match="silent"):
        await stalls(Peer("h:1", TARGET, "o", Ears()))


async def test_F82_a_server_that_returns_is_found_within_two_seconds() -> None:
    ears = Ears()
    async with Server().serving() as port, dialled(port, ears) as peer:
        await until(lambda: peer.connected)
        port_again = port
    async with dialled(port_again, ears) as peer:
        await until(lambda: len(ears.told) > 1)
        await asyncio.sleep(0.7)  # several failures: the pauses have grown
        async with Server().serving(port_again):
            await until(lambda: peer.connected, 2.5)
    assert sum(told.startswith("trouble") for told in ears.told) == 1  # told once, not at every try


async def test_what_comes_and_goes_is_dialled_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(hangs_up=True)
    async with server.serving() as port, dialled(port, Ears()):
        await asyncio.sleep(1.0)
    assert 2 <= server.dials <= 5


async def test_a_hanging_engine_gets_no_sessions() -> None:
    server, ears = Server(beat=replace(BEAT, running_step_ms=60_000)), Ears()
    async with server.serving() as port, dialled(port, ears) as peer:
        await until(lambda: server.dials >= 2)
        assert "up" not in ears.told and "engine step" in ears.told[0]
        server.beat = BEAT
        await until(lambda: peer.connected)
        server.beat = replace(BEAT, running_step_ms=60_000)
        await until(lambda: not peer.connected)
    assert [told.split(":")[0] for told in ears.told] == ["trouble", "up", "down"]


def test_a_step_that_was_predicted_to_take_long_is_not_hung() -> None:
    peer = Peer("127.0.0.1:1", TARGET, "o", Ears())
    peer.beat = replace(BEAT, predicted_step_ms=1000, running_step_ms=20_000)
    peer._check_engine()
    peer.beat = replace(peer.beat, running_step_ms=20_001)
    with pytest.raises(Unavailable, match="20001 ms old"):
        peer._check_engine()


# --- F49: another model -----------------------------------------------------------------------------------------------


async def test_F49_another_model_stays_out_and_is_told_once() -> None:
    """A server that is rolled to another model while we are connected, and back."""
    ears = Ears()
    peer = None
    async with contextlib.AsyncExitStack() as stack:
        async with Server().serving() as port:
            peer = await stack.enter_async_context(dialled(port, ears))
            await until(lambda: peer.connected)
        await until(lambda: any("trouble" in told for told in ears.told))
        other = Server(info=model_info(model="another"))
        async with other.serving(port):
            await until(lambda: any("another" in told for told in ears.told))
            await asyncio.sleep(0.2)
            assert other.dials == 0 and not peer.connected
        async with Server().serving(port):
            await until(lambda: peer.connected)
    assert sum("another model" in told for told in ears.told) == 1
    assert ears.told.count("up") == 2


async def test_F49_twin_a_listener_that_takes_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ears, "accept", lambda self, peer, info: None)
    with pytest.raises((AssertionError, TimeoutError)):
        await _shortened(test_F49_another_model_stays_out_and_is_told_once, 0.8)


async def _shortened(test: Callable[[], Awaitable[None]], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        await test()


async def test_F149_after_a_long_outage_a_peer_is_found_again_within_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pauses between two dials are as long as they ever get, as after a minute without an answer. They are cut short by chance, so the
    longest is LAST_BACKOFF_S; the rest of the bound is for a slow machine."""
    monkeypatch.setattr(peers, "FIRST_BACKOFF_S", peers.LAST_BACKOFF_S)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ears = Ears()
    async with dialled(port, ears) as peer:
        await until(lambda: ears.told)
        assert ears.told[0].startswith("trouble")
        async with Server().serving(port):
            opened = time.monotonic()
            await until(lambda: peer.connected, 15)
            assert time.monotonic() - opened < peers.LAST_BACKOFF_S + 3
