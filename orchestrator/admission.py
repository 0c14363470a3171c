"""Who may start, who waits, who is turned away. Pure: times are arguments, ms of one clock; the door calls it.

Rules

1. At most `max_running` generations run. The answers of one request start together or not at all: half of them help nobody, and two
   requests that hold half of their places each would wait for each other for ever.
2. Lower priority numbers first, with bounded ageing: who waited `age_ms` has gained one level. Levels beyond MAX_LEVEL either way count as
   MAX_LEVEL, so a stream of urgent requests holds up others by 2 * MAX_LEVEL * age_ms at most. Both gain as they wait, so the order of two
   never changes: it is that of level * age_ms + the time of asking.
3. The waiting room is bounded: in generations, in tokens of their prompts, and in bytes of requests whose prompt is not made of tokens yet.
   Those count from their first moment, so what does not fit is refused before any work is done for it.
4. Nobody waits in vain: whoever is expected to wait longer than it may is turned away at once, with a time to come back. The expectation is
   what waits before it times how long a place was held of late, by the places in use (Little's law).
5. Who has just been let in asks a target for room, and asks again if there is none. For each target MAX_ASKING requests do so at a time,
   MAX_ASKING_FULL while there is word of full targets, and nobody else starts while MAX_KNOCKING of them were told that there is none. Who
   waits here waits in order, does not ask again and again, and a large session finds the room it needs once it is free. Who has heard
   nothing for ASKING_MS is in: its prompt is being computed.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.errors import DeadlineExceeded, Overloaded

MAX_LEVEL = 16  # priorities beyond it, either way, are as urgent or patient as it
MAX_ASKING, MAX_ASKING_FULL, MAX_KNOCKING = 64, 16, 4  # requests
ASKING_MS = 250.0  # a few times what a target tells a session to wait until it asks again
FULL_MS = 5000.0  # how long word of a full target counts
MAX_ARRIVING_BYTES = 256 << 20  # of requests that are being read and made into tokens
FIRST_HOLD_MS = 1000.0  # how long a place is held, until that is known
HOLD_WEIGHT = 0.1
LEAST_RETRY_MS, MOST_RETRY_MS = 100, 60_000
FOREVER_MS = float("inf")


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request between its first moment and its asking. `until_ms` = how long it may wait."""

    answers: int
    size: int
    until_ms: float


@dataclass(slots=True)
class _Waiting:
    rank: float
    order: int
    sessions: list[str]
    tokens: int
    until_ms: float


@dataclass(frozen=True, slots=True)
class _Asking:
    """`request` = the first session of the same request. `refused`: a target had no room."""

    since_ms: float
    request: str
    refused: bool = False


