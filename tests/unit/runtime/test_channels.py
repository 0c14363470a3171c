"""Who dials through a proxy that the environment names."""

from __future__ import annotations

import asyncio

import pytest

from specdec.runtime.channels import open_channel

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]


async def first_words(direct: bool, monkeypatch: pytest.MonkeyPatch) -> tuple[bytes, bytes]:
    """What the proxy and the server hear first of a channel to the server, empty = nothing."""
    heard: dict[str, asyncio.Future[bytes]] = {who: asyncio.get_running_loop().create_future() for who in ("proxy", "server")}

    async def listen(who: str) -> asyncio.Server:
        async def hear(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            word = await reader.read(7)
            if not heard[who].done():
                heard[who].set_result(word)
            writer.close()

        return await asyncio.start_server(hear, "127.0.0.1", 0)

    async with await listen("proxy") as proxy, await listen("server") as server:
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        channel = open_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}", direct=direct)
        channel.get_state(try_to_connect=True)
        await asyncio.wait(heard.values(), return_when=asyncio.FIRST_COMPLETED)
        await channel.close()
    proxy_heard, server_heard = (heard[who].result() if heard[who].done() else b"" for who in ("proxy", "server"))
    return proxy_heard, server_heard


@pytest.mark.parametrize(("direct", "told"), [(True, (b"", b"PRI * H")), (False, (b"CONNECT", b""))])
async def test_services_dial_each_other_past_a_proxy(direct: bool, told: tuple[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster that puts https_proxy into every pod keeps its pools reachable; a client may need the proxy."""
    for name in ("grpc_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert await first_words(direct, monkeypatch) == told
