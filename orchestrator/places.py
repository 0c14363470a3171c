"""Which replica of a pool holds which session, as far as we placed them, and which sessions want one. Plain state; the driver tells the
generations what comes of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from orchestrator.peers import Peer
from orchestrator.placement import Candidate, choose


class Places:
    """Of one pool. `eligible` = replicas that may take a session now; `vacated` hears the name of one that has lost its last session,
    `took` of one that is about to get one."""

    def __init__(self, eligible: Callable[[], Iterable[Peer]], vacated: Callable[[str], None], took: Callable[[str], None]) -> None:
        self._eligible, self._vacated, self._took = eligible, vacated, took
        self.sessions = Counter[str]()  # by replica, those that hold some
        self._wants: dict[str, tuple[str, str]] = {}  # session -> replica to avoid, replica to prefer

    @property
    def wanted(self) -> int:
        """Sessions without a replica."""
        return len(self._wants)

    def want(self, session_id: str, avoid: str, prefer: str = "") -> None:
        self._wants[session_id] = avoid, prefer

    def forget(self, session_id: str, held_by: str) -> None:
        self._wants.pop(session_id, None)
        self.moved(held_by, "")

    def moved(self, old: str, new: str) -> None:
        """A session went from one replica to another; empty = none."""
        if new:
            self.sessions[new] += 1
        if old:
            self.sessions[old] -= 1
            if not self.sessions[old]:
                del self.sessions[old]
                self._vacated(old)

    def place(self, numerics: Callable[[str], str] = lambda session_id: "") -> Iterator[tuple[str, str]]:
        """Gives every session that wants a replica the name of one, if there is any. `numerics` of a session = fingerprint of its first
        replica. What the caller does about one session may end others, place them, or make them want again."""
        for session_id, (avoid, prefer) in list(self._wants.items()):
            if session_id not in self._wants:
                continue
            name = choose(self._candidates(), avoid, (random.random(), random.random()), numerics(session_id), prefer)
            if name is None:
                return
            del self._wants[session_id]
            self._took(name)
            yield session_id, name

    def elsewhere(self, full: Sequence[str], tokens: int, numerics: str, equal: bool) -> str | None:
        """A replica other than those in `full` that reports room for so many tokens, None when there is none. `equal`: of equal numerics,
        or none."""
        room = {peer.name for peer in self._eligible() if peer.beat is None or _free(peer) >= tokens}
        fit = [c for c in self._candidates() if c.name in room and c.name not in full and not (equal and c.numerics != numerics)]
        return choose(fit, "", (random.random(), random.random()), numerics)

    def _candidates(self) -> list[Candidate]:
        return [
            Candidate(peer.name, self.sessions[peer.name], _load(peer), peer.info.numerics_fingerprint if peer.info is not None else "")
            for peer in self._eligible()
        ]


def _free(peer: Peer) -> int:
    """Tokens there is room for, by its last report."""
    return int(peer.beat.kv_total_tokens - peer.beat.kv_used_tokens)


def _load(peer: Peer) -> float:
    """What the peer last reported, 0 = idle, 1 = full."""
    beat = peer.beat
    return beat.kv_used_tokens / beat.kv_total_tokens if beat is not None and beat.kv_total_tokens else 0.0
