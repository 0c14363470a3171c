"""What two models on neighbouring cores cost each other. One core each, no services: engine steps alone.

    python -m specdec.bench.beside [--target-model DIR] [--draft-model DIR] [--rows 3] [--seconds 2] [--draft-dtype int4] [--json]

Two cores of one CPU have their own first caches and share the last one and the way to memory. A target whose weights no cache holds
reads all of them at every step and sweeps the draft's out. A draft that is never at rest keeps its weights in the cache; one that waits a
moment between passes, as in service, reads them from memory again, and takes bandwidth from the target as well. Medians in milliseconds:

    target          1 and `--rows` rows, alone and beside the draft that rests
    draft           a pass of four rows: alone and at work without a rest; resting PAUSE_MS between passes beside the target

and, of these, the most that a round can gain where the draft needs K passes behind every commit it did not foresee.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from specdec.bench.system import DRAFT_DTYPE, DRAFT_MODEL, TARGET_MODEL, default_pins
from specdec.errors import InvalidRequest, SpecdecError

PAUSE_MS = 2.0  # about what a draft of one stream has nothing to do for
DRAFT_ROWS = 4
START = 200  # tokens of context
START_S = 120.0  # longest wait for the models to load


@dataclass(frozen=True, slots=True)
class Job:
    """Steps of so many rows, one after the other with `pause_ms` between them."""

    name: str
    model: Path
    core: int
    rows: int
    pause_ms: float = 0.0
    dtype: str = "int8"


def beside(jobs: Sequence[Job], seconds: float) -> dict[str, float]:
    """Median milliseconds of a step by job's name; all run at the same time. Raises InvalidRequest when one of them cannot start."""
    context = multiprocessing.get_context("spawn")
    ready, found = context.Barrier(len(jobs)), context.SimpleQueue()
    processes = [context.Process(target=_work, args=(job, seconds, ready, found), daemon=True) for job in jobs]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(START_S + seconds)
        if any(process.exitcode != 0 for process in processes):
            raise InvalidRequest("model", "the steps could not be measured; the reason stands above")
        return dict(found.get() for _ in jobs)
    finally:
        for process in processes:
            process.kill()


def _work(job: Job, seconds: float, ready: Any, found: Any) -> None:
    os.sched_setaffinity(0, {job.core})
    from specdec.engine import EngineConfig, Segment, load_engine  # torch comes with it

    engine = load_engine(EngineConfig(job.model, dtype=job.dtype, self_test=False, kv_tokens=2048, reduced_head=True))
    slot = engine.kv.open()
    engine.forward([Segment(slot, 0, tuple(range(1000, 1000 + START)), START)])
    rows = [Segment(slot, START, tuple(range(7, 7 + job.rows)), 0)]
    ready.wait(START_S)
    taken, end = list[float](), time.perf_counter() + seconds
    while (begun := time.perf_counter()) < end:
        engine.forward(rows)
        taken.append(1000 * (time.perf_counter() - begun))
        engine.kv.truncate(slot, START)
        time.sleep(job.pause_ms / 1000)
    found.put((job.name, statistics.median(taken)))


def measure(target: Path, draft: Path, rows: int, seconds: float, cores: tuple[int, int], draft_dtype: str) -> dict[str, float]:
    """Milliseconds by name."""
    plain, block = Job("target_1", target, cores[0], 1), Job("target_block", target, cores[0], rows)
    busy = Job("draft", draft, cores[1], DRAFT_ROWS, dtype=draft_dtype)
    resting = replace(busy, name="draft_beside", pause_ms=PAUSE_MS)
    found = beside([plain], seconds) | beside([block], seconds) | beside([busy], seconds)
    both = beside([block, resting], seconds)
    return found | {"target_block_beside": both["target_block"], "draft_beside": both["draft_beside"]}


def most(found: Mapping[str, float], length: float, hit_rate: float, k: int) -> float:
    """Ratio to plain decoding of rounds of `length` tokens, `hit_rate` of which find their block ready while the others wait for K passes;
    messages, sampling and everything else cost nothing."""
    round_ms = found["target_block_beside"] + (1 - hit_rate) * k * found["draft_beside"]
    return length * found["target_1"] / round_ms


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.beside", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--target-model", type=Path, default=TARGET_MODEL)
    parser.add_argument("--draft-model", type=Path, default=DRAFT_MODEL)
    parser.add_argument("--rows", type=int, default=3, help="of a block, K + 1 (default: %(default)s)")
    parser.add_argument("--draft-dtype", choices=("int4", "int8", "float32"), default=DRAFT_DTYPE, help="default: the draft service's")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement (default: %(default)s)")
    parser.add_argument(
        "--acceptance", type=float, default=0.54, help="for the gain: share kept of each slot (default: the shipped draft's)"
    )
    parser.add_argument("--hit-rate", type=float, default=0.5, help="for the gain: rounds whose block is ready (default: %(default)s)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    pins = default_pins()
    if not pins:
        print("beside: two cores are needed", file=sys.stderr)
        return 2
    try:
        found = measure(
            args.target_model, args.draft_model, args.rows, args.seconds, (int(pins["target"]), int(pins["draft"])), args.draft_dtype
        )
    except SpecdecError as error:
        print(f"beside: {error}", file=sys.stderr)
        return 2
    k = args.rows - 1
    length = sum(args.acceptance**slot for slot in range(args.rows))
    gain = most(found, length, args.hit_rate, k)
    if args.json:
        print(json.dumps({name: round(ms, 3) for name, ms in found.items()} | {"most": round(gain, 3)}))
        return 0
    print(f"target, 1 row                    {found['target_1']:6.2f} ms")
    print(
        f"target, {args.rows} rows                   {found['target_block']:6.2f} ms, beside the draft {found['target_block_beside']:.2f}"
    )
    print(f"draft, a pass of {DRAFT_ROWS} rows          {found['draft']:6.2f} ms, beside the target {found['draft_beside']:.2f}")
    print(
        f"most that K = {k} can gain         {gain:6.2f}x  ({length:.2f} tokens a round, {args.hit_rate:.0%} of the blocks ready in time)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
