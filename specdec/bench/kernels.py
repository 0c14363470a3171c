"""What the compiled kernels give: their steps and torch's in turn, and a prefill beside transformers'.

python -m specdec.bench.kernels --model DIR [--repeats 25] [--prefill 1024]

One thread, and processor time of that thread, so that a busy machine disturbs little. Every row of a step gets logits; 128 tokens of
context. `branches`: one row each, all of one session. A prefill is fed in chunks of 64 rows, as the services do, and scores its last row.
`--prefill 0` leaves it out. One JSON object on standard output.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specdec.engine import Engine, EngineConfig, Segment, load_engine

CONTEXT = 128
CHUNK = 64
WARM_UP = 3
PREFILLS = 4


class Subject:
    """An engine with sessions that hold CONTEXT tokens each, and branches of the first."""

    def __init__(self, model: Path, native: bool, sessions: int, tokens: Sequence[int]) -> None:
        config = EngineConfig(model, native=native, reduced_head=True, self_test=False, kv_tokens=max(8192, (sessions + 2) * 256))
        self._engine: Engine = load_engine(config)
        self._tokens = tokens
        self._slots = [self._engine.kv.open() for _ in range(sessions)]
        for slot in self._slots:
            self._engine.forward([Segment(slot, 0, tuple(tokens[:CONTEXT]), CONTEXT)])
        self._branches = [self._engine.kv.branch(self._slots[0], CONTEXT) for _ in range(sessions)]

    def rows(self, count: int) -> None:
        self._step(self._slots[:1], count)

    def sessions(self, count: int) -> None:
        self._step(self._slots[:count], 1)

    def branches(self, count: int) -> None:
        self._step(self._branches[:count], 1)

    def _step(self, slots: Sequence[int], rows: int) -> None:
        self._engine.forward([Segment(slot, CONTEXT, tuple(self._tokens[CONTEXT : CONTEXT + rows]), 0) for slot in slots])
        for slot in slots:
            self._engine.kv.truncate(slot, CONTEXT)

    def prefill(self, count: int) -> None:
        slot = self._engine.kv.open()
        for start in range(0, count, CHUNK):
            piece = tuple(self._tokens[start : min(count, start + CHUNK)])
            last = start + len(piece) == count
            self._engine.forward([Segment(slot, start, piece, len(piece) - last)])
        self._engine.kv.close(slot)


def in_turn(ways: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Median milliseconds of each, one after the other in every round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(WARM_UP + repeats):
        for name, way in ways.items():
            begun = time.thread_time()
            way()
            taken[name].append(1e3 * (time.thread_time() - begun))
    return {name: round(statistics.median(times[WARM_UP:]), 2) for name, times in taken.items()}


def steps(model: Path, repeats: int, tokens: Sequence[int]) -> dict[str, dict[str, float]]:
    subjects = {"compiled_ms": Subject(model, True, 16, tokens), "torch_ms": Subject(model, False, 16, tokens)}
    cases = [("rows", n) for n in (1, 6, 8, 16)] + [(kind, n) for kind in ("sessions", "branches") for n in (8, 16)]
    report = {}
    for kind, count in cases:
        ways = {name: functools.partial(getattr(subject, kind), count) for name, subject in subjects.items()}
        report[f"{count} {kind}"] = in_turn(ways, repeats)
    return report


def prefills(model: Path, count: int, tokens: Sequence[int]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    ids = torch.tensor([tokens[:count]])
    subject = Subject(model, True, 1, tokens)
    ways: dict[str, Callable[[], object]] = {"compiled_ms": lambda: subject.prefill(count)}
    for dtype in (torch.float32, torch.bfloat16):
        module: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        ways[f"transformers_{str(dtype).removeprefix('torch.')}_ms"] = functools.partial(module, ids, logits_to_keep=1)
    with torch.inference_mode():
        return in_turn(ways, PREFILLS)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compiled kernels beside torch's.")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--prefill", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    tokens = torch.randint(0, 1000, (max(options.prefill, 256),), generator=torch.Generator().manual_seed(0)).tolist()
    report: dict[str, Any] = {"steps": steps(options.model, options.repeats, tokens)}
    if options.prefill:
        report["prefill"] = {"tokens": options.prefill, **prefills(options.model, options.prefill, tokens)}
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
