"""Which replicas of one pool are shut out, and when to look at them again. A clock and timers around breaker.py."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from orchestrator.breaker import PROBE_S, Breaker, State, Trouble

MARGIN_S = 0.01  # a timer may fire a little early
log = logging.getLogger(__name__)


class Ejection:
    """A replica that was never in trouble has no breaker, and costs nothing. `ejected` hears the name of one that is shut out and why;
    `again` that one may take sessions again. Everything but construction needs the running loop."""

    def __init__(self, pool: str, max_pause_s: float, ejected: Callable[[str, Trouble], None], again: Callable[[], None]) -> None:
        self._pool, self._max_pause_s, self._ejected, self._again = pool, max_pause_s, ejected, again
        self._breakers: dict[str, Breaker] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}
        self._probing: set[str] = set()  # their pause is over

    def allows(self, name: str) -> bool:
        """Whether it may get a session now."""
        breaker = self._breakers.get(name)
        return breaker is None or breaker.allows(_now())

    def closed(self, name: str) -> bool:
        """Whether it serves as any other. Also from the thread that reads metrics."""
        breaker = self._breakers.get(name)
        return breaker is None or not breaker.shut

    def state(self, name: str) -> State:
        """Half-open: its pause is over, and what it is worth will show with its next sessions. Also from the thread that reads metrics."""
        return State.CLOSED if self.closed(name) else State.HALF_OPEN if name in self._probing else State.OPEN

    def took(self, name: str) -> None:
        """It got a session."""
        if name in self._breakers and self._breakers[name].took(_now()):
            self._look_again(name, PROBE_S)

    def judge(self, name: str, good: bool, trouble: Trouble | None) -> None:
        """What one message of it was: of use, and trouble."""
        if trouble is not None:
            self.bad(name, trouble)
        if good and name in self._breakers:
            self.good(name)

    def good(self, name: str) -> None:
        if (breaker := self._breakers.get(name)) is None:
            return
        if breaker.good(_now()):
            log.info("replica serves again", extra={"pool": self._pool, "peer": name})
            self._probing.discard(name)
            self._again()
        elif breaker.forgotten(_now()):
            del self._breakers[name]

    def bad(self, name: str, trouble: Trouble) -> None:
        breaker = self._breakers.setdefault(name, Breaker(self._max_pause_s, _now()))
        if breaker.bad(trouble, _now()):
            told = {"pool": self._pool, "peer": name, "reason": trouble.label, "pause_s": breaker.pause_s}
            log.warning("replica is shut out for a while", extra=told)
            self._probing.discard(name)
            self._look_again(name, breaker.pause_s)
            self._ejected(name, trouble)

    def forget(self, name: str) -> None:
        """It is no longer there, or another process has its name."""
        self._breakers.pop(name, None)
        self._probing.discard(name)
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()

    def close(self) -> None:
        for name in list(self._breakers):
            self.forget(name)

    def _look_again(self, name: str, after_s: float) -> None:
        if (timer := self._timers.pop(name, None)) is not None:
            timer.cancel()
        self._timers[name] = asyncio.get_running_loop().call_later(after_s + MARGIN_S, self._pause_over, name)

    def _pause_over(self, name: str) -> None:
        self._probing.add(name)
        self._again()


def _now() -> float:
    return time.monotonic()
