"""GetMetrics: what an orchestrator counts, for those who may see it, at a bounded cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from orchestrator.fronts import showing
from orchestrator.fronts.showing import Showing
from orchestrator.text import TextModel
from specdec.bench.scrape import parse
from specdec.errors import InternalFault, Overloaded, PermissionDenied
from specdec.runtime.guard import Guard
from specdec.runtime.limits import Limits
from specdec.runtime.telemetry import Telemetry
from specdec.status import error_from_rpc
from specdec.v1 import generation_pb2 as pb
from tests.unit.orchestrator.front_rig import serving, text_model_in

pytestmark = pytest.mark.unit


@pytest.fixture(scope="module")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return text_model_in(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "GAP_S", 0.01)


async def refusal(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return error_from_rpc(caught.value)


async def test_the_text_is_that_of_this_moment(text_model: TextModel) -> None:
    telemetry = Telemetry("orchestrator")
    async with serving(text_model, telemetry, show_metrics=True) as service:
        for rounds in (1, 2):
            telemetry.counter("specdec.rounds").add()
            told = parse((await service.stub.GetMetrics(pb.GetMetricsRequest())).text)
            assert told["specdec_rounds_total", frozenset()] == rounds


async def test_who_may_not_see_them_is_told_what_to_set(text_model: TextModel) -> None:
    async with serving(text_model) as service:
        error = await refusal(service.stub.GetMetrics(pb.GetMetricsRequest()))
        assert isinstance(error, PermissionDenied) and "SPECDEC_SHOW_METRICS=true" in str(error)


async def test_limits_of_clients_hold_for_it(text_model: TextModel) -> None:
    telemetry = Telemetry("orchestrator")
    guard = Guard(telemetry, limits=Limits(1e-3, 0))
    async with serving(text_model, telemetry, show_metrics=True, guard=guard) as service:
        await service.stub.GetMetrics(pb.GetMetricsRequest())
        error = await refusal(service.stub.GetMetrics(pb.GetMetricsRequest()))
        assert isinstance(error, Overloaded) and "SPECDEC_CLIENT_REQUESTS_PER_S" in str(error)


# ---------------------------------------------------------------- readings


class Counting:
    """A reading tells how many there were; each waits until it is let on, on its thread."""

    def __init__(self) -> None:
        self.begun = 0
        self.go, self.threads = threading.Semaphore(0), set[int]()

    def __call__(self) -> bytes:
        self.begun += 1
        number = self.begun
        self.threads.add(threading.get_ident())
        assert self.go.acquire(timeout=10)
        return str(number).encode()


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_crowd_costs_two_readings_and_nobody_gets_an_old_one() -> None:
    reading = Counting()
    shown = Showing(reading)
    first = [asyncio.create_task(shown.text()) for _ in range(50)]
    await until(lambda: reading.begun == 1)
    later = [asyncio.create_task(shown.text()) for _ in range(50)]  # what is being read may be older than they are
    await asyncio.sleep(0)
    reading.go.release(2)
    assert set(await asyncio.gather(*first)) == {"1"} and set(await asyncio.gather(*later)) == {"2"}
    assert threading.get_ident() not in reading.threads and reading.begun == 2
    shown.close()


async def test_there_is_a_pause_between_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "GAP_S", 0.2)
    shown, began = Showing(lambda: b"x"), asyncio.get_running_loop().time()
    for _ in range(3):
        await shown.text()
    assert asyncio.get_running_loop().time() - began >= 0.4
    shown.close()


async def test_who_leaves_takes_nothing_from_the_others() -> None:
    reading = Counting()
    shown = Showing(reading)
    impatient, patient = asyncio.create_task(shown.text()), asyncio.create_task(shown.text())
    await until(lambda: reading.begun == 1)
    impatient.cancel()
    reading.go.release()
    assert await patient == "1" and impatient.cancelled()
    shown.close()


async def test_a_reading_that_fails_is_told_and_the_next_one_works() -> None:
    outcomes = iter([InternalFault("a gauge is broken"), b"fine"])

    def read() -> bytes:
        if isinstance(outcome := next(outcomes), bytes):
            return outcome
        raise outcome

    shown = Showing(read)
    told = await asyncio.gather(shown.text(), shown.text(), return_exceptions=True)
    assert [str(error) for error in told] == ["a gauge is broken"] * 2 and await shown.text() == "fine"
    shown.close()


async def test_what_is_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(showing, "MAX_SHOWN_BYTES", 10)
    sizes = iter([10, 11])
    shown = Showing(lambda: b"x" * next(sizes))
    assert len(await shown.text()) == 10
    with pytest.raises(Overloaded, match=r"11 bytes, more than 10 \(MAX_SHOWN_BYTES\)"):
        await shown.text()
    shown.close()
