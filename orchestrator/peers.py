"""One replica of a pool: dial, greet, read, write, watch, dial again. Knows no session.

What is ready in one turn of the loop travels in one message: `send` only appends, and the writer task takes all there is. A peer that
is silent for `SILENCE_TICKS` ticks is lost; ticks are counted by our own clock, so a stall of this process accuses nobody. A peer that
comes and goes is dialled ever more rarely, and a target counts as up once it has spoken: one whose engine hangs gets no sessions.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc

from orchestrator.discovery.names import DEFAULT_POOL
from orchestrator.toll import Toll
from specdec import terms, wire
from specdec.errors import Mismatch, ProtocolFault, SpecdecError, Unavailable
from specdec.runtime.channels import MAX_MESSAGE_BYTES, open_channel
from specdec.runtime.diagnosis import why
from specdec.runtime.tls import Dialler
from specdec.terms.record import record
from specdec.v1 import draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

TICK_S = 0.125  # peers send a beat at least every second one
SILENCE_TICKS = 7  # ticks without a message until a peer counts as lost: within a second, by three beats that did not come
HUNG_STEP_MS = 10_000  # a step older than this, and than 20 predicted steps, is hung
DIAL_TIMEOUT_S = 5.0
FIRST_BACKOFF_S, LAST_BACKOFF_S = 0.1, 2.0
MISMATCH_BACKOFF_S = 10.0  # a server of another model will not change its mind soon
MAX_OUTBOX = 1 << 18  # commands that may wait for a slow socket before the peer counts as lost; four per session that may run at most
MAX_REQUEST_BYTES = MAX_MESSAGE_BYTES // 4  # of one message: the prompts of many sessions that move at once do not fit into one
log = logging.getLogger(__name__)


@record(frozen=True, slots=True)
class Heard:
    """One message of a peer, decoded. `items` = answers or draft events; `beat` a load report; `faults` broken items."""

    items: tuple[Any, ...]
    beat: Any = None
    rows: int = 0
    engine_us: int = 0
    faults: int = 0


@dataclass(frozen=True, slots=True)
class Dialect:
    """What differs between the two kinds of peers."""

    pool: str
    stub: Callable[[grpc.aio.Channel], Any]
    service: str  # full name
    stream: str  # its method
    ask_info: Callable[[Any], Any]  # stub -> awaitable of a response with `.info`
    open_stream: Callable[[Any], Any]
    encode: Callable[..., Any]  # items, and in the first message also orchestrator_id and link
    decode: Callable[[Any], Heard]
    speaks_first: bool  # sends a beat at once
    trusted: bool  # with our time


def _decode_target(message: target_pb2.VerifyResponse) -> Heard:
    response = wire.verify_response_from_wire(message)
    return Heard(response.answers, response.beat, response.rows, response.engine_us)


def _decode_draft(message: draft_pb2.DraftResponse) -> Heard:
    response = wire.draft_response_from_wire(message)
    return Heard(response.events, response.load, faults=len(response.faults))


TARGET = Dialect(
    pool="target",
    service="specdec.v1.TargetService",
    stream="Verify",
    stub=target_pb2_grpc.TargetServiceStub,
    ask_info=lambda stub: stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest(), timeout=DIAL_TIMEOUT_S),
    open_stream=lambda stub: stub.Verify(),
    encode=wire.verify_request_to_wire,
    decode=_decode_target,
    speaks_first=True,
    trusted=True,
)
DRAFT = Dialect(
    pool="draft",
    service="specdec.v1.DraftService",
    stream="Draft",
    stub=draft_pb2_grpc.DraftServiceStub,
    ask_info=lambda stub: stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest(), timeout=DIAL_TIMEOUT_S),
    open_stream=lambda stub: stub.Draft(),
    encode=wire.draft_request_to_wire,
    decode=_decode_draft,
    speaks_first=False,
    trusted=False,
)


class Listener(Protocol):
    """Hears of a peer, always on the event loop."""

    def accept(self, peer: Peer, info: terms.ModelInfo) -> None:
        """Raises Mismatch to refuse the peer."""

    def up(self, peer: Peer) -> None: ...

    def heard(self, peer: Peer, heard: Heard) -> None: ...

    def down(self, peer: Peer, reason: str) -> None: ...

    def trouble(self, peer: Peer, reason: str) -> None:
        """Could not connect; called once per streak of failures of one kind."""

    def called(self, method: str, seconds: float, code: str) -> None:
        """A call to the peer has ended. `code` = name of its gRPC status."""


class Peer:
    def __init__(self, address: str, dialect: Dialect, orchestrator_id: str, listener: Listener, dialler: Dialler | None = None) -> None:
        """`dialler` None = plain text."""
        self.name, self.dialect, self._dialler = address, dialect, dialler
        self.pool_name = DEFAULT_POOL  # which of the pools of its kind it is in
        self.info: terms.ModelInfo | None = None
        self.beat: Any = None
        self.connected = False
        self._orchestrator_id, self._listener = orchestrator_id, listener
        self._link = secrets.token_hex(8)  # not the address: two peers may lead to one process
        self._outbox: list[Any] = []
        self._wake, self._flushed, self._overflow = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._flushed.set()
        self._up_since = 0.0  # loop time; 0 = this connection was not up yet
        self._heard_in_tick = True
        self._unread = False  # its next message waits for us

    def send(self, item: Any) -> None:
        """Queues an item for the next message. Items for a peer that is down are dropped: `down` told that all is lost."""
        if not self.connected:
            return
        if len(self._outbox) >= MAX_OUTBOX:
            self._overflow.set()
            return
        self._outbox.append(item)
        if len(self._outbox) == 1:  # else the writer knows
            self._flushed.clear()
            self._wake.set()

    async def flushed(self) -> None:
        """Returns when everything that was sent so far is out, or lost."""
        await self._flushed.wait()

    async def run(self) -> None:
        """Keeps the peer connected until cancelled."""
        backoff, told = FIRST_BACKOFF_S, ""
        while True:
            kind, reason, self._up_since = "ended", "the peer ended the stream", 0.0
            try:
                await self._connection()
            except Mismatch as error:
                kind, reason = "mismatch", str(error)
            except (SpecdecError, grpc.aio.AioRpcError, grpc.aio.UsageError, TimeoutError, OSError) as error:
                kind, reason = "lost", _reason(error)
            except asyncio.InvalidStateError:  # what grpc.aio raises for a write on a call that has just ended
                pass
            except Exception as error:  # a defect must not end the one task that dials, nor leave its sessions untold
                log.exception("a connection failed", extra={"pool": self.dialect.pool, "peer": self.name})
                kind, reason = "defect", _reason(error)
            if self._up_since:
                if asyncio.get_running_loop().time() - self._up_since > LAST_BACKOFF_S:
                    backoff = FIRST_BACKOFF_S
                told = ""
                self._listener.down(self, reason)
            elif told != kind:
                told = kind
                tls = None if self._dialler is None else self._dialler.tls
                self._listener.trouble(self, (kind == "lost" and await why(self.name, tls)) or reason)
            pause = MISMATCH_BACKOFF_S if kind == "mismatch" else backoff
            backoff = min(2 * backoff, LAST_BACKOFF_S)
            await asyncio.sleep(pause * (0.5 + random.random() / 2))

    async def _channel(self) -> grpc.aio.Channel:
        if self._dialler is None:
            return open_channel(self.name, direct=True)
        credentials = await asyncio.to_thread(self._dialler.credentials)
        return open_channel(self.name, credentials, self._dialler.tls.server_name, direct=True)

    async def _connection(self) -> None:
        async with await self._channel() as channel:
            stub = self.dialect.stub(channel)
            with self._told("GetModelInfo"):
                self.info, self.beat = wire.model_info_from_wire((await self.dialect.ask_info(stub)).info), None
            self._listener.accept(self, self.info)
            call = self.dialect.open_stream(stub)
            try:
                async with asyncio.timeout(DIAL_TIMEOUT_S):
                    await call.write(self.dialect.encode((), self._orchestrator_id, self._link))
                self._heard_in_tick = True
                if not self.dialect.speaks_first:
                    self._rise()
                with self._told(self.dialect.stream):
                    await self._converse(call)
            finally:
                self.connected = False
                self._outbox.clear()
                self._flushed.set()
                self._overflow.clear()
                call.cancel()

    @contextlib.contextmanager
    def _told(self, method: str) -> Iterator[None]:
        """Around a call: the listener hears how long it took and how it ended. A stream that we leave is CANCELLED."""
        began, code = asyncio.get_running_loop().time(), "OK"
        try:
            yield
        except grpc.aio.AioRpcError as error:
            code = error.code().name
            raise
        except BaseException:
            code = "CANCELLED"
            raise
        finally:
            self._listener.called(f"{self.dialect.service}/{method}", asyncio.get_running_loop().time() - began, code)

    def _rise(self) -> None:
        self.connected, self._up_since = True, asyncio.get_running_loop().time()
        self._listener.up(self)

    async def _converse(self, call: Any) -> None:
        tasks = [asyncio.create_task(part) for part in (self._read(call), self._write(call), self._watch(), self._burst())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        toll, loop = Toll(), asyncio.get_running_loop()
        while (message := await call.read()) is not grpc.aio.EOF:
            if message is None:
                raise ProtocolFault("it sent what is no message")
            self._heard_in_tick, began = True, loop.time()
            heard = self.dialect.decode(message)
            if heard.beat is not None:
                self.beat = heard.beat
            if not self.connected:
                self._check_engine()
                self._rise()
            self._listener.heard(self, heard)
            if not self.dialect.trusted:
                now = loop.time()
                if pause_s := toll.pause_s(now - began, message.ByteSize(), heard.faults > 0, now):
                    await self._leave_unread(pause_s)

    async def _leave_unread(self, seconds: float) -> None:
        self._unread = True
        try:
            await asyncio.sleep(seconds)
        finally:
            self._unread = False

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._outbox:
                items, self._outbox = self._outbox[: wire.MAX_ITEMS], self._outbox[wire.MAX_ITEMS :]
                await self._say(call, items)
            self._flushed.set()

    async def _say(self, call: Any, items: Sequence[Any]) -> None:
        message = self.dialect.encode(items)
        if len(items) > 1 and message.ByteSize() > MAX_REQUEST_BYTES:
            half = len(items) // 2
            await self._say(call, items[:half])
            await self._say(call, items[half:])
        else:
            await call.write(message)

    async def _burst(self) -> None:
        """The writer may be stuck in a write for ever: a peer that shows signs of life need not read."""
        await self._overflow.wait()
        raise Unavailable(f"{MAX_OUTBOX} commands wait for the socket (MAX_OUTBOX)")

    async def _watch(self) -> None:
        silent = 0
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            late = loop.time() > due + TICK_S
            silent = 0 if self._heard_in_tick or self._unread or late else silent + 1
            self._heard_in_tick = False
            if silent >= SILENCE_TICKS:
                raise Unavailable(f"silent for {silent * TICK_S:g} s")
            self._check_engine()

    def _check_engine(self) -> None:
        if isinstance(self.beat, terms.TargetBeat):
            age = self.beat.running_step_ms
            if age > max(HUNG_STEP_MS, 20 * self.beat.predicted_step_ms):
                raise Unavailable(f"its engine step is {age} ms old")


def _reason(error: BaseException) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
