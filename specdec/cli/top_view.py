"""What `specdec top` shows, from two looks at the metrics ports. Pure: numbers in, tables of text out.

Rates are between the two looks, levels those of the second. A dash stands for what did not happen or is not known, so that a zero means
zero: nobody should read "0 % kept" where nothing was proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specdec.bench.scrape import Samples, Total, added, added_to

NONE = "–"
MAX_POSITIONS = 10  # slots of a block that fit on a line
OUTCOMES = ("hit", "late", "ngram", "forced", "miss")
STATES = ("up", "probing", "ejected", "down")
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


@dataclass(frozen=True, slots=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True)
class Look:
    """Samples by address; None = nobody answered there. `at_s` by any one clock."""

    at_s: float
    samples: Mapping[str, Samples | None]


def tables(before: Look, after: Look) -> list[Table]:
    seconds = max(1e-9, after.at_s - before.at_s)
    pairs = {address: (before.samples.get(address) or {}, now) for address, now in after.samples.items() if now is not None}
    view = _View(list(pairs.values()), seconds)
    return [
        view.answers(),
        view.speculation(),
        view.positions(),
        view.fallbacks(),
        view.replicas(),
        _processes(after, pairs, seconds),  # last: there may be more of them than lines
    ]


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
        row = (self._state(), _share(accepted, drafted), length, per_round, *shares)
        return Table("speculation", ("is", "kept", "length", "tok/round", *OUTCOMES), (row,))

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
            states = [self._level(name, pool=pool, state=state, least=True) for state in STATES]
            if any(count is not None for count in states):
                rows.append((pool, *map(_count, states)))
        return Table("replicas, as the orchestrators see them", ("pool", *STATES), tuple(rows))

    def fallbacks(self) -> Table:
        """Whatever did not go as it should since the processes began."""
        rows = []
        for name, what in FALLBACKS.items():
            for labels in sorted(self._label_sets(name), key=sorted):
                wanted = dict(labels)
                total = self._levels(name, wanted, least=False) or 0.0
                if total and wanted.get("reason") not in ORDINARY:
                    why = " ".join(value for _, value in sorted(labels))
                    rows.append((what, why, _rate(self._added(name, **wanted) / self._seconds), _count(total)))
        return Table("fallbacks", ("what", "why", "per s", "in all"), tuple(rows))

    def _label_sets(self, name: str) -> set[frozenset[tuple[str, str]]]:
        return {labels for _, now in self._pairs for sample, labels in now if sample == name}

    def _added(self, name: str, **labels: str) -> float:
        return sum(max(0.0, added(before, now, name, **labels)) for before, now in self._pairs)  # a restart begins at zero

    def _level(self, name: str, least: bool = False, **labels: str) -> float | None:
        """Summed over the processes, or the least of them; None where nobody says."""
        return self._levels(name, labels, least)

    def _levels(self, name: str, labels: Mapping[str, str], least: bool) -> float | None:
        wanted = set(labels.items())
        found = [[value for (sample, has), value in now.items() if sample == name and wanted <= has] for _, now in self._pairs]
        told = [sum(values) for values in found if values]
        return None if not told else min(told) if least else sum(told)

    def _mean(self, histogram: str) -> float | None:
        return _mean([added_to(before, now, histogram) for before, now in self._pairs])


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
            _ms(_mean([steps])),
            _rate(steps.count / seconds) if steps.count else NONE,
            _ms(one._level("specdec_step_age_seconds") or None),
        ))  # fmt: skip
    return Table("processes", ("role", "metrics at", "ready", "sessions", "KV", "rows", "step", "steps/s", "age"), tuple(rows))


def _role(samples: Samples) -> str:
    told = (dict(labels).get("service_name", "") for name, labels in samples if name == "target_info")
    return next(told, "").removeprefix("specdec-") or "?"


def _mean(totals: Sequence[Total]) -> float | None:
    count = sum(total.count for total in totals)
    return sum(total.seconds for total in totals) / count if count > 0 else None


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


def plain(found: Sequence[Table], width: int = 80) -> str:
    """Every table under its title, columns aligned; a line never exceeds `width`."""
    lines: list[str] = []
    for table in found:
        lines += ["", table.title.upper()]
        if not table.rows:
            lines.append("  none")
            continue
        widths = [max(len(row[i]) for row in (table.columns, *table.rows)) for i in range(len(table.columns))]
        lines += ["  " + "  ".join(cell.ljust(widths[i]) for i, cell in enumerate(row)).rstrip() for row in (table.columns, *table.rows)]
    return "\n".join(line if len(line) <= width else line[: width - 1] + "…" for line in lines[1:]) + "\n"
