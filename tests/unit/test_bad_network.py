"""The tools of the fault tests do what they say: else a test of bad networks runs over a good one."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from tests.e2e.frames import PREFACE, Messages
from tests.e2e.levels import Level, Levels, slope
from tests.e2e.network import Link
from tests.waiting import until


@dataclass
class Wire:
    """An echo server behind a link, and one client. `heard` = what the server got; `reset` = how its connections ended."""

    link: Link
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    heard: bytearray = field(default_factory=bytearray)
    ends: list[str] = field(default_factory=list)

    async def ask(self, words: bytes) -> bytes:
        self.writer.write(words)
        return await self.reader.readexactly(len(words))


@contextlib.asynccontextmanager
async def wired() -> AsyncIterator[Wire]:
    heard, ends = bytearray(), list[str]()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(65536):
                heard.extend(piece)
                writer.write(piece)
            ends.append("closed")
        except ConnectionResetError:
            ends.append("reset")
        writer.transport.abort()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    link = Link(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server, link.serving() as name:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(name.rpartition(":")[2]))
        wire = Wire(link, reader, writer, heard, ends)
        assert await wire.ask(b"hello") == b"hello"
        yield wire
        writer.transport.abort()


async def took(work: object) -> float:
    begun = time.monotonic()
    await work  # type: ignore[misc]
    return time.monotonic() - begun


async def test_a_long_wire_takes_its_time_and_keeps_the_order() -> None:
    async with wired() as wire:
        wire.link.there.delay_s = wire.link.back.delay_s = 0.05
        assert await took(wire.ask(b"abc" * 1000)) >= 0.1


async def test_a_narrow_wire_takes_as_long_as_its_bytes() -> None:
    async with wired() as wire:
        wire.link.there.bytes_per_s = 20_000
        assert await took(wire.ask(b"x" * 4000)) >= 0.15


async def test_a_connection_is_cut_behind_exactly_so_many_bytes() -> None:
    async with wired() as wire:
        wire.link.there.drop_after = 700
        wire.writer.write(b"x" * 1000)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await wire.reader.readexactly(1000)
        await until(lambda: wire.ends)
        assert (len(wire.heard), wire.link.counts["cut"]) == (len(b"hello") + 700, 1)


async def test_half_a_connection_hears_nothing() -> None:
    async with wired() as wire:
        wire.link.forget_client()
        await until(lambda: wire.ends)
        assert wire.ends == ["reset"]
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(wire.ask(b"anybody?"), 0.1)
        wire.link.heal()
        with pytest.raises((ConnectionResetError, BrokenPipeError, asyncio.IncompleteReadError)):
            await wire.reader.readexactly(1)


async def test_the_other_half() -> None:
    async with wired() as wire:
        wire.link.forget_server()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await wire.ask(b"anybody?")
        assert wire.ends == []


async def test_a_black_hole_gives_back_what_fell_in() -> None:
    async with wired() as wire:
        wire.link.partition()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(asking := asyncio.ensure_future(wire.ask(b"later"))), 0.1)
        assert bytes(wire.heard) == b"hello"
        wire.link.heal()
        assert await asking == b"later"


async def test_nobody_is_let_in_while_it_refuses() -> None:
    async with wired() as wire:
        wire.link.refuse()
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await wire.reader.readexactly(1)


def frame(kind: int, stream: int, content: bytes) -> bytes:
    return len(content).to_bytes(3, "big") + bytes((kind, 0)) + stream.to_bytes(4, "big") + content


def message(content: bytes) -> bytes:
    return b"\0" + len(content).to_bytes(4, "big") + content


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_messages_are_found_however_the_bytes_are_cut(size: int) -> None:
    first, second, third = message(b"one"), message(b""), message(b"x" * 300)
    body = frame(4, 0, b"") + frame(0, 3, first[:4]) + frame(0, 1, third) + frame(0, 3, first[4:] + second) + frame(1, 5, b"head")
    reader, content = Messages(from_client=True), PREFACE + body
    found = [hit for i in range(0, len(content), size) for hit in reader.feed(content[i : i + size])]
    assert found == [(1, b"x" * 300), (3, b"one"), (3, b"")]
    assert Messages(from_client=True).feed(b"\x16\x03\x01" + body) == []  # TLS


def test_growth_is_seen_and_a_crowd_is_not() -> None:
    assert slope([(0, 1), (1, 3), (2, 5)]) == pytest.approx(2)
    level = [Level(float(t), 30 + 200 * (t % 10 == 9), 100.0) for t in range(160)]
    leak = [Level(float(t), 30 + t // 4, 100.0 + t / 2) for t in range(160)]
    levels = Levels({}, {"level": level, "leak": leak})
    assert levels.slopes("level") == pytest.approx((0, 0))
    assert levels.slopes("leak") == pytest.approx((15, 30), rel=0.05)
    assert levels.grown(descriptors=8, memory_mb=30) == [
        "level: 30 → 230 descriptors", "leak: 30 → 69 descriptors", "leak: 100 → 180 MB",
    ]  # fmt: skip
