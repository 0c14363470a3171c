"""F184: labels come from closed sets. What clients, peers and errors make up never becomes a series."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator

import pytest

from orchestrator import events as ev
from orchestrator.fronts.meters import Meters
from orchestrator.observe import MAX_POSITIONS, Observer
from specdec import status
from specdec.errors import InvalidRequest, Overloaded, SpecdecError, Unavailable
from specdec.runtime.instruments import MAX_SERIES, OTHER, Counter, Histogram
from specdec.runtime.metrics import Kind, Metric
from specdec.runtime.telemetry import Telemetry


def word(rng: random.Random) -> str:
    return "".join(rng.choices(string.ascii_letters, k=12))


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry("orchestrator")
    yield made
    made.close()


def series(telemetry: Telemetry) -> int:
    return sum(len(family.samples) for family in telemetry._registry.collect())


class Anything:
    """Sessions as a front and a driver tell of them, with all that is free made up."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry, self.model, self.rng = telemetry, "", random.Random(1)
        self.observer, self.meters = Observer(telemetry), Meters(telemetry)
        self.calls = telemetry.histogram("rpc.server.call.duration")
        telemetry.aliases(lambda: self.model, lambda: 0.5)

    def session(self) -> None:
        rng, self.model = self.rng, word(self.rng)
        error: SpecdecError | None = rng.choice(
            [None, InvalidRequest(word(rng), word(rng)), Overloaded(word(rng), 5), Unavailable(word(rng))]
        )
        try:
            with self.meters.request(word(rng), chat=rng.random() < 0.5) as meter:
                meter.tokens(rng.randint(1, 9), index=rng.randint(0, 3))
                if error is not None:
                    raise error
        except SpecdecError:
            pass
        outcome = rng.choice(["hit", "late", "forced", "ngram", "miss", "no_draft", "prefill", "tail", "off"])
        verified = rng.choice([0, 1, 3, 500]) if outcome in ("hit", "late", "forced") else 0
        self.observer.round(ev.Observe(outcome, verified, rng.randint(0, verified), verified + 1))
        self.observer.replaced(equal=rng.random() < 0.5, reason=rng.choice(["target_lost", "no_room", "draining"]))
        code = rng.choice(["OK", "CANCELLED", "INTERNAL"])
        self.calls.record(0.1, status.rpc_labels(status.method_label(f"specdec.v1.{word(rng)}/{word(rng)}"), code, served=True))


def test_f184_ten_thousand_sessions_make_no_more_series_than_the_first(telemetry: Telemetry) -> None:
    anything = Anything(telemetry)
    for _ in range(500):
        anything.session()
    early = series(telemetry)
    for _ in range(9500):
        anything.session()
    assert series(telemetry) == early
    assert telemetry._instruments.left_out == 0
    positions = telemetry.counter("specdec.accepted.tokens.per_position").read().samples
    assert len(positions) == MAX_POSITIONS


def test_a_label_that_grows_costs_itself_and_no_memory() -> None:
    """The broken twin: an id as a label. The test above sees it by `left_out`, and the process lives on."""
    counter = Counter("x", Metric(Kind.COUNTER, "1", "", ("id", "kind")))
    times = Histogram("y", Metric(Kind.HISTOGRAM, "s", "", ("id",), (1.0,)))
    for i in range(3 * MAX_SERIES):
        counter.add(1, id=i, kind="a")
        times.record(0.5, id=i)
    assert len(counter.read().samples) == MAX_SERIES + 1 and counter.left_out == 2 * MAX_SERIES
    assert counter.read().samples[-1].labels == {"id": OTHER, "kind": OTHER} and counter.read().samples[-1].value == 2 * MAX_SERIES
    assert sum(sample.value for sample in counter.read().samples) == 3 * MAX_SERIES
    assert times.left_out == 2 * MAX_SERIES and len(times.read().samples) == 4 * (MAX_SERIES + 1)


def test_methods_that_nobody_knows_share_a_label() -> None:
    import specdec.v1.generation_pb2  # noqa: F401 - registers the known ones

    assert status.method_label("specdec.v1.GenerationService/Generate") == "specdec.v1.GenerationService/Generate"
    assert status.method_label("specdec.v1.GenerationService/MadeUp") == status.method_label("x") == status.OTHER_METHOD


def told(histogram: Histogram) -> list[tuple[str, tuple[tuple[str, str], ...], float]]:
    return [(sample.name, tuple(sorted(sample.labels.items())), sample.value) for sample in histogram.read().samples]


def test_what_records_one_series_records_as_the_histogram_does() -> None:
    one, other = (Histogram("x", Metric(Kind.HISTOGRAM, "s", "", ("phase", "kind"), (0.1, 1.0))) for _ in range(2))
    wire, text = one.series({"kind": "a"}, phase="wire"), one.series(phase="text")
    assert told(one) == [], "a series that saw nothing is not there"
    for value, times in ((0.05, 1), (0.1, 3), (5.0, 2)):
        wire(value, times)
        other.record(value, {"kind": "a"}, times, phase="wire")
    one.record(0.5, {"kind": "a"}, phase="wire")
    wire(0.5)
    text(0.2)
    other.record(0.5, {"kind": "a"}, 2, phase="wire")
    other.record(0.2, phase="text")
    assert told(one) == told(other)


def test_a_series_that_came_too_late_is_counted_as_other_each_time() -> None:
    histogram = Histogram("x", Metric(Kind.HISTOGRAM, "s", "", ("id",), (1.0,)))
    early = histogram.series(id="early")
    early(0.5)
    for number in range(MAX_SERIES - 1):
        histogram.record(0.5, id=number)
    late = histogram.series(id="late")
    for _ in range(3):
        late(0.5)
        early(0.5)
    assert histogram.left_out == 3
    counts = {labels: value for name, labels, value in told(histogram) if name.endswith("_count")}
    assert counts[(("id", OTHER),)] == 3 and counts[(("id", "early"),)] == 4


def test_a_series_with_an_unknown_label_is_refused() -> None:
    histogram = Histogram("x", Metric(Kind.HISTOGRAM, "s", "", ("id",), (1.0,)))
    with pytest.raises(ValueError, match="labels"):
        histogram.series(idea="x")(0.5)
