"""What to set, and why, in sentences: from a report of `specdec bench`, from a running service's counters, and for what is not there yet.
Pure. Whatever was not measured is called modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from specdec.bench import economics, figures, tables, verdict, whatif
from specdec.bench.scrape import Samples, added, added_to
from specdec.bench.whatif import Setting

FEW_ROUNDS = 200  # with fewer rounds a service's counters say little
FEW_BLOCKS = 100  # and with fewer blocks: what is kept of them is then known to ± 0.1 at the best
NOT_ENOUGH = "not enough was seen"
MAY_PAY = "may pay"  # at best: what the rows of a block cost is not known
MANY_MISSES = 0.3
NO_ACCEPTANCE = 0.005
MOST_K = 8
NEXT = (
    "next: `specdec bench --endpoint HOST:PORT --out DIR` measures it with and without speculation and compares the texts; "
    "`specdec advise DIR` then says what to set"
)


def of_report(report: Mapping[str, Any]) -> list[str]:
    summary = report["summary"]
    lines = [summary["headline"], *summary["sentences"]]
    if summary["advised"]:
        lines += [": ".join(tables.to_set(summary)), f"  {tables.where_to_set(summary['advised'])}"]
    if report["differing"]:
        lines.append(f"{report['differing']} texts differ from those without speculation: a defect; do not use it before it is understood")
    if report.get("simulated"):
        lines.append("simulated: nothing here says how fast a model is")
    (_, _, *titles), *rows = tables.slices(report.get("slices", []))
    for row in rows:
        lines.append(f"  {row[0]}: {', '.join(f'{way} {part}' for way, part in zip(titles, row[2:], strict=True) if part)}")
    for cell in report["cells"]:
        if cell["verdict"]:
            told = tables.reasons(cell)
            lines += ["", f"{cell['name']}: {told[0]}", *told[1:]]
    return lines


# ---------------------------------------------------------------- what if


@dataclass(frozen=True, slots=True)
class Change:
    """None = as it is. Milliseconds; `acceptance` = the same of every slot."""

    rtt_ms: float | None = None
    target_step_ms: float | None = None
    draft_step_ms: float | None = None
    acceptance: float | None = None

    @property
    def any(self) -> bool:
        return any(value is not None for value in (self.rtt_ms, self.target_step_ms, self.draft_step_ms, self.acceptance))

    def of(self, setting: Setting) -> Setting:
        """A target that is faster or slower by some factor makes its further rows so as well."""
        if self.target_step_ms is not None:
            factor = self.target_step_ms / setting.target_step_ms if setting.target_step_ms else 1.0
            setting = replace(setting, target_step_ms=self.target_step_ms, row_ms=setting.row_ms * factor)
        if self.draft_step_ms is not None:
            setting = replace(setting, draft_step_ms=self.draft_step_ms)
        if self.rtt_ms is not None:
            setting = replace(setting, rtt_ms=self.rtt_ms)
        return setting if self.acceptance is None else replace(setting, alphas=(self.acceptance,))


def what_if(setting: Setting) -> dict[str, Any]:
    """By block length, and where it stops paying."""
    best = whatif.best(setting)
    k = best.k or 1
    return {
        "modelled": True,
        "target_step_ms": setting.target_step_ms,
        "draft_step_ms": setting.draft_step_ms,
        "rtt_ms": setting.rtt_ms,
        "host_ms": setting.host_ms,
        "row_ms": setting.row_ms,
        "alphas": list(setting.alphas),
        "foresight": setting.foresight,
        "by_k": [{"k": one.k, "ratio": round(one.ratio, 3), "ms_per_token": round(one.ms_per_token, 3)} for one in _by_k(setting)],
        "best_k": best.k,
        "ratio": round(best.ratio, 3),
        "word": verdict.PAYS if best.ratio >= 1 + verdict.MARGIN else verdict.NEUTRAL,
        "break_even_acceptance": whatif.break_even_acceptance(setting, k),
        "break_even_draft_ms": whatif.break_even_draft_ms(setting, k),
    }


def _by_k(setting: Setting) -> list[whatif.Predicted]:
    return [whatif.predicted(setting, k) for k in range(MOST_K + 1)]


def said(found: Mapping[str, Any]) -> list[str]:
    """Of what_if, in sentences."""
    kept = ", ".join(f"{alpha:.2f}" for alpha in found["alphas"])
    untold = "" if found["draft_step_ms"] else " (nobody told it: --draft-step-ms)"
    free = "" if found["row_ms"] else " (as if rows were free)"
    lines = [
        f"modelled: target {found['target_step_ms']:.2f} ms a step and {found['row_ms']:.2f} ms for each further row{free}, draft "
        f"{found['draft_step_ms']:.2f} ms a step{untold}, round trip {found['rtt_ms']:g} ms, {found['host_ms']:.2f} ms beside them, "
        f"each slot kept, where the one before was, with a chance of {kept}",
        "  K      " + "  ".join(f"{one['k']:>5}" for one in found["by_k"]),
        "  ratio  " + "  ".join(f"{one['ratio']:5.2f}" for one in found["by_k"]),
    ]
    if found["best_k"]:
        lines.append(f"  {found['word']}: best K = {found['best_k']}, {found['ratio']:.2f} times as fast as no speculation (modelled)")
    else:
        lines.append("  no block length gains anything: no speculation (modelled)")
    k = found["best_k"] or 1
    acceptance, draft_ms = found["break_even_acceptance"], found["break_even_draft_ms"]
    from_where = "never" if acceptance is None else f"from an acceptance of {acceptance:.2f} on"
    if acceptance is not None and acceptance < NO_ACCEPTANCE:
        from_where = "with any acceptance at all, since further rows of a step are free here"
    waited = "" if draft_ms is None else f"; where the draft is waited for, up to {draft_ms:.2f} ms for a step of it"
    lines.append(f"  with K = {k} it pays {from_where}{waited}")
    return lines


def setting_of(report: Mapping[str, Any]) -> tuple[str, Setting] | None:
    """The first cell that tells enough, with a fixed block length if there is one."""
    baseline = report["settings"]["baseline"]
    for only in ("fixed", None):
        for cell in report["cells"]:
            for way in cell["ways"]:
                setting = economics.setting_of(cell, way, baseline) if only in (way, None) else None
                if setting is not None:
                    return f"{cell['name']}, {way}", setting
    return None


# ---------------------------------------------------------------- a running service


@dataclass(frozen=True, slots=True)
class Counters:
    """What a service counted. `outcomes` of the rounds that wanted a block; `draftless` rounds by why; times are means in milliseconds,
    None where nobody tells them."""

    rounds: float = 0.0
    spec_rounds: float = 0.0
    drafted: float = 0.0
    accepted: float = 0.0
    kept: tuple[float, ...] = ()
    outcomes: Mapping[str, float] = field(default_factory=dict)
    draftless: Mapping[str, float] = field(default_factory=dict)
    engine_ms: float | None = None
    beside_ms: float = 0.0
    draft_step_ms: float | None = None
    rows: float | None = None  # of a target's step, on the mean
    waiting: float = 0.0

    @property
    def alphas(self) -> tuple[float, ...]:
        """Kept of those whose slot before was kept; blocks that were shorter count as refused, so this is a lower bound."""
        before = (self.spec_rounds, *self.kept)
        return tuple(kept / base for kept, base in zip(self.kept, before, strict=False) if base)


def counters(before: Mapping[str, Samples], after: Mapping[str, Samples]) -> Counters:
    """By role, between two looks; an empty `before` = since the start."""
    was, orchestrator = before.get("orchestrator", {}), after["orchestrator"]

    def labelled(name: str, label: str) -> dict[str, float]:
        values = {dict(key[1]).get(label, "") for key in orchestrator if key[0] == name}
        return {value: added(was, orchestrator, name, **{label: value}) for value in sorted(values)}

    def mean_ms(phase: str) -> float | None:
        total = added_to(was, orchestrator, "specdec_round_duration_seconds", phase=phase)
        return 1e3 * total.seconds / total.count if total.count else None

    positions = labelled("specdec_accepted_tokens_per_position_total", "position")
    draft = added_to(before.get("draft", {}), after.get("draft", {}), "specdec_step_duration_seconds")
    engine = added_to(was, orchestrator, "specdec_round_duration_seconds", phase="engine")
    rows = added_to(was, orchestrator, "specdec_target_batch_size")  # a sum of rows, not of seconds
    return Counters(
        rounds=engine.count,
        spec_rounds=added(was, orchestrator, "specdec_draft_rounds_total"),
        drafted=added(was, orchestrator, "specdec_draft_tokens_total"),
        accepted=added(was, orchestrator, "specdec_accepted_tokens_total"),
        kept=tuple(positions[name] for name in sorted(positions, key=lambda text: int(text or 0))),
        outcomes=labelled("specdec_lookahead_rounds_total", "outcome"),
        draftless=labelled("specdec_draftless_rounds_total", "reason"),
        engine_ms=mean_ms("engine"),
        beside_ms=sum(mean_ms(phase) or 0.0 for phase in ("wire", "queue")),
        draft_step_ms=1e3 * draft.seconds / draft.count if draft.count else None,
        rows=rows.seconds / rows.count if rows.count else None,
        waiting=sum(value for key, value in orchestrator.items() if key[0] == "specdec_requests_waiting"),
    )


def of_service(told: Counters, draft_available: bool, k: int, change: Change) -> dict[str, Any]:
    """`word` of the verdict, MAY_PAY or NOT_ENOUGH, `lines` in words, and the model behind them, if there is enough for one."""
    if not draft_available:
        lines = ["no draft can be used, none is there or all are shut out: nothing to be said of speculation; start one, send traffic"]
        return {"word": verdict.NEUTRAL, "lines": lines, "what_if": None}
    if told.rounds < FEW_ROUNDS:
        lines = [f"{NOT_ENOUGH}: only {told.rounds:.0f} rounds, at least {FEW_ROUNDS} are needed; send traffic meanwhile, and ask again"]
        return {"word": NOT_ENOUGH, "lines": lines, "what_if": None}
    lines = [f"{told.rounds:.0f} rounds, {told.spec_rounds / told.rounds:.0%} of them with a block (up to {k} proposals)"]
    if not told.spec_rounds or told.engine_ms is None:
        lines.append("no block was verified: the service found that none pays, or requests ask for none (disable_spec_decode)")
        return {"word": verdict.NEUTRAL, "lines": [*lines, NEXT], "what_if": None}
    if told.spec_rounds < FEW_BLOCKS:
        lines.append(f"{NOT_ENOUGH}: {told.spec_rounds:.0f} rounds had a block; send traffic and ask again (at least {FEW_BLOCKS} of them)")
        return {"word": NOT_ENOUGH, "lines": [*lines, *_troubles(told)], "what_if": None}
    block = max(1, round(told.drafted / told.spec_rounds))
    share = min(1.0, told.spec_rounds / told.rounds)
    alphas = told.alphas[: max(1, k)]  # what lies beyond is mostly forced by a grammar
    setting = change.of(Setting(told.engine_ms, told.draft_step_ms or 0.0, alphas or (0.0,), host_ms=told.beside_ms))
    if change.target_step_ms is not None:  # then what further rows cost is what the mean step takes beyond it
        setting = replace(setting, row_ms=max(0.0, told.engine_ms - change.target_step_ms) / block)
    length = figures.expected_length(setting.alpha(block))
    ratio = figures.expected_gain(length, share, setting.step_ms(1), told.engine_ms, setting.host_ms + setting.rtt_ms)
    word, _ = verdict.word_of(ratio, ratio, ratio)
    if word == verdict.PAYS and change.target_step_ms is None:
        word = MAY_PAY  # the ratio is an upper bound
    if told.rows is not None:
        lines.append(f"a target's step took {told.engine_ms:.2f} ms and had {told.rows:.1f} rows, on the mean")
    lines += [
        f"a round with a block decides {1 + told.accepted / told.spec_rounds:.2f} tokens; each slot is kept, where the one before was, "
        f"with a chance of at least {', '.join(f'{alpha:.2f}' for alpha in alphas)}",
        *_troubles(told),
        NEXT,
    ]
    return {
        "word": word,
        "lines": [_modelled(word, ratio, change), *lines],
        "what_if": what_if(setting),
        "ratio": round(ratio, 3),
        "share": round(share, 4),
    }


def _modelled(word: str, ratio: float, change: Change) -> str:
    """For who reads nothing else."""
    told = f"{word} (modelled): {ratio:.2f} times as fast as no speculation"
    if change.target_step_ms is not None:
        return f"{told}, with {change.target_step_ms:g} ms for a step without blocks"
    return (
        f"{told} at the best, if further rows cost the target nothing; "
        "--target-step-ms, what a step without blocks takes at this load, tells what they cost"
    )


def _troubles(told: Counters) -> Sequence[str]:
    lines, wanted = [], sum(told.outcomes.values())
    missed = told.outcomes.get("miss", 0.0) + told.outcomes.get("late", 0.0)
    if wanted and missed / wanted > MANY_MISSES:
        lines.append(
            f"{missed / wanted:.0%} of the rounds that wanted a block had none in time: another draft, a faster or a nearer one may help"
        )
    off = told.draftless.get("off", 0.0)
    if off > told.spec_rounds:
        lines.append(
            f"in {off / told.rounds:.0%} of the rounds the request or the service chose no block, as the service does where none pays"
        )
    if told.waiting:
        lines.append(f"{told.waiting:.0f} requests wait: where the target is full, speculation has little room")
    return lines
