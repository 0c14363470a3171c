"""What the table of metrics looks like to a scraper: names, types and labels, for checks of scrapes, dashboards and alerts."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.runtime.aliases import ALIASES, KV_USAGE
from specdec.runtime.instruments import UNITS
from specdec.runtime.metrics import METRICS, Kind


@dataclass(frozen=True)
class Family:
    """`name` as in the TYPE line of the text format, `samples` = names of its samples."""

    name: str
    type: str
    samples: tuple[str, ...]
    labels: frozenset[str]


def family(name: str) -> Family:
    metric = METRICS[name]
    plain = name.replace(".", "_") + UNITS.get(metric.unit, "")
    labels = frozenset(label.replace(".", "_") for label in metric.labels)
    if metric.kind is Kind.COUNTER:
        return Family(f"{plain}_total", "counter", (f"{plain}_total",), labels)
    if metric.kind is Kind.HISTOGRAM:
        return Family(plain, "histogram", tuple(f"{plain}_{part}" for part in ("bucket", "sum", "count")), labels | {"le"})
    return Family(plain, "gauge", (plain,), labels)


def alias_families() -> list[Family]:
    """vLLM's names."""
    found = [Family(KV_USAGE, "gauge", (KV_USAGE,), frozenset({"model_name", "engine"}))]
    for name, alias in ALIASES.items():
        counts = METRICS[alias.of].kind is Kind.COUNTER
        full = name + ("_total" if counts else "")
        found.append(
            Family(full, "counter" if counts else "gauge", (full,), frozenset({"model_name", "engine", *METRICS[alias.of].labels}))
        )
    return found


def families() -> dict[str, Family]:
    """By our own name, or the alias."""
    return {**{name: family(name) for name in METRICS}, **{found.name: found for found in alias_families()}}


def sample_labels() -> dict[str, frozenset[str]]:
    """Every sample's name and the labels that it may have."""
    return {sample: found.labels for found in families().values() for sample in found.samples}
