"""What is measured of a request at the door: F106, and how it ended."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import Any

import pytest

from orchestrator.fronts.meters import Meters
from specdec.errors import InternalFault, Overloaded
from specdec.runtime.telemetry import Span, Telemetry
from tests import scraped


class Recorded:
    """A telemetry that keeps what it is told, and a clock that is set by hand."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[float, dict[str, Any]]]] = defaultdict(list)
        self.now = 0.0

    def histogram(self, name: str) -> Any:
        recorded = self.values

        class Histogram:
            def record(self, value: float, labels: dict[str, Any] | None = None, times: int = 1, **more: Any) -> None:
                recorded[name] += [(value, {**(labels or {}), **more})] * times

            def add(self, value: float, **labels: Any) -> None:
                self.record(value, labels)

            def series(self, labels: dict[str, Any] | None = None, **more: Any) -> Any:
                return lambda value, times=1: self.record(value, labels, times, **more)

        return Histogram()

    counter = histogram

    def span(self, name: str, traceparent: str = "", **attributes: Any) -> Span:
        return Span(traceparent)

    def of(self, name: str) -> list[float]:
        return [round(value, 6) for value, _ in self.values[name]]


@pytest.fixture
def recorded() -> Recorded:
    return Recorded()


@pytest.fixture
def meters(recorded: Recorded) -> Meters:
    return Meters(recorded, lambda: recorded.now)  # type: ignore[arg-type]


def test_blocks_count_by_token(meters: Meters, recorded: Recorded) -> None:
    """F106: four tokens every 40 ms are 10 ms a token, and one entry for every token after the first."""
    with meters.request("", chat=True) as meter:
        meter.admitted()
        recorded.now = 0.1
        meter.tokens(1)
        for _ in range(3):
            recorded.now += 0.04
            meter.tokens(4)
            meter.tokens(0)
    assert recorded.of("gen_ai.server.time_to_first_token") == [0.1]
    assert recorded.of("gen_ai.server.time_per_output_token") == [0.01] * 12
    assert recorded.of("gen_ai.server.request.duration") == [0.22]
    for name in ("request.duration", "time_to_first_token", "time_per_output_token"):
        for _, labels in recorded.values[f"gen_ai.server.{name}"]:
            assert labels == {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "specdec"}
    assert recorded.of("specdec.delivered.tokens") == [1, 4, 4, 4], "nothing is no delivery"


def test_what_it_took_to_make_text_is_known_of_tokens_that_leave_later_too(meters: Meters, recorded: Recorded) -> None:
    """A character or a stop string may be begun: the ids became text, and none of it leaves yet."""
    with meters.request("", chat=False) as meter:
        for count in (2, 0):
            began = meter.now()
            recorded.now += 0.003
            meter.tokens(count, 0, began)
        meter.tokens(1)
    assert recorded.values["specdec.round.duration"] == [(pytest.approx(0.003), {"phase": "text"})] * 2


def test_the_sum_over_tokens_is_the_time_after_the_first(meters: Meters, recorded: Recorded) -> None:
    with meters.request("", chat=False) as meter:
        meter.tokens(3)
        recorded.now = 0.5
        meter.tokens(2)
    times = recorded.of("gen_ai.server.time_per_output_token")
    assert len(times) == 4 and sum(times) == pytest.approx(0.5)


def test_each_answer_has_its_own_clock(meters: Meters, recorded: Recorded) -> None:
    """Tokens of one answer say nothing about the pace of another; the first token of all is the request's."""
    with meters.request("", chat=False) as meter:
        recorded.now = 0.1
        meter.tokens(1, 0)
        recorded.now = 0.2
        meter.tokens(1, 1)
        recorded.now = 0.3
        meter.tokens(2, 0)
        recorded.now = 0.5
        meter.tokens(1, 1)
    assert recorded.of("gen_ai.server.time_to_first_token") == [0.1]
    assert recorded.of("gen_ai.server.time_per_output_token") == [0.1, 0.1, 0.3]


@pytest.mark.parametrize(
    ("error", "admitted", "code", "refused"),
    [
        (Overloaded("full", 1), False, "RESOURCE_EXHAUSTED", True),
        (InternalFault("broken"), True, "INTERNAL", False),
        (asyncio.CancelledError(), True, "CANCELLED", False),
        (ValueError("a defect"), True, "INTERNAL", False),
    ],
)
def test_how_it_ended(meters: Meters, recorded: Recorded, error: BaseException, admitted: bool, code: str, refused: bool) -> None:
    with pytest.raises(type(error)), meters.request("", chat=False) as meter:
        if admitted:
            meter.admitted()
        raise error
    assert recorded.values["gen_ai.server.request.duration"][0][1]["error.type"] == code
    assert recorded.values["specdec.requests.refused"] == ([(1, {"reason": code})] if refused else [])


def test_the_names_are_in_the_table() -> None:
    telemetry = Telemetry("orchestrator", metrics_port=0)
    try:
        with Meters(telemetry).request("00-" + "a" * 32 + "-" + "b" * 16 + "-01", chat=False) as meter:
            assert meter.span.traceparent.startswith("00-" + "a" * 32)
            meter.tokens(2)
        assert "gen_ai_server_time_to_first_token_seconds_count" in scraped.page(telemetry.metrics_port)
    finally:
        telemetry.close()
