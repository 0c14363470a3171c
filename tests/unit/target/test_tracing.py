"""A session that fails at a target: its span says so, and so does a line with its trace."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import pytest

from specdec.runtime import logs
from specdec.runtime.session_spans import SessionSpans
from specdec.runtime.telemetry import Telemetry
from specdec.terms import Answer, Closed, Failed, Grammar, GrammarForm, NoRoom
from target_service.tracing import Tracing
from tests.collector import collector
from tests.unit.target.harness import SAMPLED, Bench, first_step, only
from tests.unit.target.test_own_rounds_loop import looping

TRACE = "00-{0:032x}-{0:016x}-01"


def test_a_failed_session_s_span_has_failed() -> None:
    """What it was told, it was told in its own epoch; its words may quote the request. What loses the session nothing ends no span."""
    with collector() as kept:
        telemetry = Telemetry("target", otlp_endpoint=kept.url)
        tracing = Tracing(SessionSpans(telemetry, "verify"))
        steps = [first_step([1], session=f"s{i}", epoch=2, traceparent=TRACE.format(i + 1)) for i in range(5)]
        tracing.asked(1, steps)
        outcomes = {
            "s0": (2, Failed(13, "secret")),
            "s1": (1, Failed(13, "late")),
            "s2": (2, Failed(3, "one item", drop=False)),
            "s3": (2, NoRoom(5)),
            "s4": (2, Closed()),
        }
        tracing.told([Answer(name, epoch, 1, outcome) for name, (epoch, outcome) in outcomes.items()])
        tracing.end()
        telemetry.close()
    spans = {span["attributes"]["session"]: span for span in kept.named("verify")}
    assert [spans[f"s{i}"]["attributes"]["end"] for i in range(5)] == ["failed", *["process ended"] * 4]
    assert spans["s0"]["attributes"]["error.type"] == "INTERNAL" and spans["s0"]["status"] == {"code": 2, "message": ""}
    assert "secret" not in str(kept.spans)


def test_a_line_about_a_session_has_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine.nan_when = lambda prefix: True
    bench.send(bench.hello(), first_step([5], traceparent=TRACE.format(7)))
    assert isinstance(only(bench.turn()), Failed)
    (line,) = caplog.records
    told = json.loads(logs.JsonFormatter("target").format(line))
    assert told["trace_id"] == f"{7:032x}" and told["message"].startswith("session fails alone")


async def test_a_line_about_a_grammar_has_its_trace(caplog: pytest.LogCaptureFixture) -> None:
    """Not of what is wrong with a grammar, which its client hears: of a defect."""
    grammar = replace(SAMPLED, grammar=Grammar(GrammarForm.REGEX, "a"))
    with caplog.at_level(logging.ERROR):
        async with looping(16) as (_, loop):  # its bench has no compiler
            stream, outlet = loop.attach("orch")
            loop.submit(stream, [first_step([5], sampling=grammar, traceparent=TRACE.format(8))])
            batch = await outlet.take(1e12)
    assert batch is not None and isinstance(only(batch.answers), Failed)
    (line,) = caplog.records
    told = json.loads(logs.JsonFormatter("target").format(line))
    assert (told["trace_id"], told["session"]) == (f"{8:032x}", "s")
