"""What an experiment found: one figure per cell and way, and the raw times beside it. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdec.bench import figures
from specdec.bench.experiment import AUTO, FIXED, NONE, Cell, Done, Outcome
from specdec.bench.load import Answer

RAW_DIGITS = 5  # of seconds in the raw times


def report(outcome: Outcome, about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON contract: `about` (machine, versions, command) first, then the settings, the cells, and the raw times of every turn."""
    experiment = outcome.experiment
    cells = [_cell(outcome, cell) for cell in experiment.cells]
    return {
        **about,
        "complete": outcome.complete,
        "notes": [*outcome.notes, *_doubts(outcome)],
        "settings": {
            "ways": list(experiment.ways),
            "baseline": experiment.baseline,
            "repeats": experiment.repeats,
            "max_tokens": experiment.sampling.max_tokens,
            "ignore_eos": experiment.sampling.ignore_eos,
            "num_speculative_tokens": experiment.num_speculative_tokens,
            "prompts": len(experiment.prompts),
            "in_force": {way: done.slice.answers[0].settings for done in outcome.done for way in [done.turn.way] if done.slice.answers},
        },
        "cells": [cell for cell in cells if cell["ways"]],
        "differing": sum(figure["differing"] or 0 for cell in cells for figure in cell["ways"].values()),
        "turns": [_raw(done) for done in outcome.done],
    }


def _cell(outcome: Outcome, cell: Cell) -> dict[str, Any]:
    experiment = outcome.experiment
    by_way = {way: {d.turn.repeat: d for d in outcome.done if d.turn.cell == cell and d.turn.way == way} for way in experiment.ways}
    base = by_way[experiment.baseline]
    ways = {way: figures_of(list(done.values())) | _compared(done, base) for way, done in by_way.items() if done}
    return {"concurrency": cell.concurrency, "temperature": cell.temperature, "ways": ways}


def figures_of(done: Sequence[Done]) -> dict[str, Any]:
    """Rates count all tokens over all time of the turns. `time_per_token` is per answer, behind its first tokens."""
    answers = [answer for one in done for answer in one.slice.answers]
    per_token = [answer.per_token_s for answer in answers if answer.per_token_s is not None]
    seconds, tokens = sum(one.slice.seconds for one in done), sum(one.slice.tokens for one in done)
    with_block = sum(answer.stats.num_spec_steps for answer in answers)
    rounds = sum(answer.stats.num_rounds for answer in answers)
    return {
        "turns": len(done),
        "answers": len(answers),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_s": round(tokens / seconds, 2) if seconds else 0.0,
        "first_token_ms_p50": _ms([answer.first_s for answer in answers], 0.5),
        "time_per_token_ms_p50": _ms(per_token, 0.5),
        "time_per_token_ms_p99": _ms(per_token, 0.99),
        "between_arrivals_ms_p99": _ms(_gaps(answers), 0.99),
        "mean_acceptance_length": round(1 + sum(a.stats.num_accepted_draft_tokens for a in answers) / with_block, 3)
        if with_block
        else None,
        "hit_rate": round(_weighted_hits(answers), 3) if with_block else None,
        "tokens_per_round": round(tokens / rounds, 3) if rounds else None,
    }


def _compared(done: Mapping[int, Done], base: Mapping[int, Done]) -> dict[str, Any]:
    """`ratio` over the repeats that both have; `differing` None where the method promises the distribution, not the text."""
    both = sorted(done.keys() & base.keys())
    found = figures.ratio([done[r].slice.rate for r in both], [base[r].slice.rate for r in both])
    pairs = [(a, b) for r in both for a, b in zip(done[r].slice.answers, base[r].slice.answers, strict=True)]
    promised = all(_text_is_promised(done[r]) for r in both)
    return {
        "ratio": None if found is None else {key: value if value is None else round(value, 4) for key, value in asdict(found).items()},
        "differing": sum(not same_text(a, b) for a, b in pairs) if promised else None,
    }


def same_text(one: Answer, other: Answer) -> bool:
    return one.token_ids == other.token_ids and one.text == other.text


