"""What replicas say: each answer and proposal becomes an event of the session that it is for, if that is where the session is, and each
message counts for or against its replica. Whatever a session must not see is taken out or dropped here."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from orchestrator import events as ev
from orchestrator.breaker import Trouble
from orchestrator.checks import conduct_of_target, is_sound, without_foreign_ids
from orchestrator.control import Desk
from orchestrator.live import Live
from orchestrator.observe import Observer
from orchestrator.peers import TARGET, Heard, Peer
from orchestrator.pools import Pools
from specdec import terms


class Hearing:
    """`feed` hands an event to a session. `told` hears of each answer whether the target had room for the session."""

    def __init__(
        self,
        pools: Pools,
        live: Mapping[str, Live],
        desk: Desk,
        observer: Observer,
        feed: Callable[[str, ev.Event], None],
        told: Callable[[str, bool], None],
    ) -> None:
        self._pools, self._live, self._desk, self._observer = pools, live, desk, observer
        self._feed, self._told = feed, told

    def heard(self, peer: Peer, heard: Heard) -> None:
        """One message of a replica."""
        if peer.dialect is TARGET:
            self._target(peer, heard)
        else:
            self._draft(peer, heard)

    def _target(self, peer: Peer, heard: Heard) -> None:
        self._desk.now_ms = time.perf_counter() * 1000
        self._desk.heard(peer.name, heard.rows, heard.engine_us, heard.items)
        rounds, vocab_size = 0, self._pools.vocab_size
        for item in heard.items:
            live = self._live.get(item.session_id)
            if live is None or live.generation.target != peer.name:
                continue
            live.answered = now = time.perf_counter()
            took_s = now - live.step_sent if live.step_sent else None
            live.step_sent = 0.0
            self._observer.later(self._observer.answered, item, took_s, heard, live.trace)
            rounds += isinstance(item.outcome, terms.Result)
            self._told(item.session_id, not isinstance(item.outcome, terms.NoRoom))
            believed = without_foreign_ids(item, vocab_size)
            if believed is not item:
                self._observer.count("broken", 1)
            self._feed(item.session_id, ev.Answered(believed))
        if heard.rows:
            self._observer.later(self._observer.stepped, heard.rows, heard.engine_us, rounds)
        self._pools.targets.ejection.judge(peer.name, *conduct_of_target(heard.items))

    def _draft(self, peer: Peer, heard: Heard) -> None:
        broken, lost, of_use, vocab_size = heard.faults, False, False, self._pools.vocab_size
        for item in heard.items:
            live = self._live.get(item.session_id)
            if live is None or live.generation.drafting.name != peer.name:
                continue
            if isinstance(item, terms.Proposal) and not is_sound(item, vocab_size):
                broken += 1
                continue
            helps = live.generation.drafting.helps
            self._feed(item.session_id, ev.Drafted(item))
            of_use |= live.generation.drafting.helps != helps
            lost |= isinstance(item, terms.Resync)
        if broken:
            self._observer.count("broken", broken)
        self._pools.drafts.ejection.judge(peer.name, of_use, Trouble.MALFORMED if broken else Trouble.FAILED if lost else None)
