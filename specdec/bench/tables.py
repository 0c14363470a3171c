"""A report in a terminal, and as CSV. Pure: figures in, text out."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

TITLES = (
    "", "tokens/s", "ratio", "95 %", "first token", "per token p50", "p99", "acceptance", "tokens/round", "hits", "differing", "errors",
)  # fmt: skip
CELL_COLUMNS = ("concurrency", "rate", "temperature", "kind", "prompt_tokens", "max_tokens")
WAY_COLUMNS = (
    "answers", "errors", "differing", "tokens_per_s", "first_token_ms_p50", "first_token_ms_p95", "first_token_ms_p99",
    "time_per_token_ms_p50", "time_per_token_ms_p95", "time_per_token_ms_p99", "between_arrivals_ms_p50", "between_arrivals_ms_p95",
    "between_arrivals_ms_p99", "jitter_ms", "goodput_per_s", "goodput_share", "mean_acceptance_length", "mean_block", "share_with_block",
    "tokens_per_round", "hit_rate", "num_speculative_tokens", "adaptive",
)  # fmt: skip
MEMORY_COLUMNS = (  # key, title; MiB
    ("weights_mib", "weights"), ("kv_used_mib", "KV used"), ("kv_mib", "KV room"), ("peak_mib", "peak"), ("rest_mib", "rest"),
    ("before_mib", "before"), ("resident_mib", "resident"), ("mapped_mib", "mapped"),
    ("device_mib", "GPU"), ("device_peak_mib", "GPU peak"),
)  # fmt: skip
COST_COLUMNS = ("plain_round_ms", "block_round_ms", "slot_ms", "constant_acceptance", "break_even_acceptance", "draft_budget_ms", "best_k")


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
            number(figure["first_token_ms_p50"], 0),
            number(figure["time_per_token_ms_p50"], 1),
            number(figure["time_per_token_ms_p99"], 1),
            *(number(figure[name], 2) for name in ("mean_acceptance_length", "tokens_per_round", "hit_rate")),
            "-" if figure["differing"] is None else str(figure["differing"]),
            str(figure["errors"]),
        ])  # fmt: skip
    return rows


def headline(cell: Mapping[str, Any]) -> str:
    answers = statistics.fmean(figure["answers"] for figure in cell["ways"].values())
    return f"{cell['name']} ({answers:.0f} answers a way, times in ms)"


def reasons(cell: Mapping[str, Any]) -> list[str]:
    """The verdict in sentences; nothing where nothing was compared."""
    given = cell.get("verdict")
    return [] if given is None else [f"{word(given)}: {advice(given['advised'])}", *(f"  {reason}" for reason in given["reasons"])]


def word(given: Mapping[str, Any]) -> str:
    """Of a verdict, with what there is to doubt in it."""
    doubt = "" if given["decided"] else "?"
    aside = f" ({given['defect']})" if given.get("defect") else "" if given.get("together", True) else " (may be chance)"
    return f"{given['word']}{doubt}{aside}"


def slices(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Titles and one row a slice."""
    ways = list(dict.fromkeys(way for one in found for way in one["ways"]))
    rows = [["", "cells", *ways]]
    for one in found:
        rows.append([one["name"], str(one["cells"]), *(_slice(one["ways"].get(way)) for way in ways)])
    return rows


def _slice(one: Mapping[str, Any] | None) -> str:
    if one is None:
        return ""
    between = "" if one["low"] is None else f" ({one['low']:.2f} - {one['high']:.2f})"
    return f"{one['mean']:.2f}x{between} {one['word']}{'' if one['decided'] else '?'}"


def memory(found: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Titles and one row a process, MiB; without columns that no process tells."""
    columns = [(key, title) for key, title in MEMORY_COLUMNS if any(one.get(key) is not None for one in found)]
    rows = [["MiB", *(title for _, title in columns)]]
    for one in found:
        rows.append([one["name"], *("" if one.get(key) is None else f"{one[key]:.0f}" for key, _ in columns)])
    return rows


def memory_csv(found: Sequence[Mapping[str, Any]]) -> str:
    """A line for every process, MiB."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow(["name", "role", *(key for key, _ in MEMORY_COLUMNS), "kv_share"])
    for one in found:
        lines.writerow(["" if one.get(key) is None else harmless(one[key]) for key in ("name", "role", *dict(MEMORY_COLUMNS), "kv_share")])
    return out.getvalue()


def advice(advised: Mapping[str, Any]) -> str:
    """Settings in words."""
    if advised.get("disable_spec_decode"):
        return "no speculation (disable_spec_decode), no draft"
    how = "the service chooses the block length" if advised.get("enable_adaptive_verification") else "every block of the same length"
    drafts = advised.get("drafts", 1)
    return (
        f"{how} (enable_adaptive_verification = {str(bool(advised.get('enable_adaptive_verification'))).lower()}), "
        f"num_speculative_tokens = {advised.get('num_speculative_tokens')}, {drafts} draft{'' if drafts == 1 else 's'}"
    )


def where_to_set(advised: Mapping[str, Any]) -> str:
    """In words, of what `advice` says."""
    if advised.get("disable_spec_decode"):
        return "for all requests: SPECDEC_DRAFTS empty at the orchestrators; for one: its field disable_spec_decode"
    settings = ("enable_adaptive_verification", "num_speculative_tokens")
    told = " ".join(f"SPECDEC_{name.upper()}={str(advised[name]).lower()}" for name in settings if name in advised)
    return f"for all requests: {told} at the orchestrators; for one: its fields of these names"


def to_set(summary: Mapping[str, Any]) -> tuple[str, str]:
    """(how it is called, what to set) of the whole sweep."""
    if not summary["advised"]:
        return "Set", "nothing to advise"
    return "Set" if summary.get("decided", True) else "Until it is decided, set", advice(summary["advised"])


def as_csv(cells: Sequence[Mapping[str, Any]]) -> str:
    """A line for every cell and way."""
    out = io.StringIO()
    lines = csv.writer(out, lineterminator="\n")
    lines.writerow([
        *CELL_COLUMNS, "way", "ratio", "ratio_low", "ratio_high", "verdict_of_cell", "decided", "together", *WAY_COLUMNS, *COST_COLUMNS,
    ])  # fmt: skip
    for cell in cells:
        given = cell.get("verdict") or {}
        for way, figure in cell["ways"].items():
            ratio = figure["ratio"] or {}
            lines.writerow([
                *(harmless(cell.get(name, "")) for name in CELL_COLUMNS),
                way,
                *(ratio.get(name, "") for name in ("mean", "low", "high")),
                *(given.get(name, "") for name in ("word", "decided", "together")),
                *(figure.get(name, "") for name in WAY_COLUMNS),
                *(figure["economics"].get(name, "") for name in COST_COLUMNS),
            ])  # fmt: skip
    return out.getvalue()


def harmless(value: Any) -> Any:
    """A spreadsheet takes a text that begins like this for a formula and runs it (OWASP, "CSV injection")."""
    return f"'{value}" if isinstance(value, str) and value[:1] in "=+-@\t\r" and value else value


def number(value: float | None, digits: int) -> str:
    """Nothing where nothing was measured: a zero means zero."""
    return "" if value is None else f"{value:.{digits}f}"
