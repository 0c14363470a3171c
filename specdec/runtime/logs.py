"""Logs: one JSON object per line on stderr, so that stdout stays free for the ready line.

A line that concerns a request carries `trace_id` and `span_id`, those of its spans: taken from the call that runs, or from
`extra={"traceparent": …}` where none does. A message that repeats itself is written BURST times in WINDOW_S; the next line of it that is
written says in `left_out` how many were not, and a metric counts them all. What telemetry's own exporter says goes nowhere but here, so a
collector that is away cannot make lines about lines.
"""

from __future__ import annotations

import datetime
import json
import logging
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.runtime import trace

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MAX_CHARS = 8000  # of one message, traceback or `extra`: peers say what they like in their names and reasons
BURST, WINDOW_S = 20, 10.0  # lines of one message in so many seconds
MAX_MESSAGES = 512  # that are told apart; of more the longest unheard is forgotten


@dataclass(slots=True)
class _Seen:
    since: float
    written: int = 0
    left_out: int = 0


class RateLimit(logging.Filter):
    """Messages are told apart by logger, level and text before its arguments are filled in. Errors that end a process pass always."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._lock = clock, threading.Lock()
        self._seen: OrderedDict[tuple[str, int, str], _Seen] = OrderedDict()
        self.left_out = 0  # lines, ever

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno >= logging.CRITICAL:
            return True
        now, key = self._clock(), (record.name, record.levelno, str(record.msg))
        with self._lock:
            seen = self._seen.setdefault(key, _Seen(now))
            self._seen.move_to_end(key)
            if len(self._seen) > MAX_MESSAGES:
                self._seen.popitem(last=False)
            if now - seen.since >= WINDOW_S:
                seen.since, seen.written = now, 0
            if seen.written >= BURST:
                seen.left_out += 1
                self.left_out += 1
                return False
            seen.written += 1
            if seen.left_out:
                record.left_out, seen.left_out = seen.left_out, 0
        return True


GRPC_LOG, OVER = "grpc._cython.cygrpc", "ExecuteBatchError"


class HungUp(logging.Filter):
    """Leaves out what gRPC says of a status that found its call over: the caller hung up a moment before. gRPC says nothing where it
    learned of that in time; here the news came later, and a line about a defect of ours would be wrong."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return type(error).__name__ != OVER


def quiet_hang_ups() -> None:
    """For every gRPC server of this process; safe to call again."""
    logging.getLogger(GRPC_LOG).addFilter(_HUNG_UP)


_HUNG_UP = HungUp()
_LIMIT = RateLimit()


def left_out() -> int:
    """Lines of this process that were not written."""
    return _LIMIT.left_out


class JsonFormatter(logging.Formatter):
    """time (UTC), level, role, logger, message, the trace, everything passed as `extra`, and the traceback."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "role": self._role, "logger": record.name}
        entry["message"] = record.getMessage()[:MAX_CHARS]
        extra = {key: value for key, value in vars(record).items() if key not in _PLAIN}
        context = trace.parse(str(extra.pop("traceparent", "") or trace.current_traceparent.get()))
        if context is not None:
            entry |= {"trace_id": context.trace_id, "span_id": context.span_id}
        entry.update((key, value[:MAX_CHARS] if isinstance(value, str) else value) for key, value in extra.items())
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[-MAX_CHARS:]
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure(role: str, level: str = "info") -> None:
    """Replaces the root handlers; safe to call again, with another level once the settings are read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role))
    handler.addFilter(_LIMIT)
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
    quiet_hang_ups()
