"""Where a round's time goes, and what could be reached: the arithmetic, on made-up metrics and answers."""

from __future__ import annotations

import pytest

from specdec.bench import ceiling, scrape
from specdec.bench.ceiling import Steps
from specdec.bench.experiment import Cell, Done, Turn
from specdec.bench.load import Answer, Slice
from specdec.bench.rounds import SHOWN, SOURCES, Part, mean_phases
from specdec.bench.scrape import Total
from specdec.client import SpeculativeStats
from specdec.terms import Origin

pytestmark = pytest.mark.unit
A, C, B, P = Origin.ACCEPTED, Origin.CORRECTED, Origin.BONUS, Origin.PLAIN
BEFORE = """\
# HELP specdec_round_duration_seconds Time of a round.
# TYPE specdec_round_duration_seconds histogram
specdec_round_duration_seconds_bucket{le="0.001",phase="wire"} 1.0
specdec_round_duration_seconds_count{phase="wire"} 1.0
specdec_round_duration_seconds_sum{phase="wire"} 0.5
specdec_draft_rounds_total 3.0
"""
AFTER = """\
specdec_round_duration_seconds_bucket{le="0.001",phase="wire"} 4.0
specdec_round_duration_seconds_count{phase="wire"} 4.0
specdec_round_duration_seconds_sum{phase="wire"} 0.8
specdec_round_duration_seconds_count{phase="queue"} 2.0
specdec_round_duration_seconds_sum{phase="queue"} 1e-3
specdec_draft_rounds_total 5.0
odd{label="a \\"quoted\\" one, with={braces}"} 7
"""


def test_what_was_added_between_two_looks() -> None:
    before, after = scrape.parse(BEFORE), scrape.parse(AFTER)
    wire = scrape.added_to(before, after, "specdec_round_duration_seconds", phase="wire")
    assert (wire.count, wire.seconds) == (3.0, pytest.approx(0.3))
    assert scrape.added_to(before, after, "specdec_round_duration_seconds", phase="queue") == Total(0.001, 2.0)
    assert scrape.added_to(before, after, "specdec_round_duration_seconds").count == 5.0
    assert scrape.added(before, after, "specdec_draft_rounds_total") == 2.0
    assert after["odd", frozenset({("label", 'a \\"quoted\\" one, with={braces}')})] == 7.0


def part(rounds: float, decode_s: float, **ms: float | None) -> Part:
    phases = {name: None if (value := ms.get(name)) is None else Total(value / 1e3, rounds) for name in SOURCES}
    return Part(phases, rounds, int(rounds), decode_s)


def test_prompts_are_taken_off_and_the_rest_is_what_remains() -> None:
    first = part(4, 0.0, wire=10.0, queue=0.0, engine=400.0, sample=2.0, wait=1.0, text=0.4, draft=50.0)
    whole = part(104, 3.0, wire=310.0, queue=10.0, engine=2600.0, sample=102.0, wait=51.0, text=10.4, draft=650.0)
    assert mean_phases(whole, first) == pytest.approx({
        "wire": 3.0, "queue": 0.1, "forward": 21.0, "sample": 1.0, "wait": 0.5,
        "rest": 30.0 - 25.6, "whole round": 30.0, "text": 0.1, "draft": 6.0,
    })  # fmt: skip


def test_phases_that_are_not_told_stay_so() -> None:
    found = mean_phases(part(10, 0.3, wire=10.0, engine=200.0), part(0, 0.0))
    assert found["sample"] is None and found["wait"] is None and found["forward"] == pytest.approx(20.0)
    assert found["rest"] == pytest.approx(30.0 - 21.0) and tuple(found) == SHOWN


def answer(origins: list[Origin], arrivals: list[tuple[float, int]], rounds: int, with_block: int) -> Answer:
    stats = SpeculativeStats(num_rounds=rounds, num_spec_steps=with_block, hit_rate=0.5)
    return Answer(tuple(range(len(origins))), "", tuple(origins), tuple(arrivals), arrivals[-1][0], stats, {})


def turn(way: str, repeat: int, one: Answer) -> Done:
    return Done(Turn(Cell(1, 0.0), repeat, way), (), Slice((one,), one.total_s))


def test_ceiling_expected_and_reached() -> None:
    """20 ms a plain round of which 18 are the step; blocks in three of four rounds, of two slots kept with 2/3 and 1/2."""
    plain = answer([P] * 11, [(0.1 + 0.02 * i, 1) for i in range(11)], 11, 0)
    spec = answer([P, A, A, B, A, C, C, P, P], [(0.1, 1), (0.12, 3), (0.14, 2), (0.16, 1), (0.2, 2)], 5, 3)
    done = [turn("none", 0, plain), turn("fixed", 0, spec), turn("none", 1, plain), turn("fixed", 1, spec)]
    found = ceiling.summary(done, 2, Steps(18.0, 20.0))
    assert found["alpha"] == [pytest.approx(2 / 3, abs=1e-4), 0.5]
    assert found["expected_length"] == pytest.approx(2.0) and found["share_of_rounds_with_a_block"] == 0.75
    assert found["host_ms"] == pytest.approx(2.0) and found["ceiling"] == pytest.approx(1.8)
    assert found["expected"] == pytest.approx(1.75 * 20 / (0.75 * 20 + 0.25 * 18 + 2), abs=1e-4)
    assert found["reached"] == pytest.approx(20 / 12.5) and found["interval"] == [found["reached"]] * 2
    assert "ceiling          1.80x" in ceiling.text(found)


def test_a_draft_that_never_came() -> None:
    plain = answer([P] * 3, [(0.1, 1), (0.12, 1), (0.14, 1)], 3, 0)
    found = ceiling.summary([turn("none", 0, plain), turn("fixed", 0, plain)], 3, Steps(18.0, 20.0))
    assert found["alpha"] == [0.0] * 3 and found["expected_length"] == 1.0 and found["expected"] == 1.0
    ceiling.text(found)
