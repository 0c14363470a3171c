"""What is measured of a request at the door: duration, time to the first token, time per token after it, refusals, its span.

Tokens that arrive together share the time since the tokens of the same answer before them, so the mean is the time per token, whatever
the block length, and the count is the tokens after each answer's first. The time to the first token is the request's.

The span begins with the request and ends behind its last message. What the client wrote and got is in it only where `content` says so.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from orchestrator.answer import Usage
from specdec.errors import SpecdecError
from specdec.runtime.metrics import GEN_AI_LABELS
from specdec.runtime.telemetry import MAX_ATTRIBUTE_CHARS, Span, Telemetry
from specdec.runtime.trace import current_traceparent
from specdec.status import code_of

OPERATION = "gen_ai.operation.name"


class Meters:
    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.perf_counter, content: bool = False) -> None:
        self.telemetry, self.clock, self.content = telemetry, clock, content
        self.delivered = telemetry.counter("specdec.delivered.tokens")
        self.discarded = telemetry.counter("specdec.discarded.tokens")
        self.duration = telemetry.histogram("gen_ai.server.request.duration")
        self.to_first = telemetry.histogram("gen_ai.server.time_to_first_token")
        self.per_token = telemetry.histogram("gen_ai.server.time_per_output_token")
        self.refused = telemetry.counter("specdec.requests.refused")
        self.text = telemetry.histogram("specdec.round.duration").series(phase="text")

    def request(self, traceparent: str, chat: bool) -> RequestMeter:
        """Begins now. `traceparent` = the caller's trace context, empty when there is none."""
        return RequestMeter(self, traceparent, "chat" if chat else GEN_AI_LABELS[OPERATION])


class RequestMeter:
    """A context around one request: leaving it records how it ended."""

    def __init__(self, meters: Meters, traceparent: str, operation: str) -> None:
        self._meters = meters
        self._labels = {**GEN_AI_LABELS, OPERATION: operation}
        self._per_token = meters.per_token.series(self._labels)
        self._began = meters.clock()
        self._last: dict[int, float] = {}  # answer -> when tokens of it arrived the last time
        self._admitted = False
        self._text = ""  # of answer 0, where it is kept
        self._input_tokens = self._output_tokens = 0
        self.span: Span = meters.telemetry.span(f"{operation} specdec", traceparent, kind="server")
        if self.span.traceparent:
            current_traceparent.set(self.span.traceparent)  # log lines of this call name this span
        self.keeps_content = meters.content and self.span.recording

    def admitted(self) -> None:
        """From here on an error is a failure, not a refusal."""
        self._admitted = True

    def tokens(self, count: int, index: int = 0, began: float | None = None) -> None:
        """So many tokens of an answer are on their way to the client; their ids became text since `began` on the meters' clock."""
        now = self._meters.clock()
        if began is not None:
            self._meters.text(now - began)
        if not count:
            return
        self._meters.delivered.add(count)
        last = self._last.get(index)
        if last is None and not self._last:
            self._meters.to_first.record(now - self._began, self._labels)
        share = 0.0 if last is None else (now - last) / count
        if others := count - (last is None):
            self._per_token(share, others)
        self._last[index] = now

    def asked(self, prompt: str) -> None:
        """For a span that keeps content."""
        self.span.set(**{"gen_ai.input.messages": prompt[:MAX_ATTRIBUTE_CHARS]})

    def said(self, text: str, index: int) -> None:
        if self.keeps_content and index == 0 and len(self._text) < MAX_ATTRIBUTE_CHARS:
            self._text += text

    def finished(self, usage: Usage) -> None:
        """The last message of an answer is written."""
        self._meters.discarded.add(usage.discarded)
        self._input_tokens = usage.prompt_tokens
        self._output_tokens += usage.completion_tokens

    def now(self) -> float:
        return self._meters.clock()

    def __enter__(self) -> RequestMeter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        labels = dict(self._labels)
        if error is not None:
            # Whatever is neither ours nor a defect is the client hanging up.
            code = code_of(error).name if isinstance(error, Exception) else "CANCELLED"
            labels["error.type"] = code
            if isinstance(error, SpecdecError) and not self._admitted:
                self._meters.refused.add(1, reason=code)
        self._meters.duration.record(self._meters.clock() - self._began, labels)
        self.span.set(**self._labels, **{"rpc.status_code": labels.get("error.type", "OK")})
        self.span.set(**{"gen_ai.usage.input_tokens": self._input_tokens, "gen_ai.usage.output_tokens": self._output_tokens})
        if self._text:
            self.span.set(**{"gen_ai.output.messages": self._text})
        self.span.end(None if labels.get("error.type") == "CANCELLED" else error)  # to a server that is no failure, by the conventions
