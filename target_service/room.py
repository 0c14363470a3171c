"""KV room: who gets it, who gives it back, who shares it. Decides by accounts alone; the engine follows in the same order.

Rules

- A new session must fit under the watermark with room to grow, and behind every parked one. Entries of the prefix cache make way, then
  sessions nobody speaks for.
- When live sessions outgrow the pool the same make way, then the youngest is parked: its KV goes, its state stays. Parked sessions return
  in the order of their age, oldest first, so the oldest always makes progress and each end of a session lets at most as many return as its
  room allows: no livelock.
- A short session, whose prompt and answer together take no more than a SHORT_PART of the pool, does not wait behind long ones: it passes
  the parked, and where there is no room the youngest of the others is parked for it before the next step. Short ones that pass hold no more
  than that part together, and for SHORT_MS after the last of them knocked nobody else grows into it by coming back. They pass only while
  the largest that is parked fits beside them, so it returns whatever comes.
- What a session held when it ended stays as an entry of the prefix cache, in whole blocks of committed tokens. Not so when it ended by a
  fault, or while a row of it was in the engine: nobody knows what came of that.
- A new session may begin with a fork: the tokens that it has in common with what a donor holds are there already and are booked once. Donor
  is who has most of them: the session that it names, an entry, any other session. What becomes of the donor afterwards is no concern of the
  fork's. A donor that holds nothing, or nothing that agrees, is no donor.
- An entry of which all agrees is taken over instead: it becomes the session's KV, nothing is copied, and others can fork from the session.
- Forks and drops reach the engine in the order in which they were decided here, before the rows of the next step. A fork's donor was
  booked when it was decided, so it is still there, and what was released earlier is free.
- What runs in the engine is not taken from under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from target_service.checks import Limits
from target_service.plan import Drop, Fork, Keep
from target_service.prefix import PrefixCache
from target_service.sessions import Key, Session

SHORT_PART = 8  # one part in so many of the pool
SHORT_MS = 1000.0
MOVED_PER_SHARED = 16  # tokens that may be moved for each that is shared


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
    def held_alone(self, sessions: Collection[Hashable]) -> int: ...


@dataclass(frozen=True, slots=True)
class Donor:
    """`resident` holds `tokens`, which a new session begins with. `whole`: an entry that holds nothing else."""

    resident: int
    tokens: tuple[int, ...] = ()
    whole: bool = False


class Room:
    """`sessions`: all that live, as their owner keeps them; read, never changed. The counts are plain numbers for whoever observes:
    `cached_tokens` = room that entries alone hold; `asked_tokens` = committed tokens that new sessions came with, `hit_tokens` = those
    that were in KV already, by their content or since the session named a donor."""

    def __init__(self, limits: Limits, budget: Budget, sessions: Mapping[Key, Session]) -> None:
        self._limits, self._budget, self._sessions = limits, budget, sessions
        self._cache = PrefixCache(limits.prefix_block_tokens)
        self._changes: list[Fork | Drop | Keep] = []
        self._names = itertools.count(1)
        self._short_until_ms = 0.0  # short sessions want room until then
        self._knocks = 0  # tokens that the shortest of those needs which found none since the last step
        self.cached_tokens = self.asked_tokens = self.hit_tokens = 0

    @property
    def live_tokens(self) -> int:
        """Room in use, but for what an admission would find free."""
        return max(0, self._budget.used_tokens - self.cached_tokens)

    # ------------------------------------------------------------ who gets room

    def admit(self, session: Session, committed: tuple[int, ...], now_ms: float, named: Session | None = None) -> bool:
        """House a new session, with what is in KV already. Prompt rows that are not computed give no logits, so a session that asks for the
        prompt's log-probabilities has no donor."""
        if session.begin.sampling.prompt_logprobs is not None:
            return self.house(session, len(committed), now_ms)
        if not self.house(session, len(committed), now_ms, self._donor(committed, named)):
            return False
        self.asked_tokens += len(committed)
        self.hit_tokens += session.kv_length
        return True

    def house(self, session: Session, tokens: int, now_ms: float, donor: Donor | None = None) -> bool:
        """Give a new or parked session room for its `tokens`, if its turn has come."""
        since = now_ms - self._limits.lease_ms  # who did not ask for so long is not in the way
        parked = [s for s in self._sessions.values() if s.resident is None and s.stream is not None and s.asked_ms >= since]
        ahead = [other for other in parked if other.age < session.age]
        passes = self._may_pass(session, parked)
        reserve = min(self._limits.reserve_tokens, self._limits.window - tokens)
        if passes:
            reserve = min(reserve, self._claim(session) - tokens)
        elif ahead:
            return False
        elif now_ms < self._short_until_ms and parked:
            reserve += max(0, self._share - self._short_tokens())
        donor = donor or Donor(0)
        while self._budget.used_tokens and not self._budget.can_admit(tokens - len(donor.tokens), reserve):
            gone = self._make_way(donor.resident)
            if gone is None:
                if passes:
                    self._short_until_ms, self._knocks = now_ms + SHORT_MS, tokens + reserve
                return False
            if gone == donor.resident:
                donor = Donor(0)
        resident = donor.resident if donor.whole else next(self._names)
        if not self._book(resident, tokens, donor):
            return False
        session.resident = resident
        if donor.tokens:
            session.tokens, session.kv_length = list(donor.tokens), len(donor.tokens)
        return True

    @property
    def _share(self) -> int:
        return self._budget.total_tokens // SHORT_PART

    def _claim(self, session: Session) -> int:
        """Tokens that it will hold at most."""
        return min(self._limits.window, session.begin.prompt_length + (session.begin.sampling.max_tokens or 0))

    def _is_short(self, session: Session) -> bool:
        return self._claim(session) <= self._share

    def _short_tokens(self) -> int:
        return sum(self._claim(s) for s in self._sessions.values() if s.resident is not None and self._is_short(s))

    def _may_pass(self, session: Session, parked: Collection[Session]) -> bool:
        if not self._is_short(session) or self._short_tokens() + self._claim(session) > self._share:
            return False
        largest = max((len(other.tokens) for other in parked), default=0)
        return largest + self._limits.reserve_tokens + 2 * self._share <= self._budget.total_tokens

    def for_short(self) -> list[Session]:
        """Before a step, when nothing runs: room for a short session that found none, at the cost of the youngest of the others but the
        oldest. Returns whom it cost their KV."""
        needed, self._knocks = self._knocks, 0
        parked: list[Session] = []
        while needed and not self._budget.can_admit(needed, 0):
            others = [s for s in self._evictable() if not self._is_short(s)]
            if len(others) < 2:
                break
            victim = max(others, key=_age)
            self.free(victim)
            parked.append(victim)
        return parked

    def _book(self, resident: int, tokens: int, donor: Donor) -> bool:
        if donor.whole:
            self._cache.remove(resident)
            if not self._budget.grow(resident, tokens):
                self._drop(resident)
                return False
            return True
        if not donor.tokens:
            return self._budget.grow(resident, tokens)
        if not self._budget.fork(resident, donor.resident, len(donor.tokens)):
            return False
        if not self._budget.grow(resident, tokens):
            self._budget.release(resident)
            return False
        self._changes.append(Fork(resident, donor.resident, len(donor.tokens)))
        return True

    def _donor(self, committed: tuple[int, ...], named: Session | None) -> Donor | None:
        """Who holds most of them: the session that is named, an entry, or any other session."""
        best = None
        if named is not None and named.resident is not None:
            best = Donor(named.resident, committed[: named.shareable(committed)])
        found = self._cache.find(committed)
        if found is not None and found[1] > _length(best):
            entry, length = found
            whole = length == len(entry.tokens)
            if whole or _pays(length, len(entry.tokens)):
                best = Donor(entry.resident, committed[:length], whole)
        for other in self._sessions.values():
            length = self._shared(other, committed, _length(best))
            if other.resident is not None and _pays(length, other.kv_length):
                best = Donor(other.resident, committed[:length])
        return best

    def _shared(self, other: Session, committed: tuple[int, ...], known: int) -> int:
        """How many tokens of it can be shared in whole blocks; 0 when they are not more than are `known` to be elsewhere."""
        step = self._cache.block_tokens
        most = self._cache.whole(min(other.kv_length, len(committed) - 1))
        length = self._cache.whole(known) + step
        if not 0 < length <= most or tuple(other.tokens[:length]) != committed[:length]:
            return 0
        while length < most and tuple(other.tokens[length : length + step]) == committed[length : length + step]:
            length += step
        return length

    def extend(self, session: Session) -> list[Session]:
        """Room for the session's next step, at the cost of entries, then of those nobody speaks for, then of the youngest, which may be
        itself. Returns whom it cost their KV."""
        assert session.pending is not None
        end = len(session.tokens) + len(session.pending.block)
        parked = []
        while session.resident is not None and not self._budget.write({session.resident: (session.kv_length, end)}):
            if self._evict() is None:
                evictable = self._evictable()
                long = [s for s in evictable if not self._is_short(s)]
                victim = max([s for s in evictable if s.stream is None] or (long if len(long) > 1 else evictable), key=_age)
                self.free(victim)
                parked.append(victim)
        return parked

    # ------------------------------------------------------------ who gives it back

    def _make_way(self, donor: int) -> int | None:
        """Frees what nobody speaks for, the donor last where there is a choice. Returns which resident, None when there is none."""
        if (entry := self._evict(donor)) is not None:
            return entry
        orphans = [s for s in self._evictable() if s.stream is None]
        if not orphans:
            return None
        victim = max(orphans, key=_age)
        resident = victim.resident
        self.free(victim)
        return resident

    def _evict(self, besides: int | None = None) -> int | None:
        resident = self._cache.oldest(besides)
        if resident is not None:
            self._cache.remove(resident)
            self._drop(resident)
        return resident

    def _evictable(self) -> list[Session]:
        """Sessions that hold KV and are not in the engine."""
        return [s for s in self._sessions.values() if s.resident is not None and not s.flying]

    def free(self, session: Session) -> None:
        """Release the session's KV. Once: who has none has nothing to release."""
        if session.resident is not None:
            self._drop(session.resident)
            session.drop_kv()

    def end(self, session: Session, sound: bool = True) -> None:
        """The session is over: its KV becomes an entry, or goes. `sound`: it did not end by a fault."""
        whole = self._cache.whole(session.kv_length)
        if session.resident is None or session.flying or not sound or whole == 0:
            return self.free(session)
        resident, tokens = session.resident, session.tokens[:whole]
        session.drop_kv()
        self._changes.append(Keep(resident, whole))
        for redundant in self._cache.add(resident, tokens):
            self._drop(redundant)

    def _drop(self, resident: int) -> None:
        self._budget.release(resident)
        self._changes.append(Drop(resident))

    def take_changes(self) -> tuple[Fork | Drop | Keep, ...]:
        """What the engine has to follow since the last call."""
        changes, self._changes = tuple(self._changes), []
        if changes:
            self.cached_tokens = self._budget.held_alone(self._cache.residents)
        return changes


def _pays(shared: int, held: int) -> bool:
    """At its first fork a CPU's store moves all that the donor holds, at a twentieth of what computing it costs."""
    return 0 < held <= MOVED_PER_SHARED * shared


def _length(donor: Donor | None) -> int:
    return 0 if donor is None else len(donor.tokens)


def _age(session: Session) -> int:
    return session.age
