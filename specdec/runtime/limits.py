"""How much one caller may ask for: requests per second and requests at once. Pure; time is an argument.

Rules
1. A caller has a bucket of `burst` requests that fills at `per_s` a second (a token bucket). An empty one refuses, and tells when the next
   request fits. A refused request costs nothing.
2. At most `at_once` requests of a caller are open. A refusal for that takes nothing out of the bucket either.
3. At most MAX_CALLERS are remembered. Beyond, one without open requests whose bucket is full again is forgotten: nothing is lost with it.
   When there is none, a caller that nobody knows is refused: somebody with many addresses does not make the table grow.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass

from specdec.errors import Overloaded

MAX_CALLERS = 10_000
BUSY_RETRY_MS = 1000  # when an open request ends is anybody's guess


@dataclass(slots=True)
class _Caller:
    left: float  # requests in the bucket when last looked at
    at: float  # when that was, s
    open: int = 0


class Limits:
    """`per_s` 0 = no limit on the rate, `at_once` 0 = none on open requests."""

    def __init__(self, per_s: float, at_once: int) -> None:
        self.per_s, self.at_once = per_s, at_once
        self.burst = max(1.0, math.ceil(per_s))
        self._callers: OrderedDict[str, _Caller] = OrderedDict()  # the one seen last comes last

    def __len__(self) -> int:
        return len(self._callers)

    def enter(self, who: str, now_s: float) -> None:
        """A request begins. Raises Overloaded, which tells when to come back."""
        caller = self._known(who, now_s)
        caller.left = min(self.burst, caller.left + max(0.0, now_s - caller.at) * self.per_s)
        caller.at = now_s
        if self.at_once and caller.open >= self.at_once:
            raise Overloaded(f"{caller.open} requests of this client are open (SPECDEC_CLIENT_MAX_OPEN); end one first", BUSY_RETRY_MS)
        if self.per_s and caller.left < 1:
            wait_ms = math.ceil(1000 * (1 - caller.left) / self.per_s)
            raise Overloaded(f"more than {self.per_s:g} requests a second of this client (SPECDEC_CLIENT_REQUESTS_PER_S)", wait_ms)
        caller.left -= 1
        caller.open += 1

    def leave(self, who: str) -> None:
        """A request that entered is over."""
        self._callers[who].open -= 1

    def _known(self, who: str, now_s: float) -> _Caller:
        if who in self._callers:
            self._callers.move_to_end(who)
            return self._callers[who]
        if len(self._callers) >= MAX_CALLERS:
            self._forget(now_s)
        return self._callers.setdefault(who, _Caller(self.burst, now_s))

    def _forget(self, now_s: float) -> None:
        """The one seen longest ago among those that lose nothing. Raises Overloaded when there is none."""
        for who, caller in self._callers.items():
            if not caller.open and (not self.per_s or caller.left + (now_s - caller.at) * self.per_s >= self.burst):
                del self._callers[who]
                return
        raise Overloaded(f"{MAX_CALLERS} clients are active (MAX_CALLERS)", BUSY_RETRY_MS)
