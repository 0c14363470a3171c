"""A TCP proxy for tests: cuts its connections (RST) or holds them up. Runs on the test's own event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

CHUNK_BYTES = 65_536


class Proxy:
    def __init__(self, to_port: int) -> None:
        self._to_port = to_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._flowing = asyncio.Event()
        self._flowing.set()
        self.cuts = 0

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """host:port"""
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            self._flowing.set()
            self.cut()
            while self._writers:
                await asyncio.sleep(0.01)

    def cut(self) -> None:
        for writer in self._writers:
            self.cuts += 1
            writer.transport.abort()

    async def hold_up(self, seconds: float) -> None:
        self._flowing.clear()
        await asyncio.sleep(seconds)
        self._flowing.set()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to_port)
        except OSError:
            writer.transport.abort()
            return
        self._writers |= {writer, there_writer}
        await asyncio.gather(self._pump(reader, there_writer), self._pump(there_reader, writer))
        self._writers -= {writer, there_writer}

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(CHUNK_BYTES):
                await self._flowing.wait()
                writer.write(piece)
                await writer.drain()
        writer.close()
