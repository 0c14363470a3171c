"""What a round with a block costs is told where the rounds that had one can tell it, and nowhere else. Turns are drawn with a cost and a
share of rounds with a block put in, on a machine that is 3 % faster or slower from turn to turn."""

from __future__ import annotations

import random
from typing import Any

import pytest

from specdec.bench import economics, tables, timings
from specdec.bench.experiment import AUTO, FIXED, NONE, Cell, Experiment, Outcome, Turn
from specdec.bench.record import Run, Said
from specdec.bench.report import Asked, report
from specdec.bench.store import Kept

pytestmark = pytest.mark.unit

K, ROUNDS, STEP_S, COST, KEPT = 2, 96, 0.008, 1.5, 0.5
CELL = Cell(1, 0.0)


def turn(draw: random.Random, way: str, repeat: int, share: float, machine: float = 0.03) -> Run:
    """One answer of many rounds; those with a block take COST times as long."""
    pace = STEP_S * max(0.5, draw.gauss(1.0, machine))
    arrivals, origins, with_block, accepted = [(0.1, 1)], "P", 0, 0
    for _ in range(ROUNDS):
        block = draw.random() < share
        kept = next((slot for slot in range(K) if draw.random() >= KEPT), K) if block else 0
        origins += "A" * kept + ("P" if not block else "B" if kept == K else "C")
        arrivals.append((arrivals[-1][0] + pace * (COST if block else 1.0), kept + 1))
        with_block, accepted = with_block + block, accepted + kept
    stats = {
        "num_rounds": ROUNDS + 1,
        "num_spec_steps": with_block,
        "num_draft_tokens": K * with_block,
        "num_accepted_draft_tokens": accepted,
        "hit_rate": 0.5,
    }
    said = Said("code", repeat, tuple(range(len(origins))), "t", origins, tuple(arrivals), arrivals[-1][0], stats, prompt_tokens=32)
    settings = {"num_speculative_tokens": K, "enable_adaptive_verification": way == AUTO}
    return Run(Turn(CELL, repeat, way), said.total_s, (said,), settings, {})


def drawn(seed: int, share: float, repeats: int, machine: float = 0.03) -> tuple[list[Run], list[Run]]:
    """Turns without speculation, and those with it."""
    draw = random.Random(seed)
    pairs = [(turn(draw, NONE, r, 0.0, machine), turn(draw, FIXED, r, share, machine)) for r in range(repeats)]
    return [plain for plain, _ in pairs], [other for _, other in pairs]


def costs(seed: int, share: float, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    plain, runs = drawn(seed, share, repeats)
    told = timings.acceptance(runs)
    found, few = economics.of_way(plain, runs, told), economics.too_few(plain, runs, told)
    assert not (found and few), "it is told or it is not"
    return found, few


def test_of_few_rounds_with_a_block_no_cost_is_made_up() -> None:
    """Three repeats, 9 % of the rounds: by the same formula the cost would come out anywhere between half a round and two and a half."""
    seen = [costs(seed, 0.09, 3) for seed in range(60)]
    assert sum(bool(few) for _, few in seen) >= 55
    for found, _ in seen:
        if found:
            assert found["block_round_reach_ms"] <= economics.MOST_UNSURE * found["plain_round_ms"]
            assert found["block_round_ms"] > 0.75 * found["plain_round_ms"]
    for _, few in seen:
        if few:
            assert 5 < few["rounds"] < 60 and (few["needed"] is None or few["needed"] > few["rounds"])


def test_where_all_rounds_have_a_block_it_is_told_with_what_it_may_be_off() -> None:
    held = 0
    for seed in range(60):
        found, few = costs(seed, 1.0, 5)
        assert found and not few
        plain_ms, block_ms, reach_ms = (found[name] for name in ("plain_round_ms", "block_round_ms", "block_round_reach_ms"))
        held += abs(block_ms - COST * plain_ms) <= reach_ms * COST
    assert held >= 54, "95 of 100 intervals hold what was put in"


def test_as_many_as_it_asks_for_are_enough() -> None:
    """Of the cost too: with them it is right to a quarter of a round."""
    for seed in range(8):
        _, few = costs(seed, 0.3, 3)
        if few and few["needed"]:
            found, still = costs(1000 + seed, 0.3, max(12, round(1.5 * few["needed"] / (0.3 * ROUNDS))))
            assert found and not still and found["block_round_ms"] == pytest.approx(COST * found["plain_round_ms"], rel=0.25)


def test_one_repeat_tells_nothing_of_its_spread() -> None:
    """So the usual one is assumed: enough where every round has a block, not where one in ten has."""
    found, _ = costs(1, 1.0, 1)
    assert found and found["block_round_reach_ms"] == pytest.approx(1.96 * 2**0.5 * 0.03 * found["plain_round_ms"], rel=0.01)
    _, few = costs(1, 0.12, 1)
    assert few["needed"] > 3 * few["rounds"]


def test_blocks_that_take_less_than_no_block_are_chance() -> None:
    """However sure it looks: the turns with blocks had the faster machine."""
    draw = random.Random(3)
    plain = [turn(draw, NONE, r, 0.0, 0.001) for r in range(5)]
    slower = [Run(run.turn, run.seconds, tuple(_stretched(one, 1.3) for one in run.said), run.settings) for run in plain]
    runs = [turn(draw, FIXED, r, 0.3, 0.001) for r in range(5)]
    told = timings.acceptance(runs)
    assert economics.of_way(plain, runs, told) and not economics.too_few(plain, runs, told)
    assert not economics.of_way(slower, runs, told) and economics.too_few(slower, runs, told)["needed"] is None


def _stretched(one: Said, factor: float) -> Said:
    told = {name: getattr(one, name) for name in Said.__slots__}
    return Said(**{**told, "arrivals": tuple((factor * at, count) for at, count in one.arrivals)})


def test_the_report_says_how_many_it_had_and_how_many_it_takes() -> None:
    experiment = Experiment(prompts=[("code", "a")], concurrencies=(1,), temperatures=(0.0,), repeats=3, batch=1)
    seed = next(seed for seed in range(60) if (few := costs(seed, 0.09, 3)[1]) and few["needed"])
    plain, runs = drawn(seed, 0.09, 3)
    found = report(Outcome(experiment, complete=True), {"command": "c", "machine": {}, "versions": {}}, Kept([*plain, *runs]), Asked())
    (cell,) = found["cells"]
    few, words = cell["ways"][FIXED]["too_few_blocks"], "\n".join(tables.reasons(cell))
    assert f"cannot be told from the {few['rounds']} rounds that had one" in words and f"it takes about {few['needed']}" in words
    assert "times as long" not in words and "pays from" not in words and not cell["ways"][FIXED]["economics"]
