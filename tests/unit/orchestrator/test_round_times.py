"""Where the time of a round goes: what the histogram's phases are told, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.control import Desk
from orchestrator.events import Observe, StartTimer, StopTimer, Timer, TimerFired
from orchestrator.observe import Observer
from orchestrator.peers import Heard
from orchestrator.tracing import UNTRACED
from specdec import terms
from specdec.runtime.telemetry import Telemetry
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

RESULT = terms.Result(3, 4, 0, 0, (7,))


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    made = Telemetry("orchestrator")
    yield made
    made.close()


def phases(telemetry: Telemetry) -> dict[str, tuple[float, float]]:
    """phase -> how many, and their sum in seconds."""
    found: dict[str, dict[str, float]] = {}
    for sample in telemetry.histogram("specdec.round.duration").read().samples:
        found.setdefault(sample.labels["phase"], {})[sample.name.rpartition("_")[2]] = sample.value
    return {phase: (values["count"], round(values["sum"], 6)) for phase, values in found.items()}


def answer(outcome: Any = RESULT, queue_us: int = 2_000) -> terms.Answer:
    return terms.Answer("s", 1, 1, outcome, queue_us=queue_us)


def test_each_phase_has_its_own_time(telemetry: Telemetry) -> None:
    observer, heard = Observer(telemetry), Heard((), rows=4, engine_us=10_000)
    observer.answered(answer(), 0.05, heard, UNTRACED)
    observer.stepped(4, 10_000, 3)
    observer.waited(0.004)
    assert phases(telemetry) == {"queue": (1, 0.002), "wire": (1, 0.038), "engine": (3, 0.03), "wait": (1, 0.004)}


def test_a_trace_hears_of_the_same_times(telemetry: Telemetry) -> None:
    times: list[tuple[float | None, ...]] = []
    trace: Any = SimpleNamespace(timed=lambda *seconds: times.append(seconds))
    observer, heard = Observer(telemetry), Heard((), rows=4, engine_us=10_000)
    observer.answered(answer(), 0.05, heard, trace)
    observer.answered(answer(), None, heard, trace)
    assert times == [(0.002, 0.01, pytest.approx(0.038)), (0.002, 0.01, None)]


def test_what_was_not_asked_for_crossed_no_wire_and_clocks_differ(telemetry: Telemetry) -> None:
    observer, heard = Observer(telemetry), Heard((), rows=4, engine_us=10_000)
    observer.answered(answer(), None, heard, UNTRACED)
    assert phases(telemetry) == {"queue": (1, 0.002)}
    observer.answered(answer(), 0.011, heard, UNTRACED)
    assert phases(telemetry)["wire"] == (1, 0.0)
    for outcome, engine_us in ((RESULT, 0), (terms.NoRoom(1), 10_000)):
        observer.answered(answer(outcome), 0.05, Heard((), engine_us=engine_us), UNTRACED)
    observer.stepped(4, 10_000, 0)
    observer.stepped(4, 0, 3)
    assert phases(telemetry) == {"queue": (2, 0.004), "wire": (1, 0.0)}


async def test_rounds_of_sessions_without_a_trace_are_recorded_by_themselves(telemetry: Telemetry, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else may be told of them for a while."""
    monkeypatch.setattr("orchestrator.observe.RECORD_AFTER_S", 0.001)
    observer, rounds = Observer(telemetry), telemetry.counter("specdec.rounds")
    for total in (2, 4):
        for _ in range(2):
            observer.later_round(Observe("hit", 3, 2, 3), UNTRACED)
        async with asyncio.timeout(20):
            while sum(sample.value for sample in rounds.read().samples) < total:
                await asyncio.sleep(0.001)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    said: dict[str, list[Any]] = {"took": [], "waited": []}
    monkeypatch.setattr(Observer, "later", lambda self, record, *what: record(*what))
    monkeypatch.setattr(Observer, "answered", lambda self, answer, took_s, heard, trace: said["took"].append(took_s))
    monkeypatch.setattr(Observer, "waited", lambda self, seconds: said["waited"].append(seconds))
    return said


