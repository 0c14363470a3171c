"""More than can be served, over real processes: deadlines, refusals, and clients that never read."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator

import grpc
import pytest

from specdec.client import Client
from specdec.errors import DeadlineExceeded, Overloaded, SpecdecError
from specdec.terms import SamplingParams
from specdec.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.e2e.ask import Ask, answers, same
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]
ONE_PLACE = {"MAX_RUNNING": "1", "MAX_WAITING": "8", "MAX_UNREAD_MS": "300"}
PROMPT = list(range(10, 30))
LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def endpoint(lasting: Stack) -> Iterator[str]:
    """Of an orchestrator with one place."""
    orchestrator = lasting.add_orchestrator(**ONE_PLACE)
    yield orchestrator.endpoint
    orchestrator.kill()
    lasting.orchestrators.remove(orchestrator)


async def until_empty(stack: Stack) -> None:
    async with asyncio.timeout(30):
        while any([p.metric("specdec_sessions") for p in (*stack.targets, *stack.drafts)]):
            await asyncio.sleep(0.02)


def test_F138_calls_whose_deadline_passes_in_the_queue_are_told_and_the_others_go_on(lasting: Stack, endpoint: str) -> None:
    """The place is taken, five calls with a short deadline wait, a sixth is patient; then there are more than the room holds."""
    ((before, patient),) = [answers(endpoint, [Ask(PROMPT, LONG, {"seed": 5}), Ask(PROMPT, SHORT, {"seed": 6})], at_once=1)]
    asyncio.run(until_empty(lasting))

    async def run() -> tuple[list[SpecdecError], list[SpecdecError]]:
        async with Client(endpoint) as client:
            long = asyncio.create_task(client.complete(PROMPT, LONG, seed=5))
            async with asyncio.timeout(30):
                while not lasting.targets[0].metric("specdec_sessions"):
                    await asyncio.sleep(0.01)
            late = [asyncio.create_task(client.complete(PROMPT, SHORT, timeout_s=0.05)) for _ in range(5)]
            waits = asyncio.create_task(client.complete(PROMPT, SHORT, seed=6))
            told = await asyncio.gather(*late, return_exceptions=True)
            crowd = await asyncio.gather(*(client.complete(PROMPT, SHORT, timeout_s=20) for _ in range(12)), return_exceptions=True)
            same(await long, before)
            same(await waits, patient)
            return told, [e for e in crowd if isinstance(e, SpecdecError)]  # type: ignore[return-value]

    told, refused = asyncio.run(run())
    assert all(isinstance(error, DeadlineExceeded | Overloaded) for error in told) and len(told) == 5
    assert len(refused) >= 4 and all(isinstance(error, Overloaded) and error.retry_after_ms >= 100 for error in refused)
    asyncio.run(until_empty(lasting))
    assert not lasting.defects()


def test_F80_a_client_that_never_reads_keeps_no_place(lasting: Stack, endpoint: str) -> None:
    """It neither reads nor leaves. Its window is small, so that little is on its way; the only place is another's soon after."""
    message = generation_pb2.GenerateRequest(
        token_ids=generation_pb2.TokenIds(ids=PROMPT),
        sampling=common_pb2.SamplingParams(max_tokens=900, temperature=1.0, ignore_eos=True, logprobs=20),
    )
    window = [("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0), ("grpc.http2.max_frame_size", 16384)]
    with grpc.insecure_channel(endpoint, options=window) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(message)
        next(call)
        began = time.monotonic()
        (answer,) = answers(endpoint, [Ask(PROMPT, SHORT, {"seed": 6})])
        assert len(answer.token_ids) == 8 and time.monotonic() - began < 30
        asyncio.run(until_empty(lasting))
        read, error = 0, None
        try:
            for event in call:
                read += len(event.delta.token_ids)
        except grpc.RpcError as failure:
            error = failure
        assert error is not None and "output_token_ids" in str(error.details()), "resumable"  # type: ignore[attr-defined]
        assert 0 < read < 900
        with contextlib.suppress(grpc.RpcError):
            call.cancel()