def _text_is_promised(done: Done) -> bool:
    return done.turn.cell.temperature == 0 or all(a.settings["rejection_sample_method"] == "coupled" for a in done.slice.answers)


def _doubts(outcome: Outcome) -> list[str]:
    """Where the service did something else than was asked, or does not promise what is compared."""
    answers = [(done.turn, answer) for done in outcome.done for answer in done.slice.answers]
    doubts = []
    if any(turn.way == NONE and answer.stats.num_draft_tokens for turn, answer in answers):
        doubts.append("none: the service verified proposals although it was told not to")
    if any(turn.way == AUTO and not answer.settings["enable_adaptive_verification"] for turn, answer in answers):
        doubts.append("auto: the service ran fixed block lengths")
    speculated = {turn.way for turn, answer in answers if answer.stats.num_draft_tokens}
    doubts += [
        f"{way}: no proposal was verified; is there a draft?"
        for way in (FIXED,)
        if way in outcome.experiment.ways and answers and way not in speculated
    ]
    if any(not answer.settings["batch_invariant"] for _, answer in answers):
        doubts.append("this engine is not batch-invariant: texts are the target's within rounding only, and may differ")
    if any(not _text_is_promised(done) for done in outcome.done):
        doubts.append("method standard: above temperature 0 the distribution is promised and not the text, which is not compared")
    return doubts


def _weighted_hits(answers: Sequence[Answer]) -> float:
    """Rounds that wanted speculation are not told per answer; all rounds weigh instead."""
    rounds = sum(answer.stats.num_rounds for answer in answers)
    return sum(answer.stats.hit_rate * answer.stats.num_rounds for answer in answers) / rounds if rounds else 0.0


def _gaps(answers: Sequence[Answer]) -> list[float]:
    return [b[0] - a[0] for answer in answers for a, b in zip(answer.arrivals, answer.arrivals[1:], strict=False)]


def _ms(seconds: Sequence[float], share: float) -> float:
    return round(1e3 * figures.percentile(seconds, share), 2)


def _raw(done: Done) -> dict[str, Any]:
    return {
        "concurrency": done.turn.cell.concurrency,
        "temperature": done.turn.cell.temperature,
        "repeat": done.turn.repeat,
        "way": done.turn.way,
        "seconds": round(done.slice.seconds, RAW_DIGITS),
        "answers": [
            {
                "kind": question.kind,
                "seed": question.seed,
                "token_ids": list(answer.token_ids),
                "arrivals": [[round(seconds, RAW_DIGITS), count] for seconds, count in answer.arrivals],
                "total_s": round(answer.total_s, RAW_DIGITS),
                "speculative": asdict(answer.stats),
            }
            for question, answer in zip(done.questions, done.slice.answers, strict=True)
        ],
    }


# ---------------------------------------------------------------- the table


TITLES = (
    "", "tokens/s", "ratio", "95 %", "first token", "per token p50", "p99", "acceptance", "tokens/round", "hits", "differing",
)  # fmt: skip


def table(cell: Mapping[str, Any]) -> list[list[str]]:
    """Titles and one row a way, times in ms."""
    rows = [list(TITLES)]
    for way, figure in cell["ways"].items():
        found = figure["ratio"]
        between = "" if found is None or found["low"] is None else f"{found['low']:.2f} - {found['high']:.2f}"
        rows.append([
            way,
            f"{figure['tokens_per_s']:.1f}",
            "" if found is None else f"{found['mean']:.2f}x",
            between if found is not None and found["low"] != found["high"] else "",
            f"{figure['first_token_ms_p50']:.0f}",
            f"{figure['time_per_token_ms_p50']:.1f}",
            f"{figure['time_per_token_ms_p99']:.1f}",
            _optional(figure["mean_acceptance_length"]),
            _optional(figure["tokens_per_round"]),
            _optional(figure["hit_rate"]),
            "-" if figure["differing"] is None else str(figure["differing"]),
        ])  # fmt: skip
    return rows


def headline(cell: Mapping[str, Any]) -> str:
    answers = statistics.fmean(figure["answers"] for figure in cell["ways"].values())
    return f"{Cell(cell['concurrency'], cell['temperature'])} ({answers:.0f} answers a way, times in ms)"


def _optional(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
