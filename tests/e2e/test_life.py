"""Stops, restarts and health of real processes under real streams."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import Client, Completion, Delta
from specdec.errors import SpecdecError, Unavailable
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers
from tests.e2e.drafts import FLOAT64
from tests.e2e.stack import Process, Stack

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
LONG = SamplingParams(temperature=1.0, max_tokens=500, ignore_eos=True)
PROMPT = list(range(10, 40))
ASK = Ask(PROMPT, LONG, {"seed": 5})
QUEUED = 200


@pytest.fixture(scope="module")
def reference(lasting: Stack) -> Completion:
    return answers(lasting.endpoint, [ASK])[0]


def stopped(stack: Stack, orchestrator: Process) -> int | None:
    """Its exit code."""
    orchestrator.kill(signal.SIGTERM)
    stack.orchestrators.remove(orchestrator)
    return orchestrator.popen.returncode


def probes_of(process: Process) -> grpc.aio.Channel:
    found = re.search(r"health_port=(\d+)", process.log.with_suffix(".out").read_text())
    assert found
    return grpc.aio.insecure_channel(f"{process.host}:{found[1]}")


async def serving(channel: grpc.aio.Channel, name: str) -> bool:
    reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
    return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)


def test_f142_an_orchestrator_that_stops_finishes_its_streams(lasting: Stack, reference: Completion) -> None:
    """Readiness goes first, then new calls are refused, the stream ends as it would have, the process with 0."""
    stopping = lasting.add_orchestrator(HEALTH_PORT="0", DRAIN_MS="60000", PRE_DRAIN_MS="0")

    async def run() -> tuple[int, ...]:
        ids: list[int] = []
        async with Client(stopping.endpoint) as client, Client(stopping.endpoint) as late, probes_of(stopping) as probes:
            async with asyncio.timeout(20):
                while not await serving(probes, "readiness"):
                    await asyncio.sleep(0.02)
            await late.get_model_info()
            async for event in client.generate(PROMPT, LONG, seed=5):
                if not isinstance(event, Delta):
                    continue
                if not ids:
                    stopping.popen.send_signal(signal.SIGTERM)
                    stopping.popen.send_signal(signal.SIGTERM)
                    while await serving(probes, "readiness"):
                        await asyncio.sleep(0.001)
                    with pytest.raises(Unavailable, match="another one"):
                        while True:
                            await late.get_model_info()
                    assert await serving(probes, "liveness")
                ids += event.token_ids
        return tuple(ids)

    assert asyncio.run(run()) == reference.token_ids
    assert stopping.popen.wait(20) == stopped(lasting, stopping) == 0


def test_f145_health_beside_a_full_queue(lasting: Stack) -> None:
    """One place, 200 who wait for it: a probe takes its usual time, on both ports."""
    busy = lasting.add_orchestrator(HEALTH_PORT="0", MAX_RUNNING="1", DRAIN_MS="0", PRE_DRAIN_MS="0")

    async def run() -> list[float]:
        took = []
        async with Client(busy.endpoint) as client, probes_of(busy) as probes, grpc.aio.insecure_channel(busy.endpoint) as main:
            waiting = [asyncio.ensure_future(client.complete(PROMPT, LONG, seed=i)) for i in range(QUEUED)]
            async with asyncio.timeout(30):
                while await asyncio.to_thread(busy.metric, "specdec_requests_waiting") < QUEUED * 0.8:
                    await asyncio.sleep(0.02)
            for channel in (probes, main) * 10:
                began = time.perf_counter()
                assert await serving(channel, "liveness")
                took.append(time.perf_counter() - began)
                await asyncio.sleep(0.01)
            for call in waiting:
                call.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)
        return took

    took = sorted(asyncio.run(run()))
    assert took[len(took) // 2] < 0.25, took
    stopped(lasting, busy)


def test_f83_an_orchestrator_without_a_target_is_not_ready(lasting: Stack) -> None:
    """No draft is no reason; no target is one."""
    target = lasting.targets[0]
    lonely = lasting.add_orchestrator(TARGETS="127.0.0.1:1", DRAFTS="127.0.0.1:1", HEALTH_PORT="0", DRAIN_MS="0", PRE_DRAIN_MS="0")
    alone = lasting.add_orchestrator(TARGETS=target.endpoint, DRAFTS="127.0.0.1:1", HEALTH_PORT="0", DRAIN_MS="0", PRE_DRAIN_MS="0")

    async def run() -> None:
        async with probes_of(lonely) as without, probes_of(alone) as with_one:
            async with asyncio.timeout(20):
                while not await serving(with_one, "readiness"):
                    await asyncio.sleep(0.02)
            assert not await serving(without, "readiness")
            assert (
                await serving(without, "liveness") and await serving(without, "") and await serving(without, "specdec.v1.GenerationService")
            )

    asyncio.run(run())
    assert [stopped(lasting, process) for process in (lonely, alone)] == [0, 0]


@pytest.mark.parametrize("roles", [("target",), pytest.param(("draft", "orchestrator"), marks=pytest.mark.long)])
def test_up_starts_again_whatever_is_killed(lasting: Stack, reference: Completion, tmp_path: Path, roles: tuple[str, ...]) -> None:
    """F149: kill -9 of each child in turn; who asks meanwhile waits, and what follows is the same text, speculation included."""
    state, model = tmp_path / "state", lasting.target_model
    settings = {f"SPECDEC_{name}": value for name, value in {**FLOAT64, "ENABLE_ADAPTIVE_VERIFICATION": "false"}.items()}
    specdec = [sys.executable, "-m", "specdec.cli.main"]
    models = ["--target-model", str(model), "--draft-model", str(model)]
    subprocess.run([*specdec, "up", "--detach", "--state", str(state), *models], env={**os.environ, **settings}, check=True, timeout=120)
    try:
        endpoint = (state / "endpoint").read_text().strip()
        for role in roles:
            pid = next(entry["pid"] for entry in json.loads((state / "processes.json").read_text()) if entry["role"] == role)
            os.kill(pid, signal.SIGKILL)
            if role != "orchestrator":
                assert answers(endpoint, [ASK])[0].token_ids == reference.token_ids
            until_told(state, f"{role}-0 is back on")
        again = speculating(endpoint)
        assert again.token_ids == reference.token_ids
    finally:
        subprocess.run([*specdec, "down", "--state", str(state)], check=True, timeout=60)


def until_told(state: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while text not in (state / "up.log").read_text():
        assert time.monotonic() < deadline, (state / "up.log").read_text()
        time.sleep(0.05)


def speculating(endpoint: str) -> Completion:
    """An answer with a draft; the orchestrator meets a restarted one when it dials again."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            answer = answers(endpoint, [ASK])[0]
        except SpecdecError:  # the connection is the old one's
            continue
        if answer.finished.speculative.num_accepted_draft_tokens > 50:
            return answer
    raise AssertionError("no speculation within 30 s")
