"""Spans on their way to a collector: a bounded queue, one thread, nothing retried. Knows no SDK.

`put` costs the caller an append. What cannot be kept or delivered is dropped, counted by reason and told in one log line when it begins
and one when it ends: a collector that is away costs spans, never a token's time nor an exit. The thread lets go of the interpreter after
every span that it encodes, so that a full queue delays the event loop by one span's encoding at most.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from specdec.runtime import otlp

QUEUE = 2048  # spans that wait; more are dropped
BATCH = 256  # spans of one request to the collector
DELAY_S = 1.0  # between a span's end and its export
FIRST_PAUSE_S, LAST_PAUSE_S = 1.0, 30.0  # between tries at a collector that takes nothing
LET_GO_S = 0.0002
log = logging.getLogger(__name__)


class Outbound:
    """`dropped(reason, spans)` and `exported(spans)` are told of every span, from any thread."""

    def __init__(self, endpoint: str, dropped: Callable[[str, int], None], exported: Callable[[int], None]) -> None:
        self._endpoint, self._dropped, self._exported = endpoint, dropped, exported
        self._collector = otlp.Collector(endpoint, "traces", "spans")
        self._queue: deque[Any] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._close_by = float("inf")  # time.monotonic()
        self._thread = threading.Thread(target=self._work, name="spans", daemon=True)  # a process may end while it waits for a collector
        self._thread.start()

    def put(self, span: Any) -> None:
        """A span that has ended. Never waits."""
        if self._closing:
            self._dropped("end", 1)
        elif len(self._queue) >= QUEUE:
            self._dropped("queue", 1)
        else:
            self._queue.append(span)

    def close(self, within_s: float) -> None:
        """Sends what waits, unless the collector is known to be away; returns within that time. What is left is counted as dropped."""
        self._close_by = time.monotonic() + within_s
        self._closing = True
        self._wake.set()
        self._thread.join(within_s)
        if left := self._drain():
            self._dropped("end", len(left))
            log.warning("spans were lost at the end of the process", extra={"spans": len(left), "collector": self._endpoint})

    def _work(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._closing:
            self._wake.wait(pause_s if self._collector.away else DELAY_S)
            while self._queue and not (self._closing and self._collector.away):
                if self._send(self._take(), min(otlp.TIMEOUT_S, self._close_by - time.monotonic())):
                    pause_s = FIRST_PAUSE_S
                else:
                    pause_s = min(2 * pause_s, LAST_PAUSE_S)
                    break

    def _send(self, spans: list[Any], timeout_s: float) -> bool:
        taken = self._collector.takes(self._encode(spans) if timeout_s > 0 else b"", timeout_s)
        if taken:
            self._exported(len(spans))
        else:
            self._dropped("collector", len(spans))
        return taken

    def _encode(self, spans: list[Any]) -> bytes:
        pieces = []
        for span in spans:
            pieces.append(otlp.encode_span(span))
            time.sleep(LET_GO_S)
        return otlp.request(spans[0].resource, pieces)

    def _take(self) -> list[Any]:
        return [self._queue.popleft() for _ in range(min(BATCH, len(self._queue)))]

    def _drain(self) -> list[Any]:
        left = list(self._queue)
        self._queue.clear()
        return left