class Admission:
    """Counts generations, by their session ids."""

    def __init__(self, max_running: int, max_waiting: int, max_waiting_tokens: int = 1 << 22, age_ms: float = 1000.0) -> None:
        self.max_running, self.max_waiting, self.max_waiting_tokens = max_running, max_waiting, max_waiting_tokens
        self.waiting_tokens = self.arriving = self.arriving_bytes = 0
        self._age_ms = age_ms
        self._running: dict[str, tuple[float, str]] = {}  # session → since when, and the first session of its request
        self._waiting: dict[str, _Waiting] = {}
        self._queue: list[_Waiting] = []  # by rank and order
        self._asking: dict[str, _Asking] = {}  # by session, oldest first
        self._full_ms = -FOREVER_MS  # when a target was full
        self.targets = 1  # that are connected
        self._order = itertools.count()
        self._hold_ms: float | None = None  # running mean; None until a place became free

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def for_room(self) -> int:
        """Generations that have no room at a target: those that were told so, and those that wait behind them, not for a place here. From
        any thread."""
        refused = sum(asks.refused for asks in list(self._asking.values()))
        return refused + (self.waiting if refused and self.running < self.max_running else 0)

    def waits(self, session_id: str) -> bool:
        return session_id in self._waiting

    def expected_wait_ms(self, before: int) -> float:
        """Until so many that wait have started, and one more."""
        return (before + 1) * (FIRST_HOLD_MS if self._hold_ms is None else self._hold_ms) / max(1, self.running)

    # ------------------------------------------------------------ in

    def arrive(self, answers: int, size: int, priority: int, now_ms: float, until_ms: float = FOREVER_MS) -> Arrival:
        """A request of so many answers and bytes is here and not read yet; `arrived` when it is. Raises Overloaded, DeadlineExceeded."""
        self._check_number(answers)
        free = 0 if self._queue or not self._open(now_ms) else self.max_running - self.running
        if self.arriving + self.waiting + answers > self.max_waiting + free:
            raise self._full()
        if self.arriving and self.arriving_bytes + size > MAX_ARRIVING_BYTES:
            raise Overloaded(f"{self.arriving_bytes} bytes of requests are being read already", self._retry_ms())
        before = self._before(self._place(priority, now_ms)) + self.arriving
        self._in_time(answers <= free - self.arriving, before, now_ms, until_ms)
        arrival = Arrival(answers, size, until_ms)
        self.arriving += answers
        self.arriving_bytes += size
        return arrival

    def arrived(self, arrival: Arrival) -> None:
        self.arriving -= arrival.answers
        self.arriving_bytes -= arrival.size

    def ask(self, sessions: Sequence[str], priority: int, *, tokens: int = 0, now_ms: float = 0.0, until_ms: float = FOREVER_MS) -> bool:
        """The sessions of one request, whose prompt has so many tokens. True: all run now. False: all wait. Raises Overloaded when they do
        not fit the waiting room, or would wait there past `until_ms`; DeadlineExceeded when that is past."""
        n = len(sessions)
        self._check_number(n)
        runs = self._open(now_ms) and not self._queue and self.running + n <= self.max_running
        place = self._place(priority, now_ms)
        self._in_time(runs, self._before(place), now_ms, until_ms)
        if runs:
            self._run(sessions, now_ms)
            return True
        if self.waiting + n > self.max_waiting:
            raise self._full()
        if self._queue and self.waiting_tokens + tokens > self.max_waiting_tokens:
            raise Overloaded(f"prompts of {self.waiting_tokens} tokens wait already (SPECDEC_MAX_WAITING_TOKENS)", self._retry_ms())
        waiting = _Waiting(self._rank(priority, now_ms), next(self._order), list(sessions), tokens, until_ms)
        self._queue.insert(place, waiting)
        self._waiting.update(dict.fromkeys(sessions, waiting))
        self.waiting_tokens += tokens
        return False

    def _check_number(self, n: int) -> None:
        if n > self.max_running:
            raise Overloaded(f"n: {n} answers never run at once here, at most {self.max_running} do", MOST_RETRY_MS)

    def _rank(self, priority: int, now_ms: float) -> float:
        return max(-MAX_LEVEL, min(MAX_LEVEL, priority)) * self._age_ms + now_ms

    def _place(self, priority: int, now_ms: float) -> int:
        return bisect.bisect_right(self._queue, self._rank(priority, now_ms), key=lambda waiting: waiting.rank)

    def _before(self, place: int) -> int:
        """About how many generations wait before this place in the queue."""
        return self.waiting * place // max(1, len(self._queue))

    def _in_time(self, runs: bool, before: int, now_ms: float, until_ms: float) -> None:
        if until_ms <= now_ms:
            raise DeadlineExceeded("the deadline passed before the request could start")
        if runs or self._hold_ms is None:
            return
        if (wait_ms := self.expected_wait_ms(before)) > until_ms - now_ms:
            raise Overloaded(
                f"it would wait about {wait_ms:.0f} ms and may wait {until_ms - now_ms:.0f} (the call's deadline, SPECDEC_MAX_WAIT_MS)",
                self._retry_ms(wait_ms),
            )

    def _full(self) -> Overloaded:
        waiting = self.waiting + self.arriving
        return Overloaded(f"{self.running} generations run and {waiting} wait already (SPECDEC_MAX_WAITING)", self._retry_ms())

    def _retry_ms(self, wait_ms: float | None = None) -> int:
        """When what waits at present is expected to have started."""
        wait_ms = self.expected_wait_ms(self.waiting) if wait_ms is None else wait_ms
        return int(max(LEAST_RETRY_MS, min(MOST_RETRY_MS, wait_ms)))

    # ------------------------------------------------------------ out

    def leave(self, session_id: str, now_ms: float = 0.0) -> list[str]:
        """A session ended or gave up waiting. Returns the sessions that may run now."""
        self._asking.pop(session_id, None)
        if (ran := self._running.pop(session_id, None)) is not None:
            held_ms = now_ms - ran[0]
            self._hold_ms = held_ms if self._hold_ms is None else self._hold_ms + HOLD_WEIGHT * (held_ms - self._hold_ms)
        if (waiting := self._waiting.pop(session_id, None)) is not None:
            waiting.sessions.remove(session_id)
            if not waiting.sessions:
                self._unqueue(waiting)
        return self.start(now_ms)

    def no_room(self, session_id: str, now_ms: float = 0.0) -> None:
        """A target has no room for a session that runs."""
        if session_id in self._running:
            self._full_ms = now_ms
            self._asking.pop(session_id, None)
            self._asking[session_id] = _Asking(now_ms, self._running[session_id][1], True)

    def asks(self, session_id: str) -> bool:
        """It runs, and no target has said yet whether there is room for it."""
        return session_id in self._asking

    def has_room(self, session_id: str, now_ms: float = 0.0) -> list[str]:
        """It has. Returns the sessions that may run now."""
        if self._asking.pop(session_id, None) is None:
            return []
        return self.start(now_ms)

    def _open(self, now_ms: float) -> bool:
        """May another ask a target for room?"""
        while self._asking and next(iter(self._asking.values())).since_ms <= now_ms - ASKING_MS:
            del self._asking[next(iter(self._asking))]
        if len(self._asking) < MAX_KNOCKING * self.targets:
            return True
        most = MAX_ASKING_FULL if now_ms - self._full_ms < FULL_MS else MAX_ASKING
        asking = {asks.request for asks in self._asking.values()}
        knocking = {asks.request for asks in self._asking.values() if asks.refused}
        return len(asking) < most * self.targets and len(knocking) < MAX_KNOCKING * self.targets

    def start(self, now_ms: float) -> list[str]:
        """Those that may run now, in order. One whose time is past is passed over, whoever keeps the time takes it out."""
        started: list[str] = []
        place = 0
        while place < len(self._queue) and self._open(now_ms):
            waiting = self._queue[place]
            if waiting.until_ms <= now_ms:
                place += 1
                continue
            if self.running + len(waiting.sessions) > self.max_running:
                break
            started += waiting.sessions
            self._run(waiting.sessions, now_ms)
            self._unqueue(waiting)
        return started

    def _run(self, sessions: Sequence[str], now_ms: float) -> None:
        for session in sessions:
            self._running[session] = now_ms, sessions[0]
            self._asking[session] = _Asking(now_ms, sessions[0])

    def _unqueue(self, waiting: _Waiting) -> None:
        del self._queue[bisect.bisect_left(self._queue, (waiting.rank, waiting.order), key=lambda other: (other.rank, other.order))]
        self.waiting_tokens -= waiting.tokens
        for session in waiting.sessions:
            del self._waiting[session]
