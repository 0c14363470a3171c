"""An OpenTelemetry collector of one thread, over real HTTP: takes spans and metrics as OTLP/JSON and keeps them. Or accepts and never
answers."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Collector:
    """`spans` = all that came, flat, each with `service` (its resource's name) and attributes as plain values; `metrics` = by instance of
    a service, then by name: what was pushed last; `taken` = messages of either kind."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self.metrics: dict[str, dict[str, dict[str, Any]]] = {}
        self.url, self.taken = "", 0

    def take(self, body: dict[str, Any]) -> None:
        self.taken += 1
        for group in body.get("resourceMetrics", []):
            found = {metric["name"]: metric for scope in group["scopeMetrics"] for metric in scope["metrics"]}
            self.metrics[attributes(group["resource"])["service.instance.id"]] = found
        for group in body.get("resourceSpans", []):
            service = attributes(group["resource"])["service.name"]
            for scope in group["scopeSpans"]:
                self.spans += [{**span, "service": service, "attributes": attributes(span)} for span in scope["spans"]]

    def values(self, instance: str) -> dict[str, float]:
        """What that instance pushed last, by metric: sums over all labels; of distributions how many values they hold."""
        points = {
            name: next(metric[kind]["dataPoints"] for kind in ("sum", "gauge", "histogram") if kind in metric)
            for name, metric in self.metrics.get(instance, {}).items()
        }
        return {name: sum(float(point.get("asDouble", point.get("count", 0))) for point in held) for name, held in points.items()}

    def named(self, name: str) -> list[dict[str, Any]]:
        return [span for span in list(self.spans) if span["name"] == name]

    def wait(self, name: str, count: int = 1, timeout_s: float = 20.0) -> list[dict[str, Any]]:
        """Spans travel once a second."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.named(name)) < count:
            assert time.monotonic() < deadline, [span["name"] for span in self.spans]
            time.sleep(0.02)
        return found


def attributes(holder: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in holder.get("attributes", [])}


@contextlib.contextmanager
def collector() -> Iterator[Collector]:
    kept = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            kept.take(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    kept.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """The URL of one that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
