"""Plain rounds that the target begins by itself: how many, until when, told how, and what a Step does that meets them."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from specdec.terms import (
    MAX_ROUND_RESULTS,
    Ahead,
    Answer,
    DraftDistribution,
    DraftMethod,
    Expired,
    Failed,
    FinishReason,
    PrefixNeeded,
    RejectionMethod,
    Result,
    Step,
)
from target_service.plan import StepPlan
from target_service.rounds import carries_on
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


def test_a_step_that_waits_keeps_the_longest_time_that_it_was_given() -> None:
    """To the last moment of it, and what it waited is told."""
    bench = Bench()
    stream = begun(bench, 5)
    bench.turn()
    plan = running(bench)
    for remaining_ms in (15, 5):
        bench.send(stream, next_step(after(1), round_=2, remaining_ms=remaining_ms))
    bench.now += 4
    bench.finish(plan)
    bench.heard()
    [(_, answer)] = bench.turn()
    assert told([(stream, answer)]) == [(2, 7, (REF[2],))] and answer.queue_us == 14_000
    bench.send(stream, next_step(after(3), round_=3, run_ahead=5))
    bench.turn()
    plan = running(bench)
    bench.send(stream, next_step(after(4), round_=4, remaining_ms=5))
    bench.now += 5
    bench.verifier.tick(bench.now)
    [answer] = bench.heard()
    assert (answer.round, answer.outcome) == (4, Expired())


@pytest.mark.parametrize("mine", [2, 4, 5])
@pytest.mark.parametrize("others", [2, 4, 5])
def test_what_carries_another_step_on(mine: int, others: int) -> None:
    """It begins with all that the other one says and says more, whatever they name by a hash."""

    def step(block: list[int], base: int) -> Step:
        return next_step(after(1), block, round_=2, base=base)

    other = step(REF[1:3], others)
    assert carries_on(step(REF[1:4], mine), other)
    for block in (REF[1:3], REF[1:2], [REF[1], 9, REF[3]], [9, *REF[2:9]]):
        assert not carries_on(step(block, mine), other)


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
