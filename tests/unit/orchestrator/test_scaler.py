"""The external scaler over gRPC: three orchestrators that ask each other, as KEDA sees them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.scaling import board as board_module
from orchestrator.scaling import siblings as siblings_module
from orchestrator.scaling.service import Scaling
from orchestrator.settings import OrchestratorSettings
from specdec.runtime.telemetry import Telemetry
from specdec.terms import DraftLoad, TargetBeat
from specdec.v1 import externalscaler_pb2 as pb
from specdec.v1 import externalscaler_pb2_grpc

pytestmark = pytest.mark.unit
TARGET = {"scalerAddress": "x:1", "pool": "target", "queue": "0.8", "kv": "0.75"}
DRAFT = {"scalerAddress": "x:1", "pool": "draft", "poolName": "far", "needed": "0.8"}


class FakePeer:
    def __init__(self, name: str, pool_name: str = "default", beat: Any = None) -> None:
        self.name, self.pool_name, self.beat = name, pool_name, beat

    @property
    def connected(self) -> bool:
        return self.beat is not None


class FakePool:
    def __init__(self, name: str, *pool_names: str) -> None:
        self.name, self.pool_names, self.peers, self.waiting = name, pool_names, list[FakePeer](), 0

    def __iter__(self) -> Iterator[FakePeer]:
        return iter(self.peers)


class FakeDriver:
    def __init__(self, orchestrator_id: str) -> None:
        self.orchestrator_id = orchestrator_id
        self.target, self.draft = FakePool("target", "default"), FakePool("draft", "default", "far")
        self.pools = (self.target, self.draft)

    def waiting_for(self, pool: FakePool) -> int:
        return pool.waiting

    def discovery_failed(self, pool: str, kind: str) -> None:
        raise AssertionError(kind)


class One:
    """An orchestrator as far as its scaler is concerned, and a client of it."""

    def __init__(self, name: str, port: int, peers: tuple[str, ...]) -> None:
        self.driver, self.telemetry = FakeDriver(name), Telemetry(name)
        settings = OrchestratorSettings(tokenizer=Path(), targets=("t:1",), scaler_port=port, peers=peers)
        self.scaling = Scaling(settings, self.driver, self.telemetry)  # type: ignore[arg-type]
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        self.stub: Any = externalscaler_pb2_grpc.ExternalScalerStub(self.channel)

    async def active(self, metadata: dict[str, str] = TARGET) -> bool:
        answer = await self.stub.IsActive(ref(metadata), timeout=10)
        return bool(answer.result)

    def reading(self, name: str) -> dict[tuple[str, ...], float]:
        families = {family.name: family for family in self.telemetry._instruments.collect()}
        samples = families[name].samples if name in families else []
        return {tuple(sample.labels.values()): sample.value for sample in samples}


def ref(metadata: dict[str, str]) -> pb.ScaledObjectRef:
    return pb.ScaledObjectRef(name="pool", namespace="models", scaler_metadata=metadata)


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for found in sockets:
            found.bind(("127.0.0.1", 0))
        return [int(found.getsockname()[1]) for found in sockets]


@pytest.fixture
async def three(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[One]]:
    """Each names all three, itself included, and one that does not answer."""
    monkeypatch.setattr(board_module, "TICK_S", 0.02)
    monkeypatch.setattr(siblings_module, "FRESH_S", 0.0)
    ports = free_ports(4)
    peers = tuple(f"127.0.0.1:{port}" for port in ports)
    made = [One(f"orchestrator-{i}", port, peers) for i, port in enumerate(ports[:3])]
    for one in made:
        await one.scaling.start()
    yield made
    for one in made:
        await one.channel.close()
        await one.scaling.close()


async def until(happened: Any, seconds: float = 20) -> None:
    async with asyncio.timeout(seconds):
        while not await happened():
            await asyncio.sleep(0.01)


async def test_F174_each_of_three_says_active_though_one_holds_the_waiting_call(three: list[One]) -> None:
    """And whoever does not answer is left out and counted."""
    assert [await one.active() for one in three] == [False] * 3
    three[1].driver.target.waiting = 1
    for one in three:
        await until(one.active)
    assert [await one.active(DRAFT) for one in three] == [False] * 3, "another pool's calls"
    assert three[1].reading("specdec_scaling_waiting") == {("target", "default"): 1, ("draft", "default"): 0, ("draft", "far"): 0}
    assert all(sum(one.reading("specdec_scaling_silent").values()) >= 2 for one in three)


async def test_who_is_asked_at_two_addresses_counts_once_and_nobody_counts_itself(three: list[One]) -> None:
    for one in three:
        one.driver.target.waiting = 5
    siblings = three[0].scaling._siblings
    siblings._channels["localhost"] = three[1].channel

    async def told() -> bool:
        return list((await siblings.waiting()).values())[:1] == [10]

    await until(told)
    del siblings._channels["localhost"]


async def test_a_sibling_that_takes_the_question_and_never_answers_costs_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(siblings_module, "ASK_S", 0.1)
    hangs = asyncio.Event()

    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await hangs.wait()
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
        peer = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        one = One("alone", free_ports(1)[0], (peer,))
        await one.scaling.start()
        one.driver.target.waiting = 1
        one.scaling._board.look()
        assert await asyncio.wait_for(one.active(), 5)
        assert sum(one.reading("specdec_scaling_silent").values()) >= 1
        await one.channel.close()
        await one.scaling.close()
        hangs.set()


async def test_a_change_is_pushed(three: list[One]) -> None:
    call = three[0].stub.StreamIsActive(ref(TARGET))
    assert (await call.read()).result is False
    three[2].driver.target.waiting = 1
    async with asyncio.timeout(20):
        assert (await call.read()).result is True
    call.cancel()


async def test_values_and_thresholds_in_thousandths(three: list[One]) -> None:
    one = three[0]
    spec = await one.stub.GetMetricSpec(ref(TARGET))
    assert [(m.metric_name, m.target_size, m.target_size_float) for m in spec.metric_specs] == [
        ("specdec-target-default-queue", 800, 0.0),
        ("specdec-target-default-kv", 750, 0.0),
    ]
    one.driver.target.peers = [FakePeer("a:1", beat=TargetBeat(2, 0, 0, 9, 0, 20, backlog_ms=75.0, kv_demand=0.25)), FakePeer("b:1")]
    one.driver.draft.peers = [FakePeer("c:1", "far", DraftLoad(1, 0, 1, 0, 9, needed_time_share=0.5, late_demand=0.1))]
    one.scaling._board.look()
    got = {}
    for metadata, metric in ((TARGET, "queue"), (TARGET, "kv"), (DRAFT, "needed")):
        name = f"specdec-{metadata['pool']}-{metadata.get('poolName', 'default')}-{metric}"
        answer = await one.stub.GetMetrics(pb.GetMetricsRequest(scaled_object_ref=ref(metadata), metric_name=name))
        got[metric] = [(value.metric_name == name, value.metric_value, value.metric_value_float) for value in answer.metric_values]
    assert got == {"queue": [(True, 1500, 0.0)], "kv": [(True, 250, 0.0)], "needed": [(True, 500, 0.0)]}
    assert await one.active() and await one.active(DRAFT), "sessions are held there"
    assert one.reading("specdec_scaling_load")["target", "default", "queue"] == 1.5

    one.driver.target.peers = [FakePeer("a:1")]
    one.scaling._board.look()
    with pytest.raises(grpc.aio.AioRpcError, match="their load is unknown") as caught:
        await one.stub.GetMetrics(pb.GetMetricsRequest(scaled_object_ref=ref(TARGET), metric_name="specdec-target-default-kv"))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert ("target", "default", "kv") not in one.reading("specdec_scaling_load"), "nobody may take it for 0"


async def test_bad_metadata_is_an_invalid_argument_that_names_the_field(three: list[One]) -> None:
    stub = three[0].stub
    calls = (
        (stub.IsActive(ref(TARGET | {"pool": "drafts"})), "scalerMetadata.pool"),
        (stub.GetMetricSpec(ref(TARGET | {"kv": "lots"})), "scalerMetadata.kv"),
        (stub.GetMetrics(pb.GetMetricsRequest(scaled_object_ref=ref(TARGET), metric_name="s0-cpu")), "metricName"),
    )
    for call, field in calls:
        with pytest.raises(grpc.aio.AioRpcError, match=field) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    stream = stub.StreamIsActive(ref(TARGET | {"poolName": "elsewhere"}))
    with pytest.raises(grpc.aio.AioRpcError, match="scalerMetadata.poolName"):
        await stream.read()


async def test_a_port_in_use_is_named(three: list[One]) -> None:
    port = int(three[0].scaling._settings.scaler_port)
    again = One("again", port, ())
    with pytest.raises(Exception, match="SPECDEC_SCALER_PORT"):
        await again.scaling.start()
    await again.channel.close()
    await again.scaling.close()
