"""Sessions that move although their replica still serves them: it drains, their draft feeds others first, or their target is far slower
than one with less to do. leaving.py, hunger.py and places.py say who; a session goes only where another replica may take it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator import events as ev
from orchestrator.generation import Generation
from orchestrator.leaving import leave
from orchestrator.live import Live
from orchestrator.pools import Pool, Pools

DRAINING, HUNGRY, SLOW = "draining", "hungry", "slow"
WORTH_TOKENS = 64  # a session with fewer to come ends where it is: elsewhere it begins with a prompt's work


class Handover:
    """`feed` hands an event to a session; `moved` counts, by pool and reason."""

    def __init__(
        self, pools: Pools, live: Mapping[str, Live], feed: Callable[[str, ev.Event], None], moved: Callable[[str, str], None]
    ) -> None:
        self._pools, self._live, self._feed, self._moved = pools, live, feed, moved

    def drains(self, pool: Pool, name: str) -> None:
        """A replica says that it drains; it says so with every beat."""
        if pool is self._pools.targets:
            self._leave_target(name)
        elif pool.eligible():
            for session_id, live in list(self._live.items()):
                if live.generation.drafting.name == name:
                    self._leave_draft(session_id, DRAINING)

    def round(self, session_id: str, live: Live, outcome: str) -> None:
        """A round of a session ended."""
        owes, places = live.generation.drafting.owes, self._pools.drafts.places
        if live.hunger.round(outcome) and owes and places.lighter(live.draft):
            self._leave_draft(session_id, HUNGRY)
        targets = self._pools.targets
        if not targets.places.asks(live.target) or _to_come(live.generation) < WORTH_TOKENS:
            return
        if targets.places.slow(live.target, live.about()):
            self._moved(targets.name, SLOW)
            self._feed(session_id, ev.TargetLost(SLOW, alive=True))

    def _leave_target(self, name: str) -> None:
        pool = self._pools.targets
        others, peer = pool.eligible(), pool.peers[name]
        if not others:
            return
        numerics = {other.info.numerics_fingerprint for other in others if other.info is not None}
        equal = peer.info is not None and peer.info.numerics_fingerprint in numerics
        held = {
            session_id: _to_come(live.generation)
            for session_id, live in self._live.items()
            if live.generation.target == name and pool.places.takes(live.about())
        }
        for session_id in leave(held, peer.beat.predicted_step_ms, peer.beat.drain_remaining_ms, equal=equal):
            self._moved(pool.name, DRAINING)
            self._feed(session_id, ev.TargetLost(DRAINING, alive=True))

    def _leave_draft(self, session_id: str, reason: str) -> None:
        self._moved(self._pools.drafts.name, reason)
        self._feed(session_id, ev.DraftLost(reason, alive=True))


def _to_come(generation: Generation) -> int:
    """Most tokens that it may still decide."""
    return (generation.request.sampling.max_tokens or generation.request.window) - generation.decided
