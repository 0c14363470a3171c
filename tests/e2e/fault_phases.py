"""The phases of a round as they look on the wire, and what can happen to a connection at that moment: the rows of the table of faults.

A `Watch` reads every message of one connection. It is armed with rows; when the phase of one of them comes it does that row's harm and is
disarmed. The phases are named after where the round is while its bytes are where the proxy sees them:

    target link   step, moving                  a Step has left and has not arrived; the first Step of another placement
                  queue, engine, prefill, moved it has arrived: behind another one's, alone, a prompt; the first of another placement
                  ahead, close                  a continuation, a farewell on its way
                  result, end                   an answer on its way: tokens, the last ones
    draft link    open, reopen, commit, drafting, proposal
    client link   request, first, middle, last  the question; the first message, tokens, the last message
"""

from __future__ import annotations

import asyncio
import collections
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from specdec.v1 import draft_pb2, generation_pb2, target_pb2
from tests.e2e.frames import Messages
from tests.e2e.network import Connection

TARGET, DRAFT, CLIENT = "target", "draft", "client"
SHORT_S = 0.12  # a stall that nobody need notice
IN_ENGINE_S = 0.0005  # after a Step has arrived

Phase = str
PHASES: dict[str, tuple[Phase, ...]] = {
    TARGET: ("step", "moving", "queue", "engine", "prefill", "moved", "ahead", "close", "result", "end"),
    DRAFT: ("open", "reopen", "commit", "drafting", "proposal"),
    CLIENT: ("request", "first", "middle", "last"),
}
ARRIVED = {"queue", "engine", "prefill", "moved", "drafting"}  # the piece is handed on before the harm is done


def stall(connection: Connection) -> None:
    connection.freeze()
    asyncio.get_running_loop().call_later(SHORT_S, connection.thaw)


def deaf(connection: Connection) -> None:
    """What the client says is held up for a while; what the server says passes."""
    connection.freeze(True)
    asyncio.get_running_loop().call_later(SHORT_S, connection.thaw)


# What is done to the connection. `torn` also lets half of the message through.
FAULTS: dict[str, Callable[[Connection], None]] = {
    "cut": Connection.cut,
    "torn": Connection.cut,
    "close": Connection.close,
    "client forgotten": Connection.forget_client,
    "server forgotten": Connection.forget_server,
    "black hole": Connection.freeze,
    "stall": stall,
    "deaf": deaf,
}
QUICK = ("cut", "torn", "close", "server forgotten", "stall", "deaf")  # for clients, who notice nothing but the end of their connection


@dataclass(frozen=True)
class Row:
    link: str
    phase: Phase
    fault: str

    def __str__(self) -> str:
        return f"{self.link}/{self.phase}: {self.fault}"


def rows(link: str) -> list[Row]:
    faults = QUICK if link == CLIENT else tuple(FAULTS)
    return [Row(link, phase, fault) for phase, fault in itertools.product(PHASES[link], faults)]


@dataclass
class Watch:
    """The tap of one connection. `armed` is shared by the connections of a link."""

    kind: str
    connection: Connection
    armed: Trigger
    outstanding: set[tuple[str, int, int]] = field(default_factory=set)  # rounds without an answer
    streams: dict[bool, Messages] = field(default_factory=lambda: {True: Messages(True), False: Messages(False)})
    _later: Row | None = None

    def passing(self, there: bool, piece: bytes) -> bytes:
        phases: set[Phase] = set()
        for stream, content in self.streams[there].feed(piece):
            phases |= set(self._phases(stream, there, content))
        row = next((row for row in self.armed.rows if row.phase in phases), None)
        if row is None:
            return piece
        if row.phase in ARRIVED:
            self._later = row
            return piece
        if row.fault == "torn":
            (self.connection.server if there else self.connection.client).write(piece[: len(piece) // 2])
        self.armed.fire(row, self.connection)
        return piece if row.fault in ("stall", "deaf", "black hole") else b""

    def passed(self, there: bool) -> None:
        if self._later is None or not there:
            return
        self._later, row = None, self._later
        asyncio.get_running_loop().call_later(IN_ENGINE_S, self._strike, row)

    def _strike(self, row: Row) -> None:
        """Unless it is over meanwhile."""
        open_ = self.kind == DRAFT or bool(self.outstanding)
        if row in self.armed.rows and open_ and not self.connection.dead:
            self.armed.fire(row, self.connection)

    def _phases(self, stream: int, there: bool, content: bytes) -> Iterator[Phase]:
        if self.kind == CLIENT:
            yield from self._of_client(there, content)
        elif stream == 1:  # GetModelInfo
            return
        elif self.kind == TARGET:
            yield from self._to_target(target_pb2.VerifyRequest.FromString(content)) if there else self._from_target(content)
        elif there:
            yield from self._to_draft(draft_pb2.DraftRequest.FromString(content))
        elif any(event.HasField("proposal") for event in draft_pb2.DraftResponse.FromString(content).events):
            yield "proposal"

    def _to_target(self, request: target_pb2.VerifyRequest) -> Iterator[Phase]:
        busy = bool(self.outstanding)
        for item in request.items:
            if item.HasField("step"):
                step = item.step
                self.outstanding.add((step.session_id, step.epoch, step.round))
                self.armed.remaining_ms.append(step.remaining_ms)
                if step.HasField("begin"):
                    yield from ("moving", "moved") if step.epoch > 1 else ("prefill",)
                else:
                    yield "step"
                    yield "queue" if busy else "engine"
            elif item.HasField("ahead"):
                yield "ahead"
            else:
                yield "close"

    def _from_target(self, content: bytes) -> Iterator[Phase]:
        for answer in target_pb2.VerifyResponse.FromString(content).answers:
            self.outstanding.discard((answer.session_id, answer.epoch, answer.round))
            if answer.HasField("result"):
                yield "end" if answer.result.finish else "result"

    def _to_draft(self, request: draft_pb2.DraftRequest) -> Iterator[Phase]:
        for command in request.commands:
            if command.HasField("open"):
                yield "open"
                if command.open.epoch > 1:
                    yield "reopen"
            elif command.HasField("commit"):
                yield from ("commit", "drafting")

    def _of_client(self, there: bool, content: bytes) -> Iterator[Phase]:
        if there:
            yield "request"
            return
        event: Any = generation_pb2.GenerateResponse.FromString(content).WhichOneof("event")
        yield {"started": "first", "delta": "middle", "finished": "last"}.get(event, "first")


class Trigger:
    """Rows that wait for their moment; the first whose phase comes is taken, and the others wait no more."""

    def __init__(self) -> None:
        self.rows: tuple[Row, ...] = ()
        self.fired = asyncio.Event()
        self.struck: tuple[Row, Connection] | None = None
        self.remaining_ms: collections.deque[int] = collections.deque(maxlen=1000)  # of the Steps that passed

    def arm(self, *rows: Row) -> None:
        self.rows = rows
        self.fired.clear()

    def fire(self, row: Row, connection: Connection) -> None:
        self.rows, self.struck = (), (row, connection)
        self.fired.set()
        FAULTS[row.fault](connection)

    async def strikes(self, seconds: float) -> tuple[Row, Connection] | None:
        """What was struck by which row; None when no phase came in time, and then nothing is armed any more."""
        try:
            await asyncio.wait_for(self.fired.wait(), seconds)
        except TimeoutError:
            self.rows = ()
            return None
        return self.struck
