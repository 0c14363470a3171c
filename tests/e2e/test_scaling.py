"""F174, F175: what the pools are scaled by, over real processes: three orchestrators, a simulated target and draft, a real Prometheus that
evaluates the chart's own queries, and a client of the external scaler."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import yaml

from specdec.bench.proxy import Proxy
from specdec.bench.sim import folder as sim_folder
from specdec.client import Client
from specdec.terms import SamplingParams
from specdec.v1 import externalscaler_pb2 as pb
from specdec.v1 import externalscaler_pb2_grpc
from tests.e2e.prometheus import Prometheus, prometheus
from tests.e2e.stack import Stack, start, wait_ready
from tests.helm.programs import NAMESPACE, RELEASE, template
from tests.helm.scenes import keda

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
SIGNALS = {"target": ("queue", "kv"), "draft": ("needed", "late")}
WAITS = 60.0
# A target whose prompts cost, and a draft whose rows do: load of one kind is a load of one pool alone.
ENGINES = {"ENGINE_PATH": "sim", "KV_TOKENS": "65536", "SELF_TEST": "false", "SCALING_SMOOTHING_MS": "500", "PREFIX_CACHE": "false"}
TARGET = ENGINES | {"SIM": "step_ms=10,row_ms=0,prefill_ms=2"}
DRAFT = {name: value for name, value in ENGINES.items() if name != "PREFIX_CACHE"} | {
    "SIM": "step_ms=10,knee=1,beyond_ms=10,prefill_ms=0,acceptance=0.8"
}
LONG_PROMPT, CROWD = 64, 8


def chart() -> tuple[dict[str, float], dict[str, str]]:
    """Thresholds by signal, and queries by signal (waiting-target, waiting-draft among them), as the chart ships them."""
    values = {pool: keda("prometheus", minReplicas=0) for pool in SIGNALS}
    told = template(values, more=["-s", "templates/autoscaling.yaml"])
    assert told.returncode == 0, told.stderr
    thresholds, queries = {}, {}
    for scaled in yaml.safe_load_all(told.stdout):
        pool = next(pool for pool in SIGNALS if f"-{pool}-" in scaled["metadata"]["name"])
        for trigger in scaled["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            signal = next((signal for signal in SIGNALS[pool] if f'signal="{signal}"' in query), f"waiting-{pool}")
            queries[signal], thresholds[signal] = query, float(trigger["metadata"]["threshold"])
    return thresholds, queries


def ports(count: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [int(found.getsockname()[1]) for found in sockets]


class System:
    """Three orchestrators that name a target and a draft which are not there yet. The two run, since that takes them seconds, behind
    addresses at which nobody listens until `begin`."""

    def __init__(self, model: Path, folder: Path, stack: Stack) -> None:
        self.folder, self.stack = folder, stack
        self.target_port, self.draft_port, self.prometheus_port, *self.scaler_ports = ports(6)
        self.prompts = itertools.count()
        self.proxies: list[Proxy] = []
        settings = {
            "TOKENIZER": str(model),
            "TARGETS": f"127.0.0.1:{self.target_port}",
            "DRAFTS": f"127.0.0.1:{self.draft_port}",
            "PEERS": ",".join(f"127.0.0.1:{port}" for port in self.scaler_ports),
            "ENABLE_ADAPTIVE_VERIFICATION": "false",
        }
        stack.orchestrators += [
            start("orchestrator", "orchestrator", {**settings, "SCALER_PORT": str(port)}, folder) for port in self.scaler_ports
        ]
        for role, engine in (("target", TARGET), ("draft", DRAFT)):
            made = start(role, f"{role}_service", {"MODEL": str(model), **engine}, folder)
            (stack.targets if role == "target" else stack.drafts).append(made)
        for process in (*stack.orchestrators, *stack.targets, *stack.drafts):
            wait_ready(process)

    def begin(self, role: str) -> None:
        process, port = (self.stack.targets[0], self.target_port) if role == "target" else (self.stack.drafts[0], self.draft_port)
        self.proxies.append(Proxy(process.endpoint, 0.0, port))
        self.proxies[-1].start()

    def close(self) -> None:
        for proxy in self.proxies:
            proxy.close()

    @property
    def pods(self) -> dict[str, int]:
        named = enumerate(self.stack.orchestrators)
        return {f"{RELEASE}-specdec-orchestrator-5d9f8c-{i}bcde": process.metrics_port for i, process in named}

    def prompt(self, length: int) -> list[int]:
        """None twice."""
        number = next(self.prompts)
        return [20 + number % 500, 20 + number // 500, *range(30, 28 + length)]


@pytest.fixture
def system(tmp_path: Path) -> Iterator[System]:
    model = tmp_path / "model"
    model.mkdir()
    sim_folder.write(model)
    stack = Stack(tmp_path, model, model)
    try:
        made = System(model, tmp_path, stack)
        yield made
        made.close()
    finally:
        stack.stop()


class Scalers:
    """KEDA's side of the three."""

    def __init__(self, scaler_ports: list[int]) -> None:
        self.channels = [grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in scaler_ports]
        self.stubs: list[Any] = [externalscaler_pb2_grpc.ExternalScalerStub(channel) for channel in self.channels]

    @staticmethod
    def ref(pool: str) -> pb.ScaledObjectRef:
        thresholds = dict.fromkeys(SIGNALS[pool], "0.8")
        return pb.ScaledObjectRef(name=pool, namespace=NAMESPACE, scaler_metadata={"pool": pool, "poolName": "default", **thresholds})

    async def active(self, pool: str) -> list[bool]:
        return [bool((await stub.IsActive(self.ref(pool), timeout=10)).result) for stub in self.stubs]

    async def loads(self, i: int = 2) -> dict[str, float]:
        """Of every signal, as one of the orchestrators tells it."""
        found = {}
        for pool in SIGNALS:
            for spec in (await self.stubs[i].GetMetricSpec(self.ref(pool), timeout=10)).metric_specs:
                request = pb.GetMetricsRequest(scaled_object_ref=self.ref(pool), metric_name=spec.metric_name)
                value = (await self.stubs[i].GetMetrics(request, timeout=10)).metric_values[0]
                found[spec.metric_name.rsplit("-", 1)[1]] = value.metric_value / 1000
        return found


