"""What an experiment found: one figure per cell and way, a verdict per cell, and the raw times beside it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from specdec.bench import economics, figures, slices, timings, verdict, whatif
from specdec.bench.experiment import AUTO, FIXED, NONE, Cell, Experiment, Outcome
from specdec.bench.record import Run, Said, run_of, to_json
from specdec.bench.store import Kept
from specdec.bench.timings import Limits

FORMAT = 2  # of the JSON


class Runs(Protocol):
    def of(self, cell: Cell) -> list[Run]: ...


@dataclass(frozen=True, slots=True)
class Asked:
    """How it is looked at."""

    limits: Limits = Limits()
    margin: float = verdict.MARGIN


def report(outcome: Outcome, about: Mapping[str, Any], runs: Runs | None = None, asked: Asked | None = None) -> dict[str, Any]:
    """The JSON contract: `about` (machine, versions, command) first, then the settings, the summary, the cells, and, where no `runs` hold
    them, the raw times of every turn. One cell's turns are in memory at a time."""
    experiment, asked = outcome.experiment, asked or Asked()
    kept = [run_of(done) for done in outcome.done]
    source: Runs = Kept(kept) if runs is None else runs
    cells, doubts, in_force = list[dict[str, Any]](), dict[str, None](), dict[str, Any]()
    for cell in experiment.cells:
        found = source.of(cell)
        if found:
            cells.append(cell_of(experiment, cell, found, asked))
            doubts |= dict.fromkeys(_doubts(experiment, found))
            in_force |= {run.turn.way: dict(run.settings) for run in found if run.settings}
    together = slices.slices(cells, asked.margin, experiment.baseline)
    return {
        "format": FORMAT,
        **about,
        "simulated": any(str(told.get("numerics_fingerprint", "")).startswith("simulated") for told in in_force.values()),
        "complete": outcome.complete,
        "notes": [*outcome.notes, *doubts],
        "settings": _settings(experiment, asked) | {"in_force": in_force},
        "summary": verdict.summary(cells, together[0] if together else None),
        "slices": together,
        "break_even_load": _loads(cells),
        "memory": economics.most_of(one for cell in cells for figure in cell["ways"].values() for one in figure["memory"]),
        "cells": cells,
        "differing": sum(figure["differing"] or 0 for cell in cells for figure in cell["ways"].values()),
        "errors": sum(figure["errors"] for cell in cells for figure in cell["ways"].values()),
        **({"turns": [to_json(run) for run in kept]} if runs is None else {}),
    }


def _settings(experiment: Experiment, asked: Asked) -> dict[str, Any]:
    return {
        "ways": list(experiment.ways),
        "baseline": experiment.baseline,
        "repeats": experiment.repeats,
        "batch": experiment.batch,
        "max_tokens": experiment.sampling.max_tokens,
        "ignore_eos": experiment.sampling.ignore_eos,
        "num_speculative_tokens": experiment.num_speculative_tokens,
        "prompts": len(experiment.prompts),
        "primed": experiment.primed,
        "arrivals": "poisson" if experiment.rates else "closed",
        "limits": asdict(asked.limits),
        "margin": asked.margin,
    }


def cell_of(experiment: Experiment, cell: Cell, runs: Sequence[Run], asked: Asked) -> dict[str, Any]:
    by_way = {way: {run.turn.repeat: run for run in runs if run.turn.way == way} for way in experiment.ways}
    base = by_way.get(experiment.baseline, {})
    ways = {way: _way(list(held.values()), base, held, cell, asked) for way, held in by_way.items() if held}
    given = verdict.verdict(ways, experiment.baseline, cell.rate is not None, asked.margin)
    told = {name: value for name, value in asdict(cell).items() if value is not None}
    return {"name": str(cell), "load": cell.load, "shape": cell.shape, **told, "ways": ways, "verdict": given.told() if given else None}


