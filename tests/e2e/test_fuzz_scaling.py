"""What the scaler's port accepts, made strange, and what another orchestrator answers: no crash, no hang, good ones are answered."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.scaling import siblings as siblings_module
from orchestrator.scaling.siblings import Siblings
from specdec.v1 import externalscaler_pb2 as pb
from specdec.v1 import scaling_pb2
from tests.e2e.mutation import mutated
from tests.unit.orchestrator.test_scaler import TARGET, One, free_ports, ref

pytestmark = [pytest.mark.unit, pytest.mark.timeout(60)]
HANG_S = 10.0
OURS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
REQUESTS: dict[str, Any] = {
    "externalscaler.ExternalScaler/IsActive": ref(TARGET),
    "externalscaler.ExternalScaler/StreamIsActive": ref(TARGET),
    "externalscaler.ExternalScaler/GetMetricSpec": ref(TARGET),
    "externalscaler.ExternalScaler/GetMetrics": pb.GetMetricsRequest(
        scaled_object_ref=ref(TARGET), metric_name="specdec-target-default-queue"
    ),
    "specdec.v1.ScalingService/GetWaiting": scaling_pb2.GetWaitingRequest(),
}
SAID = scaling_pb2.GetWaitingResponse(
    orchestrator_id="other", pools=[scaling_pb2.PoolWaiting(pool="target", pool_name="default", waiting=3), scaling_pb2.PoolWaiting()]
)
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
T = TypeVar("T")


class World:
    """An orchestrator's scaler, and a sibling of it that says what the test wants."""

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self.said = b""
        self.run(self._begin())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(asyncio.wait_for(work, HANG_S))

    async def _begin(self) -> None:
        port, other = free_ports(2)
        self.one = One("orchestrator", port, ())
        await self.one.scaling.start()
        handler = grpc.unary_unary_rpc_method_handler(self._answer)
        self._other = grpc.aio.server()
        self._other.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdec.v1.ScalingService", {"GetWaiting": handler}),))
        self._other.add_insecure_port(f"127.0.0.1:{other}")
        await self._other.start()
        self.silent = 0
        self.siblings = Siblings((f"127.0.0.1:{other}",), "me", poll_s=1.0, keep_s=1.0, failed=print, silent=self._was_silent)
        self.siblings.run()

    async def _answer(self, request: bytes, context: Any) -> bytes:
        return self.said

    def _was_silent(self) -> None:
        self.silent += 1

    def close(self) -> None:
        async def end() -> None:
            await self.siblings.close()
            await self._other.stop(0)
            await self.one.channel.close()
            await self.one.scaling.close()

        self.run(end())
        self._runner.close()

    async def ask(self, method: str, content: bytes) -> None:
        """A watcher is heard once and leaves."""
        streamed = method.endswith("StreamIsActive")
        kind: Any = self.one.channel.unary_stream if streamed else self.one.channel.unary_unary
        call = kind(f"/{method}", lambda sent: sent, lambda got: got)(content, timeout=HANG_S)
        try:
            await (call.read() if streamed else call)
        except grpc.aio.AioRpcError as error:
            assert error.code() not in OURS or not decodable(method, content), error
        finally:
            call.cancel()

    async def told(self) -> Any:
        """What one who asks well hears."""
        specs = await self.one.stub.GetMetricSpec(ref(TARGET), timeout=HANG_S)
        return await self.one.active(), specs


def decodable(method: str, content: bytes) -> bool:
    with contextlib.suppress(DecodeError):
        type(REQUESTS[method]).FromString(content)
        return True
    return False


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(siblings_module, "FRESH_S", 0.0)
        made = World()
        yield made
        made.close()


@settings(max_examples=150, deadline=None, derandomize=True, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F52_strange_questions_of_a_scaler(world: World, data: st.DataObject, caplog: pytest.LogCaptureFixture) -> None:
    want = world.run(world.told())
    method = data.draw(st.sampled_from(list(REQUESTS)))
    content = mutated(data.draw, REQUESTS[method])
    world.run(world.ask(method, content))
    assert world.run(world.told()) == want
    assert [record for record in caplog.records if record.levelno >= logging.ERROR and decodable(method, content)] == []
    caplog.clear()


@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=CHECKS, database=None)
@given(data=st.data())
def test_F51_strange_answers_of_another_orchestrator(world: World, data: st.DataObject) -> None:
    """It counts for what it says, within bounds, or for nothing."""
    world.said, world.silent = mutated(data.draw, SAID), 0
    told = world.run(world.siblings.waiting())
    assert all(0 <= count <= siblings_module.MOST_WAITING * len(world.said) for count in told.values())
    assert not (told and world.silent)
    world.said = SAID.SerializeToString()
    assert {key.pool: count for key, count in world.run(world.siblings.waiting()).items()} == {"target": 3, "": 0}
