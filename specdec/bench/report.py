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
OVERLOADED, LEAST_HALF = 1.5, 4  # times as long as it should take; answers of a half


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
    verdict.judge_together(cells, experiment.baseline)
    all_figures = [figure for cell in cells for figure in cell["ways"].values()]
    others = [figure for cell in cells for way, figure in cell["ways"].items() if way != experiment.baseline]
    doubts |= dict.fromkeys(_of_figures(cells, experiment.baseline))
    together = slices.slices(cells, asked.margin, experiment.baseline)
    return {
        "format": FORMAT,
        **about,
        "simulated": any(str(told.get("numerics_fingerprint", "")).startswith("simulated") for told in in_force.values()),
        "complete": outcome.complete,
        "notes": [*outcome.notes, *doubts],
        "settings": _settings(experiment, asked) | {"in_force": in_force},
        "summary": verdict.summary(cells, together[0] if together else None, experiment.baseline),
        "slices": together,
        "break_even_load": _loads(cells),
        "memory": economics.most_of(one for figure in all_figures for one in figure["memory"]),
        "cells": cells,
        "differing": sum(figure["differing"] or 0 for figure in others),
        "compared": sum(figure["compared"] for figure in others if figure["differing"] is not None),
        "errors": sum(figure["errors"] for figure in all_figures),
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
    plain = list(by_way.get(NONE, {}).values())
    ways = {way: _way(list(held.values()), base, held, plain, cell, asked) for way, held in by_way.items() if held}
    given = verdict.verdict(ways, experiment.baseline, cell.rate is not None, asked.margin)
    told = {name: value for name, value in asdict(cell).items() if value is not None}
    return {"name": str(cell), "load": cell.load, "shape": cell.shape, **told, "ways": ways, "verdict": given.told() if given else None}


def _way(
    runs: Sequence[Run], base: Mapping[int, Run], held: Mapping[int, Run], plain: Sequence[Run], cell: Cell, asked: Asked
) -> dict[str, Any]:
    told = timings.acceptance(runs)
    settings: Mapping[str, Any] = next((run.settings for run in runs if run.settings), {})
    return {
        **timings.throughput(runs, asked.limits),
        **timings.latencies(runs),
        **told,
        **_compared(held, base, cell),
        "economics": economics.of_way(plain, runs, told) if told["share_with_block"] else {},
        "too_few_blocks": economics.too_few(plain, runs, told) if told["share_with_block"] else {},
        "phases": economics.phases(runs),
        "memory": economics.memory(runs),
        "draft_busy": _rounded(economics.draft_busy(runs)),
        "draft_step_ms": _rounded(economics.draft_step_ms(runs)),
        "drafts": max((run.seen.get("processes", {}).get("draft", 0) for run in runs), default=0) or None,
        "num_speculative_tokens": settings.get("num_speculative_tokens"),
        "adaptive": bool(settings.get("enable_adaptive_verification")),
    }


def _compared(held: Mapping[int, Run], base: Mapping[int, Run], cell: Cell) -> dict[str, Any]:
    """`ratio` over the repeats that both have: of rates, in an open loop of the mean times of the answers that came whole in both.
    `left_out` = repeats that are not in it, since other answers failed in one than in the other. `differing` None where the text is not
    promised; `compared` = answers that both have; `unlike` = those of them that differ, promised or not."""
    shared = sorted(held.keys() & base.keys())
    alike = [r for r in shared if _failed(held[r]) == _failed(base[r])]
    if cell.rate is None:
        both = alike or shared  # where some fail in every repeat, what came is what is compared
        ours, others = [held[r].rate for r in both], [base[r].rate for r in both]
    else:
        both = shared
        ours, others = [_mean_s(base[r], held[r]) for r in both], [_mean_s(held[r], base[r]) for r in both]
    found = figures.careful_ratio(ours, others)
    pairs = [pair for r in shared for pair in _pairs(held[r], base[r])]
    unlike = sum(not same_text(a, b) for a, b in pairs)
    return {
        "ratio": None if found is None else {key: value if value is None else round(value, 4) for key, value in asdict(found).items()},
        "pairs": [round(a / b, 4) for a, b in zip(ours, others, strict=True) if a > 0 and b > 0],
        "left_out": len(shared) - len(both),
        "differing": unlike if all(_text_is_promised(run) for r in shared for run in (held[r], base[r])) else None,
        "compared": len(pairs),
        "unlike": unlike,
    }


def _failed(run: Run) -> set[int]:
    return {one.seed for one in run.said if one.error}


def _mean_s(run: Run, other: Run) -> float:
    """Of the answers that came whole in both: else a way that refuses whoever would have waited seems fast."""
    times = [ours.total_s for ours, _ in _pairs(run, other)]
    return sum(times) / len(times) if times else 0.0


def _pairs(one: Run, other: Run) -> Iterable[tuple[Said, Said]]:
    """Answers to the same question that both came whole."""
    whole = {said.seed: said for said in other.answers}
    return ((said, whole[said.seed]) for said in one.answers if said.seed in whole)


def same_text(one: Said, other: Said) -> bool:
    return one.token_ids == other.token_ids and one.text_hash == other.text_hash


def _text_is_promised(run: Run) -> bool:
    return bool(run.settings.get("batch_invariant", True)) and _text_is_wanted(run)


def _text_is_wanted(run: Run) -> bool:
    """But for rounding."""
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
    if any(not _text_is_wanted(run) for run in runs):
        doubts.append("method standard: above temperature 0 the distribution is promised and not the text, which is not compared")
    away = [run for run in by_way.get(FIXED, ()) if run.answers and not any(one.count("num_draft_tokens") for one in run.answers)]
    if away and drafted[FIXED]:
        turns = sum(bool(run.answers) for run in by_way[FIXED])
        doubts.append(
            f"{runs[0].turn.cell}, fixed: no proposal was verified in {len(away)} of {turns} turns; was the draft away meanwhile?"
        )
    blocks = {run.settings.get("num_speculative_tokens") for run in by_way.get(FIXED, ()) if run.answers}
    if len(blocks) > 1:
        told = ", ".join(sorted(map(str, blocks)))
        doubts.append(f"fixed: blocks of {told} were in force: the service was set otherwise meanwhile, and the figures are of both")
    doubts += _slow(experiment, runs)
    short = [run for run in runs if run.turn.cell.prompt_tokens and any(0 < one.prompt_tokens < 0.9 * run.turn.cell.prompt_tokens
             or one.prompt_tokens > 1.1 * run.turn.cell.prompt_tokens for one in run.answers)]  # fmt: skip
    if short:
        doubts.append(
            f"prompts of {short[0].turn.cell.prompt_tokens}: some are longer than that by themselves, or could not be made as long"
        )
    return doubts


def _of_figures(cells: Sequence[Mapping[str, Any]], baseline: str) -> Iterable[str]:
    loose = [figure for cell in cells for way, figure in cell["ways"].items() if figure["differing"] is None and way != baseline]
    if unlike := sum(figure["unlike"] for figure in loose):
        compared = sum(figure["compared"] for figure in loose)
        yield f"{unlike} of {compared} texts are not those of {baseline} where the text is not promised"
    for cell in cells:
        for way, figure in cell["ways"].items():
            if figure["left_out"]:
                yield (
                    f"{cell['name']}, {way}: {figure['left_out']} repeats are not in its ratio, since other answers failed in them than "
                    f"with {baseline}"
                )


def _slow(experiment: Experiment, runs: Sequence[Run]) -> list[str]:
    """Where questions of an open loop came faster than they were answered."""
    found = []
    for way in experiment.ways:
        held = [run for run in runs if run.turn.way == way and run.turn.cell.rate is not None]
        bursts = [run for run in held if run.answers and experiment.due(run.turn)[-1] < min(one.total_s for one in run.answers)]
        if 2 * len(bursts) > len(held):
            found.append(
                f"{held[0].turn.cell}, {way}: all questions of a turn came before the first was answered: this is a burst and no steady "
                "load; a larger --batch or a lower --rate would be"
            )
        elif held and 2 * sum(_falls_behind(run, experiment.due(run.turn)) for run in held) > len(held):
            found.append(
                f"{held[0].turn.cell}, {way}: questions came faster than they were answered; the times are those of a queue that grows, "
                "and would be longer with a larger --batch"
            )
    return found


def _falls_behind(run: Run, due: Sequence[float]) -> bool:
    """It takes much longer than its arrivals, and whoever comes late waits much longer than whoever came first."""
    times = [one.total_s for one in run.answers]
    half = len(times) // 2
    if half < LEAST_HALF or run.seconds - min(times) <= OVERLOADED * due[-1]:
        return False
    return sum(times[-half:]) > OVERLOADED * sum(times[:half])


def _loads(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Where each way stops paying as the load grows, the rest being equal."""
    found = []
    for shape in dict.fromkeys(cell["shape"] for cell in cells):
        of_shape = [cell for cell in cells if cell["shape"] == shape]
        for way in dict.fromkeys(way for cell in of_shape for way in cell["ways"]):
            held = [(cell.get("rate") or cell["concurrency"], cell["ways"][way]["ratio"]) for cell in of_shape
                    if cell["ways"].get(way, {}).get("ratio")]  # fmt: skip
            load = whatif.break_even_load([x for x, _ in held], [(told["mean"], told["low"], told["high"]) for _, told in held])
            if load is not None:
                found.append({"shape": shape, "way": way, "load": round(load, 2)})
    return found


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
