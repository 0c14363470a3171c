"""Spans on their way: bounded, counted, never waited for (F176, F177); sessions' spans and steps' links."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator

import pytest

from specdec.runtime import outbound, session_spans
from specdec.runtime.session_spans import FIRST, MOST, SessionSpans
from specdec.runtime.telemetry import Telemetry
from tests import scraped
from tests.collector import Collector, collector, silent


def header(number: int = 1, sampled: bool = True) -> str:
    return f"00-{number:032x}-{number:016x}-{'01' if sampled else '00'}"


def count(telemetry: Telemetry, name: str, reason: str = "") -> float:
    labels = f'{{reason="{reason}"}}' if reason else ""
    return scraped.samples(telemetry.metrics_port)[f"{name}_total{labels}"]


@pytest.fixture
def kept() -> Iterator[Collector]:
    with collector() as made:
        yield made


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hung collector is given up after 0.2 s instead of 2 s."""
    monkeypatch.setattr(outbound.otlp, "TIMEOUT_S", 0.2)


def test_f176_recording_costs_the_same_whatever_the_collector_does(kept: Collector) -> None:
    """CPU time of the thread that makes spans, in turns; wall time belongs to the machine."""
    with silent() as url:
        two = [Telemetry("target", otlp_endpoint=where) for where in (kept.url, url)]
        spent = [[0.0] * 5, [0.0] * 5]
        for turn in range(5):
            for which, telemetry in enumerate(two):
                began = time.thread_time()
                for _ in range(400):
                    telemetry.span("x", header()).end()
                spent[which][turn] = time.thread_time() - began
        answering, hung = (sorted(times)[2] for times in spent)
        for telemetry in two:
            telemetry.close()
    assert hung < 1.5 * answering + 0.002


def test_what_is_lost_is_counted_by_reason(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbound, "QUEUE", 300)
    with silent() as url, caplog.at_level(logging.INFO):
        telemetry = Telemetry("target", metrics_port=0, otlp_endpoint=url)
        made = outbound.QUEUE + outbound.BATCH + 500
        for _ in range(made):
            telemetry.span("x", header()).end()
        assert count(telemetry, "specdec_telemetry_spans_dropped", "queue") >= 500 - outbound.BATCH
        began = time.monotonic()
        assert telemetry._outbound is not None
        telemetry._outbound.close(0.2)
        assert time.monotonic() - began < 1.8, "an export may take two seconds"
        telemetry.span("x", header()).end()
        dropped = {reason: count(telemetry, "specdec_telemetry_spans_dropped", reason) for reason in ("queue", "collector", "end")}
        assert dropped["end"] >= 1
        telemetry.close()
    assert caplog.text.count("spans were lost at the end of the process") == 1


def test_a_collector_that_comes_back(caplog: pytest.LogCaptureFixture, kept: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line when it goes and one when it is there again, whatever the number of spans in between."""
    away, real = [True], outbound.otlp.post
    monkeypatch.setattr(outbound.otlp, "post", lambda *what: "gone" if away[0] else real(*what))
    monkeypatch.setattr(outbound, "DELAY_S", 0.01)
    monkeypatch.setattr(outbound, "FIRST_PAUSE_S", 0.01)
    with caplog.at_level(logging.INFO):
        telemetry = Telemetry("target", metrics_port=0, otlp_endpoint=kept.url)
        deadline = time.monotonic() + 10
        lost = 0.0
        while lost < 3:
            telemetry.span("lost", header()).end()
            time.sleep(0.01)
            lost = count(telemetry, "specdec_telemetry_spans_dropped", "collector")
            assert time.monotonic() < deadline
        away[0] = False
        telemetry.span("kept", header()).end()
        kept.wait("kept")
        telemetry.close()
    assert caplog.text.count("takes no spans") == 1 and caplog.text.count("takes spans again") == 1


def test_sessions_and_the_steps_that_serve_them(kept: Collector) -> None:
    telemetry = Telemetry("target", otlp_endpoint=kept.url)
    now = [0.0]
    spans = SessionSpans(telemetry, "verify", lambda: now[0])
    for name, traceparent in (("a", header(1)), ("b", header(2)), ("decided against", header(3, sampled=False)), ("no trace", "")):
        spans.open(name, 1, stream=1, traceparent=traceparent)
    assert len(spans) == 2
    for _ in range(200):
        spans.event("a", "round", accepted=1)
        spans.event("nobody", "round")
    spans.step("engine step", ["a", "b", "nobody"], 0.5, rows=3)
    spans.step("engine step", ["a", "b"], 0.5, rows=3)  # too soon after the other one
    spans.open("a", 2, stream=1, traceparent=header(1))
    spans.close("a", "failed", epoch=1, error="INTERNAL")  # late: of the epoch before
    spans.close("a")
    spans.open("c", 4, stream=1, traceparent=header(4))
    spans.close("c", "failed", epoch=4, error="INTERNAL")
    spans.gone(1)
    spans.close("nobody")
    assert len(spans) == 0
    telemetry.close()
    verify = {(span["attributes"]["session"], int(span["attributes"]["epoch"])): span for span in kept.named("verify")}
    assert {key: span["attributes"]["end"] for key, span in verify.items()} == {
        ("a", 1): "replaced",
        ("a", 2): "closed",
        ("b", 1): "stream ended",
        ("c", 4): "failed",
    }
    failed = verify["c", 4]
    assert failed["status"] == {"code": 2, "message": ""} and failed["attributes"]["error.type"] == "INTERNAL"
    assert verify["a", 2]["status"]["code"] == 0
    eldest = verify["a", 1]
    assert int(eldest["attributes"]["rounds"]) == 200 and FIRST < len(eldest["events"]) <= MOST
    (step,) = kept.named("engine step")
    assert [link["spanId"] for link in step["links"]] == [verify["a", 1]["spanId"], verify["b", 1]["spanId"]]
    assert 0.4e9 < int(step["endTimeUnixNano"]) - int(step["startTimeUnixNano"]) < 2e9


def test_a_step_of_a_recorded_session_is_recorded(kept: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its trace begins here, where none is to begin by itself; what it serves was the callers' choice. Links are bounded."""
    monkeypatch.setattr(session_spans, "MAX_LINKS", 3)
    telemetry = Telemetry("target", otlp_endpoint=kept.url, sample_ratio=0.0)
    spans = SessionSpans(telemetry, "verify")
    for i in range(5):
        spans.open(str(i), 1, 1, header(i + 1))
    spans.step("engine step", map(str, range(5)), 0.1)
    telemetry.span("of its own").end()
    telemetry.span("linked to what nobody records", links=[header(9, sampled=False)]).end()
    telemetry.close()
    (step,) = kept.spans
    assert step["name"] == "engine step" and [link["traceId"] for link in step["links"]] == [f"{i + 1:032x}" for i in range(3)]


def test_open_spans_are_bounded_and_end_with_the_process(kept: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_spans, "MAX_SESSIONS", 8)
    telemetry = Telemetry("target", otlp_endpoint=kept.url)
    spans = SessionSpans(telemetry, "verify")
    for i in range(11):
        spans.open(str(i), 1, 1, header(i + 1))
    assert len(spans) == 8
    spans.end()
    assert len(spans) == 0
    telemetry.close()
