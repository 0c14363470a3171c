"""Plain rounds that the target begins by itself: closes, epochs, lost streams, room, faults; and those beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.hashing import prefix_hash
from specdec.terms import Ahead, Answer, Begin, Close, Closed, Failed, NoRoom, Result, StaleEpoch
from tests.unit.target.harness import Bench, first_step, next_step, only
from tests.unit.target.test_run_ahead import PROMPT, REF, after, begun, running, told

# ------------------------------------------------------------ ends, streams and room


def test_close_ends_it() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    assert [a.outcome for a in bench.send(stream, Close("s", 1))] == [Closed()] and bench.settle() == []
    assert bench.verifier.num_sessions == 0


def test_close_lets_the_running_round_finish_and_drops_what_waits_behind_it() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), REF[1:4], round_=2))
    assert bench.send(stream, Close("s", 1), Close("s", 1)) == []
    bench.now += 100_000
    bench.verifier.tick(bench.now)
    bench.finish(plan)
    result, closed = bench.heard()
    assert isinstance(result.outcome, Result) and (result.round, result.outcome.tokens) == (1, (REF[1],)) and closed.outcome == Closed()
    assert bench.settle() == [] and bench.pool.used_tokens == 0


def test_a_newer_epoch_ends_it_without_a_word() -> None:
    """Nobody waits for a round that nobody asked for; a Step behind it is answered."""
    for waits in (False, True):
        bench = Bench()
        stream = begun(bench, 5)
        bench.turn()
        plan = running(bench)
        if waits:
            bench.send(stream, next_step(after(1), round_=2))
        answers = bench.send(stream, first_step(after(1), prompt_length=5, epoch=2))
        assert [(a.round, a.outcome) for a in answers] == ([(2, StaleEpoch(2))] if waits else [])
        bench.finish(plan)
        assert bench.heard() == [] and told(bench.settle()) == [(1, 6, (REF[1],))]


@pytest.mark.parametrize("flying", ["nothing", "its own", "the Step"])
def test_a_lost_stream_ends_it_at_once(flying: str) -> None:
    bench = Bench()
    stream = begun(bench, 20)
    if flying != "the Step":
        bench.turn()
    plan = None if flying == "nothing" else running(bench)
    bench.verifier.detach(stream, bench.now)
    if plan is not None:
        bench.finish(plan)
    steps = len(bench.engine.log)
    assert bench.settle() == [] and len(bench.engine.log) == steps, "nobody reads"
    stream = bench.hello()
    again = [(stream, answer) for answer in bench.send(stream, first_step(PROMPT))]
    assert told(again) == [(1, 5 + i, (REF[i],)) for i in range(2 if flying == "its own" else 1)]
    bench.send(stream, Ahead("s", 1, 6, 1, (9,)))
    assert bench.plan() is None, "what the Step allowed ended with its stream"
    bench.send(stream, next_step(after(1), REF[1:4], round_=2, run_ahead=1))
    assert [t for _, _, tokens in told(bench.settle()) for t in tokens][-1] == REF[5]


def test_a_step_that_waited_on_a_lost_stream_is_not_begun() -> None:
    bench = Bench()
    stream = begun(bench, 20)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), round_=2))
    bench.verifier.detach(stream, bench.now)
    bench.finish(plan)
    assert bench.plan() is None and bench.heard() == []


def test_a_step_that_waits_and_cannot_be_fails_alone() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    short = replace(next_step(PROMPT, round_=2, base=0), tokens=(PROMPT[0],))
    bench.send(stream, short)
    bench.finish(plan)
    result, failed = bench.heard()
    assert isinstance(result.outcome, Result) and isinstance(failed.outcome, Failed)
    assert (failed.round, failed.outcome.code, failed.outcome.drop) == (2, 3, False) and "prompt" in failed.outcome.message
    bench.send(stream, next_step(after(2), round_=2))
    assert told(bench.turn()) == [(2, 7, (REF[2],))], "the session is unharmed"


@pytest.mark.parametrize("why", ["it is parked", "its first Step expired"])
def test_a_continuation_wakes_nobody_who_may_not_go_on(why: str) -> None:
    bench = Bench()
    stream = begun(bench, 0, remaining_ms=50)
    if why == "it is parked":
        bench.turn()
        bench.verifier.room.free(bench.verifier._sessions["orch", "s"])
    else:
        bench.now += 50
    bench.turn()
    length = len(bench.verifier._sessions["orch", "s"].tokens)
    bench.send(stream, Ahead("s", 1, length, prefix_hash(after(length - 5)), tuple(REF[length - 5 :][:3])))
    bench.turn()
    assert bench.plan() is None and len(bench.engine.log) == (why == "it is parked")


def test_a_drained_target_lets_it_go_on() -> None:
    bench = Bench()
    begun(bench, 2)
    bench.verifier.draining = True
    assert len(bench.settle()) == 3


def test_it_has_no_deadline() -> None:
    bench = Bench()
    begun(bench, 2, remaining_ms=15)
    bench.turn()
    bench.now += 1_000_000
    assert len(bench.settle()) == 2


def test_who_is_parked_is_told_under_the_last_round_and_rests() -> None:
    bench = Bench(pool=24, reserve_tokens=0)
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, session="old"))
    bench.turn()
    bench.send(stream, replace(first_step(PROMPT), run_ahead=60))
    for _ in range(3):
        bench.turn()
    committed, round_ = after(1), 2
    parked: list[Answer] = []
    while not parked:
        bench.send(stream, next_step(committed, session="old", round_=round_))
        heard = [a for _, a in bench.turn()]
        committed += next(a.outcome.tokens for a in heard if a.session_id == "old")  # type: ignore[union-attr]
        parked = [a for a in heard if isinstance(a.outcome, NoRoom)]
        round_ += 1
    assert [(a.session_id, a.round) for a in parked] == [("s", 1)]
    bench.send(stream, Close("old", 1))
    assert bench.settle() == [] and bench.pool.used_tokens == 0, "it rests until it is asked"
    tokens = list(bench.verifier._sessions["orch", "s"].tokens)
    base = next_step(tokens, round_=2, base=0)
    bench.send(stream, base)
    assert only(bench.turn()).tokens == (REF[len(tokens) - 5],)


def test_a_row_that_cannot_be_decided_fails_the_session_under_the_round_it_waits_for() -> None:
    for waits in (False, True):
        bench = Bench()
        bench.engine.nan_when = lambda prefix: len(prefix) == 7
        stream = begun(bench, 5)
        bench.turn(), bench.turn()
        plan = running(bench)
        if waits:
            bench.send(stream, next_step(after(1), round_=2))
        bench.finish(plan)
        [answer] = bench.heard()
        assert isinstance(answer.outcome, Failed) and answer.outcome.drop and answer.round == 1 + waits
        assert bench.verifier.num_sessions == 0


# ------------------------------------------------------------ beside others


def test_a_step_of_another_session_joins_the_next_engine_step() -> None:
    bench = Bench()
    stream = begun(bench, 30)
    bench.turn()
    bench.send(stream, first_step(PROMPT, session="other"))
    assert sorted(a.session_id for _, a in bench.turn()) == ["other", "s"]


def test_a_wave_does_not_wait_for_who_is_back_at_once() -> None:
    bench = Bench()
    stream = begun(bench, 30)
    bench.send(stream, replace(first_step(PROMPT, session="other"), run_ahead=30))
    bench.turn()
    assert bench.verifier.hold_ms(bench.now) == 0.0 and len(bench.verifier.queued) == 2
    bench.send(stream, first_step(PROMPT, session="asks"))
    bench.turn()
    assert bench.verifier.hold_ms(bench.now) == 0.0, "two would lose more by waiting than the third gains, as far as is known"
    bench.now += 0.1
    bench.send(stream, next_step(after(1), session="asks", round_=2))
    bench.turn()
    assert 0 < bench.verifier.hold_ms(bench.now) < 0.2, "it is back at once: for that, a moment"
    bench.send(stream, next_step(after(2), session="asks", round_=3))
    assert bench.verifier.hold_ms(bench.now) == 0.0, "all are there"


def test_who_asks_is_not_starved_by_those_who_need_not() -> None:
    """F125: rows are given in order of arrival, and who goes on by himself arrives anew."""
    bench = Bench(max_step_rows=4, max_num_speculative_tokens=3)
    stream = bench.hello()
    for i in range(6):
        bench.send(stream, replace(first_step([i], session=f"own{i}"), run_ahead=60))
    bench.turn(), bench.turn()
    bench.send(stream, first_step([9], session="asks"))
    heard = [a.session_id for _ in range(3) for _, a in bench.turn()]
    assert "asks" in heard


def test_whose_reader_is_behind_gets_nothing_that_it_did_not_ask_for() -> None:
    bench = Bench()
    slow, quick = bench.hello("slow"), bench.hello("quick")
    for stream in (slow, quick):
        bench.send(stream, replace(first_step(PROMPT), run_ahead=30))
    bench.turn()
    plan = bench.verifier.plan(bench.now, {slow})
    assert plan is not None and len(plan.rows) == 1
    bench.finish(plan)
    assert [stream for stream, _ in bench.verifier.take_answers()] == [quick]
    bench.send(slow, next_step(after(1), round_=2, run_ahead=30))
    plan = bench.verifier.plan(bench.now, {slow})
    assert plan is not None and len(plan.rows) == 2, "a Step is served"
    bench.finish(plan)
    bench.heard()
    assert len(bench.turn()) == 2, "it caught up"


def test_begin_has_no_part_in_it() -> None:
    """A Step that repeats its Begin, as one does whose first answer was lost, is matched like any other."""
    bench = Bench()
    stream = begun(bench, 2)
    bench.settle()
    begin: Begin | None = first_step(PROMPT).begin
    bench.send(stream, next_step(after(1), REF[1:6], round_=2, begin=begin))
    assert only(bench.turn()).tokens == tuple(REF[3:7])
