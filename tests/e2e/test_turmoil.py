"""Many streams while processes and connections come and go: every text is the reference's, and afterwards nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Iterator

import pytest

from specdec.client import Client, Delta
from specdec.errors import Unavailable
from specdec.terms import SamplingParams
from tests.e2e.network import Link
from tests.e2e.stack import Process, Stack, running, wait_ready
from tests.tiny import save_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false", "LEASE_MS": "1000"}
LENGTH = 300
STREAMS = 8
SECONDS, FOR_LONG = 3.0, 30.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    model = save_tiny(tmp_path_factory.mktemp("model") / "target", seed=0)
    with running(model, model, targets=2, drafts=2, target=FLOAT64, draft=FLOAT64) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(stack: Stack) -> list[tuple[int, ...]]:
    async def ask() -> list[tuple[int, ...]]:
        async with Client(stack.endpoint) as client:
            return await asyncio.gather(*(answer(client, i, num_speculative_tokens=0) for i in range(STREAMS)))

    return asyncio.run(ask())


async def answer(client: Client, i: int, length: int = LENGTH, **options: int) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True)
    got = await client.complete(list(range(10 + i, 40 + i)), sampling, seed=i, timeout_s=100, **options)
    return got.token_ids


def nothing_left(stack: Stack) -> None:
    for process in (*stack.targets, *stack.drafts):
        wait_until(lambda process=process: not process.metric("specdec_sessions"), 10)  # type: ignore[misc]
    for process in (one for one in stack.orchestrators if one.popen.poll() is None):
        for name in ("specdec_requests_running", "specdec_requests_waiting"):
            wait_until(lambda process=process, name=name: not process.metric(name), 10)  # type: ignore[misc]
    assert stack.defects() == []


async def kill(stack: Stack, pool: list[Process], which: int) -> None:
    old = pool[which]
    await asyncio.to_thread(old.kill)
    begin = stack.begin_target if pool is stack.targets else stack.begin_draft
    pool[which] = begin(PORT=str(old.port))
    pool.pop()
    await asyncio.to_thread(wait_ready, pool[which])


async def stop_for_a_while(process: Process, seconds: float) -> None:
    process.kill(signal.SIGSTOP)
    await asyncio.sleep(seconds)
    process.kill(signal.SIGCONT)


@pytest.mark.parametrize("seconds", [SECONDS, pytest.param(FOR_LONG, marks=pytest.mark.long)])
@pytest.mark.parametrize("act", ["kill", "stop"])
def test_processes_come_and_go(stack: Stack, reference: list[tuple[int, ...]], act: str, seconds: float) -> None:
    draw = random.Random(1)

    async def run() -> int:
        over = time.monotonic() + seconds
        answers = 0

        async def ask(client: Client, i: int) -> None:
            nonlocal answers
            while time.monotonic() < over:
                assert await answer(client, i) == reference[i]
                answers += 1

        async def trouble() -> None:
            while time.monotonic() < over:
                await asyncio.sleep(draw.uniform(0.2, 0.7))
                pool, which = draw.choice((stack.targets, stack.drafts)), draw.randrange(2)
                if act == "kill":
                    await kill(stack, pool, which)
                else:
                    await stop_for_a_while(pool[which], draw.choice((0.3, 1.6)))

        async with Client(stack.endpoint) as client:
            await asyncio.gather(trouble(), *(ask(client, i) for i in range(STREAMS)))
        return answers

    assert asyncio.run(run()) >= STREAMS
    nothing_left(stack)


def test_connections_are_cut(stack: Stack, reference: list[tuple[int, ...]]) -> None:
    """Both pools behind proxies; two more drafts in the list that nobody can reach."""
    draw = random.Random(2)

    async def run() -> None:
        target, draft = Link(f"127.0.0.1:{stack.targets[0].port}"), Link(f"127.0.0.1:{stack.drafts[0].port}")
        async with target.serving() as target_name, draft.serving() as draft_name:
            drafts = f"127.0.0.1:1,{draft_name},10.255.255.1:9"
            other = await asyncio.to_thread(lambda: stack.add_orchestrator(TARGETS=target_name, DRAFTS=drafts))

            cut: set[Link] = set()

            async def trouble() -> None:
                while True:
                    await asyncio.sleep(draw.uniform(0.1, 0.4))
                    link = draw.choice((target, draft))
                    if draw.random() < 0.7:
                        cut.update([link] if link.connections else [])
                        link.cut()
                    else:
                        link.partition()
                        await asyncio.sleep(draw.choice((0.3, 1.5)))
                        link.heal()

            cutting = asyncio.create_task(trouble())
            async with Client(other.endpoint) as client:
                got = await asyncio.gather(*(answer(client, i) for i in range(STREAMS)))
            cutting.cancel()
            await asyncio.gather(cutting, return_exceptions=True)
            await asyncio.to_thread(other.kill)
            assert got == reference
            assert cut == {target, draft}

    asyncio.run(run())
    nothing_left(stack)


def test_hundreds_of_tiny_requests_and_of_callers_that_hang_up(stack: Stack, reference: list[tuple[int, ...]]) -> None:
    async def run() -> None:
        async with Client(stack.endpoint) as client:
            got = await asyncio.gather(*(answer(client, i % STREAMS, 1 + i % 3, num_speculative_tokens=8) for i in range(300)))
            assert got == [reference[i % STREAMS][: 1 + i % 3] for i in range(300)]

            async def hang_up(i: int) -> None:
                sampling = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
                events = client.generate(list(range(10, 40)), sampling, seed=i)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(events), (0.0001, 0.01, 0.05)[i % 3])
                await events.aclose()

            for _ in range(4):
                await asyncio.gather(*(hang_up(i) for i in range(50)))

    asyncio.run(run())
    nothing_left(stack)


def test_no_draft_at_all(stack: Stack, reference: list[tuple[int, ...]]) -> None:
    async def run(endpoint: str) -> tuple[int, ...]:
        async with Client(endpoint) as client:
            return await answer(client, 0)

    assert asyncio.run(run(stack.add_orchestrator(DRAFTS="").endpoint)) == reference[0]


def test_an_orchestrator_that_has_to_stop_says_how_to_go_on(stack: Stack, reference: list[tuple[int, ...]]) -> None:
    """SIGTERM under running streams that take longer than DRAIN_MS."""
    stopping = stack.add_orchestrator(DRAIN_MS="100")

    async def part(client: Client, begun: asyncio.Semaphore) -> tuple[int, ...]:
        ids: list[int] = []
        sampling = SamplingParams(temperature=1.0, max_tokens=LENGTH, ignore_eos=True)
        with pytest.raises(Unavailable, match="resume with output_token_ids"):
            async for event in client.generate(list(range(10, 40)), sampling, seed=0):
                if isinstance(event, Delta):
                    if not ids:
                        begun.release()
                    ids += event.token_ids
        return tuple(ids)

    async def run() -> list[tuple[int, ...]]:
        begun = asyncio.Semaphore(0)
        async with Client(stopping.endpoint) as client:
            streams = [asyncio.create_task(part(client, begun)) for _ in range(STREAMS)]
            for _ in streams:
                await begun.acquire()
            stopping.popen.send_signal(signal.SIGTERM)
            return await asyncio.gather(*streams)

    for ids in asyncio.run(run()):
        assert ids == reference[0][: len(ids)]
    assert stopping.popen.wait(10) == 0
    nothing_left(stack)
