"""Which rows make a step, without verifier and engine."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from specdec.terms import Begin, SamplingParams, TokenLogprobs
from target_service.batching import StepCost, choose_rows, returning
from target_service.checks import Limits
from target_service.sessions import Pending, Session
from tests.unit.target.harness import GREEDY

NUMBERS = itertools.count(1)


def limits(rows: int) -> Limits:
    return Limits(
        vocab_size=64, window=512, max_sessions=64, max_step_rows=rows, max_num_speculative_tokens=3, reserve_tokens=0, lease_ms=1000.0
    )


def waiting(name: str, todo: int, block: int = 0, priority: int = 0, sampling: SamplingParams = GREEDY, decides: bool = True) -> Session:
    """So many committed tokens are to be fed, then the block. `name`: of orchestrator and session."""
    begin, number = Begin(200, sampling, 7, priority=priority), next(NUMBERS)
    session = Session((name[0], name), 1, begin, number, 1, list(range(200)), number, 200 - todo)
    session.pending = Pending(1, tuple(range(block)), (), 0.0, 1e9, number, decides=decides)
    return session


def chosen(rows: int, *queued: Session, cost: StepCost | None = None, away: int = 0) -> dict[str, int]:
    """Rows of each that is in the step."""
    picked = choose_rows(queued, limits(rows), cost or StepCost(), away)
    for session, row in picked:
        assert session.pending is not None and row.resident == session.resident and row.start == session.kv_length
        fed = min(len(row.tokens), 200 - row.start)
        assert list(row.tokens[:fed]) == session.tokens[row.start : row.start + fed], "in order, what is not fed yet"
        whole = row.start + fed == 200
        assert row.score is None or row.score.room == 512 - 200
        assert row.tokens[fed:] == (session.pending.block if whole else ()) and (row.score is not None) is whole
    return {session.key[1]: len(row.tokens) for session, row in picked}


def seen(*steps: tuple[int, float]) -> StepCost:
    cost = StepCost()
    for rows, took_ms in steps:
        cost.seen(rows, took_ms)
    return cost


def test_a_prefill_keeps_its_share_of_the_smallest_steps() -> None:
    decodes = [waiting(f"d{i}", 1) for i in range(4)]
    assert chosen(4, *decodes, waiting("p", 50)) == {"d0": 1, "d1": 1, "d2": 1, "p": 1}
    assert chosen(4, *decodes) == {"d0": 1, "d1": 1, "d2": 1, "d3": 1}, "without one nothing is kept"
    assert chosen(4, waiting("d", 1, 3), waiting("p", 50)) == {"d": 4}, "who needs them all goes all the same, and no row more"


def test_pieces_beside_others_are_as_long_as_the_time_allows_and_no_shorter_than_their_share() -> None:
    dear, cheap = seen((4, 4.0), (32, 3200.0)), seen((4, 10.0), (64, 40.0))
    assert chosen(16, waiting("d", 1), waiting("p", 50), cost=dear) == {"d": 1, "p": 2}, "an eighth"
    assert chosen(128, waiting("d", 1), waiting("p", 150), cost=dear) == {"d": 1, "p": 8}, "LEAST_ROWS"
    assert chosen(128, waiting("d", 4), waiting("p", 150), cost=cheap) == {"d": 4, "p": 20}, "twice the time is 24 rows"
    assert chosen(128, waiting("p", 150), cost=cheap) == {"p": 128}
    assert chosen(128, waiting("p", 150), cost=cheap, away=4) == {"p": 24}, "those who will be back in a moment wait for it as well"


@pytest.mark.parametrize("rows", [8, 9, 10, 16, 23])
def test_a_step_has_no_row_too_many_and_none_too_few(rows: int) -> None:
    """Of prefills alone: what is left out is less than the row and the block of one of them."""
    for todos in itertools.product((5, 9, 20), repeat=3):
        for blocks in ((0, 0, 0), (3, 3, 3), (0, 3, 1)):
            queued = [waiting(f"p{i}", todo, block) for i, (todo, block) in enumerate(zip(todos, blocks, strict=True))]
            got = chosen(rows, *queued)
            wanted = {s.key[1]: todo + block for s, todo, block in zip(queued, todos, blocks, strict=True)}
            left = rows - sum(got.values())
            assert left >= 0 and all(count > 0 for count in got.values())
            assert got["p0"] >= min(todos[0] - 1, rows // 2), "the first in order has half"
            for session, todo, block in zip(queued, todos, blocks, strict=True):
                had = got.get(session.key[1], 0)
                assert not left or had == wanted[session.key[1]] or (had == todo - 1 and left < 1 + block)


def test_a_prefill_whose_last_token_and_block_do_not_fit_is_fed_all_but_that() -> None:
    assert chosen(10, waiting("p", 10, 1)) == {"p": 9} and chosen(10, waiting("p", 9, 1)) == {"p": 10}
    assert chosen(10, waiting("p", 10, 0)) == {"p": 10}


def test_the_first_goes_on_where_it_lacks_less_than_the_next() -> None:
    assert chosen(64, waiting("p0", 100), waiting("p1", 80)) == {"p0": 64}
    assert chosen(64, waiting("p0", 100), waiting("p1", 20)) == {"p0": 44, "p1": 20}
    assert chosen(64, waiting("p0", 100), waiting("p1", 20, priority=1)) == {"p0": 64}


def test_orchestrators_take_turns_with_what_is_left() -> None:
    queued = [waiting("a0", 100), waiting("a1", 8), waiting("a2", 10), waiting("a3", 12), waiting("b0", 20)]
    assert chosen(60, *queued) == {"a0": 30, "a1": 8, "b0": 20, "a2": 2}
    queued = [waiting("a0", 100), waiting("a1", 8), waiting("a2", 10), waiting("a3", 12), waiting("a4", 20)]
    assert chosen(60, *queued) == {"a0": 30, "a1": 8, "a2": 10, "a3": 12}, "of one orchestrator the shortest come first"
    queued = [waiting("b0", 100), waiting("b1", 5), waiting("b2", 6), waiting("b3", 7), waiting("a1", 15), waiting("a2", 20)]
    assert chosen(80, *queued) == {"b0": 40, "b1": 5, "a1": 15, "b2": 6, "b3": 7, "a2": 7}, "turns are of rows, not of sessions"


def test_of_what_only_comes_back_nothing_is_scored() -> None:
    params: Any = {"sampling": SamplingParams(temperature=0.0, prompt_logprobs=0, max_tokens=9)}
    for known, first in ((150, None), (50, 50)):
        session = waiting("p", 150, **params)
        session.prompt_logprobs = [TokenLogprobs(0.0)] * known
        ((_, row),) = choose_rows([session], limits(60), StepCost())
        assert (None if row.prompt is None else (row.prompt.first, row.prompt.tokens)) == (
            None if first is None else (50, tuple(range(51, 111)))
        )
    session = waiting("p", 20, decides=False, **params)
    ((_, row),) = choose_rows([session], limits(60), StepCost())
    assert len(row.tokens) == 19 and row.score is None, "the last token of the prompt scores none of it"


def test_who_is_about_to_return() -> None:
    def away(**changes: Any) -> Session:
        session = waiting("a", 1)
        session.pending, session.round, session.asked_ms = None, 1, 100.0
        for name, value in changes.items():
            setattr(session, name, value)
        return session

    assert returning([away(), away()], 120.0, 20.0) == 2 and returning([away()], 120.1, 20.0) == 0
    for changes in ({"resident": None}, {"round": 0}, {"stream": None}, {"pending": waiting("a", 1).pending}, {"closing": True}):
        assert returning([away(**changes)], 100.0, 20.0) == 0
