"""Whether this orchestrator may be sent sessions. A decider: time is an argument.

Not before it has met a target: one that cannot reach its targets, from a wrong address or behind a wall, must not replace one that can.
From then on as long as a session that came now could be served: a target is there, or was there so lately that sessions still wait for one.
Drafts never count, since every answer comes without them, only later.
"""

from __future__ import annotations


class Readiness:
    """`wait_ms`: how long a session waits for a target."""

    def __init__(self, wait_ms: float) -> None:
        self._wait_s = wait_ms / 1000
        self._seen_s: float | None = None

    def may_take(self, targets: int, now_s: float) -> bool:
        """`targets`: those that may take a session now. `now_s` never goes back."""
        if targets:
            self._seen_s = now_s
        return self._seen_s is not None and now_s - self._seen_s <= self._wait_s
