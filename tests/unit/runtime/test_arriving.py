"""Calls whose request does not come: they hold no place for long, and few of them any."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded
from specdec.runtime.arriving import Arriving
from specdec.runtime.channels import open_channel
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.telemetry import Telemetry
from specdec.status import error_from_rpc
from tests.unit.runtime.secured import serving

pytestmark = pytest.mark.timeout(30)
OWN = "/specdec.v1.GenerationService/"
METHODS = (OWN + "GetModelInfo", OWN + "Generate", "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch")


class Context:
    """A call: its client says what is put into `said`."""

    def __init__(self, *said: Any) -> None:
        self._said = asyncio.Queue[Any]()
        for message in said:
            self._said.put_nowait(message)

    async def read(self) -> Any:
        return await self._said.get()


async def test_a_request_that_comes_is_handed_on() -> None:
    arriving = Arriving()
    assert await arriving.request(Context("hello")) == "hello"  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="request: must be one message"):
        await arriving.request(Context(grpc.aio.EOF))  # type: ignore[arg-type]
    assert not len(arriving)


async def test_a_request_has_so_long_to_come() -> None:
    arriving = Arriving((1,), (0.02, 0.02))
    with pytest.raises(DeadlineExceeded, match=r"request: must come within 0\.02 s"):
        await arriving.request(Context())  # type: ignore[arg-type]
    assert not len(arriving)


async def test_the_eldest_makes_way() -> None:
    arriving = Arriving((2,), (30.0, 0.0))
    calls = [asyncio.create_task(arriving.request(Context())) for _ in range(5)]  # type: ignore[arg-type]
    await asyncio.wait(calls[:3])
    assert all(isinstance(call.exception(), Overloaded) for call in calls[:3]) and len(arriving) == 2
    assert await arriving.request(Context("hello")) == "hello"  # type: ignore[arg-type]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not len(arriving)


async def test_those_that_began_last_have_the_most_time() -> None:
    """Of ten, two have 30 s, four more 10, and the rest none."""
    arriving = Arriving((2, 4), (30.0, 10.0, 0.0))
    calls = [asyncio.create_task(arriving.request(Context())) for _ in range(10)]  # type: ignore[arg-type]
    await asyncio.wait(calls[:4])
    assert [call.done() for call in calls] == [True] * 4 + [False] * 6
    now = asyncio.get_running_loop().time()
    assert [[round((limit.when() or 0.0) - now, -1) for limit in few] for few in arriving._waiting] == [[30.0] * 2, [10.0] * 4]
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)
    assert not len(arriving)


async def test_one_whose_time_is_over_is_left_alone_by_who_comes_in_that_moment() -> None:
    arriving = Arriving((1,), (0.02, 0.0))
    first = asyncio.create_task(arriving.request(Context()))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    (limit,) = arriving._waiting[0]
    limit.reschedule(asyncio.get_running_loop().time())
    while not limit.expired():
        await asyncio.sleep(0)
    assert len(arriving) == 1, "it has not noticed yet"
    assert await arriving.request(Context("hello")) == "hello"  # type: ignore[arg-type]
    assert isinstance((await asyncio.gather(first, return_exceptions=True))[0], Overloaded)


async def test_a_burst_is_no_attack() -> None:
    """Many begin before the first message is looked at."""
    arriving, contexts = Arriving((2, 2)), [Context() for _ in range(50)]
    calls = [asyncio.create_task(arriving.request(context)) for context in contexts]  # type: ignore[arg-type]
    await asyncio.sleep(0)
    for i, context in enumerate(contexts):
        context._said.put_nowait(i)
    assert await asyncio.gather(*calls) == list(range(50))


# ---------------------------------------------------------------- over the wire


def silent(channel: grpc.aio.Channel, method: str) -> Any:
    """A call that begins and says nothing."""
    return channel.stream_stream(method)()


@pytest.mark.parametrize("method", METHODS)
async def test_silent_calls_do_not_take_the_places_of_others(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    made: list[Arriving] = []

    def few(*_: object) -> Arriving:
        made.append(Arriving((2,), (30.0, 0.0)))
        return made[-1]

    monkeypatch.setattr("specdec.runtime.interceptor.Arriving", few)
    async with serving() as service, open_channel(service.endpoint) as channel:
        calls = [silent(channel, method) for _ in range(5)]
        ends = [asyncio.create_task(call.code()) for call in calls]
        async with asyncio.timeout(20):
            while sum(end.done() for end in ends) < 3:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED, timeout=0.05)
        assert {end.result() for end in ends if end.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert await service.ask() is None and await service.healthy(channel)
        for call in calls:
            call.cancel()
        await asyncio.gather(*ends)
        async with asyncio.timeout(20):
            while any(map(len, made)):
                await asyncio.sleep(0.01)


async def test_a_silent_call_counts_as_its_clients() -> None:
    async with serving(client_max_open=1) as service, open_channel(service.endpoint) as channel, asyncio.timeout(20):
        call = silent(channel, OWN + "GetModelInfo")
        while not isinstance(error := await service.ask(), Overloaded):
            if call.done():  # it met one of ours
                call = silent(channel, OWN + "GetModelInfo")
            await asyncio.sleep(0.02)
        assert "SPECDEC_CLIENT_MAX_OPEN" in str(error)
        call.cancel()
        while await service.ask() is not None:
            await asyncio.sleep(0.02)


async def test_streams_of_reflection_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.runtime.interceptor.MAX_OTHERS", 2)
    server = grpc.aio.server(interceptors=[CallInterceptor(Telemetry("orchestrator", metrics_port=-1))])
    reflection.enable_server_reflection((reflection.SERVICE_NAME,), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)  # type: ignore[no-untyped-call]
            listing = partial(reflection_pb2.ServerReflectionRequest, list_services="")
            open_ = [stub.ServerReflectionInfo() for _ in range(2)]
            for call in open_:
                await call.write(listing())
                assert (await call.read()).list_services_response.service
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.ServerReflectionInfo(iter([listing()])).read()
            assert isinstance(error_from_rpc(refused.value), Overloaded)
            await open_[0].done_writing()
            assert await open_[0].read() is grpc.aio.EOF
            assert (await stub.ServerReflectionInfo(iter([listing()])).read()).list_services_response.service
            open_[1].cancel()
    finally:
        await server.stop(0)
