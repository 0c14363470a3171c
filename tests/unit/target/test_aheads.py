"""Continuations that wait at the target: which fits, when it is taken, and what becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.hashing import prefix_hash
from specdec.terms import MAX_AHEADS, MAX_ROUND_RESULTS, Ahead, Close, Closed, DraftMethod, Failed, FinishReason, RejectionMethod, Result
from target_service.ahead import Shelf
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, VOCAB, Bench, first_step, next_step, only, reference
from tests.unit.target.test_run_ahead import PROMPT, REF, SCRIPT, after, begun, running, told

LONG = reference(SCRIPT, PROMPT, 400)


def ahead(known: int, tokens: Sequence[int], **more: Any) -> Ahead:
    """A continuation of prompt and the first `known` tokens of the text."""
    prefix = [*PROMPT, *LONG[:known]]
    return replace(Ahead("s", 1, len(prefix), prefix_hash(prefix), tuple(tokens)), **more)


# ------------------------------------------------------------ what is taken, and when


def test_at_the_boundary_the_target_goes_on_with_it() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    assert bench.send(stream, ahead(0, REF[:5])) == []
    assert [a.outcome for _, a in bench.settle()] == [Result(5, 5, 0, 0, (REF[0],)), Result(6, 10, 4, 4, tuple(REF[1:6]))]


def test_its_prefix_may_reach_past_what_is_decided() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, ahead(3, REF[3:6]), ahead(1, REF[1:2]))
    assert told(bench.settle()) == [(1, 5, (REF[0],)), (1, 6, tuple(REF[1:3])), (1, 8, tuple(REF[3:7]))]


def test_a_long_one_is_taken_block_by_block() -> None:
    bench = Bench(max_num_speculative_tokens=4)
    stream = begun(bench, 0)
    bench.send(stream, ahead(0, REF[:12]))
    assert told(bench.settle()) == [(1, 5, (REF[0],)), (1, 6, tuple(REF[1:6])), (1, 11, tuple(REF[6:11])), (1, 16, tuple(REF[11:13]))]


def test_the_rest_of_one_that_went_wrong_is_of_no_use() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, ahead(0, [*REF[:3], 63, *REF[4:9]]))
    assert [a.outcome for _, a in bench.settle()] == [Result(5, 5, 0, 0, (REF[0],)), Result(6, 8, 8, 2, tuple(REF[1:4]))]
    assert len(bench.verifier._sessions["orch", "s"].aheads) == 0


WRONG = {
    "another prefix": ahead(1, REF[1:4], prefix_hash=1),
    "another length": ahead(1, REF[1:4], prefix_length=7),
    "tokens that were not decided": ahead(0, [63, *REF[1:4]]),
    "nothing more than is decided": ahead(0, REF[:1]),
    "an old epoch": ahead(1, REF[1:4], epoch=2),
    "another session": ahead(1, REF[1:4], session_id="other"),
    "a prefix that will be another": ahead(3, REF[3:5], prefix_hash=prefix_hash([*PROMPT, 63, *REF[1:3]])),
}


@pytest.mark.parametrize("credit", [0, 1])
@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_what_does_not_fit_is_passed_over(case: str, late: bool, credit: int) -> None:
    """F85: what was drafted for another future is never verified, whatever its tokens are."""
    bench = Bench()
    stream = begun(bench, credit)
    if not late:
        assert bench.send(stream, WRONG[case]) == []
    results = bench.settle()
    assert bench.send(stream, WRONG[case]) == [] and bench.plan() is None
    assert told(results) == [(1, 5 + i, (REF[i],)) for i in range(1 + credit)]
    session = bench.verifier._sessions["orch", "s"]
    assert len(session.aheads) == (WRONG[case].prefix_length > len(session.tokens)), "only what may fit later takes a place"


def test_one_that_comes_late_is_as_good() -> None:
    """And a session that it wakes is missed by no wave."""
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, first_step(PROMPT, session="other"))
    bench.turn()
    bench.send(stream, ahead(0, REF[:5]))
    assert bench.verifier.wave._left.keys() == {("orch", "other")}
    assert told(bench.settle()) == [(1, 6, tuple(REF[1:6]))]


def test_one_that_wakes_nobody_is_no_return() -> None:
    """The session's Step is still on its way, and worth waiting for."""
    bench = Bench()
    stream = begun(bench, 0)
    bench.turn()
    bench.send(stream, ahead(3, REF[3:5]))
    assert bench.verifier.wave._left.keys() == {("orch", "s")}