async def test_an_answer_is_timed_from_its_step_and_a_step_from_the_answer_before(
    monkeypatch: pytest.MonkeyPatch, told: dict[str, list[Any]]
) -> None:
    pools, began = Pools(monkeypatch, drafts=0), time.perf_counter()
    sent: list[Any] = []
    send = ScriptedPeer.send
    monkeypatch.setattr(ScriptedPeer, "send", lambda self, item: (sent.append(item), send(self, item))[1])
    assert await fetch(pools.start("s", count=10)) == answer_of(prompt_of("s"), 10)
    most, steps = time.perf_counter() - began, sum(isinstance(item, terms.Step) for item in sent)
    assert len(told["took"]) == steps and len(told["waited"]) == steps - 1
    assert all(0 <= seconds <= most for seconds in (*told["took"], *told["waited"]))


async def test_what_a_target_says_again_was_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, told: dict[str, list[Any]]) -> None:
    pools = Pools(monkeypatch, drafts=0)
    pools.targets[0].silent = True
    handle = pools.start("s", count=10)
    await settle()
    (first,) = pools.targets[0].kept
    live = pools.driver._live["s"]
    step = pools.driver._door.bounded(terms.Step("s", 9, 9, 0, 0, (1,), 0, None))
    pools.targets[0].say(first, first, first)  # for the first Step, for the one that follows, for nothing
    assert [took_s is None for took_s in told["took"]] == [False, False, True]
    assert len(told["waited"]) == 1
    monkeypatch.setattr(ScriptedPeer, "send", lambda self, item: None)
    pools.driver._to_target(live, "t0:1", step, False)
    pools.driver._to_target(live, "t0:1", step, False)
    assert len(told["waited"]) == 2, "from the answer said again to the first Step behind it"
    handle.cancel()


async def test_a_step_is_told_with_the_rounds_it_ended_here(monkeypatch: pytest.MonkeyPatch, told: dict[str, list[Any]]) -> None:
    """Also of the rows of others; one message of a target is one step, however many of its answers are ours."""
    steps: list[tuple[int, int, int]] = []
    desk: list[tuple[str, int, int, int]] = []
    monkeypatch.setattr(Observer, "stepped", lambda self, *what: steps.append(what))
    monkeypatch.setattr(Desk, "heard", lambda self, name, rows, engine_us, items: desk.append((name, rows, engine_us, len(items))))
    pools = Pools(monkeypatch, drafts=0)
    (target,) = pools.targets
    target.silent = True
    handles = [pools.start(name) for name in ("a", "b", "c")]
    await settle()
    first, second, third = target.kept
    full = terms.Answer("c", third.epoch, third.round, terms.NoRoom(1))
    foreign = terms.Answer("nobody", 1, 1, RESULT)
    whole: Any = target
    pools.driver.heard(whole, Heard((first, second, full, foreign), rows=9, engine_us=5_000))
    pools.driver.heard(whole, Heard((), rows=0, engine_us=0))
    assert steps == [(9, 5_000, 2)] and desk == [("t0:1", 9, 5_000, 4), ("t0:1", 0, 0, 0)]
    for handle in handles:
        handle.cancel()


async def test_every_round_of_a_session_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Observe] = []
    monkeypatch.setattr(Observer, "later_round", lambda self, told, trace: seen.append(told))
    assert len(await fetch(Pools(monkeypatch).start("s", count=50))) == 50
    assert sum(one.num_decided for one in seen) == 50
    assert any(one.num_verified for one in seen) and len(seen) < 50, "the draft was of use"


async def test_a_timer_that_is_stopped_rings_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    fed: list[Any] = []
    pools = Pools(monkeypatch, drafts=0)
    pools.targets[0].silent = True
    handle = pools.start("s")
    await settle()
    monkeypatch.setattr(pools.driver, "feed", lambda session, event: fed.append((session, event)))
    live = pools.driver._live["s"]
    pools.driver._carry_out("s", live, [StartTimer(Timer.GRACE, 1.0), StartTimer(Timer.STEP, 2.0), StopTimer(Timer.GRACE)])
    async with asyncio.timeout(20):
        while not fed:
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.005)
    assert fed == [("s", TimerFired(Timer.STEP))]
    monkeypatch.undo()
    handle.cancel()
