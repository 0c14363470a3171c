"""Which rows the next engine step has. Pure.

Rules
1. Chains come before branches, and among them the most urgent first: those whose target waits. A long prompt enters in chunks, so that the
   others keep drafting, and no token is drafted before all of it is in.
2. Branches take what rows are left, the likeliest first, but not many: every row makes the step longer, and a session that becomes hungry
   meanwhile waits for its end. Beside chains whose targets wait they may only fill up what costs hardly more than one row.
3. Several passes are planned at once only where every row wants as many and nothing new can begin between them.
4. Orchestrators, each of which is a stream, share the rows of a pass, those of branches too: whoever had fewer of them comes next, each
   with its own sessions in their order, and a piece of a prompt is no longer than the share of one. So many sessions of one, or prompts of
   theirs, keep no other out of a pass. The target does the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from draft_service.plan import DraftRow
from draft_service.session import Session
from draft_service.tree import Branch

CHEAP_ROWS = 4  # a step of so many rows takes hardly longer than one of a single row
BRANCH_ROWS = 16  # most rows of branches in a step
T = TypeVar("T")


def draw_up(
    sessions: Sequence[Session], step_rows: int, chunk_rows: int, number: int, survives: Callable[[Session, Branch], int]
) -> tuple[tuple[DraftRow, ...], int, int]:
    """Rows, passes over them, and how many of these are needed. `number`: of this plan. `survives`: tokens to draft now behind a branch."""
    waiting = sorted((s for s in sessions if s.wanted), key=lambda s: s.urgency)
    rows: list[DraftRow] = []
    needed = 0
    left, alone = step_rows, len(sessions) == 1
    chunk_rows = min(chunk_rows, max(1, step_rows // max(1, len({session.stream for session in waiting}))))
    for session in in_turns(waiting, lambda s: (s.stream, min(s.chain.unfed, chunk_rows))):
        if left == 0:
            break
        row = _row(session, left if alone else min(left, chunk_rows))
        needed = max(needed, session.lacks)
        session.served, session.stepping = number, True
        left -= len(row.tokens)
        rows.append(row)
    complete = len(rows) == len(waiting)
    hungry = any(session.hungry for session in waiting)
    most = CHEAP_ROWS - sum(len(row.tokens) for row in rows) if hungry else min(left, BRANCH_ROWS)
    rows += _branches(sessions, most, survives)
    steps = min((row.draws for row in rows), default=0) if complete else 1
    steps = 1 if steps == 0 or any(session.tree.seeds for session in sessions) else steps
    return tuple(rows), steps, min(needed, steps)


def in_turns(items: Sequence[T], whose: Callable[[T], tuple[int, int]]) -> list[T]:
    """`items` in the order in which they get rows. `whose`: the stream of one, and how many rows it wants. Where all are of one stream,
    nothing changes."""
    had, before = Counter[int](), []
    for item in items:
        stream, rows = whose(item)
        before.append(had[stream])
        had[stream] += rows
    return [items[place] for place in sorted(range(len(items)), key=before.__getitem__)] if len(had) > 1 else list(items)


def _row(session: Session, most: int) -> DraftRow:
    chain, bounds = session.chain, session.bounds
    fed = tuple(chain.tokens[chain.kv : chain.kv + most])
    draws = session.wanted if len(fed) == chain.unfed else 0
    output = tuple(chain.tokens[bounds.prompt_length :]) if draws else ()
    return DraftRow(session.handle, chain.kv, fed, draws, session.choose, output, bounds.ends, bounds.ends_from)


def _branches(sessions: Sequence[Session], left: int, survives: Callable[[Session, Branch], int]) -> list[DraftRow]:
    wanted = [
        (branch, session, draws)
        for session in sessions
        for branch in session.tree.branches.values()
        if (draws := survives(session, branch))
    ]
    rows = []
    wanted.sort(key=lambda item: -item[0].chance)
    for branch, session, draws in in_turns(wanted, lambda item: (item[1].stream, len(item[0].tokens) - item[0].kv)):
        fed, bounds = tuple(branch.tokens[branch.kv :]), session.bounds
        if len(fed) > left:
            break
        left -= len(fed)
        output = (*session.chain.tokens[bounds.prompt_length : branch.base], *branch.tokens)
        start = branch.base + branch.kv
        rows.append(
            DraftRow(session.handle, start, fed, draws, session.choose, output, bounds.ends, bounds.ends_from, branch.handle, branch.base)
        )
        branch.planned = session.stepping = True
    return rows
