"""Peers that are gone, or hang, while their connection looks alive: found out by a ping that nobody answers or by the age of a step. The
answer goes on elsewhere as if nothing had happened, and what they held is freed although nobody ever says that they are gone."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import draft_service.__main__
import orchestrator.peers
from specdec.client import Client, FailoverClient
from specdec.engine import EngineThread
from specdec.runtime import channels
from specdec.terms import SamplingParams
from tests.e2e import inprocess
from tests.e2e.fault_driver import Told
from tests.e2e.inprocess import Cluster, Hosted, cluster, hurried
from tests.e2e.network import Link
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]
PING_MS = 600  # for the 12 s until a ping, and the 28 s until its answer
HUNG_MS = 1000  # for 10 s
STEP_S = 0.06  # least time of a step, where an answer is to last
FOUND_S = 8.0  # both of that, a lease, and a busy machine
LONG = SamplingParams(temperature=1.0, max_tokens=120, ignore_eos=True)
PROMPT = list(range(10, 40))


class Pausing(EngineThread):
    """A target's engine that can be slow, or stuck."""

    made: list[Pausing]
    pause_s = 0.0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.made.append(self)

    async def run(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
        def slowly() -> Any:
            time.sleep(self.pause_s)
            return fn(*args, **kwargs)

        return await super().run(slowly)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pausing]]:
    """Of the targets, in their order."""
    made: list[Pausing] = []
    monkeypatch.setattr(Pausing, "made", made, raising=False)
    monkeypatch.setattr(inprocess, "EngineThread", Pausing)
    with hurried():
        yield made


