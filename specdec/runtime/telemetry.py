"""The telemetry seam: typed handles for the metrics of metrics.py (instruments.py), spans, and the Prometheus port. The only importer of
the OTel SDK.

    telemetry = Telemetry("target", host="127.0.0.1", metrics_port=0)
    rounds = telemetry.counter("specdec.draft.rounds");  rounds.add(1)
    step = telemetry.histogram("specdec.round.duration"); step.record(0.02, phase="engine")
    telemetry.gauge("specdec.kv_cache.utilization", lambda: budget.utilization)

A name that is not in the table, or a label that the table does not list, is an error at the first use. Nothing here is global: two
instances in one process do not meet. `close` returns within CLOSE_S seconds whatever the collector does.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import cast
from wsgiref.simple_server import WSGIServer

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from prometheus_client import CollectorRegistry, start_http_server

from specdec.runtime import otlp
from specdec.runtime import trace as w3c
from specdec.runtime.instruments import Counter, Gauge, Histogram, Instruments, LabelValue, Reading
from specdec.runtime.metrics import METRICS, Kind, Metric

CLOSE_S = 4.0
SPAN_QUEUE = 2048  # spans waiting for export; more are dropped
SPAN_BATCH = 256
SPAN_DELAY_MS = 1000
MAX_EVENTS_PER_SPAN = 128


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
        self._instruments = Instruments({**_strings(resource.attributes), "service_instance_id": str(uuid.uuid4())})
        if metrics_port >= 0:
            registry = CollectorRegistry()
            registry.register(self._instruments)
            self._http, _ = start_http_server(metrics_port, host, registry)
            self.metrics_port = self._http.server_port
        self._tracers: TracerProvider | None = None
        if otlp_endpoint:
            self._tracers = TracerProvider(ParentBased(ALWAYS_ON), resource, shutdown_on_exit=False)
            self._tracers.add_span_processor(_batches(otlp_endpoint))

    def counter(self, name: str) -> Counter:
        metric = _metric(name, Kind.COUNTER)
        return cast(Counter, self._instruments.once(name, lambda: Counter(name, metric)))

    def level(self, name: str) -> Counter:
        """A level moved by add(1) and add(-1)."""
        metric = _metric(name, Kind.UP_DOWN)
        return cast(Counter, self._instruments.once(name, lambda: Counter(name, metric)))

    def histogram(self, name: str) -> Histogram:
        metric = _metric(name, Kind.HISTOGRAM)
        return cast(Histogram, self._instruments.once(name, lambda: Histogram(name, metric)))

    def gauge(self, name: str, read: Callable[[], Reading]) -> None:
        """`read` runs on the scraper's thread: it may look at plain attributes, and must not wait."""
        metric = _metric(name, Kind.GAUGE)
        if name in self._instruments:
            raise ValueError(f"gauge {name} has a reader already")
        self._instruments.once(name, lambda: Gauge(name, metric, read))

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
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
        if self._tracers is not None:
            self._tracers.shutdown()


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


def _strings(attributes: Mapping[str, object]) -> dict[str, str]:
    return {name.replace(".", "_"): str(value) for name, value in attributes.items()}
