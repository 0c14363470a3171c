"""Orchestrators share a step's rows, and priority ages: nobody is held up for ever. Broken twins beside them."""

from __future__ import annotations

import pytest

from target_service import batching, turns
from tests.fakes import hashed_script
from tests.unit.target.harness import VOCAB, Bench, Caller, oracle, reference

pytestmark = pytest.mark.unit
SCRIPT = hashed_script(VOCAB)


def callers(bench: Bench, stream: int, name: str, count: int, want: int = 1000) -> list[Caller]:
    draft = oracle(SCRIPT, 5, 3)
    prompts = ([(i * 31 + j * 7 + len(name)) % VOCAB for j in range(5)] for i in range(count))
    return [Caller(bench, stream, prompt, session=f"{name}{i}", want=want, draft=draft) for i, prompt in enumerate(prompts)]


def share_of_the_small(steps: int = 40) -> float:
    """Rounds a session of an orchestrator that has 2 gets for each of one that has 20."""
    bench = Bench(max_step_rows=16, max_sessions=64, pool=60_000, window=3000)
    many, few = bench.hello("many"), bench.hello("few")
    all_ = [*callers(bench, many, "m", 20), *callers(bench, few, "f", 2)]
    by_name = {caller.session: caller for caller in all_}
    for _ in range(steps):
        for caller in all_:
            caller.act()
        for _, answer in bench.turn():
            by_name[answer.session_id].hear(answer)
    for caller in all_:
        assert caller.output == reference(SCRIPT, caller.prompt, len(caller.output)), "who goes first changes no text"
    mean = [sum(len(c.output) for c in all_ if c.session[0] == name) / count for name, count in (("f", 2), ("m", 20))]
    return mean[0] / mean[1]


def test_many_sessions_of_one_orchestrator_do_not_starve_another() -> None:
    assert share_of_the_small() > 4, "four fit a step: its two are in every one"


def test_twin_first_come_first_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batching, "in_turns", lambda sessions, rows: list(sessions))
    assert share_of_the_small() < 2


def turns_until_served(urgent: int = 12) -> int:
    """A session of priority 2 beside more urgent ones than a step takes; a step takes 20 ms."""
    bench = Bench(max_step_rows=8, max_num_speculative_tokens=3, max_sessions=64, pool=60_000, window=3000)
    bench.step_ms = 20.0
    stream = bench.hello()
    all_ = [*callers(bench, stream, "u", urgent), *callers(bench, stream, "p", 1)]
    all_[-1].priority = 2
    by_name = {caller.session: caller for caller in all_}
    for turn in range(200):
        for caller in all_:
            caller.act()
        for _, answer in bench.turn():
            by_name[answer.session_id].hear(answer)
        if all_[-1].output:
            return turn
    return 200


def test_urgent_sessions_hold_up_a_patient_one_for_a_bounded_time() -> None:
    assert 5 <= turns_until_served() <= 2 * turns.AGE_MS / 20 + 12 / 2 + 2


def test_twin_strict_priority_starves_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "AGE_MS", 1e9)
    assert turns_until_served() == 200


def test_levels_beyond_the_last_are_the_last() -> None:
    """Else a patient session waits for ever for who names an ever lower number."""
    bench = Bench()
    stream = bench.hello()
    urgent, patient = callers(bench, stream, "u", 1)[0], callers(bench, stream, "p", 1)[0]
    urgent.priority, patient.priority = -(2**31), 2**31 - 1
    patient.act()
    bench.now += 2 * turns.MAX_LEVEL * turns.AGE_MS - 1
    urgent.act()
    assert [session.key[1] for session in bench.verifier.queued] == ["u0", "p0"]
    bench.verifier._sessions["orch", "u0"].pending.arrived_ms += 2  # type: ignore[union-attr]
    assert [session.key[1] for session in bench.verifier.queued] == ["p0", "u0"]
