"""Whether a draft is far later than others. Pure.

A round whose draft has nothing yet goes on without a block. That says little of the draft: a short step, a crowd at one target, a busy
orchestrator or long blocks make all drafts late alike, and then no other would serve the session better. So a draft is measured by the
others of its pool, as Envoy's success-rate outlier detection measures a host by its cluster. What one is worth that nobody has used shows
when a hungry session (hunger.py) tries it.
"""

from __future__ import annotations

MEMORY_ROUNDS, EACH = 64.0, 8.0  # that a share remembers; and of every session: those of one target are late together
FEW_ROUNDS = 32.0  # less says nothing
FAR, CONSIDERABLE = 2.0, 0.25  # a far better one is in time more than so many times as often, and for so much more of its rounds


class Lateness:
    """Of the drafts of one pool, by name."""

    def __init__(self) -> None:
        self._known: dict[str, list[float]] = {}  # rounds seen, as far as they count; share of them that it was in time for

    def round(self, name: str, late: bool, sessions: int = 1) -> None:
        """A round that wanted this draft's block began; it has so many sessions."""
        known = self._known.get(name)
        if known is None:
            known = self._known[name] = [0.0, 0.0]
        seen = known[0] = min(known[0] + 1.0, max(MEMORY_ROUNDS, EACH * sessions))
        known[1] += ((not late) - known[1]) / seen

    def known(self) -> list[str]:
        """Those that enough is known of."""
        return [name for name, (seen, _) in self._known.items() if seen >= FEW_ROUNDS]

    def far_better(self, name: str) -> list[str]:
        """The others where a session is sure to do far better."""
        seen, mine = self._known.get(name, (0.0, 0.0))
        if seen < FEW_ROUNDS:
            return []
        enough = max(FAR * mine, mine + CONSIDERABLE)
        return [other for other, (seen, share) in self._known.items() if share > enough and seen >= FEW_ROUNDS]

    def forget(self, name: str) -> None:
        """It is gone, or another process has its name."""
        self._known.pop(name, None)
