"""Real targets behind one name, scaled from one to two to one and then replaced while answers run: nothing is lost, and the texts are those
of one target.

The orchestrator's core runs in this process, so that its resolver can be a script. The targets listen on two addresses of the loopback net.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.driver import Driver
from orchestrator.observe import Observer
from orchestrator.output import Ended
from orchestrator.settings import OrchestratorSettings
from specdec import terms, wire
from specdec.runtime.channels import open_channel
from specdec.runtime.telemetry import Telemetry
from specdec.v1 import target_pb2, target_pb2_grpc
from tests.e2e.stack import Process, start, wait_ready
from tests.tiny import save_tiny
from tests.waiting import until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
COUNT = 400
ANSWERS = 4
ADDRESSES = "127.0.0.2", "127.0.0.3"


class Targets:
    """Two processes of one model on one port, and the records that the name `pool` has."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.records = [ADDRESSES[0]]
        with socket.socket() as free:
            free.bind((ADDRESSES[0], 0))
            self.port = free.getsockname()[1]
        settings = {"MODEL": str(model), "DTYPE": "float64", "SELF_TEST": "false", "PORT": str(self.port), "DRAIN_MS": "1500"}
        self.processes: list[Process] = []
        self._settings, self._folder = settings, folder
        for address in ADDRESSES:
            self.begin(address)
        for process in self.processes:
            wait_ready(process)

    def begin(self, address: str) -> Process:
        self.processes.append(start("target", "target_service", {**self._settings, "HOST": address}, self._folder))
        return self.processes[-1]

    def resolve(self, host: str, port: int, **kinds: Any) -> list[tuple[Any, ...]]:
        assert host == "pool"
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (record, port)) for record in self.records]

    def name(self, i: int) -> str:
        return f"{ADDRESSES[i]}:{self.port}"

    async def fingerprint(self) -> bytes:
        async with open_channel(self.name(0)) as channel:
            stub = target_pb2_grpc.TargetServiceStub(channel)
            told = await stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest())
        return wire.model_info_from_wire(told.info).vocabulary_fingerprint


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Targets]:
    folder = tmp_path_factory.mktemp("targets")
    made = Targets(save_tiny(folder / "tiny", seed=0), folder)
    try:
        yield made
    finally:
        for process in made.processes:
            process.kill(signal.SIGCONT)
            process.kill()


@contextlib.asynccontextmanager
async def driving(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Driver]:
    monkeypatch.setattr(socket, "getaddrinfo", targets.resolve)
    settings = OrchestratorSettings(tokenizer=Path(), targets=(f"dns:///pool:{targets.port}",), discovery_poll_ms=100)
    driver = Driver(settings, await targets.fingerprint(), Observer(Telemetry("orchestrator")))
    driver.run()
    try:
        yield driver
    finally:
        await driver.close()


async def answer(driver: Driver, i: int, wave: str = "") -> list[int]:
    prompt = tuple(range(10 + i, 40 + i))
    sampling = terms.SamplingParams(temperature=1.0, max_tokens=COUNT, ignore_eos=True)
    admitted = ev.Admitted(f"s{wave}{i}", prompt, len(prompt), sampling, i, 1000, 3, 8)
    tokens: list[int] = []
    async for _, event in driver.start((admitted,), f"r{wave}{i}"):
        if not isinstance(event, Ended):
            tokens += event.tokens
    return tokens


def answers(driver: Driver, wave: str = "") -> asyncio.Future[list[list[int]]]:
    return asyncio.gather(*(answer(driver, i, wave) for i in range(ANSWERS)))


def held(driver: Driver, name: str) -> int:
    return driver.pools.targets.places.sessions[name]


async def answers_on(driver: Driver, name: str, wave: str) -> asyncio.Future[list[list[int]]]:
    """Answers that have begun, one of them at least there: who gets a session is drawn, and one that just came back gets them singly."""
    for turn in range(20):
        running = answers(driver, f"{wave}{turn}-")
        await until(lambda running=running: running.done() or decided(driver) > 20 and held(driver, name) > 0)
        if not running.done():
            return running
    raise AssertionError(f"{name} got no session")


def decided(driver: Driver) -> int:
    return min((live.generation.decided for live in driver._live.values()), default=0)


async def test_F135_F152_scaled_to_two_one_stalls_and_back_to_one(targets: Targets, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = targets.name(0), targets.name(1)
    async with driving(targets, monkeypatch) as driver:
        await driver.model_info()
        running = answers(driver, "a")
        await until(lambda: decided(driver) > 20)
        targets.records.append(ADDRESSES[1])
        await until(lambda: len(driver.pools.targets.connected) == 2, 5)
        more = answers(driver, "b")
        await until(lambda: held(driver, two) > 0)
        assert held(driver, one) >= ANSWERS, "who runs stays where its keys and values are"
        reference = await running
        assert all(len(tokens) == COUNT for tokens in reference) and await more == reference

        running = await answers_on(driver, one, "c")
        targets.processes[0].kill(signal.SIGSTOP)
        assert await running == reference
        assert [peer.name for peer in driver.pools.targets.connected] == [two], "the other one served"
        targets.processes[0].kill(signal.SIGCONT)
        back = time.monotonic()
        await until(lambda: len(driver.pools.targets.eligible()) == 2)
        assert time.monotonic() - back < 5.0

        moved: list[str] = []
        monkeypatch.setattr(driver._handover, "_moved", lambda pool, reason: moved.append(reason))
        lost: list[int] = []
        monkeypatch.setattr(driver, "lost", lambda pool, name, reason: lost.append(held(driver, name)))
        running = await answers_on(driver, one, "d")
        targets.processes[0].popen.send_signal(signal.SIGTERM)
        targets.records.remove(ADDRESSES[0])
        assert await running == reference
        assert await asyncio.to_thread(targets.processes[0].popen.wait, 10) == 0
        assert not any(lost) and set(moved) == {"draining"}, "all had left before it ended"
        await until(lambda: set(driver.pools.targets.peers) == {two}, 5)

        fresh = targets.begin(ADDRESSES[0])
        await asyncio.to_thread(wait_ready, fresh)
        running = answers(driver, "e")
        await until(lambda: decided(driver) > 20)
        targets.records.append(ADDRESSES[0])
        await until(lambda: len(driver.pools.targets.eligible()) == 2, 5)
        targets.processes[1].popen.send_signal(signal.SIGTERM)
        targets.records.remove(ADDRESSES[1])
        assert await running == reference, "one after the other was replaced, and no answer noticed"
        assert await asyncio.to_thread(targets.processes[1].popen.wait, 10) == 0
        assert not any(lost) and set(moved) == {"draining"}
        assert await answers(driver, "f") == reference and set(driver.pools.targets.places.sessions) <= {one}
