"""gRPC messages out of the bytes of an HTTP/2 connection (RFC 9113, section 4; gRPC over HTTP/2): for a proxy that knows what passes."""

from __future__ import annotations

import collections

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEAD, MESSAGE_HEAD = 9, 5
DATA = 0
PADDED = 0x08


class Messages:
    """One direction of one connection, from its first byte on. `feed` returns the messages that a piece completes: (stream, content)."""

    def __init__(self, from_client: bool) -> None:
        self._skip = len(PREFACE) if from_client else 0
        self._foreign = False  # something else than HTTP/2, such as a question whether TLS is spoken here
        self._bytes = bytearray()
        self._bodies: collections.defaultdict[int, bytearray] = collections.defaultdict(bytearray)

    def feed(self, piece: bytes) -> list[tuple[int, bytes]]:
        self._bytes += piece
        if self._skip:
            self._foreign |= not PREFACE.startswith(self._bytes[: self._skip])
            if self._foreign or len(self._bytes) < self._skip:
                return []
            del self._bytes[: self._skip]
            self._skip = 0
        found: list[tuple[int, bytes]] = []
        while len(self._bytes) >= FRAME_HEAD:
            size = FRAME_HEAD + int.from_bytes(self._bytes[:3], "big")
            if len(self._bytes) < size:
                break
            kind, flags, stream = self._bytes[3], self._bytes[4], int.from_bytes(self._bytes[5:9], "big") & 0x7FFFFFFF
            if kind == DATA:
                assert not flags & PADDED, "gRPC does not pad"
                self._bodies[stream] += self._bytes[FRAME_HEAD:size]
                found += [(stream, message) for message in self._whole(stream)]
            del self._bytes[:size]
        return found

    def _whole(self, stream: int) -> list[bytes]:
        body = self._bodies[stream]
        found: list[bytes] = []
        while len(body) >= MESSAGE_HEAD and len(body) >= (size := MESSAGE_HEAD + int.from_bytes(body[1:MESSAGE_HEAD], "big")):
            assert body[0] == 0, "not compressed"
            found.append(bytes(body[MESSAGE_HEAD:size]))
            del body[:size]
        return found
