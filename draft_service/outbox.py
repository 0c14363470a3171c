"""Events on their way to one stream. A reader that falls behind gets the newest state of each session, not its history: pieces that
continue each other are joined, and what hangs on a chain that is no more is dropped. Pure but for the wake-up.

Order is kept: the chain's token arrives before the guesses at its place (tree.py, rule 4).
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from specdec.errors import SpecdecError
from specdec.terms import DraftDistribution, DraftEvent, DraftLoad, Proposal

MAX_PENDING = 4096  # events that wait for a reader; a stream beyond this is closed
MAX_JOINED = 128  # tokens in one joined proposal


class Told(NamedTuple):
    """A proposal, the line that it continues, and the line that is its session's chain. `line` == `chain`: of the chain itself."""

    proposal: Proposal
    line: int = 0
    chain: int = 0


class Outbox:
    def __init__(self) -> None:
        self._events: dict[str, dict[int, Told | DraftEvent]] = {}  # by session and line; -1 = what is no proposal
        self._load: DraftLoad | None = None
        self._ready = asyncio.Event()
        self._ended = False
        self._fault: SpecdecError | None = None

    @property
    def overflowing(self) -> bool:
        return sum(map(len, self._events.values())) > MAX_PENDING

    @property
    def ended(self) -> bool:
        return self._ended

    def put(self, event: Told | DraftEvent) -> None:
        event = Told(event) if isinstance(event, Proposal) else event
        if isinstance(event, Told):
            self._put(event, self._events.setdefault(event.proposal.session_id, {}))
        else:
            self._events[event.session_id] = {-1: event}  # what was told before it ended is of no use any more
        self._ready.set()

    def _put(self, event: Told, waiting: dict[int, Told | DraftEvent]) -> None:
        for line, other in list(waiting.items()):
            if isinstance(other, Told) and not _together(other, event):
                del waiting[line]
        older = waiting.get(event.line)
        if isinstance(older, Told):
            proposal = joined(older.proposal, event.proposal)
            if proposal is event.proposal:  # else it stays where it is, in front of what was told behind it
                del waiting[event.line]
            event = event._replace(proposal=proposal)
        waiting[event.line] = event

    def put_load(self, load: DraftLoad) -> None:
        self._load = load
        self._ready.set()

    def end(self, fault: SpecdecError | None = None) -> None:
        """Nothing more is told; what waits is lost. `fault` = how the stream ends, None = well."""
        self._ended, self._fault = True, self._fault or fault
        self._ready.set()

    async def wait(self) -> bool:
        """True when there is something to tell, False at the end. Raises the fault the stream ends with."""
        await self._ready.wait()
        if self._fault is not None:
            raise self._fault
        return not self._ended

    def take(self, most: int) -> tuple[list[DraftEvent], DraftLoad | None]:
        """At most `most` events, oldest first, and the newest load report."""
        events: list[DraftEvent] = []
        for session_id in list(self._events):
            waiting = self._events[session_id]
            for line in list(waiting)[: most - len(events)]:
                event = waiting.pop(line)
                events.append(event.proposal if isinstance(event, Told) else event)
            if waiting:
                break
            del self._events[session_id]
        load, self._load = self._load, None
        if not self._events and not self._ended:
            self._ready.clear()
        return events, load


def _together(older: Told, newer: Told) -> bool:
    """Whether both may wait: they hang on the same chain, or the older one has become the chain."""
    return older.proposal.epoch == newer.proposal.epoch and newer.chain in (older.chain, older.line)


def joined(older: Proposal, newer: Proposal) -> Proposal:
    """One proposal when `newer` continues `older`, else `newer`."""
    continues = older.epoch == newer.epoch and newer.prefix_length == older.prefix_length + len(older.tokens)
    if not continues or len(older.tokens) + len(newer.tokens) > MAX_JOINED:
        return newer
    told = (*_padded(older), *_padded(newer)) if older.distributions or newer.distributions else ()
    return Proposal(
        newer.session_id,
        newer.epoch,
        older.prefix_length,
        older.prefix_hash,
        older.tokens + newer.tokens,
        older.confidences + newer.confidences,
        told,
    )


def _padded(proposal: Proposal) -> tuple[DraftDistribution | None, ...]:
    return proposal.distributions or (None,) * len(proposal.tokens)