def _way(runs: Sequence[Run], base: Mapping[int, Run], held: Mapping[int, Run], cell: Cell, asked: Asked) -> dict[str, Any]:
    told = timings.acceptance(runs)
    settings: Mapping[str, Any] = next((run.settings for run in runs if run.settings), {})
    return {
        **timings.throughput(runs, asked.limits),
        **timings.latencies(runs),
        **told,
        **_compared(held, base, cell),
        "economics": economics.of_way(list(base.values()), runs, told) if told["share_with_block"] else {},
        "phases": economics.phases(runs),
        "memory": economics.memory(runs),
        "draft_busy": _rounded(economics.draft_busy(runs)),
        "draft_step_ms": _rounded(economics.draft_step_ms(runs)),
        "drafts": max((run.seen.get("processes", {}).get("draft", 0) for run in runs), default=0) or None,
        "num_speculative_tokens": settings.get("num_speculative_tokens"),
        "adaptive": bool(settings.get("enable_adaptive_verification")),
    }


def _compared(held: Mapping[int, Run], base: Mapping[int, Run], cell: Cell) -> dict[str, Any]:
    """`ratio` over the repeats that both have: of rates, in an open loop of the mean times of an answer. `differing` None where the method
    promises the distribution, not the text."""
    both = sorted(held.keys() & base.keys())
    if cell.rate is None:
        ours, others = [held[r].rate for r in both], [base[r].rate for r in both]
    else:
        ours, others = [_mean_s(base[r]) for r in both], [_mean_s(held[r]) for r in both]
    found = figures.careful_ratio(ours, others)
    promised = all(_text_is_promised(held[r]) for r in both)
    return {
        "ratio": None if found is None else {key: value if value is None else round(value, 4) for key, value in asdict(found).items()},
        "pairs": [round(a / b, 4) for a, b in zip(ours, others, strict=True) if a > 0 and b > 0],
        "differing": sum(not same_text(a, b) for r in both for a, b in _pairs(held[r], base[r])) if promised else None,
    }


def _mean_s(run: Run) -> float:
    return sum(one.total_s for one in run.answers) / len(run.answers) if run.answers else 0.0


def _pairs(one: Run, other: Run) -> Iterable[tuple[Said, Said]]:
    """Answers to the same question that both came whole."""
    whole = {said.seed: said for said in other.answers}
    return ((said, whole[said.seed]) for said in one.answers if said.seed in whole)


def same_text(one: Said, other: Said) -> bool:
    return one.token_ids == other.token_ids and one.text_hash == other.text_hash


def _text_is_promised(run: Run) -> bool:
    return run.turn.cell.temperature == 0 or run.settings.get("rejection_sample_method") in ("coupled", None)


def _doubts(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """Where the service did something else than was asked, or does not promise what is compared."""
    by_way = {way: [run for run in runs if run.turn.way == way] for way in experiment.ways}
    drafted = {way: sum(one.count("num_draft_tokens") for run in held for one in run.answers) for way, held in by_way.items()}
    doubts = []
    if drafted.get(NONE):
        doubts.append("none: the service verified proposals although it was told not to")
    if any(not run.settings.get("enable_adaptive_verification", True) for run in by_way.get(AUTO, ())):
        doubts.append("auto: the service ran fixed block lengths")
    if by_way.get(FIXED) and not drafted[FIXED]:
        doubts.append("fixed: no proposal was verified; is there a draft?")
    if any(not run.settings.get("batch_invariant", True) for run in runs):
        doubts.append("this engine is not batch-invariant: texts are the target's within rounding only, and may differ")
    if any(not _text_is_promised(run) for run in runs):
        doubts.append("method standard: above temperature 0 the distribution is promised and not the text, which is not compared")
    short = [run for run in runs if run.turn.cell.prompt_tokens and any(0 < one.prompt_tokens < 0.9 * run.turn.cell.prompt_tokens
             or one.prompt_tokens > 1.1 * run.turn.cell.prompt_tokens for one in run.answers)]  # fmt: skip
    if short:
        doubts.append(
            f"prompts of {short[0].turn.cell.prompt_tokens}: some are longer than that by themselves, or could not be made as long"
        )
    return doubts


def _loads(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each way stops paying as the load grows, the rest being equal."""
    found = []
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        of_shape = [cell for cell in cells if cell["shape"] == shape]
        for way in dict.fromkeys(way for cell in of_shape for way in cell["ways"]):
            points = [(cell.get("rate") or cell["concurrency"], cell["ways"][way]["ratio"]["mean"]) for cell in of_shape
                      if cell["ways"].get(way, {}).get("ratio")]  # fmt: skip
            load = whatif.break_even_load([x for x, _ in points], [y for _, y in points])
            if load is not None:
                found.append({"shape": shape, "way": way, "load": round(load, 2)})
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
