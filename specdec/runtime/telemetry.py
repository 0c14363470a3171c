"""The telemetry seam: typed handles for the metrics of metrics.py, spans, and the Prometheus port. The only importer of the OTel SDK.

    telemetry = Telemetry("target", host="127.0.0.1", metrics_port=0)
    rounds = telemetry.counter("specdec.draft.rounds");  rounds.add(1)
    step = telemetry.histogram("specdec.round.duration"); step.record(0.02, phase="engine")
    telemetry.gauge("specdec.kv_cache.utilization", lambda: budget.utilization)

A name that is not in the table, or a label that the table does not list, is an error at the first use. Nothing here is global: two
instances in one process do not meet. `close` returns within CLOSE_S seconds whatever the collector does.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from wsgiref.simple_server import WSGIServer

from opentelemetry import trace
from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from prometheus_client import CollectorRegistry, start_http_server

from specdec.runtime import otlp
from specdec.runtime import trace as w3c
from specdec.runtime.metrics import METRICS, Kind, Metric

CLOSE_S = 4.0
SPAN_QUEUE = 2048  # spans waiting for export; more are dropped
SPAN_BATCH = 256
SPAN_DELAY_MS = 1000
MAX_EVENTS_PER_SPAN = 128

Reading = float | Iterable[tuple[float, Mapping[str, str]]]
LabelValue = str | int | bool


class Counter:
    """Only grows."""

    __slots__ = ("_add", "_labels")

    def __init__(self, add: Callable[..., None], labels: frozenset[str]) -> None:
        self._add, self._labels = add, labels

    def add(self, amount: float = 1, labels: Mapping[str, LabelValue] | None = None, **more: LabelValue) -> None:
        self._add(amount, _checked(self._labels, labels, more))


class Histogram:
    """A distribution, in the unit of the table (seconds, not milliseconds)."""

    __slots__ = ("_labels", "_record")

    def __init__(self, record: Callable[..., None], labels: frozenset[str]) -> None:
        self._record, self._labels = record, labels

    def record(self, value: float, labels: Mapping[str, LabelValue] | None = None, **more: LabelValue) -> None:
        self._record(value, _checked(self._labels, labels, more))


class Span:
    """One operation. Not recording unless a collector is set; `traceparent` is what the next hop gets, recording or not."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str, span: trace.Span | None = None) -> None:
        self.traceparent, self._span = traceparent, span

    @property
    def recording(self) -> bool:
        return self._span is not None

    def event(self, name: str, **attributes: LabelValue | float) -> None:
        if self._span is not None:
            self._span.add_event(name, attributes)

    def set(self, **attributes: LabelValue | float) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def end(self, error: BaseException | None = None) -> None:
        """Safe from any task: nothing is attached to a context, so nothing can be detached in the wrong one."""
        if self._span is not None:
            if error is not None:
                self._span.set_status(trace.StatusCode.ERROR, str(error)[:200])
                self._span.set_attribute("error.type", type(error).__name__)
            self._span.end()


