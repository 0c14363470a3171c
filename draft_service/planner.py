"""Which rows the next engine step has. Pure.

Rules
1. Chains come before branches, and among them the most urgent first: those whose target waits. A long prompt enters in chunks, so that the
   others keep drafting, and no token is drafted before all of it is in.
2. Branches take what rows are left, the likeliest first, but not many: every row makes the step longer, and a session that becomes hungry
   meanwhile waits for its end. Beside chains whose targets wait they may only fill up what costs hardly more than one row.
3. Several passes are planned at once only where every row wants as many and nothing new can begin between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draft_service.plan import DraftRow
from draft_service.session import Session
from draft_service.tree import Branch

CHEAP_ROWS = 4  # a step of so many rows takes hardly longer than one of a single row
BRANCH_ROWS = 16  # most rows of branches in a step


def draw_up(
    sessions: Sequence[Session], step_rows: int, chunk_rows: int, number: int, survives: Callable[[Session, Branch], int]
) -> tuple[tuple[DraftRow, ...], int, int]:
    """Rows, passes over them, and how many of these are needed. `number`: of this plan. `survives`: tokens to draft now behind a branch."""
    waiting = sorted((s for s in sessions if s.wanted), key=lambda s: s.urgency)
    rows: list[DraftRow] = []
    needed = 0
    left, alone = step_rows, len(sessions) == 1
    for session in waiting:
        if left == 0:
            break
        row = _row(session, left if alone else min(left, chunk_rows))
        needed = max(needed, min(session.lacks, row.draws or 1))
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
    for branch, session, draws in sorted(wanted, key=lambda item: -item[0].chance):
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
