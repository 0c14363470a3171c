"""Bad networks for tests: a TCP proxy whose wire can be made long, narrow, deaf or dead while connections run. On the test's event loop.

    link = Link("127.0.0.1:7000")
    async with link.serving() as name:      # connect to `name` instead
        link.there.delay_s = 0.05           # one way; `there` leads to the server, `back` to the client
        link.back.bytes_per_s = 4096
        link.cut()                          # RST to both sides
        link.forget_client()                # half-open: the server gets an RST, the client hears nothing ever after
        link.freeze()                       # a black hole for the connections there are; `partition` for those to come as well

`counts` tells how often each was done to a connection that was open. A `Tap` sees the bytes of a connection before they go on and may do
all this at a moment of its choosing.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Protocol

CHUNK_BYTES = 65_536
MAX_CHUNKS = 1024  # on the wire, each way; then the sender is held, as by a full window
SLICE_S = 0.02  # a narrow wire hands on at least so much time's worth at once
RESET = struct.pack("ii", 1, 0)  # SO_LINGER of no time: closing sends RST


@dataclass
class Way:
    """One direction of a link. Every byte arrives `delay_s` later, in order, at most `bytes_per_s`. `drop_after`: once so many more bytes
    have passed, the connection that carried the last one is cut, in the middle of whatever it was saying."""

    delay_s: float = 0.0
    bytes_per_s: float | None = None
    drop_after: int | None = None
    bytes: int = 0


class Tap(Protocol):
    """What watches one connection."""

    def passing(self, there: bool, piece: bytes) -> bytes:
        """Before a piece goes on; returns what of it does. May act on the connection."""

    def passed(self, there: bool) -> None:
        """The piece is written."""


class Silent:
    """Sees nothing."""

    def passing(self, there: bool, piece: bytes) -> bytes:
        return piece

    def passed(self, there: bool) -> None:
        pass


@dataclass(eq=False)
class Connection:
    """A client's socket and the one to the server."""

    link: Link
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter
    flowing: dict[bool, asyncio.Event] = field(default_factory=lambda: {True: asyncio.Event(), False: asyncio.Event()})
    tap: Tap = field(default_factory=Silent)
    dead: bool = False  # nothing goes on any more, whatever arrives

    def __post_init__(self) -> None:
        self.thaw()

    def cut(self) -> None:
        self.link.counts["cut"] += 1
        self.dead = True
        self.thaw()
        reset(self.client)
        reset(self.server)

    def close(self) -> None:
        """FIN to both."""
        self.link.counts["close"] += 1
        self.dead = True
        self.thaw()
        self.client.close()
        self.server.close()

    def forget_client(self) -> None:
        self.link.counts["half-open client"] += 1
        self.dead = True
        reset(self.server)

    def forget_server(self) -> None:
        self.link.counts["half-open server"] += 1
        self.dead = True
        reset(self.client)

    def freeze(self, *ways: bool) -> None:
        self.link.counts["freeze"] += 1
        for there in ways or (True, False):
            self.flowing[there].clear()

    def thaw(self) -> None:
        for event in self.flowing.values():
            event.set()


