"""The telemetry seam: typed handles for the metrics of metrics.py (instruments.py), spans, and the Prometheus port. The only importer of
the OTel SDK.

    telemetry = Telemetry("target", host="127.0.0.1", metrics_port=0)
    rounds = telemetry.counter("specdec.draft.rounds");  rounds.add(1)
    step = telemetry.histogram("specdec.round.duration"); step.record(0.02, phase="engine")
    telemetry.gauge("specdec.kv_cache.utilization", lambda: budget.utilization)

A name that is not in the table, or a label that the table does not list, is an error at the first use. Nothing here is global: two
instances in one process do not meet. `close` returns within CLOSE_S seconds whatever the collector does (outbound.py).

Spans carry counts and times, never text: what a client wrote or got is in none of them unless the orchestrator is told to
(`trace_content`).
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, SamplingResult, TraceIdRatioBased
from opentelemetry.util.types import Attributes
from prometheus_client import CollectorRegistry, generate_latest, make_wsgi_app

from specdec.errors import InvalidRequest, Unsupported
from specdec.runtime import logs
from specdec.runtime import trace as w3c
from specdec.runtime.aliases import Aliases
from specdec.runtime.instruments import Counter, Family, Gauge, Histogram, Instruments, LabelValue, Reading
from specdec.runtime.metrics import METRICS, Kind, Metric
from specdec.runtime.outbound import Outbound
from specdec.runtime.pushed import Push
from specdec.runtime.scraped import MetricsServer
from specdec.runtime.shown import shown

CLOSE_S, FLUSH_S, PUSH_S = 4.0, 2.5, 1.0  # for all of it; for the spans that wait; for the last push of metrics
MAX_EVENTS = 128  # of one span
MAX_LINKS = 64
MAX_ATTRIBUTE_CHARS = 4096
MAX_ERROR_CHARS = 200
DROPPED = ("queue", "collector", "end")  # why a span was lost


class Span:
    """One operation. Not recording unless a collector is set; `traceparent` is what the next hop gets, recording or not."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, traceparent: str, span: trace.Span | None = None) -> None:
        self.traceparent, self._span = traceparent, span

    @property
    def recording(self) -> bool:
        return self._span is not None

    def event(self, name: str, at_ns: int | None = None, /, **attributes: LabelValue | float) -> None:
        """`at_ns`: Unix time of what happened earlier; None = this moment."""
        if self._span is not None:
            self._span.add_event(name, attributes, at_ns)

    def set(self, **attributes: LabelValue | float) -> None:
        if self._span is not None:
            self._span.set_attributes(attributes)

    def end(self, error: BaseException | str | None = None) -> None:
        """Safe from any task: nothing is attached to a context, so nothing can be detached in the wrong one. A refusal's own words stay
        out of the span: they may quote the request. A str is the error's class alone."""
        if self._span is not None:
            if error is not None:
                silent = isinstance(error, InvalidRequest | Unsupported | str)
                self._span.set_status(trace.StatusCode.ERROR, None if silent else str(error)[:MAX_ERROR_CHARS])
                self._span.set_attribute("error.type", error if isinstance(error, str) else type(error).__name__)
            self._span.end()


NO_SPAN = Span("")