@contextlib.asynccontextmanager
async def load(client: Client, ask: Callable[[], Awaitable[Any]]) -> AsyncIterator[None]:
    """A crowd of callers, each of which asks again and again."""

    async def caller() -> None:
        while True:
            await ask()

    callers = [asyncio.create_task(caller()) for _ in range(CROWD)]
    try:
        yield
    finally:
        for task in callers:
            task.cancel()
        await asyncio.gather(*callers, return_exceptions=True)


async def until(happened: Callable[[], Awaitable[Any]], what: str) -> None:
    last: Any = None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(WAITS):
            while True:
                if (last := await happened()) is True:
                    return
                await asyncio.sleep(0.05)
    raise AssertionError(f"{what}: {last}")


async def test_F174_F175_from_zero_and_each_pool_by_its_own_load(system: System) -> None:
    thresholds, queries = chart()
    scalers = Scalers(system.scaler_ports)
    with prometheus(system.folder, system.prometheus_port, system.pods, NAMESPACE) as metrics:
        async with Client(system.stack.orchestrators[1].endpoint) as client:
            await from_zero(system, scalers, metrics, client, queries)
            await by_their_load(system, scalers, metrics, client, queries, thresholds)
    for channel in scalers.channels:
        await channel.close()
    assert system.stack.defects() == []


async def from_zero(system: System, scalers: Scalers, metrics: Prometheus, client: Client, queries: dict[str, str]) -> None:
    """One of three holds a call, none has a target: each says that the pool is needed, and the call is answered once it is there."""

    async def waiting(pool: str) -> list[float]:
        return await asyncio.to_thread(metrics.query, queries[f"waiting-{pool}"])

    async def nobody_waits() -> Any:
        return [await waiting(pool) for pool in SIGNALS] == [[0.0], [0.0]]

    async def call_waits() -> Any:
        return await waiting("target") == [1.0] or await waiting("target")

    async def all_active(pool: str) -> Any:
        return (found := await scalers.active(pool)) == [True] * 3 or found

    await until(nobody_waits, "the series are there without any replica")
    assert await scalers.active("target") == [False] * 3
    call = asyncio.create_task(client.complete(system.prompt(3), SamplingParams(max_tokens=60, ignore_eos=True), timeout_s=WAITS))
    await until(call_waits, "Prometheus sees the call that waits")
    await until(lambda: all_active("target"), "each of the three says that a target is needed")
    assert await scalers.active("draft") == [False] * 3
    with pytest.raises(grpc.aio.AioRpcError, match="load is unknown"):
        await scalers.loads()
    assert await asyncio.to_thread(metrics.query, queries["queue"]) == [], "a load that nobody knows is no zero"
    system.begin("target")
    await until(lambda: all_active("draft"), "answers that go without a draft say that one is needed")
    assert len((await call).token_ids) == 60, "service goes on without a draft"
    system.begin("draft")


async def by_their_load(
    system: System, scalers: Scalers, metrics: Prometheus, client: Client, queries: dict[str, str], thresholds: dict[str, float]
) -> None:
    async def long_prompt() -> None:
        await client.complete(system.prompt(LONG_PROMPT), SamplingParams(max_tokens=1), num_speculative_tokens=0, timeout_s=WAITS)

    async def speculation() -> None:
        sampling = SamplingParams(max_tokens=200, ignore_eos=True)
        await client.complete(system.prompt(3), sampling, num_speculative_tokens=4, timeout_s=WAITS)

    async def told() -> list[dict[str, float]]:
        """By the external scaler and by Prometheus; unknown = beyond everything."""
        asked = {signal: await asyncio.to_thread(metrics.query, queries[signal]) for pool in SIGNALS.values() for signal in pool}
        try:
            loads = await scalers.loads()
        except grpc.aio.AioRpcError:
            loads = dict.fromkeys(asked, math.inf)
        return [loads, {signal: values[0] if values else math.inf for signal, values in asked.items()}]

    async def beyond(*signals: str) -> Any:
        """Exactly these signals are beyond their thresholds, for both who ask."""
        found = await told()
        over = [{signal for signal, value in loads.items() if value >= thresholds[signal]} for loads in found]
        return all(names == set(signals) for names in over) or found

    await until(beyond, "at rest nothing is beyond its threshold")
    async with load(client, long_prompt):
        await until(lambda: beyond("queue"), "long prompts load the target alone")
    await until(beyond, "it comes to rest")
    async with load(client, speculation):
        await until(lambda: beyond("needed", "late"), "speculation loads the draft alone")