def test_a_plain_row_that_waits_becomes_a_block() -> None:
    bench = Bench()
    stream = begun(bench, 1)
    bench.turn()
    bench.send(stream, ahead(1, REF[1:3]))
    assert told(bench.settle()) == [(1, 6, tuple(REF[1:4])), (1, 9, (REF[4],))], "and costs no run_ahead"


def test_what_runs_is_left_alone() -> None:
    bench = Bench()
    stream = begun(bench, 1)
    bench.turn()
    plan = running(bench)
    bench.send(stream, ahead(1, REF[1:4]))
    bench.finish(plan)
    assert told([(stream, a) for a in bench.heard()]) == [(1, 6, (REF[1],))]
    assert told(bench.settle()) == [(1, 7, tuple(REF[2:5]))]


def test_the_first_that_came_is_taken_and_later_ones_carry_it_on() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, ahead(1, [REF[1], 60]), ahead(1, REF[1:5]), ahead(1, [REF[1], 60, 61]), ahead(1, [9]))
    plan = bench.plan()
    assert plan is not None
    bench.finish(plan)
    [row] = running(bench).rows
    assert row.score is not None and row.score.block == (REF[1], 60, 61)


def test_the_oldest_makes_way() -> None:
    shelf = Shelf()
    for token in range(MAX_AHEADS + 1):
        shelf.put(Ahead("s", 1, 3, prefix_hash([1, 2, 3]), (token, 5)))
    assert len(shelf) == MAX_AHEADS
    assert shelf.fit([1, 2, 3, 0], lambda n: prefix_hash([1, 2, 3, 0][:n])) == () and len(shelf) == 0
    shelf.put(Ahead("s", 1, 3, prefix_hash([1, 2, 3]), (1, 5, 6)))
    shelf.put(Ahead("s", 1, 3, prefix_hash([1, 2, 3]), (1, 5, 6)))
    assert shelf.fit([1, 2, 3, 1], lambda n: prefix_hash([1, 2, 3, 1][:n])) == (5, 6) and len(shelf) == 1


def test_a_step_that_waits_comes_first() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, ahead(0, REF[:4]))
    bench.turn()
    plan = running(bench)
    bench.send(stream, ahead(4, REF[4:7]), next_step(after(1), REF[1:9], round_=2))
    bench.finish(plan)
    bench.heard()
    assert only(bench.turn()) == Result(10, 14, 4, 4, tuple(REF[5:10]))
    assert bench.settle() == []


def test_they_last_over_a_step() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.turn()
    bench.send(stream, ahead(3, REF[3:6]), next_step(after(1), REF[1:2], round_=2))
    assert told(bench.settle()) == [(2, 6, tuple(REF[1:3])), (2, 8, tuple(REF[3:7]))]


# ------------------------------------------------------------ bounds and ends


def test_the_last_token_is_told_as_an_aheads() -> None:
    for window, most in [(512, 3), (8, 1000)]:
        bench = Bench(window=window)
        stream = begun(bench, 0, sampling=replace(GREEDY, max_tokens=most))
        bench.send(stream, ahead(0, REF[:2]), ahead(2, REF[2:6]))
        results = [a.outcome for _, a in bench.settle()]
        assert results[-1] == Result(6, 7, 1, 1, tuple(REF[1:3]), finish=FinishReason.LENGTH)
    bench = Bench()
    stream = begun(bench, 0, sampling=replace(GREEDY, max_tokens=2))
    bench.send(stream, ahead(0, REF[:6]))
    assert [a.outcome for _, a in bench.settle()][-1] == Result(6, 6, 1, 1, (REF[1],), finish=FinishReason.LENGTH)


