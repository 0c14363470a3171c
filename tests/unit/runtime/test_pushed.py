"""Metrics that are pushed: what a collector reads is what a scraper would."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource

from specdec.runtime.pushed import Push
from specdec.runtime.telemetry import Telemetry
from tests.collector import attributes, silent
from tests.waiting import wait_until


class Taken:
    """By path: the bodies that came."""

    def __init__(self) -> None:
        self.url, self.bodies = "", list[tuple[str, dict[str, Any]]]()

    def newest(self) -> dict[str, Any]:
        """Metrics by name."""
        (group,) = self.bodies[-1][1]["resourceMetrics"]
        assert attributes(group["resource"])["service.name"] == "specdec-target"
        return {metric["name"]: metric for metric in group["scopeMetrics"][0]["metrics"]}


@pytest.fixture
def taken() -> Iterator[Taken]:
    kept = Taken()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.bodies.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    kept.url = f"http://127.0.0.1:{server.server_port}"
    yield kept
    server.shutdown()
    server.server_close()


def test_the_last_push_holds_all_that_was_counted(taken: Taken) -> None:
    telemetry = Telemetry("target", otlp_endpoint=taken.url, push_s=3600)
    telemetry.counter("specdec.draft.rounds").add(3)
    telemetry.counter("specdec.draftless.rounds").add(2, reason="off")
    telemetry.gauge("specdec.kv_cache.utilization", lambda: 0.25)
    for rows in (1, 2, 3, 5000):
        telemetry.histogram("specdec.batch.size").record(rows)
    telemetry.histogram("rpc.server.call.duration").record(0.004, {"rpc.method": "x/Generate"})
    telemetry.close()
    assert [path for path, _ in taken.bodies] == ["/v1/metrics"]
    found = taken.newest()
    rounds = found["specdec.draft.rounds"]["sum"]
    assert rounds["isMonotonic"] and rounds["aggregationTemporality"] == 2 and rounds["dataPoints"][0]["asDouble"] == 3
    (off,) = found["specdec.draftless.rounds"]["sum"]["dataPoints"]
    assert (attributes(off), off["asDouble"]) == ({"reason": "off"}, 2)
    assert found["specdec.kv_cache.utilization"]["gauge"]["dataPoints"][0]["asDouble"] == 0.25
    (rows,) = found["specdec.batch.size"]["histogram"]["dataPoints"]
    assert rows["explicitBounds"][:3] == [1, 2, 4] and rows["bucketCounts"][:3] == ["1", "1", "1"]
    assert len(rows["bucketCounts"]) == len(rows["explicitBounds"]) + 1 and rows["bucketCounts"][-1] == "1"
    assert (rows["count"], rows["sum"]) == ("4", 5006) and found["specdec.batch.size"]["unit"] == "{row}"
    (call,) = found["rpc.server.call.duration"]["histogram"]["dataPoints"]
    assert attributes(call) == {"rpc.method": "x/Generate"}, "labels have the conventions' own names"


def test_totals_are_pushed_again_and_again(taken: Taken) -> None:
    telemetry = Telemetry("target", otlp_endpoint=taken.url, push_s=0.05)
    rounds = telemetry.counter("specdec.draft.rounds")
    for total in (1, 2):
        rounds.add(1)
        wait_until(lambda total=total: bool(taken.bodies) and _rounds(taken) == total)
    telemetry.close()
    starts = {_point(body)["startTimeUnixNano"] for _, body in taken.bodies}
    assert len(starts) == 1, "totals since one moment"


def _point(body: dict[str, Any]) -> dict[str, Any]:
    metrics = body["resourceMetrics"][0]["scopeMetrics"][0]["metrics"]
    return next(metric for metric in metrics if metric["name"] == "specdec.draft.rounds")["sum"]["dataPoints"][0]


def _rounds(taken: Taken) -> float:
    return float(_point(taken.bodies[-1][1])["asDouble"])


def test_nothing_is_pushed_unasked(taken: Taken) -> None:
    telemetry = Telemetry("target", otlp_endpoint=taken.url)
    telemetry.counter("specdec.draft.rounds").add(1)
    telemetry.close()
    assert taken.bodies == []


def test_the_last_push_waits_as_long_as_it_is_told() -> None:
    with silent() as url:
        push = Push(url, Resource.create({}), list, 3600)
        began = time.monotonic()
        push.close(0.1)
        assert time.monotonic() - began < 1.8, "an export may take two seconds"


def test_a_silent_collector_delays_no_exit() -> None:
    with silent() as url:
        telemetry = Telemetry("target", otlp_endpoint=url, push_s=0.01)
        telemetry.counter("specdec.draft.rounds").add(1)
        began = time.monotonic()
        telemetry.close()
        assert time.monotonic() - began < 5
