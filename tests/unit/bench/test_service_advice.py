"""What is advised of a running service, from its counters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.bench import advice
from specdec.bench.advice import Change, Counters
from specdec.bench.scrape import parse
from specdec.bench.verdict import COSTS

pytestmark = pytest.mark.unit

METRICS = """\
specdec_round_duration_seconds_count{phase="engine"} 1000.0
specdec_round_duration_seconds_sum{phase="engine"} 20.0
specdec_round_duration_seconds_count{phase="wire"} 1000.0
specdec_round_duration_seconds_sum{phase="wire"} 1.0
specdec_draft_rounds_total 800.0
specdec_draft_tokens_total 2400.0
specdec_accepted_tokens_total 1200.0
specdec_accepted_tokens_per_position_total{position="0"} 640.0
specdec_accepted_tokens_per_position_total{position="1"} 400.0
specdec_accepted_tokens_per_position_total{position="2"} 160.0
specdec_lookahead_rounds_total{outcome="hit"} 300.0
specdec_lookahead_rounds_total{outcome="late"} 500.0
specdec_draftless_rounds_total{reason="off"} 200.0
specdec_requests_waiting 3.0
"""


def test_advice_from_a_running_service() -> None:
    told = advice.counters({}, {"orchestrator": parse(METRICS)})
    assert (told.rounds, told.spec_rounds, told.engine_ms) == (1000.0, 800.0, pytest.approx(20.0))
    assert told.alphas == pytest.approx((0.8, 0.625, 0.4)) and told.beside_ms == pytest.approx(1.0)
    found = advice.of_service(told, True, 3, Change())
    length = 1 + 0.8 + 0.5 + 0.2
    assert found["word"] == advice.MAY_PAY and found["ratio"] == pytest.approx(0.8 * length + 0.2, abs=0.001)
    text = "\n".join(found["lines"])
    assert "modelled" in text and "another draft" in text and "3 requests wait" in text
    assert found["lines"][0].startswith("may pay (modelled): 2.20 times") and found["lines"][-1].startswith("next: `specdec bench")
    forced = advice.of_service(replace(told, kept=(*told.kept, 1.0, 1.0)), True, 3, Change())
    assert forced["what_if"]["alphas"] == found["what_if"]["alphas"], "slots beyond a block are those that a grammar forced"
    dear = advice.of_service(told, True, 3, Change(target_step_ms=6.0))
    assert dear["word"] == COSTS and dear["what_if"]["row_ms"] == pytest.approx((20.0 - 6.0) / 3)
    twice = advice.counters({"orchestrator": parse(METRICS)}, {"orchestrator": parse(METRICS)})
    assert "only 0 rounds" in advice.of_service(twice, True, 3, Change())["lines"][0]
    assert "no draft" in advice.of_service(told, False, 3, Change())["lines"][0]


def test_a_few_blocks_are_no_verdict() -> None:
    """However good they were: of a small sample with 8 % of rounds that had a block nothing is said to pay."""
    few = Counters(200, 16, 48, 40, kept=(15, 14, 11), draftless={"off": 184}, engine_ms=20.0)
    found = advice.of_service(few, True, 3, Change(target_step_ms=20.0))
    text = "\n".join(found["lines"])
    assert (found["word"], found["what_if"]) == (advice.NOT_ENOUGH, None) and "modelled" not in text
    assert "not enough was seen: 16 rounds had a block" in text and "chose no block" in text, "and why there were so few"
    least = float(advice.FEW_BLOCKS)
    enough = replace(few, rounds=least / 0.08, spec_rounds=least, drafted=3 * least, accepted=2.5 * least, kept=(94.0, 88.0, 69.0))
    assert advice.of_service(enough, True, 3, Change())["word"] == advice.MAY_PAY
    short = advice.of_service(replace(few, rounds=100.0, spec_rounds=100.0), True, 3, Change())
    assert short["word"] == advice.NOT_ENOUGH and "not enough was seen: only 100 rounds" in short["lines"][0]
