"""Logs: one JSON object per line on stderr, so that stdout stays free for the ready line."""

from __future__ import annotations

import datetime
import json
import logging
import sys
from typing import Any

_PLAIN = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
MAX_CHARS = 8000  # of one message or traceback


class JsonFormatter(logging.Formatter):
    """time (UTC), level, role, logger, message, everything passed as `extra`, and the traceback."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        entry: dict[str, Any] = {"time": time, "level": record.levelname.lower(), "role": self._role, "logger": record.name}
        entry["message"] = record.getMessage()[:MAX_CHARS]
        entry.update({key: value for key, value in vars(record).items() if key not in _PLAIN})
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)[-MAX_CHARS:]
        return json.dumps(entry, default=str, ensure_ascii=False)


def configure(role: str, level: str = "info") -> None:
    """Replaces the root handlers; safe to call again, with another level once the settings are read."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(role))
    logging.basicConfig(handlers=[handler], level=level.upper(), force=True)
