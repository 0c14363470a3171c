"""How long to wait before something that ended is begun again. Pure."""

from __future__ import annotations


class Backoff:
    """Seconds. What lived for `calm_s` and did not fail begins again at once; each end sooner than that doubles the wait, from `first_s` to
    `last_s`."""

    def __init__(self, first_s: float, last_s: float, calm_s: float) -> None:
        self._first_s, self._last_s, self._calm_s = first_s, last_s, calm_s
        self._next_s = first_s

    def pause(self, lived_s: float, failed: bool, draw: float) -> float:
        """`draw` in [0, 1): half of the wait is chance, so that those who lost the same server do not come back together."""
        if lived_s >= self._calm_s:
            self._next_s = self._first_s
            if not failed:
                return 0.0
        wait_s, self._next_s = self._next_s, min(self._last_s, 2 * self._next_s)
        return wait_s * (1 + draw) / 2
