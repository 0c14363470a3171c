"""What `specdec top` shows, from two looks at the metrics. Pure: numbers in, tables of text out.

Rates are between the two looks, levels those of the second. A dash stands for what did not happen or is not known, so that a zero means
zero: nobody should read "0 % kept" where nothing was proposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from specdec.bench.scrape import Samples, Total, added, added_to

NONE = "–"
NEEDS = "--metrics or --state"
MAX_POSITIONS = 10  # slots of a block that fit on a line
OUTCOMES = ("hit", "late", "ngram", "forced", "miss")
STATES = ("up", "probing", "ejected", "leaving", "down")
ORDINARY = frozenset({"prefill", "tail"})  # rounds that can have no block
FALLBACKS = {  # counter -> what it is called here
    "specdec_draftless_rounds_total": "round without block",
    "specdec_session_replacements_total": "session moved",
    "specdec_session_handovers_total": "session handed over",
    "specdec_pool_ejections_total": "replica shut out",
    "specdec_proposals_rejected_total": "proposal unusable",
    "specdec_lookahead_stale_total": "proposal stale",
    "specdec_requests_refused_total": "request refused",
    "specdec_calls_refused_total": "call refused",
    "specdec_discovery_failures_total": "look-up failed",
    "specdec_telemetry_spans_dropped_total": "span lost",
}


Fold = Callable[[Iterable[float]], float]


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Samples by address; None = nobody answered there, perhaps for one of the `reasons`. `at_s` by any one clock. `strange` = where
    another process answered than at the look before: between the two there is nothing to tell."""

    at_s: float
    samples: Mapping[str, Samples | None]
    strange: frozenset[str] = frozenset()
    reasons: Mapping[str, str] = field(default_factory=dict)


def tables(before: Look, after: Look) -> list[Table]:
    seconds = max(1e-9, after.at_s - before.at_s)
    pairs = {
        address: (now if address in after.strange else before.samples.get(address) or now, now)
        for address, now in after.samples.items()
        if now is not None
    }
    view, roles = _View(list(pairs.values()), seconds), {_role(now) for _, now in pairs.values()}
    from_afar = "orchestrator" in roles and "target" not in roles
    return [
        view.answers(),
        view.speculation(),
        view.positions(),
        *([view.steps()] if from_afar else []),
        view.fallbacks(),
        view.replicas(),
        *_untold(roles, view.drafts_wanted),
        _processes(after, pairs, seconds),  # last: there may be more of them than lines
    ]


def _untold(roles: set[str], drafts_wanted: bool) -> list[Table]:
    """What only processes know that were not asked."""
    if "orchestrator" not in roles:
        return []
    rows = [("each target's KV room, its steps and their age", NEEDS)] if "target" not in roles else []
    rows += [("the drafts' steps and what they drafted for nothing", NEEDS)] if drafts_wanted and "draft" not in roles else []
    return [Table("not told by orchestrators", ("what", "where it is told"), tuple(rows))] if rows else []


