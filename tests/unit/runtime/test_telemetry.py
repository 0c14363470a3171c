"""Metrics as a scraper sees them, W3C trace context, and an end in time whatever the collector does (F176–F178)."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from specdec.runtime import trace
from specdec.runtime.metrics import GEN_AI_LABELS, METRICS, Kind
from specdec.runtime.telemetry import CLOSE_S, Telemetry
from tests import scraped
from tests.metric_names import alias_families, family


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry("target", metrics_port=0)
    yield made
    made.close()


def scrape(telemetry: Telemetry) -> str:
    return scraped.page(telemetry.metrics_port)


def test_scrape(telemetry: Telemetry) -> None:
    telemetry.counter("specdec.draft.rounds").add(3)
    telemetry.counter("specdec.lookahead.rounds").add(2, outcome="hit")
    telemetry.histogram("gen_ai.server.time_per_output_token").record(0.004, GEN_AI_LABELS)
    telemetry.gauge("specdec.kv_cache.utilization", lambda: 0.25)
    telemetry.gauge("specdec.pool.endpoints", lambda: [(2, {"pool": "draft", "state": "up"})])
    text = scrape(telemetry)
    assert "\nspecdec_draft_rounds_total 3.0" in text
    assert 'specdec_lookahead_rounds_total{outcome="hit"} 2.0' in text
    assert "\nspecdec_kv_cache_utilization 0.25" in text
    assert 'specdec_pool_endpoints{pool="draft",state="up"} 2.0' in text
    labels = 'gen_ai_operation_name="text_completion",gen_ai_provider_name="specdec",le="0.005"'
    assert f"gen_ai_server_time_per_output_token_seconds_bucket{{{labels}}} 1.0" in text
    assert 'service_name="specdec-target"' in text and "otel_scope" not in text


def test_every_metric_of_the_table_can_be_made_and_scraped(telemetry: Telemetry) -> None:
    for name, metric in METRICS.items():
        if name.startswith("specdec.telemetry."):
            continue  # is there from the beginning
        labels = {label: "x" for label in metric.labels}
        match metric.kind:
            case Kind.COUNTER:
                telemetry.counter(name).add(1, labels)
            case Kind.UP_DOWN:
                telemetry.level(name).add(1, labels)
            case Kind.HISTOGRAM:
                telemetry.histogram(name).record(1, labels)
            case Kind.GAUGE:
                telemetry.gauge(name, lambda labels=labels: [(1, labels)])  # type: ignore[misc]
    text = scrape(telemetry)
    assert not [name for name in METRICS if name.replace(".", "_") not in text]


def test_the_table_in_the_documents_is_this_one() -> None:
    """docs/telemetry.md: a row for each, with its type, labels and words."""
    text = (Path(__file__).parents[3] / "docs" / "telemetry.md").read_text()
    rows = {row.split("`")[1]: row for row in text.split("## Metrics\n")[1].split("## Traces\n")[0].splitlines() if row.startswith("| `")}
    for name, metric in METRICS.items():
        found = family(name)
        labels = ", ".join(f"`{label.replace('.', '_')}`" for label in metric.labels)
        assert rows.pop(found.name, None) == f"| `{found.name}` | {found.type} | {labels} | {metric.description} |", name
    assert set(rows) == {found.name for found in alias_families()}


OPEN = "application/openmetrics-text;version=1.0.0"
ASKED_FOR = {  # what scrapers say that they take
    "nothing": "",
    "Prometheus 2": f"{OPEN},application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
    "Prometheus 3": f"{OPEN};escaping=allow-utf-8;q=0.6,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4",
}


@pytest.mark.parametrize("scraper", ASKED_FOR)
def test_vllms_names_are_the_same_for_every_scraper(telemetry: Telemetry, scraper: str) -> None:
    telemetry.counter("specdec.draft.rounds").add(2)
    telemetry.aliases(lambda: "a model", lambda: 0.25)
    request = urllib.request.Request(f"http://127.0.0.1:{telemetry.metrics_port}/metrics", headers={"Accept": ASKED_FOR[scraper]})
    with urllib.request.urlopen(request, timeout=5) as answer:
        text = answer.read().decode()
    assert 'vllm:spec_decode_num_drafts_total{engine="0",model_name="a model"} 2.0' in text
    assert "\nvllm:kv_cache_usage_perc{" in text and "vllm_" not in text


def test_unknown_names_and_labels_are_errors(telemetry: Telemetry) -> None:
    with pytest.raises(ValueError, match="not a counter"):
        telemetry.counter("specdec.nope")
    with pytest.raises(ValueError, match="not a histogram"):
        telemetry.histogram("specdec.draft.rounds")
    with pytest.raises(ValueError, match="session"):
        telemetry.counter("specdec.draft.rounds").add(1, session="s-1")


def test_two_instances_do_not_meet(telemetry: Telemetry) -> None:
    other = Telemetry("draft", metrics_port=0)
    telemetry.counter("specdec.draft.rounds").add(1)
    other.counter("specdec.draft.rounds").add(5)
    assert "specdec_draft_rounds_total 1.0" in scrape(telemetry) and "specdec_draft_rounds_total 5.0" in scrape(other)
    other.close()


def test_no_label_can_grow() -> None:
    """Sessions, requests, tokens and addresses are not labels."""
    forbidden = ("session", "request", "token", "address", "endpoint", "peer", "user", "id")
    assert not [label for metric in METRICS.values() for label in metric.labels if label in forbidden or label.endswith("_id")]


# ---------------------------------------------------------------- trace context

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_parse_and_print() -> None:
    context = trace.parse(HEADER)
    assert context is not None and str(context) == HEADER and context.sampled


BAD_HEADERS = [
    "",
    "00",
    HEADER.upper(),
    HEADER.replace("00-", "ff-", 1),
    HEADER + "-more",
    HEADER.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
    HEADER.replace("b7ad6b7169203331", "0" * 16),
    HEADER + "x" * 600,
]


@pytest.mark.parametrize("header", BAD_HEADERS)
def test_what_the_specification_tells_us_to_ignore(header: str) -> None:
    assert trace.parse(header) is None


def test_a_later_version_with_more_fields_is_read() -> None:
    assert trace.parse("01" + HEADER[2:] + "-what-comes") is not None


def test_without_a_collector_the_header_is_passed_on(telemetry: Telemetry) -> None:
    span = telemetry.span("generate", HEADER)
    span.event("round", accepted=3)
    span.end()
    assert span.traceparent == HEADER and not span.recording


# ---------------------------------------------------------------- spans


class Collector(BaseHTTPRequestHandler):
    received: list[dict[str, Any]] = []

    def do_POST(self) -> None:
        self.received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_spans_reach_a_collector_with_parent_events_and_links() -> None:
    Collector.received = []
    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    telemetry = Telemetry("orchestrator", otlp_endpoint=f"http://127.0.0.1:{server.server_port}")
    parent = telemetry.span("generate", HEADER, kind="server", model="m")
    parent.event("round", accepted=2, ratio=0.5)
    child = telemetry.span("verify", parent.traceparent, links=[HEADER, "nonsense"])
    child.end(ValueError("boom"))
    parent.end()
    telemetry.close()
    server.shutdown()
    server.server_close()
    (batch,) = Collector.received
    inner, outer = batch["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert outer["traceId"] == inner["traceId"] == HEADER[3:35]
    assert outer["parentSpanId"] == HEADER[36:52] and inner["parentSpanId"] == outer["spanId"]
    assert outer["events"][0]["name"] == "round" and outer["kind"] == 2
    assert inner["status"]["code"] == 2 and len(inner["links"]) == 1
    assert trace.parse(parent.traceparent) is not None


def test_f177_a_collector_that_never_answers_costs_no_time() -> None:
    """Accepts and stays silent: recording stays cheap, closing is bounded, spans beyond the queue are dropped."""
    silent = socket.create_server(("127.0.0.1", 0))
    telemetry = Telemetry("target", otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")
    began = time.thread_time()  # wall time belongs to the machine; had it waited for the collector, each span would take two seconds
    waits = time.monotonic()
    for _ in range(3000):
        telemetry.span("x", HEADER).end()
    computing, recording = time.thread_time() - began, time.monotonic() - waits
    closes = time.monotonic()
    telemetry.close()
    silent.close()
    assert computing < 2.0 and recording < 20.0 and time.monotonic() - closes < CLOSE_S + 2.0


async def test_f178_spans_and_streams_abandoned_by_another_task(caplog: pytest.LogCaptureFixture) -> None:
    """Ending a span in another task than the one that began it detaches nothing from the wrong context."""
    silent = socket.create_server(("127.0.0.1", 0))
    telemetry = Telemetry("target", otlp_endpoint=f"http://127.0.0.1:{silent.getsockname()[1]}")

    async def stream() -> AsyncIterator[int]:
        span = telemetry.span("stream", HEADER)
        try:
            for i in range(10):
                yield i
        finally:
            span.end()

    items = stream()
    assert await anext(items) == 0
    await asyncio.create_task(items.aclose())  # type: ignore[attr-defined]
    await asyncio.to_thread(telemetry.close)
    silent.close()
    assert "detach" not in caplog.text
