"""docs/benchmarks.md: the part between the marks, made of the runs of `make bench-peers`. Pure: runs in, text out.

A run is one contender in one round: {"key", "round", "versions", "cells": [{"streams", "tokens", "seconds", "answers"}]}, or
{"key", "round", "skipped" | "failed": why}. Ratios are taken within a round and their median is shown: a slow round says nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peer_catalogue import CONTENDERS, OURS, Contender, command

BEGIN, END = "<!-- written by make bench-peers: begin -->", "<!-- written by make bench-peers: end -->"
BUSY = 1.0  # load average before anything of ours has run
Run = Mapping[str, Any]
_ENVIRONMENT: Mapping[str, str] = {contender.key: contender.environment for contender in CONTENDERS}


class Found:
    """The runs, by contender and round."""

    def __init__(self, runs: Iterable[Run], streams: Sequence[int]) -> None:
        self.streams = list(streams)
        self._cells: dict[tuple[str, int], dict[int, Mapping[str, Any]]] = {}
        self.versions: dict[str, dict[str, str]] = {}  # by environment
        self.reasons: dict[str, str] = {}
        for run in runs:
            key, number = run["key"], run["round"]
            if "cells" in run:
                self._cells[key, number] = {cell["streams"]: cell for cell in run["cells"]}
                self.versions.setdefault(_ENVIRONMENT[key], {}).update(run["versions"])
            else:
                self.reasons[key] = run.get("skipped") or run["failed"]

    @property
    def contenders(self) -> list[Contender]:
        return [c for c in CONTENDERS if any(key == c.key for key, _ in self._cells)]

    @property
    def rounds(self) -> int:
        return len({number for _, number in self._cells})

    def rates(self, key: str, streams: int) -> dict[int, float]:
        """round → tokens per second of all streams together."""
        cells = {number: cells.get(streams) for (name, number), cells in self._cells.items() if name == key}
        return {number: cell["tokens"] / cell["seconds"] for number, cell in cells.items() if cell is not None}

    def rate(self, key: str, streams: int) -> float | None:
        rates = self.rates(key, streams)
        return statistics.median(rates.values()) if rates else None

    def ratio(self, key: str, other: str, streams: int) -> float | None:
        """Median over the rounds that have both."""
        ours, theirs = self.rates(key, streams), self.rates(other, streams)
        each = [ours[number] / theirs[number] for number in ours.keys() & theirs.keys()]
        return statistics.median(each) if each else None

    def same_texts(self, key: str, plain: str, streams: int) -> tuple[int, int] | None:
        """(equal, compared) with the same engine's plain answers of one stream, over all rounds."""
        pairs = [
            (mine, other)
            for (name, number), cells in self._cells.items()
            if name == key and streams in cells and 1 in self._cells.get((plain, number), {})
            for mine, other in zip(cells[streams]["answers"], self._cells[plain, number][1]["answers"], strict=False)
        ]
        return (sum(a == b for a, b in pairs), len(pairs)) if pairs else None


def page(old: str, found: Found, about: Mapping[str, Any]) -> str:
    """`old` with its marked part replaced. Raises ValueError when the marks are not there, once each and in order."""
    head, begin, rest = old.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end or BEGIN in rest or END in tail:
        raise ValueError("docs/benchmarks.md lacks the marks of the part that is written here")
    return f"{head}{BEGIN}\n\n{body(found, about)}\n{END}{tail}"


