"""What clients of a service may see of its metrics: counts, times and levels, and no name that an operator gave. Knows no table of metrics.

No metric carries what a client sent. Those of ours that name machines or pools lose these labels, and samples that are equal then are
added up. Of the process itself its role and its random id are left, since an operator may put names into the others. What is neither
ours nor vLLM's stays away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from specdec.runtime.instruments import Family

PREFIXES = ("specdec_", "gen_ai_", "vllm:")
OPERATORS = frozenset({"replica", "pool_name"})  # labels whose values are addresses, or names that were chosen
PROCESS = "target_info"
OF_PROCESS = frozenset({"service_name", "service_instance_id"})


def shown(families: Iterable[Family]) -> Iterator[Family]:
    """In the order they come."""
    for family in families:
        if family.name == PROCESS:
            yield _summed(family, {label for sample in family.samples for label in sample.labels} - OF_PROCESS)
        elif family.name.startswith(PREFIXES):
            yield _summed(family, OPERATORS)


def _summed(family: Family, without: Iterable[str]) -> Family:
    """Itself where nothing has to go."""
    hidden = frozenset(without)
    if not any(hidden & sample.labels.keys() for sample in family.samples):
        return family
    totals: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
    for sample in family.samples:
        key = sample.name, frozenset((name, value) for name, value in sample.labels.items() if name not in hidden)
        totals[key] = totals.get(key, 0.0) + sample.value
    made = Family(family.name, family.documentation, family.type)
    for (name, labels), value in totals.items():
        made.add_sample(name, dict(labels), value)
    return made
