"""Which replica of a pool holds which session, as far as we placed them, how busy each is, and which sessions want one. Plain state; the
driver tells the generations what comes of it."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.peers import Peer
from orchestrator.placement import Candidate, Report, choose
from orchestrator.prefixes import PrefixIndex

LIGHTER = 0.5  # share of the load that makes moving a session worth a prompt's work
SLOW = 4.0  # a target whose steps take so many times as long as another's loses sessions to it,
SLOW_REPORTS = 12  # once it has said so for about three seconds
SILENT = Report()


@dataclass(frozen=True, slots=True)
class About:
    """What a session's place depends on: the fingerprint of its first replica, where caches count its tokens, how many it may
    come to have, and the longest block that it sends; for a draft, the target that it is at."""

    numerics: str = ""
    tokens: Sequence[int] = ()
    target: str = ""
    window: int = 0
    block: int = 0

    def fits(self, peer: Peer) -> bool:
        """Whether its limits are those the session was admitted under, or wider: it would end an answer early, or refuse a block."""
        return peer.info is None or (peer.info.max_model_len >= self.window and peer.info.max_num_speculative_tokens >= self.block)


ANY = About()


class Places:
    """Of one pool. `eligible` = replicas that may take a session now; `vacated` hears the name of one that has lost its last session,
    `took` of one that is about to get one."""

    def __init__(self, eligible: Callable[[], Iterable[Peer]], vacated: Callable[[str], None], took: Callable[[str], None]) -> None:
        self._eligible, self._vacated, self._took = eligible, vacated, took
        self.sessions = Counter[str]()  # by replica, those that hold some
        self._wants: dict[str, tuple[str, str]] = {}  # session -> replica to avoid, replica to prefer
        self._reports: dict[str, Report] = {}
        self._prefixes = PrefixIndex()
        self._asked = set[str]()  # those that were asked whether they are slow since their last report
        self._pairs = Counter[tuple[str, str]]()  # sessions by replica and target

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

    def paired(self, old: tuple[str, str], new: tuple[str, str]) -> None:
        """A session has another replica and target; empty = none."""
        if old == new:
            return
        if all(new):
            self._pairs[new] += 1
        if all(old):
            self._pairs[old] -= 1
            if not self._pairs[old]:
                del self._pairs[old]

    def heard(self, name: str, beat: Any) -> None:
        """A load report."""
        self._reports[name] = self._report(name).heard(beat, self.sessions[name])
        self._asked.discard(name)

    def gone(self, name: str) -> None:
        """What it said of itself is of the past."""
        self._reports.pop(name, None)
        self._asked.discard(name)

    def takes(self, what: About) -> bool:
        """Whether a replica takes a session of this kind."""
        return any(map(what.fits, self._eligible()))

    def place(self, about: Callable[[str], About] = lambda session_id: ANY) -> Iterator[tuple[str, str, str]]:
        """Gives every session that wants a replica one, if there is any: session, replica, why (prefer, prefix, load). What the caller does
        about one session may end others, place them, or make them want again."""
        for session_id, (avoid, prefer) in list(self._wants.items()):
            if session_id not in self._wants:
                continue
            what = about(session_id)
            candidates = {c.name: c for c in self._candidates(what)}
            draws = random.random(), random.random()
            name = choose(list(candidates.values()), avoid, draws, what.numerics, prefer, len(what.tokens))
            if name is None and not self._eligible():
                return
            if name is None:
                continue  # who is there is too small for it
            del self._wants[session_id]
            self._note(name, what.tokens)
            self._took(name)
            yield session_id, name, "prefer" if name == prefer else "prefix" if candidates[name].prefix else "load"

    def elsewhere(self, full: Sequence[str], what: About, equal: bool) -> str | None:
        """A replica other than those in `full` that reports room for its tokens, None when there is none. `equal`: of equal numerics, or
        none."""
        room = {peer.name for peer in self._eligible() if peer.beat is None or _free(peer) >= len(what.tokens)}
        candidates = self._candidates(replace(what, tokens=()))
        fit = [c for c in candidates if c.name in room and c.name not in full and not (equal and c.numerics != what.numerics)]
        return choose(fit, "", (random.random(), random.random()), what.numerics)

    def lighter(self, name: str) -> bool:
        """Whether another replica that takes sessions has far less to do."""
        most = LIGHTER * self._report(name).load(self.sessions[name] - 1)
        return any(peer.name != name and self._report(peer.name).load(self.sessions[peer.name]) <= most for peer in self._eligible())

    def asks(self, name: str) -> bool:
        """Whether one of its sessions may ask now whether it is slow: one does for each report."""
        return name not in self._asked and self._report(name).served >= SLOW_REPORTS

    def slow(self, name: str, what: About) -> bool:
        """Whether a session is better off elsewhere, at equal numerics: steps are far slower than those of another, which has far less to
        do."""
        if not self.asks(name):
            return False
        report = self._report(name)
        self._asked.add(name)
        enough, most = report.step_ms / SLOW, LIGHTER * report.load(self.sessions[name] - 1)
        if min(other.step_ms for other in self._reports.values()) > enough:
            return False
        candidates = self._candidates(replace(what, tokens=()))
        fit = (c for c in candidates if c.name in self._reports and c.numerics == what.numerics)
        return any(c.step_ms <= enough and c.load <= most for c in fit)

    def _candidates(self, what: About) -> list[Candidate]:
        holders, least_ms = self._prefixes.holders(what.tokens), self._least_ms()
        return [
            Candidate(
                peer.name,
                self.sessions[peer.name],
                self._report(peer.name).load(self.sessions[peer.name], least_ms),
                peer.info.numerics_fingerprint if peer.info is not None else "",
                holders.get(peer.info.boot_id, 0) if peer.info is not None else 0,
                self._report(peer.name).expected_ms(self.sessions[peer.name], least_ms),
                self._pairs[peer.name, what.target],
            )
            for peer in self._eligible()
            if what.fits(peer)
        ]

    def _note(self, name: str, tokens: Sequence[int]) -> None:
        info = next((peer.info for peer in self._eligible() if peer.name == name), None) if tokens else None
        if info is not None:
            self._prefixes.took(tokens, info.boot_id)

    def _report(self, name: str) -> Report:
        return self._reports.get(name, SILENT)

    def _least_ms(self) -> float:
        return min((report.step_ms for report in self._reports.values() if report.tried), default=math.inf)


def _free(peer: Peer) -> int:
    """Tokens there is room for, by its last report."""
    return int(peer.beat.kv_total_tokens - peer.beat.kv_used_tokens)
