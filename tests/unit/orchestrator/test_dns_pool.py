"""A pool behind one name: gRPC servers on addresses of the loopback net, a resolver that is a script, the real driver."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from orchestrator import events as ev
from orchestrator import peers
from orchestrator.driver import Driver
from orchestrator.observe import Observer
from orchestrator.settings import OrchestratorSettings
from specdec import terms, wire
from specdec.runtime.channels import server_options
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.fakes_driver import model_info
from tests.unit.orchestrator.scripted_pools import FINGERPRINT, SEED, VOCAB, fetch
from tests.waiting import until

pytestmark = pytest.mark.timeout(60)
POLL_MS = 50


class Server(target_pb2_grpc.TargetServiceServicer):
    """A target that decides one token of every session, its last."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sessions: set[str] = set()
        self.dials = 0

    @contextlib.asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[int]:
        server = grpc.aio.server(options=server_options())
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)
        port = server.add_insecure_port(f"{self.address}:{port}")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)

    async def GetModelInfo(self, request: Any, context: Any) -> target_pb2.TargetServiceGetModelInfoResponse:
        self.dials += 1
        info = model_info(VOCAB, window=1000, boot_id=self.address)
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(info))

    async def Verify(self, requests: Any, context: Any) -> None:
        lock = asyncio.Lock()

        async def say(*answers: terms.Answer, beat: terms.TargetBeat | None = None) -> None:
            async with lock:
                await context.write(wire.verify_response_to_wire(answers, beat=beat))

        async def beats() -> None:
            while True:
                await say(beat=terms.TargetBeat(len(self.sessions), 0, 0, 10_000, 0, 5))
                await asyncio.sleep(0.1)

        await context.read()
        task = asyncio.create_task(beats())
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                steps = [i for i in wire.verify_request_from_wire(message).items if isinstance(i, terms.Step)]
                self.sessions |= {step.session_id for step in steps}
                end = terms.FinishReason.LENGTH
                results = [terms.Result(len(s.tokens), len(s.tokens), 0, 0, (7,), finish=end) for s in steps]
                await say(*(terms.Answer(s.session_id, s.epoch, s.round, r) for s, r in zip(steps, results, strict=True)))
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


class Name:
    """Records of the name `pool`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *records: str) -> None:
        self.records = list(records)
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: str, port: int, **kinds: Any) -> list[tuple[Any, ...]]:
        assert host == "pool"
        if not self.records:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (record, port)) for record in self.records]


@contextlib.asynccontextmanager
async def driving(port: int, **settings: Any) -> AsyncIterator[Driver]:
    checked = OrchestratorSettings(
        tokenizer=Path(), targets=(f"dns:///pool:{port}",), discovery_poll_ms=POLL_MS, max_running=1000, **settings
    )
    assert not checked.problems()
    driver = Driver(checked, FINGERPRINT, Observer(Telemetry("orchestrator")))
    driver.run()
    try:
        yield driver
    finally:
        await driver.close()


async def ask(driver: Driver, name: str) -> list[int]:
    admitted = ev.Admitted(name, (1, 2, 3), 3, terms.SamplingParams(max_tokens=1), SEED, 1000, 0, 8)
    return await fetch(driver.start((admitted,), name))


def up(driver: Driver) -> int:
    return len(driver.pools.targets.connected)


async def test_F134_three_records_share_300_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = [Server(f"127.0.0.{i}") for i in (1, 2, 3)]
    Name(monkeypatch, *(server.address for server in servers))
    async with contextlib.AsyncExitStack() as stack:
        port = 0
        for server in servers:
            port = await stack.enter_async_context(server.serving(port))
        driver = await stack.enter_async_context(driving(port))
        await until(lambda: up(driver) == 3)
        assert await asyncio.gather(*(ask(driver, f"s{i}") for i in range(300))) == [[7]] * 300
    counts = [len(server.sessions) for server in servers]
    assert sum(counts) == 300 and all(60 <= count <= 141 for count in counts), counts


async def test_F135_a_new_record_gets_traffic_and_F136_none_at_all_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = Server("127.0.0.1"), Server("127.0.0.2")
    name = Name(monkeypatch, one.address)
    async with one.serving(0) as port, driving(port, discovery_keep_ms=300) as driver:
        assert await ask(driver, "first") == [7]
        async with two.serving(port):
            name.records.append(two.address)
            await until(lambda: up(driver) == 2, 5)
            await asyncio.gather(*(ask(driver, f"s{i}") for i in range(40)))
            assert len(two.sessions) > 5
            name.records.clear()
            kept = driver.pools.targets.peers.copy()
            await asyncio.sleep(3 * POLL_MS / 1000)
            assert driver.pools.targets.peers == kept, "an empty answer is not believed at once"
            await until(lambda: not driver.pools.targets.peers, 5)
            waits = asyncio.create_task(ask(driver, "waits"))
            name.records.append(two.address)
            assert await asyncio.wait_for(waits, 10) == [7]
            assert "waits" in two.sessions


async def test_F162_an_endpoint_that_refuses_connections_gets_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("127.0.0.1")
    Name(monkeypatch, server.address, "127.0.0.9")
    async with server.serving(0) as port, driving(port) as driver:
        await until(lambda: len(driver.pools.targets.peers) == 2 and up(driver) == 1)
        assert await asyncio.gather(*(ask(driver, f"s{i}") for i in range(20))) == [[7]] * 20
        assert len(server.sessions) == 20


async def test_F149_first_success_soon_after_the_port_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The back-off is as long as it gets."""
    monkeypatch.setattr(peers, "FIRST_BACKOFF_S", peers.LAST_BACKOFF_S)
    server = Server("127.0.0.1")
    Name(monkeypatch, server.address)
    async with server.serving(0) as port:
        pass
    async with driving(port) as driver:
        troubles: list[str] = []
        monkeypatch.setattr(driver.pools, "trouble", lambda peer, reason: troubles.append(reason))
        asked = asyncio.create_task(ask(driver, "s"))
        await until(lambda: bool(troubles))
        async with server.serving(port):
            began = time.monotonic()
            assert await asked == [7]
            assert time.monotonic() - began < 3.0
