"""Metrics on their way to a collector, for systems that nobody scrapes: OTLP/HTTP JSON (opentelemetry-proto, `v1/metrics`). Knows no SDK.

All values are totals since the start of the process (cumulative temporality), so a push that is lost costs nothing: the next one says all
that it would have said. One thread, nothing retried; an exit waits for a last push no longer than it is told to.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from specdec.runtime import otlp
from specdec.runtime.metrics import Kind, Metric

CUMULATIVE = 2
log = logging.getLogger(__name__)


class Family(Protocol):
    """The part of prometheus_client's that is used here."""

    @property
    def name(self) -> str: ...
    @property
    def samples(self) -> Sequence[Any]: ...


Read = tuple[str, Metric, Family]
"""Name in the table, its row, what is held now."""


class Push:
    """`read` is called on a thread of its own, as a scraper's."""

    def __init__(self, endpoint: str, resource: Any, read: Callable[[], Iterable[Read]], every_s: float) -> None:
        self._resource, self._read, self._every_s = resource, read, every_s
        self._collector = otlp.Collector(endpoint, "metrics", "metrics")
        self._began_ns = time.time_ns()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._work, name="metrics", daemon=True)  # a process may end while it waits for a collector
        self._thread.start()

    def close(self, within_s: float) -> None:
        """Pushes once more, unless the collector is known to be away; returns within that time."""
        self._closing.set()
        self._thread.join(within_s)

    def _work(self) -> None:
        while not self._closing.wait(self._every_s):
            self._push()
        if not self._collector.away:
            self._push()

    def _push(self) -> None:
        try:
            body = request(self._resource.attributes, self._read(), self._began_ns, time.time_ns())
        except Exception:  # a reader of ours; what goes to a scraper fails alike
            log.exception("metrics cannot be read")
            return
        self._collector.takes(body)


def request(resource: Mapping[str, Any], read: Iterable[Read], began_ns: int, now_ns: int) -> bytes:
    """One ExportMetricsServiceRequest; Unix times in ns. Names, units and labels are the table's, with dots."""
    times = {"startTimeUnixNano": str(began_ns), "timeUnixNano": str(now_ns)}
    metrics = [_metric(name, metric, family, times) for name, metric, family in read if family.samples]
    scoped = [{"scope": {"name": "specdec"}, "metrics": metrics}]
    return json.dumps({"resourceMetrics": [{"resource": {"attributes": otlp.attributes(resource)}, "scopeMetrics": scoped}]}).encode()


def _metric(name: str, metric: Metric, family: Family, times: Mapping[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {"name": name, "unit": metric.unit, "description": metric.description}
    dotted = {label.replace(".", "_"): label for label in metric.labels}

    def labels(found: Mapping[str, str]) -> list[dict[str, Any]]:
        return otlp.attributes({dotted.get(key, key): value for key, value in found.items()})

    if metric.kind is Kind.HISTOGRAM:
        points = [{**_distribution(metric, one), "attributes": labels(dict(key)), **times} for key, one in _distributions(family).items()]
        return told | {"histogram": {"aggregationTemporality": CUMULATIVE, "dataPoints": points}}
    points = [{"asDouble": sample.value, "attributes": labels(sample.labels), **times} for sample in family.samples]
    if metric.kind is Kind.GAUGE:
        return told | {"gauge": {"dataPoints": points}}
    monotonic = metric.kind is Kind.COUNTER
    return told | {"sum": {"aggregationTemporality": CUMULATIVE, "isMonotonic": monotonic, "dataPoints": points}}


def _distributions(family: Family) -> dict[tuple[tuple[str, str], ...], dict[str, list[float]]]:
    """By labels: what the samples of each suffix say, buckets in their order."""
    found: dict[tuple[tuple[str, str], ...], dict[str, list[float]]] = {}
    for sample in family.samples:
        key = tuple((name, value) for name, value in sample.labels.items() if name != "le")
        found.setdefault(key, {}).setdefault(sample.name.removeprefix(family.name), []).append(sample.value)
    return found


def _distribution(metric: Metric, found: Mapping[str, list[float]]) -> dict[str, Any]:
    """Prometheus' buckets hold what is below as well; OTLP's do not."""
    below = [0.0, *found["_bucket"]]
    counts = [str(int(upper - lower)) for lower, upper in zip(below, below[1:], strict=False)]
    return {"count": str(int(found["_count"][0])), "sum": found["_sum"][0], "bucketCounts": counts, "explicitBounds": list(metric.buckets)}
