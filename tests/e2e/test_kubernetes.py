"""A real orchestrator that watches a Kubernetes Service whose endpoints come, end and go under an answer: the text is the reference's."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.client import Client, Delta
from specdec.terms import SamplingParams
from tests.api_server import ApiServer, endpoint, slice_of
from tests.e2e.ask import Ask, gather_answers, same
from tests.e2e.stack import Process, Stack, running
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
LONG = SamplingParams(temperature=1.0, max_tokens=560, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(10, 90))


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
        return {state: metrics[f'specdec_pool_endpoints{{pool="target",state="{state}"}}'] for state in ("up", "down")}


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ApiServer, Stack, contextlib.ExitStack]]:
    """Closing the last one ends the API server."""
    model = save_tiny(tmp_path / "target", seed=0)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with contextlib.ExitStack() as serves:
        api = serves.enter_context(ApiServer().serving())
        monkeypatch.setenv("KUBECONFIG", str(api.kubeconfig(tmp_path / "kubeconfig")))
        entries = {"TARGETS": "large=kubernetes:///target:grpc"}
        with running(model, None, targets=2, target={**FLOAT64, "LEASE_MS": "1000"}, orchestrator=entries) as stack:
            yield api, stack, serves


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not await asyncio.to_thread(happened):
            await asyncio.sleep(0.05)


def held(process: Process) -> float:
    return process.metric("specdec_sessions")


def steps(process: Process) -> float:
    return process.metric("specdec_step_duration_seconds_count")


async def test_F160_endpoints_that_come_end_and_go_under_an_answer(served: tuple[ApiServer, Stack, contextlib.ExitStack]) -> None:
    api, stack, api_server_serves = served
    endpoints, (one, two) = Endpoints(api, stack), stack.targets
    short = Ask(PROMPT, SHORT, {"seed": 6})
    endpoints.put(one)
    reference, little = await gather_answers(stack.endpoint, [Ask(PROMPT, LONG, {"seed": 5}), short])
    ids: list[int] = []
    async with Client(stack.endpoint) as client, contextlib.aclosing(client.generate(PROMPT, LONG, seed=5)) as events:
        async for event in events:  # what is not read is held at 512 tokens: the answer goes on as long as nobody reads on
            ids += event.token_ids if isinstance(event, Delta) else ()
            if ids:
                break
        endpoints.put(two)
        await until(lambda: endpoints.up() == {"up": 2, "down": 0})
        endpoints.put(one, terminating=True)
        await until(lambda: api.count(watch=True) == 1)
        for _ in range(3):
            before = steps(two)
            same(*await gather_answers(stack.endpoint, [short]), little)
            assert steps(two) > before, "given to the one that stays, although the other one has the prompt"
        await until(lambda: (held(one), held(two)) == (1, 0))
        endpoints.delete(one)
        await until(lambda: held(one) == 1 and endpoints.up() == {"up": 2, "down": 0})
        one.kill()
        async for event in events:
            ids += event.token_ids if isinstance(event, Delta) else ()
    assert tuple(ids) == tuple(reference.token_ids)
    await until(lambda: endpoints.up() == {"up": 1, "down": 0})
    metrics = stack.orchestrators[0].metrics()
    assert not any(name.startswith("specdec_discovery_failures") and value for name, value in metrics.items())
    assert metrics['specdec_discovery_age_seconds{pool="target"}'] < 60

    api_server_serves.close()
    await until(lambda: stack.orchestrators[0].metric("specdec_discovery_failures_total") > 0)
    same(*await gather_answers(stack.endpoint, [short]), little)
    assert endpoints.up() == {"up": 1, "down": 0} and not stack.defects()
