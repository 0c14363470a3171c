"""Tokens and limits over the wire: who is refused with what, before anything of the request is read; health is open to everybody."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from pathlib import Path

import grpc
import pytest

from specdec.client import Client, Credentials
from specdec.errors import Overloaded, Unauthenticated
from specdec.runtime.channels import open_channel
from specdec.runtime.guard import address_of, names_of
from tests.unit.runtime.secured import serving


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.runtime.listening.REREAD_S", 0.02)


def write(path: Path, **tokens: str) -> Path:
    path.write_text("".join(f"{name}:{hashlib.sha256(token.encode()).hexdigest()}\n" for name, token in tokens.items()))
    return path


async def test_missing_wrong_and_exchanged(tmp_path: Path) -> None:
    path = write(tmp_path / "tokens", alice="first")
    mine = tmp_path / "mine"
    mine.write_text("first\n")
    async with serving(tokens_file=path) as service:
        for credentials, words in ((Credentials(), "asks for a token; send the header"), (Credentials(token="guess"), "is not known here")):
            error = await service.ask(credentials)
            assert isinstance(error, Unauthenticated) and words in str(error) and "guess" not in str(error)
        assert service.calls == 0
        async with Client(service.endpoint, Credentials(token_file=mine)) as client:  # F158: one client through an exchange
            await client.get_model_info()
            write(path, alice="second")

            async def refused() -> bool:
                return isinstance(await service.ask(Credentials(token="first")), Unauthenticated)

            async with asyncio.timeout(20):
                while not await refused():
                    await asyncio.sleep(0.02)
            with pytest.raises(Unauthenticated):
                await client.get_model_info()
            mine.write_text("second\n")
            await client.get_model_info()
        async with open_channel(service.endpoint) as channel:
            assert await service.healthy(channel)  # probes carry no token


async def test_a_caller_without_a_token_cannot_make_the_service_read(tmp_path: Path) -> None:
    """Nobody reads the second half of its request: the answer is there while it is still being sent."""
    async with serving(tokens_file=write(tmp_path / "tokens", alice="first")) as service, open_channel(service.endpoint) as channel:
        call = channel.stream_unary("/specdec.v1.GenerationService/GetModelInfo")()
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the answer may be quicker still
            await call.write(b"\n")
        assert await asyncio.wait_for(call.code(), 10) is grpc.StatusCode.UNAUTHENTICATED


async def test_requests_per_second_of_each_client(tmp_path: Path) -> None:
    tokens = write(tmp_path / "tokens", alice="a", bob="b")
    async with serving(tokens_file=tokens, client_requests_per_s=0.01) as service:
        assert await service.ask(Credentials(token="a")) is None
        error = await service.ask(Credentials(token="a"))
        assert isinstance(error, Overloaded) and 99_000 < error.retry_after_ms <= 100_000
        assert "SPECDEC_CLIENT_REQUESTS_PER_S" in str(error)
        assert await service.ask(Credentials(token="b")) is None


async def test_requests_at_once_are_given_back_however_they_end() -> None:
    async with serving(client_max_open=1) as service, Client(service.endpoint) as client:
        for _ in range(2):
            events = client.generate([1])
            service.more.put_nowait(True)
            await anext(events)
            error = await service.ask()
            assert isinstance(error, Overloaded) and "SPECDEC_CLIENT_MAX_OPEN" in str(error)
            await events.aclose()  # the client walks away

            async def free() -> bool:
                return await service.ask() is None

            async with asyncio.timeout(20):
                while not await free():
                    await asyncio.sleep(0.02)


@pytest.mark.parametrize(
    "peer, who",
    [
        ("ipv4:10.0.0.7:1234", "10.0.0.7"),
        ("ipv6:%5B2001:db8:1:2:3::9%5D:1234", "2001:db8:1:2::/64"),
        ("ipv6:[::ffff:10.0.0.7]:1234", "10.0.0.7"),
        ("ipv6:%5Bfe80::1%25eth0%5D:1", "fe80::/64"),
        ("unix:/tmp/x", "unix"),
        ("", ""),
    ],
)
def test_a_peer_is_its_address_without_the_port(peer: str, who: str) -> None:
    assert address_of(peer) == who


def test_the_common_name_is_no_identity() -> None:
    assert names_of({"x509_common_name": [b"admin"]}) == ()
    assert names_of({"x509_common_name": [b"admin"], "peer_dns": [b"a.b"], "peer_uri": [b"spiffe://x"]}) == ("a.b", "spiffe://x")
