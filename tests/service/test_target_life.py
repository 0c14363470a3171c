"""A target's life as a process: room, SIGTERM, an engine that dies or hangs."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.terms import (
    Failed,
)
from tests.service.target_process import BREAKING, GREEDY, PROMPTS, Talk, TargetProcess, contextual, generated
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


async def test_a_hung_engine_shows_in_the_beats_and_cannot_keep_the_process(model: Path) -> None:
    process = TargetProcess(model, BREAKING.format(fault="time.sleep(3600)"), SELF_TEST="false", DRAIN_MS=500)
    try:
        async with process.stream() as stream:
            await stream.send(first_step([5, 299], sampling=GREEDY))
            while not stream.beats or stream.beats[-1].running_step_ms < 500:
                await stream.listen()
            process.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.process.wait, 15.0) == 1
    finally:
        process.end()
