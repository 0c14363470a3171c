"""Whose turn it is in an engine step. Pure.

Rules

1. Lower priority numbers first, with bounded ageing: a Step that waited AGE_MS has gained one level, and levels beyond MAX_LEVEL either way
   count as MAX_LEVEL. So urgent sessions, however many, hold up others by 2 * MAX_LEVEL * AGE_MS at most. Both gain as they wait, so the
   order of two never changes: it is that of level * AGE_MS + arrival.
2. Orchestrators share the rows of a step: whoever had fewer of them comes next, each with its own sessions in their order. So many sessions
   of one, or urgent ones, leave half of a step to another that has work for it. This is deficit round robin that begins anew with every
   step: what a step had no rows for is in front of the next one, by rule 1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from target_service.sessions import Session

AGE_MS = 100.0  # a few steps
MAX_LEVEL = 16


def rank(session: Session) -> tuple[float, int]:
    """Of a session whose Step waits; the smallest is first."""
    assert session.pending is not None
    level = max(-MAX_LEVEL, min(MAX_LEVEL, session.begin.priority))
    return level * AGE_MS + session.pending.arrived_ms, session.pending.serial


def in_turns(sessions: Sequence[Session], rows: Callable[[Session], int]) -> list[Session]:
    """`sessions` in the order in which they get rows. Where all are of one orchestrator, nothing changes."""
    had = Counter[str]()
    before: list[int] = []
    for session in sessions:
        before.append(had[session.key[0]])
        had[session.key[0]] += rows(session)
    if len(had) < 2:
        return list(sessions)
    return [sessions[place] for place in sorted(range(len(sessions)), key=before.__getitem__)]