def reset(writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError, AttributeError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()


class Link:
    """From a port of its own to `to`, host:port. `tap` makes the watcher of each new connection."""

    def __init__(self, to: str, tap: Callable[[Connection], Tap] | None = None) -> None:
        host, _, port = to.rpartition(":")
        self.to = host, int(port)
        self.there, self.back = Way(), Way()
        self.connections: set[Connection] = set()
        self.counts: Counter[str] = Counter()
        self._tap = tap
        self._partitioned = self._refusing = False
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """host:port. At the end every connection is cut."""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self.heal()
            self.cut()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- trouble, for the connections there are -----------------------------------------------------------------------

    def cut(self) -> None:
        self._each(Connection.cut)

    def close(self) -> None:
        self._each(Connection.close)

    def forget_client(self) -> None:
        self._each(Connection.forget_client)

    def forget_server(self) -> None:
        self._each(Connection.forget_server)

    def freeze(self) -> None:
        self._each(Connection.freeze)

    def thaw(self) -> None:
        self._each(Connection.thaw)

    def _each(self, act: Callable[[Connection], None]) -> None:
        for connection in list(self.connections):
            act(connection)

    # --- and for those to come ----------------------------------------------------------------------------------------

    def partition(self) -> None:
        """Nothing passes until `heal`; who connects finds a port that takes the connection and says nothing."""
        self._partitioned = True
        self.freeze()

    def refuse(self) -> None:
        """All connections are cut, and those to come at once."""
        self._refusing = True
        self.cut()

    def heal(self) -> None:
        """Whoever was left with half a connection learns of it."""
        self._partitioned = self._refusing = False
        self.thaw()
        for connection in [one for one in self.connections if one.dead]:
            connection.cut()

    # --- bytes --------------------------------------------------------------------------------------------------------

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection(*self.to)
        except OSError:
            return reset(writer)
        connection = Connection(self, writer, there_writer)
        for one in (writer, there_writer):
            one.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tap is not None:
            connection.tap = self._tap(connection)
        if self._refusing:
            return connection.cut()
        self.counts["connections"] += 1
        self.connections.add(connection)
        if self._partitioned:
            connection.freeze()
        task = asyncio.ensure_future(self._until_over(connection, reader, there_reader))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_over(self, connection: Connection, client: asyncio.StreamReader, server: asyncio.StreamReader) -> None:
        there, back = (True, client, connection.server), (False, server, connection.client)
        try:
            await asyncio.gather(self._pump(connection, *there), self._pump(connection, *back))
        finally:
            self.connections.discard(connection)
            for writer in (connection.client, connection.server):
                writer.transport.abort()

    async def _pump(self, connection: Connection, there: bool, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Reads ahead of what is written, as a long wire does."""
        wire: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(MAX_CHUNKS)
        writing = asyncio.ensure_future(self._write(connection, there, wire, writer))
        way = self.there if there else self.back
        now = asyncio.get_running_loop().time
        try:
            piece = b"."
            while piece:
                try:
                    piece = await reader.read(CHUNK_BYTES)
                except OSError:
                    piece = b""
                await wire.put((now() + way.delay_s, piece))
            await writing
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    async def _write(
        self, connection: Connection, there: bool, wire: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter
    ) -> None:
        """An empty piece is the end of the direction. A dead connection swallows what comes."""
        way = self.there if there else self.back
        now = asyncio.get_running_loop().time
        while True:
            due, piece = await wire.get()
            if (left := due - now()) > 0:
                await asyncio.sleep(left)
            if not piece:
                break
            await connection.flowing[there].wait()
            piece = connection.tap.passing(there, piece) if not connection.dead else b""
            await connection.flowing[there].wait()  # the tap may have stopped it
            with contextlib.suppress(OSError, RuntimeError):
                await self._hand_on(connection, way, piece, writer)
                if not connection.dead:
                    connection.tap.passed(there)
        if not connection.dead:
            with contextlib.suppress(OSError, RuntimeError):
                writer.write_eof()

    async def _hand_on(self, connection: Connection, way: Way, piece: bytes, writer: asyncio.StreamWriter) -> None:
        while piece and not connection.dead and not writer.is_closing():
            size = len(piece)
            if way.bytes_per_s is not None:
                size = min(size, max(1, int(way.bytes_per_s * SLICE_S)))
            if way.drop_after is not None:
                size = min(size, way.drop_after)
                way.drop_after -= size
            part, piece = piece[:size], piece[size:]
            writer.write(part)
            await writer.drain()
            way.bytes += size
            if way.drop_after == 0:
                way.drop_after = None
                await asyncio.sleep(0)
                connection.cut()
            elif way.bytes_per_s is not None:
                await asyncio.sleep(size / way.bytes_per_s)