@pytest.fixture
def pinged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keepalive as it is, only faster."""
    times = {"grpc.keepalive_time_ms": PING_MS, "grpc.http2.ping_timeout_ms": PING_MS}
    monkeypatch.setattr(channels, "_KEEPALIVE", [(name, times.get(name, value)) for name, value in channels._KEEPALIVE])
    monkeypatch.setattr(channels, "MIN_PING_INTERVAL_MS", PING_MS // 3)


@contextlib.asynccontextmanager
async def pools(folder: Path, targets: int = 1) -> AsyncIterator[tuple[Cluster, Told]]:
    """And what the long answer is without speculation and without faults."""
    async with cluster(save_tiny(folder / "tiny", seed=0), targets=targets) as made:
        names = [target.endpoint for target in made.targets], [draft.endpoint for draft in made.drafts]
        plain = await made.begin_orchestrator(*names, enable_adaptive_verification=False)
        async with Client(plain.endpoint) as client:
            yield made, Told.of(await client.complete(PROMPT, LONG, seed=5, num_speculative_tokens=0))


async def streamed(client: Client, after: int, act: Callable[[], Awaitable[None]]) -> Told:
    """Acts once `after` tokens are here."""
    told, acted = Told(), False
    async with client, contextlib.aclosing(client.generate(PROMPT, LONG, seed=5, timeout_s=40)) as events:
        async for event in events:
            told.take(event)
            if not acted and len(told.ids) >= after:
                acted = True
                await act()
    return told


async def gauge(service: Hosted, name: str) -> float:
    return await asyncio.to_thread(service.metric, name)


async def nothing_in(services: list[Hosted], name: str = "specdec_sessions") -> None:
    async with asyncio.timeout(FOUND_S):
        for service in services:
            while await gauge(service, name):
                await asyncio.sleep(0.02)


async def test_an_engine_that_hangs_while_its_target_says_that_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Pausing]
) -> None:
    """Beats go on. Its sessions go elsewhere and so does who comes; once the step is over it serves again."""
    monkeypatch.setattr(orchestrator.peers, "HUNG_STEP_MS", HUNG_MS)
    over = threading.Event()
    async with contextlib.AsyncExitStack() as exit:
        made, want = await exit.enter_async_context(pools(tmp_path, targets=2))
        exit.callback(over.set)
        hanging: list[asyncio.Task[Any]] = []

        async def hang() -> None:
            held = [await gauge(target, "specdec_sessions") for target in made.targets]
            hanging.append(asyncio.create_task(engines[held.index(1)].run(over.wait)))

        told = await streamed(Client(made.orchestrators[0].endpoint), 10, hang)
        assert told.all() == want.all()
        assert told.finished is not None and told.finished.speculative.num_replacements >= 1
        async with Client(made.orchestrators[0].endpoint) as client, asyncio.timeout(FOUND_S):
            again = [Told.of(await client.complete(PROMPT, LONG, seed=5)) for _ in range(2)]
        assert [one.all() for one in again] == [want.all()] * 2 and not over.is_set()
        over.set()
        await asyncio.gather(*hanging)
        await nothing_in([*made.targets, *made.drafts])


async def test_F82_the_engine_of_a_draft_hangs_in_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engines: list[Pausing], caplog: pytest.LogCaptureFixture
) -> None:
    """Rounds go on without it; it lets go of its orchestrators, one line and the metrics say so, and it is back once the step is over."""
    monkeypatch.setattr(draft_service.__main__, "EngineThread", Pausing)
    over = threading.Event()
    async with contextlib.AsyncExitStack() as exit:
        made, want = await exit.enter_async_context(pools(tmp_path))
        exit.callback(over.set)
        draft = await made.begin_draft(hung_step_ms=HUNG_MS)
        asked = await made.begin_orchestrator([made.targets[0].endpoint], [draft.endpoint], enable_adaptive_verification=False)
        hanging: list[asyncio.Task[Any]] = []

        async def hang() -> None:
            hanging.append(asyncio.create_task(engines[-1].run(over.wait)))

        async with asyncio.timeout(FOUND_S):
            told = await streamed(Client(asked.endpoint), 10, hang)
            while await gauge(asked, "specdec_spec_enabled"):
                await asyncio.sleep(0.02)
        assert told.all() == want.all() and not over.is_set()
        assert ["hangs in a step" in record.__dict__["reason"] for record in caplog.records if record.message == "peer down"] == [True]
        async with Client(asked.endpoint) as client, asyncio.timeout(2 * FOUND_S):
            assert Told.of(await client.complete(PROMPT, LONG, seed=5)).all() == want.all()
            over.set()
            await asyncio.gather(*hanging)
            while not (got := await client.complete(PROMPT, LONG, seed=5)).finished.speculative.num_accepted_draft_tokens:
                pass
        assert Told.of(got).all() == want.all()
        await nothing_in([*made.targets, *made.drafts])


@pytest.mark.usefixtures("pinged")
async def test_F72_the_wire_between_client_and_orchestrator_is_dead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told. The client goes on at another orchestrator, and the first one stops working for it long before its answer is over."""
    async with pools(tmp_path) as (made, want):
        names = [made.targets[0].endpoint], [made.drafts[0].endpoint]
        other = await made.begin_orchestrator(*names)
        left, taken_up = made.orchestrators
        decided = await gauge(left, "specdec_decided_tokens_total")
        link = Link(left.endpoint)
        async with link.serving() as name:
            monkeypatch.setattr(Pausing, "pause_s", STEP_S)

            async def pull() -> None:
                link.partition()

            asking = asyncio.create_task(streamed(FailoverClient([name, other.endpoint]), 10, pull))
            await asyncio.sleep(0)
            async with asyncio.timeout(FOUND_S):
                while not link.counts["freeze"]:
                    await asyncio.sleep(0.01)
            await nothing_in([left], "specdec_requests_running")
            assert await gauge(left, "specdec_decided_tokens_total") - decided < len(want.ids)
            monkeypatch.setattr(Pausing, "pause_s", 0.0)
            assert (await asking).all() == want.all()
            assert await gauge(taken_up, "specdec_decided_tokens_total") > 0
            await nothing_in([*made.targets, *made.drafts])


@pytest.mark.usefixtures("pinged")
async def test_F77_an_orchestrator_whose_machine_is_gone(tmp_path: Path) -> None:
    """Neither pool hears another byte of it, not even that its connections are over; what it held is free again while they still stand."""
    async with pools(tmp_path) as (made, want), contextlib.AsyncExitStack() as exit:
        links = [Link(service.endpoint) for service in (made.targets[0], made.drafts[0])]
        target, draft = [await exit.enter_async_context(link.serving()) for link in links]
        lost = await made.begin_orchestrator([target], [draft], placement_wait_ms=300, enable_adaptive_verification=False)

        async def pull() -> None:
            for link in links:
                link.partition()

        told = await streamed(FailoverClient([lost.endpoint, made.orchestrators[0].endpoint]), 10, pull)
        assert told.all() == want.all()
        await nothing_in([*made.targets, *made.drafts])
        assert all(link.counts["freeze"] and not link.counts["cut"] for link in links)
