"""The time of one engine step: forward and head for so many rows per session, and, apart, the sampling of a row with its noise."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.bench.in_process import filled
from specdec.engine import Engine, EngineConfig, Segment, load_engine
from specdec.errors import InvalidRequest
from specdec.sampling import Sampler
from specdec.terms import SamplingParams

WARM_UP = 3
REPEATS = 21
SAMPLED_ROWS = 64
SAMPLING = {
    "greedy": SamplingParams(temperature=0.0),
    "t1": SamplingParams(temperature=1.0),
    "topp": SamplingParams(temperature=0.8, top_p=0.95),
}


def run_bench_step(
    model: Path | str,
    rows: Sequence[int],
    sessions: int = 1,
    start: int = 128,
    threads: int = 1,
    sampling: str = "greedy",
) -> dict[str, Any]:
    """{"rows": {rows per session: milliseconds, median}, "sampling_ms_per_row": …}. Every row gets logits; `start` tokens of context."""
    room = sessions * (start + max(rows) + 64)
    config = EngineConfig(
        model, threads=threads, kv_tokens=max(8192, room), max_rows=max(512, sessions * max(rows)), self_test=False, reduced_head=True
    )
    engine = load_engine(config)
    if start + max(rows) > engine.info.window:
        raise InvalidRequest("--start", f"context and rows together must fit the model's window of {engine.info.window} positions")
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, engine.info.vocab_size, (start + max(rows),), generator=draw).tolist()
    slots = [filled(engine, tokens[:start]) for _ in range(sessions)]
    times: dict[int, list[float]] = {n: [] for n in rows}
    for _, n in itertools.product(range(WARM_UP + REPEATS), rows):  # one after the other: a slow second hits all counts alike
        times[n].append(_step_ms(engine, slots, tokens[start : start + n], start))
    return {
        "rows": {str(n): round(statistics.median(taken[WARM_UP:]), 3) for n, taken in times.items()},
        "sampling_ms_per_row": round(_sampling_ms(engine, slots[0], tokens[start : start + 1], start, SAMPLING[sampling]), 4),
    }


def _step_ms(engine: Engine, slots: Sequence[int], tokens: Sequence[int], start: int) -> float:
    segments = [Segment(slot, start, tuple(tokens), 0) for slot in slots]
    begun = time.perf_counter()
    engine.forward(segments)
    taken = 1e3 * (time.perf_counter() - begun)
    for slot in slots:
        engine.kv.truncate(slot, start)
    return taken


def _sampling_ms(engine: Engine, slot: int, tokens: Sequence[int], start: int, params: SamplingParams) -> float:
    """A row of real logits, a fresh position each time, so that noise is drawn each time."""
    row = engine.forward([Segment(slot, start, tuple(tokens), 0)])[0][0]
    engine.kv.truncate(slot, start)
    choose = _chooser(engine, params, row)
    taken = []
    for position in range(WARM_UP + SAMPLED_ROWS):
        begun = time.perf_counter()
        choose(position)
        taken.append(1e3 * (time.perf_counter() - begun))
    return statistics.median(taken[WARM_UP:])


def _chooser(engine: Engine, params: SamplingParams, row: Tensor) -> Callable[[int], int]:
    info = engine.info
    sampler = Sampler(params, 0, info.vocab_size, info.eos_ids, (), info.draft_ids)
    output = [5] * (WARM_UP + SAMPLED_ROWS)
    return lambda position: sampler.choose(row, position, output[:position])