class Telemetry:
    """`metrics_port` 0 = any free port, -1 = no port and no cost; `otlp_endpoint` empty = no spans; `sample_ratio` = share of the traces
    that begin here which are recorded: where the caller has decided, its word counts; `push_s` = pace at which metrics go there as well;
    0 = never."""

    def __init__(
        self,
        role: str,
        *,
        host: str = "127.0.0.1",
        metrics_port: int = -1,
        otlp_endpoint: str = "",
        sample_ratio: float = 1.0,
        push_s: float = 0.0,
    ) -> None:
        resource = Resource.create({"service.name": f"specdec-{role}", "service.instance.id": str(uuid.uuid4())})
        self.metrics_port = -1
        self._http: MetricsServer | None = None
        self._instruments = Instruments(_strings(resource.attributes))
        self._registry = CollectorRegistry()
        self._registry.register(self._instruments)
        self._watch_itself()
        if metrics_port >= 0:
            self._http = MetricsServer(host, metrics_port, _as_text(make_wsgi_app(self._registry)))
            self.metrics_port = self._http.server_port
        self._tracers: TracerProvider | None = None
        self._outbound: Outbound | None = None
        if otlp_endpoint:
            limits = SpanLimits(max_events=MAX_EVENTS, max_links=MAX_LINKS, max_attribute_length=MAX_ATTRIBUTE_CHARS)
            sampler = ParentBased(_Linked(sample_ratio))
            self._tracers = TracerProvider(sampler, resource, shutdown_on_exit=False, span_limits=limits)
            dropped, exported = self.counter("specdec.telemetry.spans_dropped"), self.counter("specdec.telemetry.spans_exported")
            self._outbound = Outbound(otlp_endpoint, lambda reason, spans: dropped.add(spans, reason=reason), exported.add)
            self._tracers.add_span_processor(_Ended(self._outbound.put))
        self._push = Push(otlp_endpoint, resource, self._instruments.read, push_s) if otlp_endpoint and push_s else None

    def _watch_itself(self) -> None:
        """Whatever telemetry loses is counted."""
        self.counter("specdec.telemetry.spans_exported")
        for reason in DROPPED:
            self.counter("specdec.telemetry.spans_dropped").add(0, reason=reason)
        for name, look in (
            ("specdec.telemetry.log_lines_left_out", logs.left_out),
            ("specdec.telemetry.series_left_out", lambda: self._instruments.left_out),
        ):
            metric = _metric(name, Kind.COUNTER)
            self._instruments.once(name, lambda name=name, metric=metric, look=look: Gauge(name, metric, look))  # type: ignore[misc]

    @property
    def traces(self) -> bool:
        """Whether spans go anywhere."""
        return self._tracers is not None

    def aliases(self, model: Callable[[], str], kv_usage: Callable[[], float]) -> None:
        """What aliases.py says. Called once."""
        self._registry.register(Aliases(self._instruments, model, kv_usage))

    def for_clients(self) -> bytes:
        """What clients may see (shown.py), in the metrics port's format. Reads all metrics: as costly as a scrape; off the event loop."""
        return generate_latest(_Shown(self._registry))

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
        self,
        name: str,
        traceparent: str = "",
        *,
        links: Sequence[str] = (),
        kind: str = "internal",
        began_s_ago: float = 0.0,
        **attributes: LabelValue | float,
    ) -> Span:
        """`traceparent` = the caller's W3C header; `kind` server, client or internal. Without a collector the header is passed on."""
        if self._tracers is None:  # log lines of all services can still be told to belong together
            return Span(traceparent or (str(w3c.new_context()) if kind == "server" else ""))
        parent = _span_context(traceparent)
        start_time = time.time_ns() - int(began_s_ago * 1e9) if began_s_ago else None
        span = self._tracers.get_tracer("specdec").start_span(
            name,
            context=None if parent is None else trace.set_span_in_context(trace.NonRecordingSpan(parent)),
            kind=trace.SpanKind[kind.upper()],
            attributes=attributes,
            start_time=start_time,
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
        if self._push is not None:
            self._push.close(PUSH_S)
        if self._outbound is not None:
            self._outbound.close(FLUSH_S)


class _Shown:
    """A collector: of another one what clients may see."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        return shown(self._registry.collect())


class _Linked(TraceIdRatioBased):
    """Of a trace that begins here: the ratio, and whatever is linked to a trace that is recorded."""

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: trace.SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[trace.Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> SamplingResult:
        if any(link.context.trace_flags.sampled for link in links or ()):
            return SamplingResult(Decision.RECORD_AND_SAMPLE, attributes, trace_state)
        return super().should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)


class _Ended(SpanProcessor):
    """Hands on what has ended and is to be recorded."""

    def __init__(self, put: Callable[[ReadableSpan], None]) -> None:
        self._put = put

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is not None and span.context.trace_flags.sampled:
            self._put(span)


def _as_text(app: Callable[..., Any]) -> Callable[..., Any]:
    """Answers in Prometheus' text format whatever is asked for: prometheus_client's OpenMetrics has no colon in the names of samples, so
    vLLM's would be there under names that nobody looks for."""

    def asked(environ: dict[str, Any], start: Any) -> Any:
        return app({**environ, "HTTP_ACCEPT": ""}, start)

    return asked


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
