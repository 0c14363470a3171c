"""A real orchestrator that watches a Kubernetes Service whose endpoints come, end and go under an answer: the text is the reference's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.bench.sim import folder
from specdec.client import Client, Completion, Delta
from specdec.terms import SamplingParams
from tests.api_server import ApiServer, endpoint, slice_of
from tests.e2e.ask import Ask, gather_answers, same
from tests.e2e.stack import Process, Stack, running, wait_ready

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
SIM = {"ENGINE_PATH": "sim", "KV_TOKENS": "4096", "LEASE_MS": "1000"}
SLOW, FAST = "step-ms=25,row_ms=0", "step-ms=1,row_ms=0"
LONG = SamplingParams(temperature=1.0, max_tokens=800, ignore_eos=True)  # 20 s where it is slow
SHORT = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
PROMPT = [20, 30, 40]


class Endpoints:
    """Of the Service `target`: processes on this machine, each in a slice of its own, since they differ by port."""

    def __init__(self, api: ApiServer, stack: Stack) -> None:
        self.api, self.stack = api, stack

    def put(self, process: Process, *, terminating: bool = False) -> None:
        conditions = {"ready": True, "serving": True, "terminating": terminating}
        self.api.put(slice_of(f"s{process.port}", endpoint(process.host, f"pod-{process.port}", **conditions), grpc=process.port))

    def delete(self, process: Process) -> None:
        self.api.delete(f"s{process.port}")

    def up(self) -> dict[str, float]:
        metrics = self.stack.orchestrators[0].metrics()
        return {state: metrics[f'specdec_pool_endpoints{{pool="target",state="{state}"}}'] for state in ("up", "leaving", "down")}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ApiServer, Stack, contextlib.ExitStack]]:
    """A slow target and a fast one, and nobody knows of them yet. Closing the last one ends the API server."""
    model = tmp_path / "model"
    model.mkdir()
    folder.write(model)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with contextlib.ExitStack() as serves:
        api = serves.enter_context(ApiServer().serving())
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        entries = {"TARGETS": "large=kubernetes:///target:grpc"}
        with running(model, None, targets=0, target=SIM, orchestrator=entries) as stack:
            for process in [stack.begin_target(SIM=sim) for sim in (SLOW, FAST)]:
                wait_ready(process)
            yield api, stack, serves


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(happened):
            await asyncio.sleep(0.05)


def held(process: Process) -> float:
    return process.metric("specdec_sessions")


async def test_F160_endpoints_that_come_end_and_go_under_an_answer(served: tuple[ApiServer, Stack, contextlib.ExitStack]) -> None:
    api, stack, api_server_serves = served
    endpoints, (one, two) = Endpoints(api, stack), stack.targets

    def short() -> asyncio.Task[list[Completion]]:
        return asyncio.create_task(gather_answers(stack.endpoint, [Ask(PROMPT, SHORT, {"seed": 6})]))

    endpoints.put(one)
    ids: list[int] = []
    async with Client(stack.endpoint) as client, contextlib.aclosing(client.generate(PROMPT, LONG, seed=5)) as events:
        async for event in events:
            ids += event.token_ids if isinstance(event, Delta) else ()
            if ids:
                break
        endpoints.put(one, terminating=True)
        await until(lambda: endpoints.up() == {"up": 0, "leaving": 1, "down": 0})
        waits = short()
        await until(lambda: stack.orchestrators[0].metrics()['specdec_scaling_waiting{pool="target",pool_name="large"}'] == 1)
        assert held(one) == 1 and not waits.done(), "who runs stays; who comes waits rather for another"
        endpoints.put(two)
        (answer,) = await waits
        endpoints.delete(one)
        await until(lambda: endpoints.up() == {"up": 1, "leaving": 1, "down": 0})
        assert held(one) == 1
        one.kill()
        async for event in events:
            ids += event.token_ids if isinstance(event, Delta) else ()
    await until(lambda: endpoints.up() == {"up": 1, "leaving": 0, "down": 0})
    reference, little = await gather_answers(stack.endpoint, [Ask(PROMPT, LONG, {"seed": 5}), Ask(PROMPT, SHORT, {"seed": 6})])
    assert tuple(ids) == tuple(reference.token_ids) and len(ids) == LONG.max_tokens
    same(answer, little)
    metrics = stack.orchestrators[0].metrics()
    failures = {name: count for name, count in metrics.items() if name.startswith("specdec_discovery_failures") and count}
    assert all('reason="empty"' in name for name in failures), "there was no slice at first"
    assert metrics['specdec_discovery_age_seconds{pool="target"}'] < 60

    api_server_serves.close()
    await until(lambda: stack.orchestrators[0].metric("specdec_discovery_failures_total") > sum(failures.values()))
    same((await short())[0], little)
    assert endpoints.up() == {"up": 1, "leaving": 0, "down": 0} and not stack.defects()
