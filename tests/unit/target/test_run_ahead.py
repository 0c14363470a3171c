"""Plain rounds that the target begins by itself: how many, until when, told how, and what a Step does that meets them."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from specdec.terms import (
    MAX_ROUND_RESULTS,
    Ahead,
    Answer,
    Begin,
    Close,
    Closed,
    DraftDistribution,
    DraftMethod,
    Expired,
    Failed,
    FinishReason,
    NoRoom,
    PrefixNeeded,
    RejectionMethod,
    Result,
    StaleEpoch,
)
from target_service.plan import StepPlan
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, SAMPLED, VOCAB, Bench, first_step, next_step, only, reference

PROMPT = [3, 1, 4, 1, 5]
SCRIPT = hashed_script(VOCAB)
REF = reference(SCRIPT, PROMPT, 40)


def after(count: int) -> list[int]:
    """Prompt and the first `count` tokens of the text."""
    return [*PROMPT, *REF[:count]]


def begun(bench: Bench, run_ahead: int, **more: object) -> int:
    """A stream with a session whose first Step waits."""
    stream = bench.hello()
    assert bench.send(stream, replace(first_step(PROMPT, **more), run_ahead=run_ahead)) == []  # type: ignore[arg-type]
    return stream


def told(answers: list[tuple[int, Answer]]) -> list[tuple[int, int, tuple[int, ...]]]:
    """(round, prefix_length, tokens) of results."""
    assert all(isinstance(a.outcome, Result) for _, a in answers), answers
    return [(a.round, a.outcome.prefix_length, a.outcome.tokens) for _, a in answers if isinstance(a.outcome, Result)]


def running(bench: Bench) -> StepPlan:
    plan = bench.plan()
    assert plan is not None
    return plan


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_as_many_plain_tokens_follow_as_were_allowed(sampling) -> None:  # type: ignore[no-untyped-def]
    bench = Bench()
    begun(bench, 3, sampling=sampling)
    text = reference(SCRIPT, PROMPT, 4, sampling=sampling)
    assert told(bench.settle()) == [(1, 5 + i, (text[i],)) for i in range(4)]
    assert bench.verifier.num_sessions == 1, "it rests"


def test_a_step_without_run_ahead_is_followed_by_nothing() -> None:
    bench = Bench()
    begun(bench, 0)
    assert len(bench.settle()) == 1


def test_each_step_says_anew_how_much() -> None:
    """Credit is what the last Step allowed: it is neither added up nor kept."""
    bench = Bench()
    stream = begun(bench, 30)
    bench.turn(), bench.turn()
    bench.send(stream, next_step(after(2), round_=2, run_ahead=1))
    assert told(bench.settle()) == [(2, 7, (REF[2],)), (2, 8, (REF[3],))]
    bench.send(stream, next_step(after(4), round_=3))
    assert len(bench.settle()) == 1


def test_there_is_a_bound() -> None:
    bench = Bench(max_run_ahead=2)
    begun(bench, 2**32 - 1)
    assert len(bench.settle()) == 3
    endless = Bench(max_run_ahead=10**6, pool=10_000)
    begun(endless, 2**32 - 1)
    assert len(endless.settle()) == MAX_ROUND_RESULTS


def test_it_ends_where_the_generation_ends() -> None:
    bench = Bench()
    begun(bench, 30, sampling=replace(GREEDY, max_tokens=3))
    *_, (_, last) = bench.settle()
    assert isinstance(last.outcome, Result) and last.outcome.finish is FinishReason.LENGTH and len(bench.engine.log) == 3
    bench = Bench()
    begun(bench, 30, sampling=replace(GREEDY, stop_token_ids=(REF[2],)))
    results = [a.outcome for _, a in bench.settle()]
    assert [r.finish for r in results if isinstance(r, Result)] == [None, None, FinishReason.STOP]
    assert isinstance(results[-1], Result) and results[-1].stop_token_id == REF[2] and results[-1].tokens == ()


def test_log_probabilities_and_the_window_are_those_of_asked_rounds() -> None:
    texts = []
    for run_ahead in (0, 30):
        bench = Bench(window=14)
        stream, committed, round_ = begun(bench, run_ahead, sampling=replace(GREEDY, logprobs=2)), list(PROMPT), 1
        results: list[Result] = []
        while not results or results[-1].finish is None:
            heard = [a.outcome for _, a in bench.settle()]
            results += [r for r in heard if isinstance(r, Result)]
            committed = [*PROMPT, *[t for r in results for t in r.tokens]]
            round_ += 1
            if results[-1].finish is None:
                bench.send(stream, next_step(committed, round_=round_, run_ahead=run_ahead))
        texts.append((committed, [p for r in results for p in r.logprobs], results[-1].finish, results[-1].kv_length_after))
    assert texts[0] == texts[1] and texts[0][2] is FinishReason.LENGTH and len(texts[0][0]) == 14


def test_the_same_round_again_gets_all_that_was_told_under_it() -> None:
    bench = Bench()
    stream = begun(bench, 2)
    heard = [answer for _, answer in bench.settle()]
    assert len(heard) == 3 and bench.send(stream, first_step(PROMPT)) == heard
    assert bench.plan() is None, "nothing is computed twice, and nothing more is allowed"
    bench.send(stream, next_step(after(3), round_=2))
    [last] = [answer for _, answer in bench.settle()]
    assert bench.send(stream, next_step(after(3), round_=2)) == [last], "of the last round alone"


# ------------------------------------------------------------ a Step that meets what was decided


@pytest.mark.parametrize("known", [1, 2, 3])
def test_what_was_decided_since_takes_the_place_of_what_foresaw_it(known: int) -> None:
    bench = Bench()
    stream = begun(bench, 2)
    bench.settle()
    bench.send(stream, next_step(after(known), REF[known:8], round_=2))
    assert only(bench.turn()) == Result(8, 13, 5, 5, tuple(REF[3:9]))


@pytest.mark.parametrize("block", [[9], [REF[1], 9], [9, *REF[2:8]], [REF[1], 9, *REF[3:8]], [REF[1]], []], ids=str)
def test_a_difference_voids_the_rest_of_the_block(block: list[int]) -> None:
    bench = Bench()
    stream = begun(bench, 2)
    bench.settle()
    bench.send(stream, next_step(after(1), block, round_=2))
    assert only(bench.turn()) == Result(8, 8, 0, 0, (REF[3],))


def test_a_step_takes_the_place_of_a_round_that_waits() -> None:
    """F66: one round of a session at a time, and none twice."""
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    assert bench.send(stream, next_step(after(1), REF[1:4], round_=2)) == []
    assert told(bench.settle()) == [(2, 6, tuple(REF[1:5]))]


def test_a_step_waits_behind_a_round_that_runs() -> None:
    """F85: blocks that were drafted past a round in flight."""
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), REF[1:4], round_=2))
    bench.send(stream, next_step(after(1), REF[1:6], round_=2))
    bench.send(stream, next_step(after(1), [9, 9, 9, 9, 9, 9], round_=2))
    bench.finish(plan)
    assert told([(stream, a) for a in bench.heard()]) == [(1, 6, (REF[1],))]
    assert only(bench.turn()) == Result(7, 11, 4, 4, tuple(REF[2:7])), "the one that carried the first on"
    assert bench.settle() == []


def test_a_step_that_waits_expires_and_can_come_again() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), round_=2, remaining_ms=5))
    bench.send(stream, next_step(after(1), round_=2, remaining_ms=7))
    bench.now += 6
    bench.verifier.tick(bench.now)
    assert bench.heard() == []
    bench.now += 6
    bench.verifier.tick(bench.now)
    [answer] = bench.heard()
    assert (answer.round, answer.outcome) == (2, Expired())
    bench.send(stream, next_step(after(1), round_=2, remaining_ms=5))
    bench.finish(plan)
    assert told([(stream, a) for a in bench.heard()]) == [(1, 6, (REF[1],))]
    assert only(bench.settle()) == Expired()
    bench.send(stream, Ahead("s", 1, 6, 1, (9,)))
    assert bench.plan() is None, "what the older Step allowed ended with the newer one"
    bench.send(stream, next_step(after(1), round_=2))
    assert told(bench.settle()) == [(2, 7, (REF[2],))]


def test_a_step_that_waits_lives_as_long_as_it_was_last_asked_for() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), round_=2, remaining_ms=5))
    bench.send(stream, next_step(after(1), round_=2))
    bench.finish(plan)
    assert told([(stream, a) for a in bench.heard()] + bench.settle()) == [(1, 6, (REF[1],)), (2, 7, (REF[2],))]


def test_a_step_that_waited_too_long_expires_at_the_boundary() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(1), round_=2, remaining_ms=5))
    bench.finish(plan)
    assert [a.outcome for a in bench.heard()][0].tokens == (REF[1],)  # type: ignore[union-attr]
    assert [a.outcome for _, a in bench.settle()] == [Expired()]


def test_a_step_that_waits_may_turn_out_to_be_wrong() -> None:
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    for wrong, outcome in [({"base": 8}, PrefixNeeded(0)), ({}, None)]:
        plan = running(bench)
        step = next_step(after(8 if wrong else 1), round_=2, **wrong)
        bench.send(stream, step)
        bench.finish(plan)
        heard = [a.outcome for a in bench.heard()]
        assert isinstance(heard[0], Result) and (outcome is None or heard[1] == outcome)
        if outcome is not None:
            assert bench.plan() is None, "it rests: the Step comes again"
            bench.send(stream, next_step(after(2), round_=2, run_ahead=5))
            bench.turn()
    short = replace(
        next_step(after(1), round_=3), tokens=(PROMPT[0],), base_length=0, base_hash=next_step(PROMPT, round_=1, base=0).base_hash
    )
    bench.settle()
    failed = only(bench.send(stream, short))
    assert isinstance(failed, Failed) and not failed.drop


def test_an_edit_is_still_an_edit() -> None:
    """Tokens that differ, or fewer than the last Step's own result: the history is the asker's."""
    edited = [*after(1), (REF[1] + 1) % VOCAB]
    for history in (edited, [*PROMPT, 9, 9], PROMPT):
        bench = Bench()
        stream = begun(bench, 3)
        bench.settle()
        bench.send(stream, next_step(history, reference(SCRIPT, history, 2), round_=2, base=4))
        assert only(bench.turn()).prefix_length == len(history)
        assert bench.verifier._sessions["orch", "s"].tokens == [*history, *reference(SCRIPT, history, 3)]


def test_a_step_behind_the_end_is_told_the_end_again() -> None:
    for limits, finish, stop in [
        ({"max_tokens": 3}, FinishReason.LENGTH, None),
        ({"stop_token_ids": (REF[3],)}, FinishReason.STOP, REF[3]),
    ]:
        bench = Bench()
        stream = begun(bench, 30, sampling=replace(GREEDY, **limits))  # type: ignore[arg-type]
        bench.settle()
        assert only(bench.send(stream, next_step(after(1), [9, 9], round_=2))) == Result(8, 7, 0, 0, (), finish=finish, stop_token_id=stop)
        assert bench.plan() is None
    edited = [*after(3), (REF[3] + 1) % VOCAB]
    bench.send(stream, next_step(edited, round_=3, base=7))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, edited, 1)), "an edit goes on behind it"


def test_under_standard_the_distributions_are_dropped_with_their_proposals(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    stream = begun(bench, 2, rejection_method=RejectionMethod.STANDARD, draft_method=DraftMethod.PROBABILISTIC)
    bench.settle()
    qs = tuple(DraftDistribution((REF[i], (REF[i] + 1) % VOCAB), struct.pack("<2f", 0.5, 0.5)) for i in range(1, 6))
    bench.send(stream, replace(next_step(after(1), REF[1:6], round_=2), distributions=qs))
    [row] = running(bench).rows
    assert row.score is not None and (row.score.block, row.score.distributions) == (tuple(REF[3:6]), qs[2:])


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
    hold = bench.verifier.hold_ms(bench.now)
    assert 0 < hold <= bench.limits.wave_fraction * bench.step_ms, "for the third, a moment"
    bench.send(stream, next_step(after(1), session="asks", round_=2))
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
