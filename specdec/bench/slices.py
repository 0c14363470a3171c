"""Many cells together: one ratio for everything, and for each value of what was varied. Single cells may be too uncertain where their
slice is not. Pure.

A slice's pairs are those of all its cells and repeats, so its interval holds the differences between the cells: it is that of a mix of
traffic in which each of them is as frequent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from specdec.bench import figures, verdict

DIMENSIONS = (
    ("kind", "kind {}"),
    ("temperature", "T = {:g}"),
    ("load", "{}"),
    ("prompt_tokens", "prompts of {}"),
    ("max_tokens", "answers up to {}"),
)  # fmt: skip
ALL = "all cells"


def slices(cells: Sequence[Mapping[str, Any]], margin: float, baseline: str) -> list[dict[str, Any]]:
    """`cells` of a report, with "pairs" by way. The first is of all cells; none where there is one cell only."""
    if len(cells) < 2:
        return []
    found = [_slice(ALL, "", cells, margin, baseline)]
    for name, words in DIMENSIONS:
        values = list(dict.fromkeys(cell.get(name) for cell in cells))
        if len(values) > 1:
            held = [(value, [cell for cell in cells if cell.get(name) == value]) for value in values]
            found += [
                _slice(words.format(value) if value is not None else f"{name} as it is", name, of, margin, baseline) for value, of in held
            ]
    return found


def _slice(name: str, dimension: str, cells: Sequence[Mapping[str, Any]], margin: float, baseline: str) -> dict[str, Any]:
    ways = {}
    for way in dict.fromkeys(way for cell in cells for way in cell["ways"] if way != baseline):
        pairs = [pair for cell in cells for pair in cell["ways"].get(way, {}).get("pairs", ())]
        ratio = figures.careful_ratio(pairs, [1.0] * len(pairs))
        if ratio is not None:
            word, decided = verdict.word_of(ratio.mean, ratio.low, ratio.high, margin)
            told = {key: value if value is None else round(value, 4) for key, value in asdict(ratio).items()}
            ways[way] = {**told, "word": word, "decided": decided}
    return {"name": name, "dimension": dimension, "cells": len(cells), "ways": ways}