class _View:
    """Sums over all processes."""

    def __init__(self, pairs: Sequence[tuple[Samples, Samples]], seconds: float) -> None:
        self._pairs, self._seconds = pairs, seconds

    def answers(self) -> Table:
        first, each = "gen_ai_server_time_to_first_token_seconds", "gen_ai_server_time_per_output_token_seconds"
        row = (
            _count(self._level("specdec_requests_running")),
            _count(self._level("specdec_requests_waiting")),
            _rate(self._added("specdec_delivered_tokens_total") / self._seconds),
            _rate(self._added("gen_ai_server_request_duration_seconds_count") / self._seconds),
            _ms(self._mean(first)),
            _ms(self._mean(each)),
        )
        return Table("answers", ("running", "waiting", "tokens/s", "ended/s", "first token", "per token"), (row,))

    def speculation(self) -> Table:
        drafted, accepted = self._added("specdec_draft_tokens_total"), self._added("specdec_accepted_tokens_total")
        blocks, rounds = self._added("specdec_draft_rounds_total"), self._added("specdec_rounds_total")
        wanted = self._added("specdec_lookahead_rounds_total")
        shares = (_share(self._added("specdec_lookahead_rounds_total", outcome=outcome), wanted) for outcome in OUTCOMES)
        length = f"{1 + accepted / blocks:.2f}" if blocks else NONE
        per_round = f"{self._added('specdec_decided_tokens_total') / rounds:.2f}" if rounds else NONE
        waste = _share(self._added("specdec_draft_wasted_tokens_total"), self._added("specdec_draft_proposed_tokens_total"))
        row = (self._state(), _share(accepted, drafted), length, per_round, *shares, waste)
        return Table("speculation", ("is", "kept", "length", "tok/round", *OUTCOMES, "waste"), (row,))

    @property
    def drafts_wanted(self) -> bool:
        return bool(self._level("specdec_spec_wanted"))

    def steps(self) -> Table:
        """Of the targets, where they do not tell themselves. Each orchestrator sees the steps with answers for it, and everybody's KV."""
        kv = self._level("vllm:kv_cache_usage_perc", max)
        name = "specdec_round_duration_seconds"
        row = (
            _mean_of(self._total("specdec_target_batch_size")),
            *(_ms(self._mean(name, phase=phase)) for phase in ("engine", "queue", "wire", "wait")),
            NONE if kv is None else f"{kv:.0%}",
        )
        return Table("rounds at the targets, as the orchestrators see them", ("rows", "step", "queue", "wire", "wait", "KV"), (row,))

    def _state(self) -> str:
        usable, wanted = self._level("specdec_spec_enabled"), self._level("specdec_spec_wanted")
        if not wanted:
            return NONE if wanted is None else "not asked"
        return "on" if usable == wanted else "OFF" if not usable else "partly"

    def positions(self) -> Table:
        """Of the rounds with a block, those that kept the slot's token."""
        name, blocks = "specdec_accepted_tokens_per_position_total", self._added("specdec_draft_rounds_total")
        slots = [str(slot) for slot in range(MAX_POSITIONS) if self._level(name, position=str(slot)) is not None]
        rows = (tuple(_share(self._added(name, position=slot), blocks) for slot in slots),) if slots else ()
        return Table("kept by slot of the block", tuple(slots), rows)

    def replicas(self) -> Table:
        name = "specdec_pool_endpoints"
        rows = []
        for pool in ("target", "draft"):
            states = [self._level(name, min, pool=pool, state=state) for state in STATES]
            if any(count is not None for count in states):
                rows.append((pool, *map(_count, states)))
        return Table("replicas, as the orchestrators see them", ("pool", *STATES), tuple(rows))

    def fallbacks(self) -> Table:
        """Whatever did not go as it should since the processes began."""
        rows = []
        for name, what in FALLBACKS.items():
            for labels in sorted(self._label_sets(name), key=sorted):
                wanted = dict(labels)
                total = self._levels(name, wanted, sum) or 0.0
                if total and wanted.get("reason") not in ORDINARY:
                    why = " ".join(wanted[label] for label in sorted(wanted, key=lambda label: (label != "reason", label)))
                    rows.append((what, why, _rate(self._added(name, **wanted) / self._seconds), _count(total)))
        return Table("fallbacks", ("what", "why", "per s", "in all"), tuple(rows))

    def _label_sets(self, name: str) -> set[frozenset[tuple[str, str]]]:
        return {labels for _, now in self._pairs for sample, labels in now if sample == name}

    def _added(self, name: str, **labels: str) -> float:
        return sum(max(0.0, added(before, now, name, **labels)) for before, now in self._pairs)  # a restart begins at zero

    def _level(self, name: str, fold: Fold = sum, **labels: str) -> float | None:
        """Of all processes together; None where nobody says."""
        return self._levels(name, labels, fold)

    def _levels(self, name: str, labels: Mapping[str, str], fold: Fold) -> float | None:
        wanted = set(labels.items())
        found = [[value for (sample, has), value in now.items() if sample == name and wanted <= has] for _, now in self._pairs]
        told = [sum(values) for values in found if values]
        return fold(told) if told else None

    def _total(self, histogram: str, **labels: str) -> Total:
        totals = [added_to(before, now, histogram, **labels) for before, now in self._pairs]
        return Total(sum(total.seconds for total in totals), sum(total.count for total in totals))

    def _mean(self, histogram: str, **labels: str) -> float | None:
        return _mean(self._total(histogram, **labels))


def _processes(after: Look, pairs: Mapping[str, tuple[Samples, Samples]], seconds: float) -> Table:
    rows = []
    for address in after.samples:
        if address not in pairs:
            rows.append(("?", address, "away", *[NONE] * 6))
            continue
        before, now = pairs[address]
        one = _View([(before, now)], seconds)
        steps = added_to(before, now, "specdec_step_duration_seconds")
        ready, kv = one._level("specdec_ready"), one._level("specdec_kv_cache_utilization")
        sessions = one._level("specdec_sessions")
        rows.append((
            _role(now),
            address,
            NONE if ready is None else "yes" if ready else "NO",
            _count(one._level("specdec_requests_running") if sessions is None else sessions),
            NONE if kv is None else f"{kv:.0%}",
            _mean_of(added_to(before, now, "specdec_batch_size")),
            _ms(_mean(steps)),
            _rate(steps.count / seconds) if steps.count else NONE,
            _ms(one._level("specdec_step_age_seconds") or None),
        ))  # fmt: skip
    return Table("processes", ("role", "metrics at", "ready", "sessions", "KV", "rows", "step", "steps/s", "age"), tuple(rows))


def _role(samples: Samples) -> str:
    told = (dict(labels).get("service_name", "") for name, labels in samples if name == "target_info")
    return next(told, "").removeprefix("specdec-") or "?"


def _mean(total: Total) -> float | None:
    return total.seconds / total.count if total.count > 0 else None


def _mean_of(total: Total) -> str:
    return f"{total.seconds / total.count:.1f}" if total.count > 0 else NONE


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole > 0 else NONE


def _count(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def _rate(per_s: float) -> str:
    return f"{per_s:.0f}" if per_s >= 100 else f"{per_s:.1f}"


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms" if seconds >= 0.001 else f"{1e3 * seconds:.2f} ms"


def plain(found: Sequence[Table], width: int | None = None) -> str:
    """Every table under its title, columns aligned; a line never exceeds `width` characters, None = whatever it needs."""
    lines: list[str] = []
    for table in found:
        lines += ["", table.title.upper()]
        if not table.rows:
            lines.append("  none")
            continue
        widths = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]
        lines += ["  " + "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in (table.columns, *table.rows)]
    shown = lines[1:] if width is None else [line if len(line) <= width else line[: width - 1] + "…" for line in lines[1:]]
    return "\n".join(shown) + "\n"
