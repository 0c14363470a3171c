"""Whether a cost lies within a limit: the word, how often it is wrong, the order of turns, and what the benchmark of tracing keeps."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest

from specdec.bench import figures, telemetry, within
from specdec.bench.figures import Ratio
from specdec.bench.telemetry import Side
from specdec.errors import InvalidRequest

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.97, 1.03, within.WITHIN),
        (0.97, 1.031, within.CANNOT_TELL),
        (1.03, 1.2, within.CANNOT_TELL),
        (1.031, 1.2, within.NOT_WITHIN),
        (0.5, 0.6, within.WITHIN),
        (None, None, within.CANNOT_TELL),
    ],
)
def test_the_whole_interval_decides(low: float | None, high: float | None, word: str) -> None:
    assert within.word(Ratio(1.0, low, high, 5), 1.03) == word
    assert within.word(None, 1.03) == within.CANNOT_TELL


def test_one_that_is_not_within_decides_for_all() -> None:
    assert within.together([within.WITHIN, within.WITHIN]) == within.WITHIN
    assert within.together([within.WITHIN, within.CANNOT_TELL]) == within.CANNOT_TELL
    assert within.together([within.CANNOT_TELL, within.NOT_WITHIN]) == within.NOT_WITHIN
    assert within.together([]) == within.CANNOT_TELL


@pytest.mark.parametrize("sides", ["ab", "abc", "abcd"])
def test_every_side_is_as_often_in_each_place_and_before_each_other(sides: str) -> None:
    turns = [within.order(sides, turn) for turn in range(2 * len(sides))]
    assert {tuple(sorted(turn)) for turn in turns} == {tuple(sides)}
    places = Counter((place, side) for turn in turns for place, side in enumerate(turn))
    assert set(places.values()) == {2} and len(places) == len(sides) ** 2
    before = Counter(pair for turn in turns for pair in itertools.combinations(turn, 2))
    assert set(before.values()) == {len(sides)} and len(before) == len(sides) * (len(sides) - 1)


def drawn(seed: int, cost: float, repeats: int, luck: float = 0.03) -> list[dict[str, Side]]:
    """`again` costs nothing and `full` so much; every process has its luck, every repeat its machine."""
    draw = random.Random(seed)
    found = []
    for _ in range(repeats):
        machine = math.exp(draw.gauss(0, 0.2))
        took = {name: machine * math.exp(draw.gauss(0, luck)) * (cost if name == "full" else 1.0) for name in ("off", "again", "full")}
        found.append({name: Side(20 * pace, 30 * pace, 1500 * pace, 1000) for name, pace in took.items()})
    return found


def test_what_was_put_in_is_told_and_chance_is_not() -> None:
    sides = ("again", "full")
    dear = [telemetry.judged(drawn(seed, 1.12, 16), sides)["sides"] for seed in range(12)]
    cheap = [telemetry.judged(drawn(seed, 1.0, 32), sides)["sides"] for seed in range(12)]
    assert sum(one["full"]["median_ms"]["word"] == within.NOT_WITHIN for one in dear) >= 11
    assert not any(one["again"]["median_ms"]["word"] == within.NOT_WITHIN for one in (*dear, *cheap))
    assert sum(one["full"]["word"] == within.WITHIN for one in cheap) >= 7
    few = [telemetry.judged(drawn(seed, 1.0, 3), sides)["sides"]["full"]["median_ms"]["word"] for seed in range(12)]
    assert few.count(within.CANNOT_TELL) >= 9, "three processes each say little"


def test_repeats_that_would_tell_do() -> None:
    pairs = [math.exp(random.Random(seed).gauss(0, 0.04)) for seed in range(6)]
    needed = within.repeats_for(pairs, 1.03)
    assert needed is not None and needed > 6
    assert within.repeats_for([1.02, 1.04, 1.03], 1.03) is None is within.repeats_for([1.0], 1.03)
    spread, reach = 0.05, 0.02
    enough = figures.repeats_until(spread, reach)
    assert enough is not None
    t = [figures.student_quantile(n - 1, 0.95) * spread / math.sqrt(n) for n in (enough - 1, enough)]
    assert t[0] > reach >= t[1]


def test_words_say_the_ratio_the_limit_and_what_is_missing() -> None:
    repeats = drawn(1, 1.2, 12)
    found = telemetry.judged(repeats, ("again", "full"))
    words = "\n".join(telemetry.lines(repeats, found))
    assert found["word"] == within.NOT_WITHIN and "full against off: not within" in words and "limit 1.03" in words
    one = telemetry.judged(repeats[:1], ("full",))
    assert one["word"] == within.CANNOT_TELL and "one repeat, so no interval" in "\n".join(telemetry.lines(repeats[:1], one))
    untold = [{name: Side(2.0, 3.0, 0.0, 9) for name in ("off", "full")}] * 3
    assert "not told by this system" in "\n".join(telemetry.lines(untold, telemetry.judged(untold, ("full",))))


def test_repeats_are_kept_and_not_mixed_with_others(tmp_path: Path) -> None:
    path, about = tmp_path / "kept", {"sides": ["full"], "traffic": {"streams": 4}}
    assert telemetry.kept(None, about) == [] == telemetry.kept(path, about)
    repeats = drawn(2, 1.0, 3)
    for one in repeats:
        telemetry.keep(path, about, one)
    assert telemetry.kept(path, about) == repeats
    with pytest.raises(InvalidRequest, match="name another file"):
        telemetry.kept(path, {**about, "sides": ["tenth"]})
    path.write_text("[]\n")
    with pytest.raises(InvalidRequest, match="something else"):
        telemetry.kept(path, about)


@pytest.mark.parametrize(
    "words", ["--sides none", "--sides full,full", "--repeats 0", "--slices 0", "--streams 0", "--sides full,tenth --same"]
)
def test_what_cannot_be_measured_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        telemetry.parsed(words.split())
    assert words.split()[0] in capsys.readouterr().err