def test_results_of_a_round_are_bounded() -> None:
    bench = Bench(max_num_speculative_tokens=1)
    stream = begun(bench, 0)
    length, results = 0, 0
    for _ in range(2 * MAX_ROUND_RESULTS):
        bench.send(stream, ahead(length, LONG[length : length + 2]))
        heard = told(bench.settle())
        results += len(heard)
        length = heard[-1][1] + len(heard[-1][2]) - 5 if heard else length
        if length > 390:
            break
    assert results < MAX_ROUND_RESULTS and bench.verifier._sessions["orch", "s"].tokens == [*PROMPT, *LONG[:length]]
    bench = Bench(max_num_speculative_tokens=1)
    stream = begun(bench, 0)
    bench.settle()
    session = bench.verifier._sessions["orch", "s"]
    session.told = session.told * (MAX_ROUND_RESULTS - 1)
    bench.send(stream, ahead(1, REF[1:2]))
    assert len(bench.settle()) == 1
    bench.send(stream, ahead(3, REF[3:4]))
    assert bench.plan() is None
    bench.send(stream, next_step(after(3), round_=2))
    assert len(bench.settle()) == 1


def test_an_edit_drops_them() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.settle()
    other = [*PROMPT, 9]
    bench.send(stream, ahead(4, REF[4:7]), next_step(other, round_=2, base=5))
    assert len(bench.verifier._sessions["orch", "s"].aheads) == 0
    assert len(bench.settle()) == 1


def test_the_streams_end_drops_them_and_another_stream_has_no_say() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    bench.send(stream, ahead(0, REF[:5]))
    bench.turn()
    second = bench.hello()
    bench.verifier.detach(stream, bench.now)
    assert bench.plan() is None
    assert bench.send(second, ahead(0, REF[:5])) == [] and bench.plan() is None, "a hint takes no session over"
    bench.send(second, first_step(PROMPT), ahead(1, [9], prefix_hash=1))
    assert bench.plan() is None
    bench.send(second, ahead(0, REF[:5]))
    assert told(bench.settle()) == [(1, 6, tuple(REF[1:6]))]


def test_after_close_and_after_the_end_they_are_nothing() -> None:
    bench = Bench()
    stream = begun(bench, 0)
    plan = running(bench)
    bench.send(stream, Close("s", 1), ahead(0, REF[:5]))
    bench.finish(plan)
    assert [a.outcome for a in bench.heard()][1:] == [Closed()] and bench.settle() == []
    assert bench.send(stream, ahead(0, REF[:5])) == []
    bench = Bench()
    stream = begun(bench, 0, sampling=replace(GREEDY, stop_token_ids=(REF[1],)))
    bench.send(stream, ahead(0, REF[:5]), ahead(1, REF[1:5]))
    assert [a.outcome.finish for _, a in bench.settle()] == [None, FinishReason.STOP]  # type: ignore[union-attr]
    assert bench.send(stream, ahead(1, REF[1:5])) == [] and bench.plan() is None


def test_standard_sessions_take_none() -> None:
    bench = Bench()
    stream = begun(bench, 0, rejection_method=RejectionMethod.STANDARD, draft_method=DraftMethod.GREEDY)
    [answer] = bench.send(stream, ahead(0, REF[:5]))
    assert isinstance(answer.outcome, Failed) and (answer.round, answer.outcome.drop) == (0, False)
    assert answer.outcome.message.startswith("ahead: ") and "coupled" in answer.outcome.message
    assert len(bench.settle()) == 1


def test_a_target_without_blocks_takes_none() -> None:
    bench = Bench(max_num_speculative_tokens=0)
    stream = begun(bench, 0)
    bench.send(stream, ahead(0, REF[:5]))
    assert len(bench.settle()) == 1


def test_hashes_of_prefixes_are_those_of_the_tokens_in_any_order() -> None:
    """The hash that is carried along is neither moved nor trusted."""
    bench = Bench(script=hashed_script(VOCAB))
    stream = begun(bench, 9)
    bench.settle()
    session = bench.verifier._sessions["orch", "s"]
    for length in (3, 15, 8, 0, 14, 9, 15):
        carried = session._hash.length
        assert session.hash_aside(length) == prefix_hash(session.tokens[:length]) and session._hash.length == carried
        if length in (8, 9, 14):
            assert session.hash_at(length) == prefix_hash(session.tokens[:length])
    bench.send(stream, ahead(10, REF[10:13]))
    assert told(bench.settle()) == [(1, 15, tuple(REF[10:14]))]
