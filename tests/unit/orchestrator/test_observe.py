"""What the counters say of a scripted sequence of rounds: F104, F105, F107."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from orchestrator.events import Admitted, Observe
from orchestrator.observe import Observer
from orchestrator.output import GenerationStats
from orchestrator.tracing import UNTRACED, session
from specdec.runtime.telemetry import Telemetry
from specdec.terms import SamplingParams
from tests.collector import attributes, collector

ROUND_COUNTERS = (
    "specdec.rounds",
    "specdec.decided.tokens",
    "specdec.draft.rounds",
    "specdec.draft.tokens",
    "specdec.accepted.tokens",
    "specdec.accepted.tokens.per_position",
    "specdec.lookahead.rounds",
    "specdec.draftless.rounds",
)


class Counted:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry, self.observer = telemetry, Observer(telemetry)

    def rounds(self, rounds: Sequence[tuple[str, int, int, int]]) -> None:
        """(outcome, verified, accepted, decided) each."""
        for outcome, verified, accepted, decided in rounds:
            self.observer.round(Observe(outcome, verified, accepted, decided))

    def total(self, name: str, **labels: str) -> float:
        samples = self._telemetry.counter(name).read().samples
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    def is_exported(self, name: str) -> bool:
        return bool(self._telemetry.counter(name).read().samples)


@pytest.fixture
def counted() -> Iterator[Counted]:
    telemetry = Telemetry("orchestrator")
    yield Counted(telemetry)
    telemetry.close()


def test_f104_drafted_is_what_was_verified(counted: Counted) -> None:
    """Proposals 3, 3, 2, 0 of which 3, 1, 0 are kept: eight drafted, four accepted, four rounds, eight decided."""
    counted.rounds([("hit", 3, 3, 4), ("hit", 3, 1, 2), ("late", 2, 0, 1), ("miss", 0, 0, 1)])
    assert counted.total("specdec.draft.tokens") == 8
    assert counted.total("specdec.accepted.tokens") == 4
    assert counted.total("specdec.rounds") == 4 and counted.total("specdec.draft.rounds") == 3
    decided = counted.total("specdec.decided.tokens")
    assert decided == 8 == counted.total("specdec.accepted.tokens") + counted.total("specdec.rounds")
    origins = {word: counted.total("specdec.decided.tokens", origin=word) for word in ("accepted", "corrected", "bonus", "plain")}
    assert origins == {"accepted": 4, "corrected": 2, "bonus": 1, "plain": 1}
    assert counted.total("specdec.draftless.rounds", reason="miss") == 1


async def test_rounds_that_went_alike_count_each(counted: Counted) -> None:
    """They are recorded in one piece, later."""
    rounds = [("hit", 3, 3, 4), ("hit", 3, 3, 4), ("late", 2, 0, 1), ("hit", 3, 3, 4), ("miss", 0, 0, 1)]
    for outcome, verified, accepted, decided in rounds:
        counted.observer.later_round(Observe(outcome, verified, accepted, decided), UNTRACED)
    assert counted.total("specdec.rounds") == 0
    counted.observer.flush()
    together = {name: counted.total(name) for name in ROUND_COUNTERS}
    counted.observer.flush()
    assert {name: counted.total(name) for name in ROUND_COUNTERS} == together, "once"
    counted.rounds(rounds)
    assert {name: counted.total(name) for name in ROUND_COUNTERS} == {name: 2 * count for name, count in together.items()}
    assert together["specdec.rounds"] == 5 and together["specdec.accepted.tokens"] == 9


def test_f105_counts_are_observed_and_not_reconstructed(counted: Counted) -> None:
    """Short last blocks, an end inside a block (no token of the target's own), several plain tokens of one answer, stale proposals."""
    counted.rounds([("hit", 5, 2, 2), ("hit", 1, 1, 1), ("off", 0, 0, 6), ("tail", 0, 0, 1)])
    counted.observer.count("stale", 7)
    assert counted.total("specdec.draft.tokens") == 6 and counted.total("specdec.accepted.tokens") == 3
    assert counted.total("specdec.decided.tokens") == 10 and counted.total("specdec.decided.tokens", origin="plain") == 7
    assert counted.total("specdec.accepted.tokens.per_position", position="0") == 2
    assert counted.total("specdec.accepted.tokens.per_position", position="1") == 1
    assert counted.total("specdec.lookahead.stale") == 1, "messages, not tokens; none of them was drafted"


def test_f107_a_collapse_is_a_pair_of_counters(counted: Counted) -> None:
    """A hundred rounds in which nothing is kept: the numerator is there and says zero, before and after."""
    names = ("specdec.accepted.tokens", "specdec.draft.tokens", "specdec.draft.rounds", "specdec.rounds")
    assert all(counted.is_exported(name) and counted.total(name) == 0 for name in names)
    counted.rounds([("hit", 3, 0, 1)] * 100)
    assert 1 + counted.total("specdec.accepted.tokens") / counted.total("specdec.draft.rounds") == 1.0
    assert counted.is_exported("specdec.accepted.tokens") and counted.total("specdec.draft.tokens") == 300
    assert counted.total("specdec.accepted.tokens.per_position") == 0
    assert counted.total("specdec.decided.tokens", origin="corrected") == 100


def test_every_outcome_is_there_before_the_first_round(counted: Counted) -> None:
    """An increase from nothing is none to Prometheus."""
    seen = {sample.labels["outcome"] for sample in counted._telemetry.counter("specdec.lookahead.rounds").read().samples}
    assert seen == {"hit", "late", "forced", "ngram", "miss"}


async def test_a_round_is_told_with_the_time_when_it_ended() -> None:
    """It is recorded later, with others, and behind what is known of its times."""
    with collector() as kept:
        telemetry = Telemetry("orchestrator", otlp_endpoint=kept.url)
        observer = Observer(telemetry)
        answer = Admitted("s", (1,), 1, SamplingParams(), 1, 10, 3, 16, traceparent=f"00-{1:032x}-{1:016x}-01")
        trace = session(telemetry, answer)
        times = []
        for number in range(2):
            observer.later(trace.timed, 0.001, 0.002, 0.003 * number)
            before = time.time_ns()
            observer.later_round(Observe("hit", 3, 3, 4), trace)
            times.append((before, time.time_ns()))
        observer.later(trace.end, GenerationStats(), None)
        observer.flush()
        telemetry.close()
    (span,) = kept.named("generation")
    assert len(span["events"]) == 2
    for event, (before, after), wire_ms in zip(span["events"], times, (0.0, 3.0), strict=True):
        assert before <= int(event["timeUnixNano"]) <= after
        assert attributes(event)["wire_ms"] == wire_ms
