"""What the metrics of one process hold, and how a scraper sees it. Knows no table and no port.

A value costs a dictionary entry and a lock that nobody else wants: rounds by the thousand a second are counted where they happen. Reading
is the scraper's work, on its thread. Prometheus' names: dots become underscores, seconds and bytes are named, counters end in `_total`.

Labels are closed sets by design (metrics.py). Should one not be, an instrument stops at MAX_SERIES: what is new then is counted under
labels that all say `other`, and `left_out` tells how often, so that a mistake costs a label and not the memory.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Protocol

import prometheus_client.core

from specdec.runtime.metrics import Kind, Metric

Family = prometheus_client.core.Metric
Reading = float | Iterable[tuple[float, Mapping[str, str]]]
LabelValue = str | int | bool
Key = tuple[tuple[str, LabelValue], ...]
MAX_SERIES = 256  # label sets of one instrument
OTHER = "other"
UNITS = {"s": "_seconds", "By": "_bytes"}  # how names end
_TYPES = {Kind.COUNTER: "counter", Kind.UP_DOWN: "gauge", Kind.GAUGE: "gauge", Kind.HISTOGRAM: "histogram"}


class _Instrument:
    __slots__ = ("_allowed", "_lock", "left_out", "metric", "name")

    def __init__(self, name: str, metric: Metric) -> None:
        self.name, self.metric = name, metric
        self._allowed = frozenset(metric.labels)
        self._lock = threading.Lock()
        self.left_out = 0  # samples that were counted under OTHER

    def check(self, labels: Iterable[str]) -> None:
        """Raises ValueError for a label that the table does not list."""
        if unknown := set(labels) - self._allowed:
            raise ValueError(f"labels {sorted(unknown)} are not in the table: {sorted(self._allowed)}")

    def admitted(self, key: Key, held: Mapping[Key, object]) -> Key:
        """The key to count under, for one that is not held; the lock is held. Raises ValueError for an unknown label."""
        self.check(name for name, _ in key)
        if len(held) < MAX_SERIES:
            return key
        self.left_out += 1
        return tuple((name, OTHER) for name, _ in key)

    def family(self) -> Family:
        return Family(self.name.replace(".", "_") + UNITS.get(self.metric.unit, ""), self.metric.description, _TYPES[self.metric.kind])


class Counter(_Instrument):
    """Only grows, or is a level moved by add(1) and add(-1)."""

    __slots__ = ("_values",)

    def __init__(self, name: str, metric: Metric) -> None:
        super().__init__(name, metric)
        self._values: dict[Key, float] = {}

    def add(self, amount: float = 1, labels: Mapping[str, LabelValue] | None = None, **more: LabelValue) -> None:
        key = tuple((({**labels, **more} if more else labels) if labels else more).items())
        with self._lock:
            if key in self._values:
                self._values[key] += amount
                return
            key = self.admitted(key, self._values)
            self._values[key] = self._values.get(key, 0.0) + amount

    def read(self) -> Family:
        family = self.family()
        with self._lock:
            values = list(self._values.items())
        name = family.name + ("_total" if self.metric.kind is Kind.COUNTER else "")
        for key, value in values:
            family.add_sample(name, _labels(key), float(value))
        if not values and not self.metric.labels:
            family.add_sample(name, {}, 0.0)  # or the first one would be no increase to whoever watches
        return family


class _Distribution:
    __slots__ = ("counts", "sum")

    def __init__(self, buckets: int) -> None:
        self.counts, self.sum = [0] * buckets, 0.0


class Record(Protocol):
    def __call__(self, value: float, times: int = 1) -> None: ...


class Histogram(_Instrument):
    """A distribution, in the unit of the table (seconds, not milliseconds)."""

    __slots__ = ("_values",)

    def __init__(self, name: str, metric: Metric) -> None:
        super().__init__(name, metric)
        self._values: dict[Key, _Distribution] = {}

    def record(self, value: float, labels: Mapping[str, LabelValue] | None = None, times: int = 1, **more: LabelValue) -> None:
        """`times` = how often this very value was seen."""
        key = tuple((({**labels, **more} if more else labels) if labels else more).items())
        with self._lock:
            found = self._found(key)
            found.counts[bisect.bisect_left(self.metric.buckets, value)] += times
            found.sum += value * times

    def series(self, labels: Mapping[str, LabelValue] | None = None, **more: LabelValue) -> Record:
        """What records under these labels: for who does so in every round, at less than half the price."""
        key, lock, bounds = tuple({**(labels or {}), **more}.items()), self._lock, self.metric.buckets
        held: _Distribution | None = None

        def record(value: float, times: int = 1) -> None:
            nonlocal held
            with lock:
                found = held
                if found is None:
                    found = self._found(key)
                    held = self._values.get(key)  # None: it is counted under OTHER
                found.counts[bisect.bisect_left(bounds, value)] += times
                found.sum += value * times

        return record

    def _found(self, key: Key) -> _Distribution:
        """The lock is held."""
        found = self._values.get(key)
        if found is None:
            found = self._values.setdefault(self.admitted(key, self._values), _Distribution(len(self.metric.buckets) + 1))
        return found

    def read(self) -> Family:
        family = self.family()
        with self._lock:
            values = [(key, list(found.counts), found.sum) for key, found in self._values.items()]
        for key, counts, total in values:
            labels, seen = _labels(key), 0
            for bound, count in zip((*map(str, self.metric.buckets), "+Inf"), counts, strict=True):
                seen += count
                family.add_sample(f"{family.name}_bucket", {**labels, "le": bound}, float(seen))
            family.add_sample(f"{family.name}_count", labels, float(seen))
            family.add_sample(f"{family.name}_sum", labels, total)
        return family


class Gauge(_Instrument):
    """A level, or a count kept elsewhere, that is looked at when somebody asks."""

    __slots__ = ("_look",)

    def __init__(self, name: str, metric: Metric, look: Callable[[], Reading]) -> None:
        super().__init__(name, metric)
        self._look = look

    def read(self) -> Family:
        family, reading = self.family(), self._look()
        name = family.name + ("_total" if self.metric.kind is Kind.COUNTER else "")
        for value, labels in [(reading, {})] if isinstance(reading, int | float) else reading:
            self.check(labels)
            family.add_sample(name, _labels(labels.items()), float(value))
        return family


class Instruments:
    """All of one process: a collector of prometheus_client. `resource` = what its `target_info` says."""

    def __init__(self, resource: Mapping[str, str]) -> None:
        self._resource = dict(resource)
        self._all: dict[str, Counter | Histogram | Gauge] = {}

    def once(self, name: str, make: Callable[[], Counter | Histogram | Gauge]) -> Counter | Histogram | Gauge:
        """The instrument of that name, made when it is first asked for."""
        if name not in self._all:
            self._all[name] = make()
        return self._all[name]

    def __contains__(self, name: str) -> bool:
        return name in self._all

    @property
    def left_out(self) -> int:
        """Samples of all instruments that lost their labels."""
        return sum(instrument.left_out for instrument in list(self._all.values()))

    def families(self, names: Iterable[str]) -> dict[str, Family]:
        """What these hold now, by name; those that were never made are missing."""
        return {name: self._all[name].read() for name in names if name in self._all}

    def read(self) -> Iterator[tuple[str, Metric, Family]]:
        """All of them: name and row of the table, what is held now."""
        for name, instrument in list(self._all.items()):
            yield name, instrument.metric, instrument.read()

    def collect(self) -> Iterator[Family]:
        info = Family("target_info", "Target metadata", "gauge")
        info.add_sample("target_info", self._resource, 1.0)
        yield info
        for _, _, family in self.read():
            if family.samples:
                yield family


def _labels(pairs: Iterable[tuple[str, LabelValue]]) -> dict[str, str]:
    return {name.replace(".", "_"): str(value) for name, value in pairs}
