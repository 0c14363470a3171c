"""A sweep without a service: raw times of answers drawn from a seed, with what a draft gains and what its rows cost put in."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.bench.experiment import AUTO, FIXED, NONE, Experiment, Outcome, Turn
from specdec.bench.record import Run, Said
from specdec.bench.report import Asked, report
from specdec.bench.store import Kept

K, TOKENS = 4, 48
STEP_S, FIRST_S = 0.020, 0.1
SETTINGS = {"rejection_sample_method": "coupled", "batch_invariant": True, "numerics_fingerprint": "f"}
GRID = Experiment(
    prompts=[("code", "a"), ("creative", "b")], kinds=("code", "creative"), concurrencies=(1, 8), temperatures=(0.0,), repeats=4, batch=2
)


def said(draw: random.Random, kind: str, seed: int, k: int, alpha: float, row_s: float) -> Said:
    """Rounds of k proposals, each kept with `alpha`; a slot costs `row_s`."""
    arrivals, origins, rounds, accepted, drafted = [(FIRST_S, 1)], "P", 1, 0, 0
    while len(origins) < TOKENS:
        kept = 0
        while kept < k and draw.random() < alpha:
            kept += 1
        origins += "A" * kept + ("P" if not k else "B" if kept == k else "C")
        took = (STEP_S + k * row_s) * draw.uniform(0.95, 1.05)
        arrivals.append((arrivals[-1][0] + took, kept + 1))
        rounds, accepted, drafted = rounds + 1, accepted + kept, drafted + k
    stats = {
        "num_rounds": rounds,
        "num_spec_steps": rounds - 1 if k else 0,
        "num_draft_tokens": drafted,
        "num_accepted_draft_tokens": accepted,
        "hit_rate": 0.75 if k else 0.0,
    }
    return Said(kind, seed, tuple(range(len(origins))), "t", origins, tuple(arrivals), arrivals[-1][0], stats, prompt_tokens=32)


def run(turn: Turn, alpha: float, row_s: float, seen: Mapping[str, Any] | None = None) -> Run:
    draw = random.Random(f"{turn}")
    streams = turn.cell.concurrency if turn.cell.rate is None else 4
    k = 0 if turn.way == NONE or (turn.way == AUTO and alpha < 0.5) else K
    answers = [said(draw, turn.cell.kind, seed, k, alpha, row_s) for seed in range(turn.repeat * 8, turn.repeat * 8 + max(2, streams))]
    answers = [Said(**{**one_of(one), "token_ids": tuple(range(TOKENS))}) for one in answers]
    seconds = sum(one.total_s for one in answers) / min(len(answers), streams)
    settings = {**SETTINGS, "num_speculative_tokens": k, "enable_adaptive_verification": turn.way == AUTO}
    return Run(turn, seconds, tuple(answers), settings, seen or {})


def one_of(answer: Said) -> dict[str, Any]:
    return {name: getattr(answer, name) for name in Said.__slots__}


def seen(way: str) -> dict[str, Any]:
    """As watch.py tells it: a second of a turn's engine, a draft that is busy for 1.7 s."""
    phases = {"wire": [0.05, 50], "queue": [0.01, 50], "engine": [1.0, 50], "sample": [0.02, 50], "wait": [0.03, 50], "text": [0.01, 50]}
    memory = [{"name": "target-0", "role": "target", "before_mib": 500.0, "resident_mib": 600.0, "peak_mib": 640.0, "mapped_mib": 200.0,
               "weights_mib": 400.0, "kv_mib": 377.5, "kv_used_mib": 80.0, "kv_share": 0.212}]  # fmt: skip
    return {"processes": {"target": 1, "draft": 1}, "memory": memory, "phases": {**phases, "draft": [1.7 * (way != NONE), 200]}}


def runs(experiment: Experiment = GRID, alphas: Mapping[str, float] | None = None, row_s: float = 0.002) -> list[Run]:
    """Every turn; rows cost eight times as much with eight streams."""
    told = alphas or {"code": 0.85, "creative": 0.2}
    return [
        run(turn, told[turn.cell.kind], row_s * (turn.cell.concurrency if turn.cell.rate is None else 1), seen(turn.way))
        for turn in experiment.turns()
    ]


def made_up(kept: Sequence[Run] | None = None, experiment: Experiment = GRID, asked: Asked | None = None) -> dict[str, Any]:
    outcome = Outcome(experiment, complete=True)
    about = {"command": "specdec bench --out sweep", "machine": {"processor": "one <of> many", "cores": 2}, "versions": {"python": "3"}}
    return report(outcome, about, Kept(list(kept if kept is not None else runs(experiment))), asked or Asked())


__all__ = ["AUTO", "FIXED", "GRID", "K", "NONE", "TOKENS", "made_up", "run", "runs", "said", "seen"]
