"""As much of HTTP/2 (RFC 9113) as it takes to open many gRPC streams on one connection and read what they say, at a few microseconds a
message: the side that makes the load must not be the one that caps. Not a client for anything else: it never fills a window of its own,
compresses no header and reads none.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_STREAM, ACK, END_HEADERS = 0x1, 0x1, 0x4
MOST = (1 << 31) - 1
FIRST_WINDOW = 65_535
MAX_FRAME = 1 << 20

Listener = Callable[[bytes | None], None]
"""Hears of each message of its stream; None = the stream is over."""


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload


def headers(path: str, authority: str) -> bytes:
    """A gRPC request's, as literals without indexing (RFC 7541, 6.2.2)."""
    fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": authority, "te": "trailers"}
    fields["content-type"] = "application/grpc"
    return b"".join(bytes((0, len(name))) + name.encode() + bytes((len(value),)) + value.encode() for name, value in fields.items())


class Connection(asyncio.Protocol):
    """`call` opens a stream with one message and ends its own side."""

    def __init__(self, path: str, authority: str) -> None:
        self._headers = headers(path, authority)
        self._next, self._rest = 1, b""
        self._streams: dict[int, Listener] = {}
        self._partial: dict[int, bytes] = {}
        self.trailers = b""  # the newest block of headers that ended a stream, as it came
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # a stream's, since that is what was asked for
        settings = struct.pack(">HIHIHI", 1, 0, 4, MOST, 5, MAX_FRAME)  # no header table, stream window, frame size
        window = struct.pack(">I", MOST - FIRST_WINDOW)
        self._send(PREFACE + frame(SETTINGS, 0, 0, settings) + frame(WINDOW_UPDATE, 0, 0, window))

    def connection_lost(self, error: Exception | None) -> None:
        streams, self._streams, self._transport = self._streams, {}, None
        for listener in streams.values():
            listener(None)

    @property
    def lost(self) -> bool:
        return self._transport is None

    def call(self, message: bytes, listener: Listener) -> int:
        stream, self._next = self._next, self._next + 2
        self._streams[stream] = listener
        data = b"\0" + struct.pack(">I", len(message)) + message
        self._send(frame(HEADERS, END_HEADERS, stream, self._headers) + frame(DATA, END_STREAM, stream, data))
        return stream

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            if end - at < 9 + length:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            self._frame(kind, flags, stream, data[at + 9 : at + 9 + length])
            at += 9 + length
        self._rest = data[at:]

    def _frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            listener = self._streams.get(stream)
            if listener is not None:
                self._messages(stream, listener, payload)
        elif kind == HEADERS and flags & END_STREAM:
            self.trailers = payload
        elif kind == SETTINGS and not flags & ACK:
            self._send(frame(SETTINGS, ACK, 0, b""))
        elif kind == PING and not flags & ACK:
            self._send(frame(PING, ACK, 0, payload))
        elif kind == GOAWAY:
            self.close()
        if (kind == RST_STREAM or (kind in (DATA, HEADERS) and flags & END_STREAM)) and stream in self._streams:
            self._partial.pop(stream, None)
            self._streams.pop(stream)(None)

    def _messages(self, stream: int, listener: Listener, payload: bytes) -> None:
        """gRPC messages have a byte that says whether they are compressed and four for their length."""
        data = self._partial.pop(stream, b"") + payload
        while len(data) >= 5:
            length = int.from_bytes(data[1:5], "big")
            if len(data) < 5 + length:
                break
            listener(data[5 : 5 + length])
            data = data[5 + length :]
        if data:
            self._partial[stream] = data

    def _send(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)
