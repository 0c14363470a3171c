"""What a target says of its load to who scales the pool."""

from __future__ import annotations

import pytest

from specdec.terms import Close, NoRoom
from target_service.verifier import TURNED_AWAY_MS
from tests.unit.target.harness import Bench, first_step, next_step, only

pytestmark = pytest.mark.unit


def test_the_backlog_is_what_sessions_wait_for_each_other_however_large_the_model() -> None:
    """F175: a lone session is no load, whatever a step takes; many in one step are, though nothing waits."""
    bench = Bench(max_step_rows=16)
    bench.step_ms = 60.0
    stream = bench.hello()
    assert bench.verifier.backlog_ms() == 0.0
    bench.send(stream, first_step([1, 2, 3], session="a"))
    assert bench.verifier.backlog_ms() == 0.0
    bench.settle()
    for name in "bcd":
        bench.send(stream, first_step([1, 2, 3], session=name))
    waiting = bench.verifier.backlog_ms()
    plan = bench.plan()
    assert plan is not None and waiting > 0.0
    assert not bench.verifier.queued and bench.verifier.backlog_ms() == waiting, "those that run count as those that wait"
    bench.finish(plan)
    bench.settle()
    assert bench.verifier.backlog_ms() == 0.0
    for name in "abcd":
        bench.send(stream, first_step([1] * 32, session=name, epoch=2))
    assert bench.verifier.backlog_ms() > 4 * waiting, "prompts are rows as well, and take several steps"


def test_kv_is_what_live_sessions_pin_and_not_the_prefix_cache() -> None:
    bench = Bench(pool=160, reserve_tokens=0, prefix_block_tokens=8)
    stream = bench.hello()
    bench.send(stream, first_step(range(1, 41), session="a"))
    bench.settle()
    held = bench.verifier.kv_demand(bench.now)
    assert 0.2 < held < 0.5
    bench.send(stream, Close("a", 1))
    bench.settle()
    assert bench.verifier.room.cached_tokens > 0 and bench.verifier.kv_demand(bench.now) == 0.0


@pytest.mark.parametrize("limits", [{"pool": 64}, {"max_sessions": 1}], ids=["room", "slots"])
def test_F175_a_target_that_turns_sessions_away_is_full_whatever_share_it_holds(limits: dict[str, int]) -> None:
    bench = Bench(reserve_tokens=0, **limits)  # type: ignore[arg-type]
    stream = bench.hello()
    bench.send(stream, first_step(range(1, 41), session="a"))
    bench.settle()
    assert bench.verifier.kv_demand(bench.now) < 0.8, "a threshold above this share would never be reached"
    assert isinstance(only(bench.send(stream, first_step(range(20, 60), session="b"))), NoRoom)
    assert bench.verifier.kv_demand(bench.now) >= 1.0
    assert bench.verifier.kv_demand(bench.now + TURNED_AWAY_MS + 1) < 0.8, "nobody came again"


def test_parked_sessions_count_as_if_they_had_room() -> None:
    bench = Bench(pool=64, reserve_tokens=0, window=60)
    stream = bench.hello()
    told = {}
    for name in "ab":
        bench.send(stream, first_step(range(1, 24), session=name))
        told[name] = list(range(1, 24))
    while all(session.resident is not None for session in bench.verifier._sessions.values()):
        for name, tokens in told.items():
            session = bench.verifier._sessions["orch", name]
            if session.round:
                tokens[:] = session.tokens
                bench.send(stream, next_step(tokens, round_=session.round + 1, session=name))
        bench.settle()
    assert bench.verifier.room.live_tokens < 0.8 * 64
    assert bench.verifier.kv_demand(1e9) > 0.7, "what both want, not what one holds"
