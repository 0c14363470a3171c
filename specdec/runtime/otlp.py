"""Spans as OTLP/HTTP JSON (opentelemetry-proto, `v1/traces`). Standard library only: a collector needs no further package here.

Takes whatever looks like an SDK span, so that this file imports no SDK.
"""

from __future__ import annotations

import http.client
import json
import logging
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

TIMEOUT_S = 2.0  # of one export; nothing is retried: a collector that is away costs spans, never time
log = logging.getLogger(__name__)
_STATUS = {"UNSET": 0, "OK": 1, "ERROR": 2}


def encode_span(span: Any) -> bytes:
    return json.dumps(_span(span)).encode()


def request(resource: Any, spans: Sequence[bytes]) -> bytes:
    """One ExportTraceServiceRequest of encoded spans."""
    head = json.dumps({"attributes": attributes(resource.attributes)}).encode()
    scoped = b'{"scope":{"name":"specdec"},"spans":[' + b",".join(spans) + b"]}"
    return b'{"resourceSpans":[{"resource":' + head + b',"scopeSpans":[' + scoped + b"]}]}"


def post(endpoint: str, body: bytes, timeout_s: float = TIMEOUT_S, signal: str = "traces") -> str:
    """Why the collector did not take it; empty = it did. `timeout_s` bounds the wait for each piece of its answer."""
    url = f"{endpoint.rstrip('/')}/v1/{signal}"
    try:
        asked = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(asked, timeout=timeout_s) as response:
            return "" if 200 <= response.status < 300 else f"HTTP {response.status}"
    except (OSError, ValueError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__


class Collector:
    """Where signals of one kind go. That it takes nothing, and that it does again, is one log line each. Of one thread."""

    def __init__(self, endpoint: str, signal: str, name: str) -> None:
        """`signal` as the protocol calls it, `name` as we do."""
        self._endpoint, self._signal, self._name = endpoint, signal, name
        self.away = False

    def takes(self, body: bytes, timeout_s: float = TIMEOUT_S) -> bool:
        reason = "the process ends" if timeout_s <= 0 else post(self._endpoint, body, timeout_s, self._signal)
        if bool(reason) != self.away:
            self.away = bool(reason)
            if reason:
                log.warning(
                    "the collector takes no %s; they are dropped", self._name, extra={"collector": self._endpoint, "reason": reason}
                )
            else:
                log.info("the collector takes %s again", self._name, extra={"collector": self._endpoint})
        return not reason


def _span(span: Any) -> dict[str, Any]:
    context, parent = span.context, span.parent
    entry = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "name": span.name,
        "kind": span.kind.value + 1,  # the SDK counts from 0, the protocol keeps 0 for "unspecified"
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": attributes(span.attributes or {}),
        "events": [_event(event) for event in span.events],
        "links": [{"traceId": f"{k.context.trace_id:032x}", "spanId": f"{k.context.span_id:016x}"} for k in span.links],
        "status": {"code": _STATUS[span.status.status_code.name], "message": span.status.description or ""},
    }
    if parent is not None:
        entry["parentSpanId"] = f"{parent.span_id:016x}"
    return entry


def _event(event: Any) -> dict[str, Any]:
    return {"timeUnixNano": str(event.timestamp), "name": event.name, "attributes": attributes(event.attributes or {})}


def attributes(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in found.items()]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, Iterable) and not isinstance(value, str | bytes):
        return {"arrayValue": {"values": [_value(entry) for entry in value]}}
    return {"stringValue": str(value)}
