"""KV room: who gets it, who gives it back, who shares it. Decides by accounts alone; the engine follows in the same order.

Rules

- A new session must fit under the watermark with room to grow, and behind every parked one. Sessions nobody speaks for make way.
- When live sessions outgrow the pool the youngest is parked: its KV goes, its state stays. Parked sessions return in the order of their
  age, oldest first, so the oldest always makes progress and each end of a session lets at most as many return as its room allows: no
  livelock.
- A new session may begin with a fork: the tokens that it has in common with what a donor holds are there already and are booked once. What
  becomes of the donor afterwards is no concern of the fork's. A donor that holds nothing, or nothing that agrees, is no donor.
- Forks and drops reach the engine in the order in which they were decided here, before the rows of the next step. A fork's donor was
  booked when it was decided, so it is still there, and what was released earlier is free.
- What runs in the engine is not taken from under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping
from typing import Protocol

from target_service.checks import Limits
from target_service.plan import Drop, Fork
from target_service.sessions import Key, Session


class Budget(Protocol):
    """Accounting of KV room by resident: specdec.engine.KvBudget."""

    @property
    def used_tokens(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...
    def can_admit(self, tokens: int, reserve_tokens: int) -> bool: ...
    def grow(self, session: int, tokens: int) -> bool: ...
    def fork(self, child: int, parent: int, tokens: int) -> bool: ...
    def write(self, writes: Mapping[Hashable, tuple[int, int]]) -> bool: ...
    def release(self, session: int) -> None: ...


class Room:
    """`sessions`: all that live, as their owner keeps them; read, never changed."""

    def __init__(self, limits: Limits, budget: Budget, sessions: Mapping[Key, Session]) -> None:
        self._limits, self._budget, self._sessions = limits, budget, sessions
        self._changes: list[Fork | Drop] = []
        self._names = itertools.count(1)

    def house(self, session: Session, tokens: int, now_ms: float, donor: Session | None = None, shared: int = 0) -> bool:
        """Give a new or parked session room for its `tokens`, if its turn has come. The first `shared` of them are the donor's."""
        since = now_ms - self._limits.lease_ms  # who did not ask for so long is not in the way
        parked = (s for s in self._sessions.values() if s.resident is None and s.stream is not None and s.asked_ms >= since)
        if any(other.age < session.age for other in parked):
            return False
        reserve = min(self._limits.reserve_tokens, self._limits.window - tokens)
        while self._budget.used_tokens and not self._budget.can_admit(tokens - shared, reserve):
            orphans = [s for s in self._evictable() if s.stream is None]
            if not orphans:
                return False
            victim = max(orphans, key=_age)
            if victim is donor:
                shared = 0
            self.free(victim)
        resident = next(self._names)
        if donor is None or donor.resident is None or shared == 0:
            if not self._budget.grow(resident, tokens):
                return False
        elif self._fork(resident, tokens, donor.resident, shared):
            session.tokens, session.kv_length = donor.tokens[:shared], shared
        else:
            return False
        session.resident = resident
        return True

    def _fork(self, resident: int, tokens: int, donor: int, shared: int) -> bool:
        if not self._budget.fork(resident, donor, shared):
            return False
        if not self._budget.grow(resident, tokens):
            self._budget.release(resident)
            return False
        self._changes.append(Fork(resident, donor, shared))
        return True

    def extend(self, session: Session) -> list[Session]:
        """Room for the session's next step, at the cost of those nobody speaks for, then of the youngest, which may be itself. Returns whom
        it cost their KV."""
        assert session.pending is not None
        end = len(session.tokens) + len(session.pending.block)
        parked = []
        while session.resident is not None and not self._budget.write({session.resident: (session.kv_length, end)}):
            evictable = self._evictable()
            victim = max([s for s in evictable if s.stream is None] or evictable, key=_age)
            self.free(victim)
            parked.append(victim)
        return parked

    def _evictable(self) -> list[Session]:
        """Sessions that hold KV and are not in the engine."""
        return [s for s in self._sessions.values() if s.resident is not None and not s.flying]

    def free(self, session: Session) -> None:
        """Release the session's KV. Once: who has none has nothing to release."""
        if session.resident is not None:
            self._budget.release(session.resident)
            self._changes.append(Drop(session.resident))
            session.drop_kv()

    def take_changes(self) -> tuple[Fork | Drop, ...]:
        """What the engine has to follow since the last call."""
        changes, self._changes = tuple(self._changes), []
        return changes


def _age(session: Session) -> int:
    return session.age