def body(found: Found, about: Mapping[str, Any]) -> str:
    parts = [_about(found, about), _rates(found), _ratios(found), _losses(found), _left_out(found), _commands(found, about)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(found: Found, about: Mapping[str, Any]) -> str:
    machine = about["machine"]
    features = ", ".join(machine["features"]) or "none of those that matter"
    told = (", ".join(f"{name} {number}" for name, number in sorted(several.items())) for several in found.versions.values())
    versions = "; ".join(told)
    return (
        f"**Machine.** {machine['processor']}, two cores of it (of {machine['cores_of_machine']}), {machine['memory_gib']} GiB, "
        f"{machine['system']}; {features}. Load average when it began: {about['load']:.2f}{_warning(about['load'])}.\n\n"
        f"**Versions.** Python {about['python']}; {versions}.\n\n"
        f"**Work.** {about['max_tokens']} tokens an answer, greedy, end-of-sequence ids taken as ordinary ones; "
        f"{found.rounds} round{'s' if found.rounds != 1 else ''}, medians over them."
    )


def _warning(load: float) -> str:
    return ", so others were at work: the figures mean little, above all those of engines with two threads" if load > BUSY else ""


def _rates(found: Found) -> str:
    titles = ["who", "precision", *(f"{n} stream{'s' if n > 1 else ''}" for n in found.streams), "its own texts"]
    rows = [[c.title, c.precision, *(_number(found.rate(c.key, n)) for n in found.streams), _texts(found, c)] for c in found.contenders]
    return (
        "Tokens per second of all streams together, prompts included. *Its own texts*: how many are equal to those that the same "
        "engine gave to one stream without speculation, at one stream and at the most streams.\n\n" + _markdown(titles, rows)
    )


def _texts(found: Found, contender: Contender) -> str:
    plain = contender.plain or contender.key
    told = []
    for streams in dict.fromkeys((found.streams[0], found.streams[-1])):
        if streams == 1 and plain == contender.key:
            continue
        if (same := found.same_texts(contender.key, plain, streams)) is not None:
            told.append(f"{same[0]}/{same[1]} at {streams}")
    return ", ".join(told)


def _ratios(found: Found) -> str:
    """Every contender by its own plain engine, and this system's ways by every contender."""
    ours = [c for c in found.contenders if c.environment == OURS]
    gains = [[c.title, *(_ratio(found.ratio(c.key, c.plain, n)) for n in found.streams)] for c in found.contenders if c.plain]
    titles = ["", *(str(n) for n in found.streams)]
    parts = (
        ["What speculation gives, by the same engine without it:\n\n" + _markdown(["speculation, by streams", *titles[1:]], gains)]
        if gains
        else []
    )
    for mine in ours:
        rows = [
            [c.title + f" ({c.precision.split(',')[0]})", *(_ratio(found.ratio(mine.key, c.key, n)) for n in found.streams)]
            for c in found.contenders
            if c.environment != OURS
        ]
        if rows:
            parts.append(f"**{mine.title}**, divided by\n\n" + _markdown(["by streams", *titles[1:]], rows))
    return "\n\n".join(parts)


def losses(found: Found) -> list[str]:
    """One sentence for each contender and number of streams where this system's best is slower, and where its speculation costs."""
    ours = [c for c in found.contenders if c.environment == OURS]
    told = []
    for n in found.streams:
        best = max(ours, key=lambda c: found.rate(c.key, n) or 0.0, default=None)
        for c in found.contenders:
            if best is None or c.environment == OURS:
                continue
            ratio = found.ratio(best.key, c.key, n)
            if ratio is not None and ratio < 1:
                told.append(f"{n} stream{'s' if n > 1 else ''}: {c.title} ({c.precision}) is {1 / ratio:.2f} times as fast as {best.title}")
    for c in ours:
        for n in found.streams:
            ratio = found.ratio(c.key, c.plain, n) if c.plain else None
            if ratio is not None and ratio < 1:
                told.append(f"{n} stream{'s' if n > 1 else ''}: {c.title} gives {ratio:.2f} of what no speculation gives")
    return told


def _losses(found: Found) -> str:
    told = losses(found)
    return "**Where this system loses.**\n\n" + ("\n".join(f"- {line}." for line in told) if told else "Nowhere in these runs.")


def _left_out(found: Found) -> str:
    titles = {c.key: c.title for c in CONTENDERS}
    told = [f"- {titles.get(key, key)}: {reason}" for key, reason in sorted(found.reasons.items())]
    return "**Not measured.**\n\n" + "\n".join(told) if told else ""


def _commands(found: Found, about: Mapping[str, Any]) -> str:
    streams = ",".join(map(str, found.streams))
    lines = [" ".join(_quoted(word) for word in command(c, about["max_tokens"], streams)) for c in found.contenders]
    return "<details><summary>Commands</summary>\n\n```\n" + "\n".join(lines) + "\n```\n\n</details>"


def _quoted(word: str) -> str:
    return f"'{word}'" if "{" in word or " " in word else word


def _markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"
