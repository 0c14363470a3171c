"""W3C trace context (https://www.w3.org/TR/trace-context/): read, write. Knows no SDK: a process passes on what it got even when
it exports nothing."""

from __future__ import annotations

import contextvars
import re
import secrets
from dataclasses import dataclass

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
SAMPLED = 1

current_traceparent: contextvars.ContextVar[str] = contextvars.ContextVar("current_traceparent", default="")
"""The caller's context while a gRPC handler runs; empty when it sent none."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    trace_id: str  # 32 lower-case hex digits, not all zero
    span_id: str  # 16, the same
    flags: int = 0

    @property
    def sampled(self) -> bool:
        return bool(self.flags & SAMPLED)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def parse(header: str) -> TraceContext | None:
    """None for a header that the specification tells us to ignore: malformed, version ff, all-zero ids."""
    match = _HEADER.fullmatch(header.strip()) if len(header) <= 512 else None
    if match is None:
        return None
    version, trace_id, span_id, flags, more = match.groups()
    if version == "ff" or (version == "00" and more) or not trace_id.strip("0") or not span_id.strip("0"):
        return None
    return TraceContext(trace_id, span_id, int(flags, 16))


def new_context(sampled: bool = False) -> TraceContext:
    return TraceContext(_random_id(16), _random_id(8), SAMPLED if sampled else 0)


def _random_id(size: int) -> str:
    while True:
        text = secrets.token_hex(size)
        if text.strip("0"):
            return text
