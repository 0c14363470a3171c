"""A report as one HTML file that needs nothing else: the verdict first, then what it rests on, then every figure. Pure."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from specdec.bench import plots, style, tables, verdict

SIGNS = {"pays": "▲ pays", "neutral": "● neutral", "costs": "▼ costs"}
NO_PLOTS = "no figures in report.html: matplotlib is not installed here (pip install 'specdec[tools]')"
WORDS = (
    "The best way of each case, how fast it is compared with {}, and the 95 % interval. none: no speculation; fixed: every "
    "block of one length; auto: the service chooses the length, and whether there is a block. T: temperature. A question mark: "
    "the interval is too wide to say."
)
Report = Mapping[str, Any]
METHODS = (
    "<b>Turns.</b> The same questions with the same seeds go through one service in every way, in short turns next to each other; the "
    "order of the ways rotates from repeat to repeat. A ratio is the geometric mean over the repeats of the ratios of one turn each.",
    "<b>Intervals.</b> 95 %. Of a ratio: Student's t on logarithms, widened to the bootstrap's where that is wider; of times and rates: "
    "the percentile bootstrap over repeats with a fixed seed. Repeats are drawn, not answers, since those of one repeat shared its minute.",
    "<b>Verdicts.</b> Pays: the whole interval above 1 and the ratio at least 1 + margin. Costs: the whole interval below 1 and the ratio "
    "at most 1 − margin. Neutral: anything else; a question mark where the interval is too wide to say. Of many cells one in twenty "
    "intervals misses the truth: a verdict that does not hold when all of them are looked at together (Benjamini and Hochberg, 5 %) is "
    "marked as maybe chance. Looking again and again until one says pays makes it say so by chance as well: set the repeats first.",
    "<b>Times.</b> First token: from asking (with Poisson arrivals: from when the question was due) to the first tokens. Per token: an "
    "answer's time behind its first arrival, over the tokens behind it. Between arrivals: what a reader sees; tokens of one block arrive "
    "together.",
    "<b>Texts.</b> Answers are compared token by token and as text with those without speculation to the same question and seed. Under "
    "the coupled method they must be equal; a difference is a defect, not a matter of taste.",
    "<b>Modelled.</b> Gain by block length, break-even points and advised K come from E = 1 + a1 + a1·a2 + … and E · t(1) / t(K + 1), with "
    "acceptance by slot (Kaplan and Meier) and costs of a round as measured here.",
)


def page(report: Report) -> tuple[str, list[str]]:
    """(HTML, notes for whoever asked for it)."""
    drawn, notes = _figures(report)
    cells = report["cells"]
    parts = [
        _top(report),
        _matrix(cells, report["settings"]["baseline"]),
        _slices(report["slices"]),
        _advice(report),
        *([_section("Speed", drawn[:2])] if drawn[:2] else []),
        *([_section("Why", drawn[2:])] if drawn[2:] else []),
        _memory(report.get("memory", [])),
        "<h2>Every cell</h2>" + "".join(map(_cell, cells)),
        _methods(report),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        "<title>Does speculation pay?</title>\n"
        '<link rel="icon" href="data:,">\n'
        f"<style>{style.css()}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n<script>{style.SCRIPT}</script>\n</body>\n</html>\n"
    ), notes


def _figures(report: Report) -> tuple[list[plots.Drawn], list[str]]:
    if not plots.there():
        return [], [NO_PLOTS]
    cells, margin = report["cells"], report["settings"]["margin"]
    found: list[plots.Drawn | None] = [plots.ratios(cells, margin, report["settings"]["baseline"]), plots.times(cells)]
    found += [draw(cells) for draw in (plots.acceptance, plots.gain, plots.phases)]
    return [one for one in found if one is not None], []


def _section(title: str, drawn: Sequence[plots.Drawn]) -> str:
    return f"<h2>{title}</h2>" + "".join(f"<figure>{svg}<figcaption>{_text(caption)}</figcaption></figure>" for svg, caption in drawn)


# ---------------------------------------------------------------- in a minute


def _top(report: Report) -> str:
    summary = report["summary"]
    called, advised = tables.to_set(summary)
    where = f"<br><small>{_text(tables.where_to_set(summary['advised']))}</small>" if summary["advised"] else ""
    sentences = "".join(f"<p>{_text(one)}</p>" for one in summary["sentences"])
    defects = []
    if report["differing"]:
        defects.append(
            f"{report['differing']} texts differ from those of the way {report['settings']['baseline']}. That must not be: do not use it "
            "before it is understood."
        )
    if report["errors"]:
        defects.append(f"{report['errors']} answers failed.")
    if not report["complete"]:
        defects.append("The sweep was interrupted: this is a part of it.")
    if report["simulated"]:
        defects.append("Simulated: the engines have no model behind them, and nothing here says how fast a model is.")
    told = "".join(f'<div class="verdict defect">{_text(one)}</div>' for one in defects)
    return (
        '<header><h1>Does speculation pay? <small>specdec bench</small></h1><button id="theme" type="button" hidden>Theme</button></header>'
        f'<div class="verdict {summary["word"]}"><strong>{_text(summary["headline"])}</strong>{sentences}'
        f"<p><b>{called}:</b> {_text(advised)}{where}</p></div>{told}"
        f'<div class="facts">{"".join(_facts(report))}</div>'
    )


def _facts(report: Report) -> Iterable[str]:
    given = [(cell, cell["verdict"]) for cell in report["cells"] if cell["verdict"]]
    if given:
        best, least = max(given, key=lambda one: one[1]["ratio"]), min(given, key=lambda one: one[1]["ratio"])
        yield _fact(f"{best[1]['ratio']:.2f}×", f"best{_between(best[1])}: {best[0]['name']}, {best[1]['way']}")
        if len(given) > 1:
            yield _fact(f"{least[1]['ratio']:.2f}×", f"worst{_between(least[1])}: {least[0]['name']}, {least[1]['way']}")
    yield _fact(str(report["differing"]), f"texts that differ, of {report['compared']} that were compared")
    yield _fact(str(report["errors"]), "answers that failed")
    for one in report["break_even_load"][:2]:
        unit = "questions/s" if report["settings"]["arrivals"] == "poisson" else "streams"
        yield _fact(f"{one['load']:.2g}", f"{unit} from which {one['way']} no longer pays ({one['shape']})")
    machine = report.get("machine") or {}
    if machine:
        yield _fact(f"{machine.get('cores', '?')} cores", str(machine.get("processor", "")))


def _between(given: Mapping[str, Any]) -> str:
    return "" if given["low"] is None else f" ({given['low']:.2f} to {given['high']:.2f})"


def _fact(number: str, text: str) -> str:
    return f'<div class="fact"><b>{_text(number)}</b><span>{_text(text)}</span></div>'


def _matrix(cells: Sequence[Mapping[str, Any]], baseline: str) -> str:
    """Shapes down, loads across."""
    loads = list(dict.fromkeys(cell["load"] for cell in cells))
    shapes = list(dict.fromkeys(cell["shape"] for cell in cells))
    by = {(cell["shape"], cell["load"]): cell["verdict"] for cell in cells}
    if not any(by.values()):
        return ""
    head = "".join(f"<th>{_text(load)}</th>" for load in loads)
    rows = "".join(f"<tr><th>{_text(shape)}</th>{''.join(_verdict_cell(by.get((shape, load))) for load in loads)}</tr>" for shape in shapes)
    return (
        f'<div class="scroll"><table class="matrix"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
        f"<p class='muted'>{_text(WORDS.format(verdict.without(baseline)))}</p>"
    )


def _verdict_cell(given: Mapping[str, Any] | None) -> str:
    if given is None:
        return "<td>–</td>"
    between = "" if given["low"] is None else f"<br><small>{given['low']:.2f} to {given['high']:.2f}</small>"
    doubt = given.get("defect") or ("" if given.get("together", True) else "may be chance")
    between += f"<br><small>{_text(doubt)}</small>" if doubt else ""
    return f'<td class="{given["word"]}"><b>{_sign(given)}</b> {given["ratio"]:.2f}× {_text(given["way"])}{between}</td>'


def _sign(given: Mapping[str, Any]) -> str:
    return f"{SIGNS[given['word']]}{'' if given['decided'] else '?'}"


def _slices(slices: Sequence[Mapping[str, Any]]) -> str:
    """Values of what was varied, over all cells that have them."""
    if len(slices) < 2:
        return ""
    ways = list(dict.fromkeys(way for one in slices for way in one["ways"]))
    head = "".join(f"<th>{_text(way)}</th>" for way in ways)
    rows = "".join(
        f"<tr><th>{_text(one['name'])}</th><td>{one['cells']}</td>{''.join(_slice_cell(one['ways'].get(way)) for way in ways)}</tr>"
        for one in slices
    )
    return (
        f'<h2>By what was varied</h2><div class="scroll"><table class="matrix"><tr><th></th><th>cells</th>{head}</tr>{rows}</table></div>'
        "<p class='muted'>Cells and repeats together, as if each cell were as frequent: a slice may be sure where its cells are not.</p>"
    )


def _slice_cell(one: Mapping[str, Any] | None) -> str:
    return "<td>–</td>" if one is None else _verdict_cell({**one, "ratio": one["mean"], "way": ""})


def _advice(report: Report) -> str:
    """What to set, by cell, where it is not the same everywhere."""
    groups: dict[tuple[bool, bool], list[Mapping[str, Any]]] = {}
    for cell in report["cells"]:
        if cell["verdict"]:
            advised = cell["verdict"]["advised"]
            groups.setdefault((bool(advised.get("disable_spec_decode")), bool(advised.get("enable_adaptive_verification"))), []).append(
                cell
            )
    if len(groups) < 2:
        return ""
    rows = "".join(
        f'<tr><td>{_text(_setting(held))}</td><td class="left">{_text("; ".join(cell["name"] for cell in held))}</td></tr>'
        for held in groups.values()
    )
    return f'<h2>What to set</h2><div class="scroll"><table><tr><th>Setting</th><th class="left">For</th></tr>{rows}</table></div>'


def _setting(held: Sequence[Mapping[str, Any]]) -> str:
    """Of cells that are advised the same but for numbers."""
    advised = [cell["verdict"]["advised"] for cell in held]
    most = {name: max(one.get(name, 0) for one in advised) for name in ("num_speculative_tokens", "drafts")}
    told = tables.advice({**advised[0], **most})
    least = min(one.get("num_speculative_tokens", 0) for one in advised)
    if advised[0].get("enable_adaptive_verification") or least == most["num_speculative_tokens"]:
        return told
    return told.replace(f"= {most['num_speculative_tokens']},", f"= {least} to {most['num_speculative_tokens']} (see each cell),")


# ---------------------------------------------------------------- in detail


COLUMNS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("tokens/s", lambda f: _with(f["tokens_per_s"], f["tokens_per_s_ci"], 1)),
    ("ratio", lambda f: "" if not f["ratio"] else _with(f["ratio"]["mean"], _pair(f["ratio"]), 2)),
    ("first token p50", lambda f: _with(f["first_token_ms_p50"], f["first_token_ms_p50_ci"], 0)),
    ("p95", lambda f: tables.number(f["first_token_ms_p95"], 0)),
    ("p99", lambda f: tables.number(f["first_token_ms_p99"], 0)),
    ("per token p50", lambda f: _with(f["time_per_token_ms_p50"], f["time_per_token_ms_p50_ci"], 1)),
    ("between p50", lambda f: tables.number(f["between_arrivals_ms_p50"], 1)),
    ("p95", lambda f: tables.number(f["between_arrivals_ms_p95"], 1)),
    ("p99", lambda f: _with(f["between_arrivals_ms_p99"], f["between_arrivals_ms_p99_ci"], 1)),
    ("jitter", lambda f: tables.number(f["jitter_ms"], 1)),
    ("goodput/s", lambda f: "" if f["goodput_per_s"] is None else f"{f['goodput_per_s']:.2f} ({f['goodput_share']:.0%})"),
    ("answers", lambda f: str(f["answers"])),
    ("errors", lambda f: str(f["errors"])),
    ("differing", lambda f: "–" if f["differing"] is None else str(f["differing"])),
)
ROUNDS: tuple[tuple[str, Callable[[Mapping[str, Any]], str]], ...] = (
    ("rounds with a block", lambda f: f"{f['share_with_block']:.0%}"),
    ("block", lambda f: _some(f["mean_block"])),
    ("acceptance length", lambda f: _some(f["mean_acceptance_length"])),
    ("kept by slot", lambda f: ", ".join(f"{share:.2f}" for share in f["alpha"][:8])),
    ("tokens/round", lambda f: _some(f["tokens_per_round"])),
    ("hits", lambda f: _some(f["hit_rate"])),
    ("plain round, ms", lambda f: _some(f["economics"].get("plain_round_ms"))),
    ("round with a block", lambda f: _some(f["economics"].get("block_round_ms"))),
    ("pays from acceptance", lambda f: _some(f["economics"].get("break_even_acceptance"))),
    ("draft's budget, ms", lambda f: _some(f["economics"].get("draft_budget_ms"))),
    ("best K", lambda f: str(f["economics"].get("best_k", ""))),
)


def _cell(cell: Mapping[str, Any]) -> str:
    given = cell["verdict"]
    word = "" if given is None else f" <small>{_sign(given)} {given['ratio']:.2f}×, {_text(given['way'])}</small>"
    spoken = {way: figure for way, figure in cell["ways"].items() if figure["share_with_block"]}
    reasons = "" if given is None else "<ul>" + "".join(f"<li>{_text(one)}</li>" for one in given["reasons"]) + "</ul>"
    advised = "" if given is None else f"<p><b>Set:</b> {_text(tables.advice(given['advised']))}</p>"
    rounds = f"<h3>Rounds</h3>{_table(spoken, ROUNDS)}" if spoken else ""
    return (
        f"<details><summary>{_text(cell['name'])}{word}</summary>{reasons}{advised}<h3>Speed, times in ms</h3>"
        f"{_table(cell['ways'], COLUMNS)}{rounds}{_kinds(spoken)}{_phases(cell['ways'])}</details>"
    )


def _table(ways: Mapping[str, Any], columns: Sequence[tuple[str, Callable[[Mapping[str, Any]], str]]]) -> str:
    head = "".join(f"<th>{_text(title)}</th>" for title, _ in columns)
    rows = "".join(
        f"<tr><td>{_text(way)}</td>{''.join(f'<td>{show(figure)}</td>' for _, show in columns)}</tr>" for way, figure in ways.items()
    )
    return f'<div class="scroll"><table><tr><th></th>{head}</tr>{rows}</table></div>'


def _kinds(spoken: Mapping[str, Any]) -> str:
    rows = [
        (f"{way}, {kind}", shares)
        for way, figure in spoken.items()
        if len(figure["alpha_by_kind"]) > 1
        for kind, shares in figure["alpha_by_kind"].items()
        if shares
    ]
    if not rows:
        return ""
    most = min(8, max(len(shares) for _, shares in rows))
    head = "".join(f"<th>slot {slot + 1}</th>" for slot in range(most))
    filled = [(name, [*shares, *[None] * most][:most]) for name, shares in rows]
    body = "".join(f"<tr><td>{_text(name)}</td>{''.join(f'<td>{_some(share)}</td>' for share in shares)}</tr>" for name, shares in filled)
    return f'<h3>Kept, by kind and slot</h3><div class="scroll"><table><tr><th></th>{head}</tr>{body}</table></div>'


def _phases(ways: Mapping[str, Any]) -> str:
    held = {way: figure["phases"] for way, figure in ways.items() if figure["phases"]}
    if not held:
        return ""
    names = [name for name in plots.PHASES if any(name in told for told in held.values())]
    columns = [(name, lambda told, name=name: _some(told.get(name))) for name in names]
    return f"<h3>Milliseconds a round, by the services' metrics</h3>{_table(held, columns)}"


def _memory(told: Sequence[Mapping[str, Any]]) -> str:
    if not told:
        return "<h2>Memory</h2><p class='muted'>Nobody looked: --state DIR of `specdec up`, or --metrics, tells where to.</p>"
    (_, *titles), *rows = tables.memory(told)
    head = "".join(f"<th>{_text(title)}</th>" for title in (*titles, "most of the KV room"))
    shares = ("" if one.get("kv_share") is None else f"{one['kv_share']:.1%}" for one in told)
    body = "".join(
        f"<tr><td>{_text(name)}</td>{''.join(f'<td>{_text(value)}</td>' for value in (*values, share))}</tr>"
        for (name, *values), share in zip(rows, shares, strict=True)
    )
    return (
        f'<h2>Memory</h2><div class="scroll"><table><tr><th>MiB</th>{head}</tr>{body}</table></div><p class="muted">Weights and keys and '
        "values (KV) as the engine counts them, peak and mapped files as the system counts the process; rest is the peak without weights "
        "and the KV in use: code, tokenizer, buffers, and what loading the model took for a moment. Before and resident = what it held "
        "before the first turn and at the most when a turn ended. On a GPU weights and KV lie there, and rest is that of the GPU's peak. "
        "The draft's line is what speculation costs in memory.</p>"
    )


def _methods(report: Report) -> str:
    rows = "".join(f"<li>{one}</li>" for one in METHODS)
    about = {
        **{f"machine: {key}": value for key, value in (report.get("machine") or {}).items()},
        **(report.get("versions") or {}),
        **{f"setting: {key}": value for key, value in report["settings"].items() if key != "in_force"},
        **{f"in force, {way}": value for way, value in report["settings"]["in_force"].items()},
    }
    told = "".join(f"<dt>{_text(key)}</dt><dd>{_text(_said(value))}</dd>" for key, value in about.items())
    notes = "".join(f"<li>{_text(note)}</li>" for note in report["notes"])
    return (
        f"<h2>Methods</h2><ul>{rows}</ul>"
        + (f"<h2>Notes</h2><ul>{notes}</ul>" if notes else "")
        + f"<h2>Machine, versions, settings</h2><dl>{told}</dl><h2>Command</h2><pre>{_text(report.get('command', ''))}</pre>"
        "<p class='muted'>Raw times of every answer: runs.jsonl beside this file, a line a turn. The figures: report.json and report.csv. "
        "`specdec advise` reads them again, also for other round-trip times, steps and acceptance.</p>"
    )


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} = {_said(one)}" for key, one in value.items())
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _with(value: float | None, between: Sequence[float] | None, digits: int) -> str:
    shown = tables.number(value, digits)
    if between is None or between[0] == between[1]:
        return shown
    return f"{shown}<br><small>{between[0]:.{digits}f} to {between[1]:.{digits}f}</small>"


def _pair(ratio: Mapping[str, Any]) -> list[float] | None:
    return None if ratio["low"] is None else [ratio["low"], ratio["high"]]


def _some(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _text(value: Any) -> str:
    return html.escape(str(value))
