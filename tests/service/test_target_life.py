"""A target's life as a process: room, SIGTERM, an engine that dies or hangs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.terms import (
    Failed,
)
from tests.service.target_process import BREAKING, GREEDY, PROMPTS, SLOW_TO_LOAD, Talk, TargetProcess, contextual, generated
from tests.unit.runtime.shell import SERVING, connected, health
from tests.unit.target.harness import first_step

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


async def test_eight_sessions_on_room_for_seven(model: Path, hf: Any) -> None:
    """F68: all finish as if alone, with at most 8 prefills more than sessions."""
    process = TargetProcess(model, KV_TOKENS=7 * 128, RESERVE_TOKENS=16)
    try:
        async with contextual(process, 8) as streams:
            prompts = [[i + 5, *range(10, 50)] for i in range(8)]
            talks = [Talk(stream, prompt, "s") for stream, prompt in zip(streams, prompts, strict=True)]
            texts = await asyncio.gather(*(talk.run(70) for talk in talks))
        assert texts == [generated(hf, prompt, 70) for prompt in prompts]
        assert sum(talk.prefills for talk in talks) <= 16
    finally:
        process.end()


async def test_sigterm_drains_and_exits_0(model: Path) -> None:
    process = TargetProcess(model, SELF_TEST="false", DRAIN_MS=5000)
    try:
        async with process.stream() as stream:
            talk = Talk(stream, PROMPTS[0], "s")
            await talk.ask()
            await talk.feed(await stream.answer())
            assert not stream.beats[-1].draining and not stream.beats[-1].drain_remaining_ms
            process.process.send_signal(signal.SIGTERM)
            while not stream.beats[-1].draining:
                await stream.listen()
            assert 3000 < stream.beats[-1].drain_remaining_ms <= 5000
            await stream.send(first_step([5], session="new", sampling=GREEDY))
            refused = (await stream.answer()).outcome
            assert isinstance(refused, Failed) and refused.code == 14, "its orchestrator goes elsewhere"
            assert len(await talk.run(10)) == 10, "who is here may finish"
            assert (await stream.status())[0] is grpc.StatusCode.OK
        assert await asyncio.to_thread(process.process.wait, 5.0) == 0
    finally:
        process.end()


async def test_f141_sigterm_while_the_model_is_loaded(model: Path, tmp_path: Path) -> None:
    """The loading thread cannot be stopped, and does not keep the process."""
    loading = tmp_path / "loading"
    code = SLOW_TO_LOAD.format(path=str(loading))
    settings = {"SPECDEC_MODEL": str(model), "SPECDEC_DRAIN_MS": "60000", "SPECDEC_METRICS_PORT": "-1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, **settings}, stdout=subprocess.PIPE)
    try:
        async with asyncio.timeout(60):
            while not loading.exists():
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 10.0) == 0
        assert process.stdout is not None and process.stdout.read() == b""
    finally:
        process.kill()
        process.communicate()


async def test_a_dead_engine_fails_the_calls_and_the_process(model: Path) -> None:
    """F170: no health without an engine."""
    process = TargetProcess(model, BREAKING.format(fault="raise RuntimeError('device lost')"), SELF_TEST="false", DRAIN_MS=60_000)
    try:
        async with process.stream("a") as one, process.stream("b") as two:
            await two.send(first_step([5], sampling=GREEDY))
            await two.answer()
            await one.send(first_step([5, 299], sampling=GREEDY))
            for stream in (one, two):
                code, details = await stream.status()
                assert code is grpc.StatusCode.INTERNAL and "device lost" in details
        assert await asyncio.to_thread(process.process.wait, 10.0) == 1
    finally:
        process.end()


async def test_an_engine_that_asks_the_process_to_end_does_not_look_like_success(model: Path) -> None:
    """F170: passed on to the event loop, sys.exit(0) in a step would be an exit without a word."""
    process = TargetProcess(model, BREAKING.format(fault="sys.exit(0)"), SELF_TEST="false", DRAIN_MS=60_000)
    try:
        async with process.stream() as stream:
            await stream.send(first_step([5, 299], sampling=GREEDY))
            code, details = await stream.status()
            assert code is grpc.StatusCode.INTERNAL and "SystemExit" in details
        assert await asyncio.to_thread(process.process.wait, 10.0) == 1
    finally:
        process.end()


async def test_a_hung_engine_shows_in_the_beats_and_in_liveness_and_cannot_keep_the_process(model: Path) -> None:
    """F170, F145: health does not wait for the engine."""
    settings = {"SELF_TEST": "false", "DRAIN_MS": 500, "HUNG_STEP_MS": 700, "HEALTH_PORT": 0}
    process = TargetProcess(model, BREAKING.format(fault="time.sleep(3600)"), **settings)
    try:
        async with process.stream() as stream, connected(f"127.0.0.1:{process.health_port}") as probes:
            await stream.send(first_step([5], session="fine", sampling=GREEDY))
            await stream.answer()
            await asyncio.sleep(1.0)
            assert await health(probes, "liveness") == SERVING, "an idle engine is not a hung one"
            await stream.send(first_step([5, 299], sampling=GREEDY))
            while not stream.beats or stream.beats[-1].running_step_ms < 500:
                await stream.listen()
            async with asyncio.timeout(20):
                while await health(probes, "liveness") == SERVING:
                    await asyncio.sleep(0.02)
            process.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.process.wait, 15.0) == 1
    finally:
        process.end()
