"""Close, streams that end, leases, adoption; every session is released exactly once."""

from __future__ import annotations

import pytest

from specdec.terms import Answer, Close, Closed, Failed, Result, UnknownSession
from tests.fakes import hashed_script
from tests.unit.target.harness import VOCAB, Bench, Caller, first_step, next_step, only, reference, run_all

PROMPT = [3, 1, 4, 1, 5]
SCRIPT = hashed_script(VOCAB)
REF = reference(SCRIPT, PROMPT, 12)
CLOSE = Close("s", 1)


def drained(bench: Bench) -> None:
    """Nothing is held any more, by anyone."""
    bench.settle()
    assert bench.verifier.num_sessions == 0
    assert bench.pool.held == {} and bench.engine.kv.slots == {}
    assert len(bench.pool.releases) == len(set(bench.pool.releases))


def test_close_of_an_idle_session() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    bench.turn()
    assert bench.send(stream, CLOSE) == [Answer("s", 1, 0, Closed())]
    drained(bench)


def test_close_drops_a_waiting_step() -> None:
    """F75: what was closed in the queue never reaches the engine; `closed` is the one answer."""
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    assert only(bench.send(stream, CLOSE)) == Closed()
    drained(bench)
    assert bench.engine.log == []


def test_close_lets_a_running_step_finish_and_is_answered_once() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    plan = bench.plan()
    assert plan is not None
    assert bench.send(stream, CLOSE, CLOSE) == []
    assert only(bench.send(stream, next_step([*PROMPT, REF[0]], round_=2))) == UnknownSession()
    bench.finish(plan)
    result, closed = bench.heard(stream)
    assert isinstance(result.outcome, Result) and closed.outcome == Closed()
    drained(bench)


def test_close_between_two_pieces_of_a_prefill_ends_it() -> None:
    """F73: no more rows for a client that is gone."""
    bench = Bench(max_step_rows=16)
    stream = bench.hello()
    bench.send(stream, first_step(range(60)))
    plan = bench.plan()
    assert plan is not None
    assert only(bench.send(stream, CLOSE)) == Closed(), "the piece in the engine has no answer of its own"
    bench.finish(plan)
    drained(bench)
    assert len(bench.engine.log) == 1


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_close_of_any_epoch_is_answered(epoch: int) -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, epoch=2))
    answers = bench.send(stream, Close("s", epoch))
    assert answers[-1] == Answer("s", epoch, 0, Closed())
    assert bench.verifier.num_sessions == (1 if epoch == 1 else 0), "an older placement's Close leaves the newer alone"
    assert only(bench.send(stream, Close("nobody", 1))) == Closed()


def test_a_stream_that_ends_leaves_a_lease() -> None:
    """F77: dropped once it is over, whatever the peer does."""
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    bench.turn()
    bench.verifier.detach(stream, bench.now)
    bench.now += 999
    bench.settle()
    assert bench.verifier.num_sessions == 1
    bench.now += 1
    drained(bench)


def test_the_same_orchestrator_takes_its_session_over() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, REF[:2]))
    bench.turn()
    bench.verifier.detach(stream, bench.now)
    stranger, again = bench.hello("other"), bench.hello()
    step = next_step([*PROMPT, *REF[:3]], REF[3:5], round_=2)
    assert only(bench.send(stranger, step)) == UnknownSession()
    bench.send(again, step)
    assert bench.turn() == [(again, Answer("s", 1, 2, Result(8, 10, 2, 2, tuple(REF[3:6]))))]
    assert bench.engine.log[-1][0].start == 7, "the KV is still there"
    bench.now += 5000
    bench.settle()
    assert bench.verifier.num_sessions == 1, "a session that a stream speaks for has no lease"


def test_a_result_decided_while_nobody_listened_is_stored() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    plan = bench.plan()
    assert plan is not None
    bench.verifier.detach(stream, bench.now)
    bench.finish(plan)
    assert bench.heard() == []
    again = bench.hello()
    assert only(bench.send(again, first_step(PROMPT))).tokens == (REF[0],)
    assert len(bench.engine.log) == 1


def test_a_round_that_runs_is_joined_from_the_new_stream() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    plan = bench.plan()
    assert plan is not None
    bench.verifier.detach(stream, bench.now)
    again = bench.hello()
    assert bench.send(again, first_step(PROMPT)) == []
    bench.finish(plan)
    assert only(bench.heard(again)).tokens == (REF[0],)


def test_a_stream_that_ends_takes_its_waiting_steps_along() -> None:
    bench = Bench()
    stream = bench.hello()
    for i in range(4):
        bench.send(stream, first_step(PROMPT, session=f"s{i}"))
    bench.verifier.detach(stream, bench.now)
    assert bench.plan() is None
    bench.now += 1000
    drained(bench)
    assert bench.engine.log == []


def test_a_lease_may_end_while_its_step_runs() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    plan = bench.plan()
    assert plan is not None
    bench.verifier.detach(stream, bench.now)
    bench.now += 2000
    bench.verifier.tick(bench.now)
    bench.finish(plan)
    drained(bench)


def test_the_same_name_at_two_orchestrators_is_two_sessions() -> None:
    """F79"""
    bench = Bench()
    one, two = bench.hello("a"), bench.hello("b")
    bench.send(one, first_step(PROMPT))
    bench.send(two, first_step([9, 9, 9]))
    answers = dict(bench.turn())
    assert answers[one].outcome.tokens == (REF[0],)
    assert answers[two].outcome.tokens == tuple(reference(SCRIPT, [9, 9, 9], 1))


def test_while_draining_who_is_here_may_finish_and_nobody_comes() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    bench.turn()
    bench.verifier.draining = True
    failed = only(bench.send(stream, first_step(PROMPT, session="new")))
    assert isinstance(failed, Failed) and failed.code == 14
    bench.send(stream, next_step([*PROMPT, REF[0]], round_=2))
    assert only(bench.turn()).tokens == (REF[1],)


def test_a_thousand_finished_and_a_thousand_cancelled_sessions_are_released_once_each() -> None:
    """F74"""
    bench = Bench(max_sessions=64, pool=100_000, max_step_rows=512)
    stream = bench.hello()
    for batch in range(50):
        names = [f"{batch}-{i}" for i in range(40)]
        for name in names:
            bench.send(stream, first_step([batch, 1, 2], session=name))
        for name in names[::4]:
            bench.send(stream, Close(name, 1))
        plan = bench.plan()
        assert plan is not None
        for name in names[1::4]:
            bench.send(stream, Close(name, 1))
        bench.finish(plan)
        for name in names[2::2]:
            bench.send(stream, Close(name, 1))
        for name in names[3::4]:
            bench.send(stream, Close(name, 1))
    drained(bench)
    assert len(bench.pool.releases) == 2000
    assert bench.engine.kv.opened == bench.engine.kv.closed


def test_reconnecting_at_every_round_loses_and_repeats_nothing() -> None:
    bench = Bench()
    caller = Caller(bench, bench.hello(), PROMPT, want=12)

    def reconnect(turn: int) -> None:
        bench.verifier.detach(caller.stream, bench.now)
        caller.stream, caller.waiting = bench.hello(), None

    run_all(bench, [caller], each_turn=reconnect)
    assert caller.output == REF
    assert caller.prefills == 1
