"""Log lines: JSON, the trace of the request they concern, and a bound on what repeats itself (F180)."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import grpc.aio
import pytest

from specdec.runtime import logs, trace

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Rig:
    def __init__(self) -> None:
        self.now = 0.0
        self.limit = logs.RateLimit(lambda: self.now)
        self.out = io.StringIO()
        handler = logging.StreamHandler(self.out)
        handler.setFormatter(logs.JsonFormatter("target"))
        handler.addFilter(self.limit)
        self.log = logging.Logger("a.room")
        self.log.addHandler(handler)

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.getvalue().splitlines()]


@pytest.fixture
def rig() -> Rig:
    return Rig()


def test_a_line_names_the_request_that_it_concerns(rig: Rig) -> None:
    token = trace.current_traceparent.set(HEADER)
    rig.log.info("in a call")
    trace.current_traceparent.reset(token)
    rig.log.info("on its behalf", extra={"traceparent": HEADER, "session_id": "s"})
    rig.log.info("of nobody", extra={"traceparent": "nonsense"})
    for line in rig.lines[:2]:
        assert (line["trace_id"], line["span_id"]) == (HEADER[3:35], HEADER[36:52])
    assert rig.lines[1]["session_id"] == "s"
    assert "trace_id" not in rig.lines[2] and not any("traceparent" in line for line in rig.lines)


def test_what_repeats_itself_is_counted_and_not_written(rig: Rig) -> None:
    for i in range(100):
        rig.log.warning("replica %s is away", i)
        rig.log.error("another thing") if i % 10 == 0 else None
    written = [line for line in rig.lines if line["level"] == "warning"]
    assert len(written) == logs.BURST and rig.limit.left_out == 100 - logs.BURST
    assert len(rig.lines) == logs.BURST + 10
    rig.now += logs.WINDOW_S
    rig.log.warning("replica %s is away", "x")
    assert rig.lines[-1]["left_out"] == 100 - logs.BURST
    rig.log.warning("replica %s is away", "y")
    assert "left_out" not in rig.lines[-1]


def test_the_end_of_a_process_is_never_left_out(rig: Rig) -> None:
    for _ in range(2 * logs.BURST):
        rig.log.critical("the engine cannot go on")
    assert len(rig.lines) == 2 * logs.BURST


def test_the_memory_of_messages_is_bounded(rig: Rig) -> None:
    for i in range(4 * logs.MAX_MESSAGES):
        rig.log.warning(f"made up {i}")
    assert len(rig.limit._seen) == logs.MAX_MESSAGES


async def test_a_status_that_finds_its_call_over_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """gRPC calls it a failure of the method when the news of the hang-up comes behind it. Whatever else it logs is written."""
    logs.quiet_hang_ups()
    logs.quiet_hang_ups()
    of_grpc = logging.getLogger(logs.GRPC_LOG)
    over = next(kind for kind in grpc.aio.InternalError.__subclasses__() if kind.__name__ == logs.OVER)
    for error in (over('Failed "execute_batch": (SendStatusFromServerOperation,)'), ValueError("a defect")):
        try:
            raise error
        except Exception:
            of_grpc.exception("raised by servicer method [/s/m]")
    of_grpc.error("Abort error unexpectedly suppressed")
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ValueError, None]


def test_what_a_peer_says_of_itself_is_cut(rig: Rig) -> None:
    """A replica may give its model a name of megabytes, which is in the reason why it is refused."""
    try:
        raise ValueError("x" * 100_000)
    except ValueError:
        rig.log.exception("%s", "x" * 100_000, extra={"reason": "x" * 100_000, "sessions": 7})
    (line,) = rig.lines
    assert {len(line[key]) for key in ("message", "reason", "traceback")} == {logs.MAX_CHARS} and line["sessions"] == 7
