"""Which rows a pass has, without engine and decider."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

from draft_service.planner import BRANCH_ROWS, CHEAP_ROWS, draw_up
from draft_service.session import Session
from draft_service.tree import Branch, Seed
from tests.unit.draft.test_session import BOUNDS, TEN, draft

HANDLES = itertools.count(1)


def made(stream: int = 1, prompt: int = 3, drafted: int = 0, block: int | None = None, chances: tuple[float, ...] = ()) -> Session:
    """`chances`: of branches, two at a place."""
    tokens = tuple(range(1, prompt + 1))
    bounds = replace(BOUNDS, limit=1000, prompt_length=prompt - 1)
    session = Session(stream, "s", 1, next(HANDLES), tokens, bounds, None)  # type: ignore[arg-type]
    if drafted:
        draft(session, *TEN[:drafted])
    if block is not None:
        session.sent(prompt, block, ())
    session.tree.sow([Seed(chance, prompt + place // 2, place % 2, False) for place, chance in enumerate(chances)])
    session.tree.sprout(99, lambda base: next(HANDLES), lambda token, index: False)
    return session


def plan(*sessions: Session, rows: int = 64, chunk: int = 16, survives: Any = None) -> Any:
    return draw_up(sessions, rows, chunk, 5, survives or (lambda session, branch: 2))


def whose(planned: Any) -> list[int]:
    return [row.handle for row in planned[0]]


def test_who_is_alone_has_all_rows() -> None:
    (row,), steps, needed = plan(made(prompt=40), rows=32)
    assert (row.start, row.tokens, row.draws, row.output) == (0, tuple(range(1, 33)), 0, ())
    assert (steps, needed) == (1, 1), "a piece of a prompt is needed as well"
    rested = made(drafted=3)
    (row,), *_ = plan(made(prompt=40), rested, rows=32)
    assert len(row.tokens) == 16, "another session may want a row at any time"
    assert not rested.stepping
    (row,), steps, needed = plan(made(prompt=4), rows=32)
    assert (row.tokens, row.draws, row.output, steps, needed) == ((1, 2, 3, 4), 3, (4,), 3, 1)


def test_more_streams_than_rows_have_a_token_each() -> None:
    planned = plan(made(1), made(2), made(3), rows=2)
    assert [len(row.tokens) for row in planned[0]] == [1, 1] and planned[1] == 1


def test_streams_take_turns_by_the_rows_that_they_get() -> None:
    """A long prompt counts as the piece of it that a pass takes, a short one as itself."""
    long, another, short, last = made(1, 100), made(1, 1), made(2, 1), made(2, 4)
    assert whose(plan(long, another, short, last, chunk=4)) == [s.handle for s in (long, short, last, another)]
    long, another, short, last = made(1, 100), made(1, 1), made(2, 7), made(2, 4)
    assert whose(plan(long, another, short, last, chunk=6, rows=30)) == [s.handle for s in (long, short, another, last)]


def test_sessions_of_a_pass_know_it() -> None:
    first, second = made(), made(drafted=3, block=3)
    first.served, second.served = 4, 3
    assert plan(first, second)[2] == 2, "as many passes as whoever lacks most needs"
    assert (first.served, second.served, first.stepping, second.stepping) == (5, 5, True, True)
    assert plan(made(drafted=5, block=3), made(drafted=6, block=3))[2] == 0, "they have what they need"
    assert plan(made(), made(drafted=6, block=3))[2] == 1


def test_branches_alone_are_a_step_of_their_session() -> None:
    session = made(drafted=3, block=3, chances=(0.5,))
    session.ahead = False
    (row,), steps, needed = plan(session)
    branch = session.tree.branches[row.branch]
    assert (row.start, row.tokens, row.base, row.draws, steps, needed) == (3, (20,), 3, 2, 2, 0)
    assert session.stepping and branch.planned and row.output == (3, 20)


def test_branches_fill_up_what_is_left_of_a_pass_and_not_more() -> None:
    chances = (0.5, 0.4, 0.3, 0.2, 0.1)
    assert len(plan(made(drafted=3, block=3, chances=chances), rows=3)[0]) == 3
    crowd = [made(drafted=3, block=3, chances=chances) for _ in range(4)]
    planned = plan(*crowd)
    assert sum(row.branch > 0 for row in planned[0]) == BRANCH_ROWS and len(planned[0]) == BRANCH_ROWS + 4
    planned = plan(*[made(drafted=3, block=3, chances=chances) for _ in range(2)], made(prompt=1))
    assert len(planned[0]) == CHEAP_ROWS, "the target of the last one waits"
    resting = made(drafted=3)
    assert resting.hungry and not resting.wanted
    assert sum(row.branch > 0 for row in plan(*crowd, resting)[0]) == BRANCH_ROWS, "who wants nothing holds nobody up"


def test_streams_take_turns_with_their_branches_whatever_the_length_of_their_texts() -> None:
    long, more = made(1, 80, 3, 3, (0.9,)), made(1, 80, 3, 3, (0.8,))
    short, other = made(2, 3, 3, 3, (0.7,)), made(2, 3, 3, 3, (0.6,))
    planned = plan(long, more, short, other)
    branches = [row.handle for row in planned[0] if row.branch]
    assert branches == [s.handle for s in (long, short, more, other)]


def test_several_passes_at_once_only_where_all_go_on_together() -> None:
    assert plan(made(), made())[1] == 3
    assert plan(made(), made(drafted=3, block=3))[1] == 3, "as many as the one that wants least"
    seeded = made(drafted=3, block=3)
    seeded.tree.sow([Seed(0.5, 8, 0, False)])
    assert plan(seeded)[1] == 1, "a branch may begin after the first"

    def one(session: Session, branch: Branch) -> int:
        return 1

    assert plan(made(drafted=3, block=3, chances=(0.5,)), survives=one)[1] == 1
