"""Prompts of the real model at a real target process: beside a running stream, and again."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.terms import TokenLogprobs
from tests import scraped
from tests.service.target_client import Stream
from tests.service.target_process import GREEDY, Talk, TargetProcess

pytestmark = [pytest.mark.pair, pytest.mark.alone, pytest.mark.timeout(120)]
MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m"
ROWS = 512  # of a step: a prompt of so many tokens would fit into one


@pytest.fixture(scope="module")
def target() -> Iterator[TargetProcess]:
    made = TargetProcess(MODEL, DTYPE="int8", SELF_TEST="false", MAX_STEP_ROWS=ROWS)
    yield made
    made.end()


def prompt(seed: int, length: int) -> list[int]:
    return [(seed * 7919 + 31 * i * i + 17 * i) % 40_000 + 20 for i in range(length)]


def counted(target: TargetProcess, name: str) -> float:
    return scraped.total(target.metrics_port, name)


async def test_f103_a_long_prompt_does_not_freeze_a_stream(target: TargetProcess) -> None:
    """Tokens of the stream while two prompts are computed, each of which would be one step: by their number, since a loaded machine
    stretches every step alike."""
    heard: list[float] = []

    async def runs(stream: Stream) -> None:
        talk = Talk(stream, prompt(1, 20), "runs")
        while True:
            await talk.ask()
            await talk.feed(await stream.answer(20.0))
            heard.append(time.monotonic())

    async with target.stream("a") as one, target.stream("b") as two, target.stream("c") as three:
        running = asyncio.create_task(runs(one))
        while len(heard) < 25:
            await asyncio.sleep(0.01)
        steady = statistics.median(b - a for a, b in itertools.pairwise(heard[5:]))
        del heard[:-1]
        await asyncio.gather(Talk(two, prompt(2, ROWS - 100), "b").run(1), Talk(three, prompt(3, ROWS - 100), "c").run(1))
        meanwhile = list(heard)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert len(meanwhile) > 12, f"{len(meanwhile)} tokens while 824 were computed"
    gaps = [b - a for a, b in itertools.pairwise(meanwhile)]
    assert statistics.median(gaps) < 5 * steady


async def test_what_is_known_is_not_computed_again_and_says_the_same(target: TargetProcess) -> None:
    """The same texts and log-probabilities bit for bit: cold, all of it known, a part of it, and computed in spite of it."""
    sampling = replace(GREEDY, temperature=0.8, logprobs=3)
    known, other = prompt(4, 300), [*prompt(4, 200), *prompt(5, 100)]

    async def says(stream: Stream, tokens: list[int], **more: object) -> tuple[list[int], list[TokenLogprobs]]:
        talk = Talk(stream, tokens, "s", replace(sampling, **more))  # type: ignore[arg-type]
        return await talk.run(8), [entry for result in talk.results for entry in result.logprobs][:8]

    async with target.stream() as stream:
        before = counted(target, "specdec_prefix_cache_hit_tokens_total")
        cold = [await says(stream, known)]
        assert counted(target, "specdec_prefix_cache_hit_tokens_total") == before
        warm = [await says(stream, known), await says(stream, other)]
        assert counted(target, "specdec_prefix_cache_hit_tokens_total") == before + 256 + 192
        cold.append(await says(stream, other, prompt_logprobs=0))
        assert await says(stream, known, prompt_logprobs=0) == cold[0]
        assert counted(target, "specdec_prefix_cache_hit_tokens_total") == before + 256 + 192
    assert warm == cold
    assert counted(target, "specdec_prefix_cache_tokens") > 0 == counted(target, "specdec_kv_cache_utilization")