class Telemetry:
    """`metrics_port` 0 = any free port, -1 = no port and no cost; `otlp_endpoint` empty = no spans."""

    def __init__(self, role: str, *, host: str = "127.0.0.1", metrics_port: int = -1, otlp_endpoint: str = "") -> None:
        resource = Resource.create({"service.name": f"specdec-{role}"})
        self.metrics_port = -1
        self._http: WSGIServer | None = None
        self._instruments: dict[str, Any] = {}
        readers = []
        if metrics_port >= 0:
            registry = CollectorRegistry()
            readers.append(PrometheusMetricReader(scope_info_enabled=False, registry=registry))
            self._http, _ = start_http_server(metrics_port, host, registry)
            self.metrics_port = self._http.server_port
        self._meters = MeterProvider(readers, resource=resource, shutdown_on_exit=False)
        self._meter = self._meters.get_meter("specdec")
        self._tracers: TracerProvider | None = None
        if otlp_endpoint:
            self._tracers = TracerProvider(ParentBased(ALWAYS_ON), resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(_batches(otlp_endpoint))

    def counter(self, name: str) -> Counter:
        metric = _metric(name, Kind.COUNTER)
        make = self._meter.create_counter
        return Counter(self._once(name, lambda: make(name, metric.unit, metric.description)).add, frozenset(metric.labels))

    def level(self, name: str) -> Counter:
        """A level moved by add(1) and add(-1)."""
        metric = _metric(name, Kind.UP_DOWN)
        make = self._meter.create_up_down_counter
        return Counter(self._once(name, lambda: make(name, metric.unit, metric.description)).add, frozenset(metric.labels))

    def histogram(self, name: str) -> Histogram:
        metric = _metric(name, Kind.HISTOGRAM)

        def make() -> Any:
            buckets = list(metric.buckets)
            return self._meter.create_histogram(name, metric.unit, metric.description, explicit_bucket_boundaries_advisory=buckets)

        return Histogram(self._once(name, make).record, frozenset(metric.labels))

    def gauge(self, name: str, read: Callable[[], Reading]) -> None:
        """`read` runs on the scraper's thread: it may look at plain attributes, and must not wait."""
        metric = _metric(name, Kind.GAUGE)
        allowed = frozenset(metric.labels)

        def observe(options: CallbackOptions) -> Iterable[Observation]:
            reading = read()
            if isinstance(reading, int | float):
                return [Observation(reading)]
            return [Observation(value, _checked(allowed, labels, {})) for value, labels in reading]

        if name in self._instruments:
            raise ValueError(f"gauge {name} has a reader already")
        self._once(name, lambda: self._meter.create_observable_gauge(name, [observe], metric.unit, metric.description))

    def span(
        self, name: str, traceparent: str = "", *, links: Sequence[str] = (), kind: str = "internal", **attributes: LabelValue | float
    ) -> Span:
        """`traceparent` = the caller's W3C header; `kind` server, client or internal. Without a collector the header is passed on."""
        if self._tracers is None:
            return Span(traceparent)
        parent = _span_context(traceparent)
        span = self._tracers.get_tracer("specdec").start_span(
            name,
            context=None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind[kind.upper()],
            attributes=attributes,
            links=[trace.Link(context) for context in map(_span_context, links) if context is not None],
        )
        context = span.get_span_context()
        header = w3c.TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", int(context.trace_flags))
        return Span(str(header), span if span.is_recording() else None)

    def close(self) -> None:
        """Exports what waits, within CLOSE_S; then gives up. Blocking: call it off the event loop or at the very end."""
        worker = threading.Thread(target=self._close, name="telemetry-close", daemon=True)
        worker.start()
        worker.join(CLOSE_S)

    def _close(self) -> None:
        self._meters.shutdown(timeout_millis=1000)
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        if self._tracers is not None:
            self._tracers.shutdown()

    def _once(self, name: str, make: Callable[[], Any]) -> Any:
        if name not in self._instruments:
            self._instruments[name] = make()
        return self._instruments[name]


class _JsonExporter(SpanExporter):
    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        taken = otlp.post(self._endpoint, otlp.encode(spans))
        return SpanExportResult.SUCCESS if taken else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def _batches(endpoint: str) -> BatchSpanProcessor:
    return BatchSpanProcessor(
        _JsonExporter(endpoint), max_queue_size=SPAN_QUEUE, schedule_delay_millis=SPAN_DELAY_MS, max_export_batch_size=SPAN_BATCH
    )


def _span_context(header: str) -> trace.SpanContext | None:
    context = w3c.parse(header)
    if context is None:
        return None
    flags = trace.TraceFlags(context.flags)
    return trace.SpanContext(int(context.trace_id, 16), int(context.span_id, 16), is_remote=True, trace_flags=flags)


def _metric(name: str, kind: Kind) -> Metric:
    metric = METRICS.get(name)
    if metric is None or metric.kind is not kind:
        raise ValueError(f"{name} is not a {kind.value} in specdec/runtime/metrics.py")
    return metric


def _checked(allowed: frozenset[str], labels: Mapping[str, LabelValue] | None, more: Mapping[str, LabelValue]) -> Mapping[str, LabelValue]:
    merged = {**labels, **more} if labels else more
    if not merged.keys() <= allowed:
        raise ValueError(f"labels {sorted(merged.keys() - allowed)} are not in the table: {sorted(allowed)}")
    return merged
