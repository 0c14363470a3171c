"""When a target's next word is due. Pure; time comes in.

A pass that begins shortly before a commit is of little use and in the way: the commit waits for its end, and the core that it takes is
often the one that brings the commit. So a draft that has something to say already rests from a while before the expected end of the round
until the commit comes, or is overdue.

Only for one session that is alone: with several, somebody can always use the pass. Commits of several are nobody's rhythm, those that
came together are one, and what takes much longer is a pause, unless it always does.
"""

from __future__ import annotations

WEIGHT = 0.1  # of the newest round
DUE, OVERDUE = 0.8, 1.5  # of a round's expected length
MIN_ROUNDS = 8  # seen before anything is expected
PAUSE = 4  # times a round's expected length
TOGETHER_MS = 1.0  # of one message, or of two that were read one after the other; no target is so fast that resting would pay


class Rhythm:
    def __init__(self) -> None:
        self._last_ms: float | None = None
        self._round_ms = 0.0
        self._rounds = 0
        self._pauses = 0  # in a row

    def committed(self, now_ms: float) -> None:
        """By the only session."""
        last, self._last_ms = self._last_ms, now_ms
        if last is None or (took := now_ms - last) < TOGETHER_MS:
            return
        if self._rounds and took > PAUSE * self._round_ms:
            self._pauses += 1
            if self._pauses < MIN_ROUNDS:
                return
            self._rounds = 0  # it is another target, or a slower one
        self._pauses = 0
        self._round_ms += (took - self._round_ms) * (WEIGHT if self._rounds >= MIN_ROUNDS else 1 / (self._rounds + 1))
        self._rounds += 1

    def mixed(self) -> None:
        """By one of several sessions."""
        self._last_ms = None

    def rest_ms(self, now_ms: float) -> float:
        """How long to rest from now on; 0 = the commit is far, or overdue."""
        if self._last_ms is None or self._rounds < MIN_ROUNDS:
            return 0.0
        elapsed = now_ms - self._last_ms
        due = DUE * self._round_ms <= elapsed < OVERDUE * self._round_ms
        return OVERDUE * self._round_ms - elapsed if due else 0.0
