"""Events on their way to one stream. A reader that falls behind gets the newest state of each session, not its history: pieces that
continue each other are joined, anything else replaces what was waiting. Pure but for the wake-up."""

from __future__ import annotations

import asyncio

from specdec.errors import SpecdecError
from specdec.terms import DraftDistribution, DraftEvent, DraftLoad, Proposal

MAX_PENDING = 4096  # events that wait for a reader; a stream beyond this is closed
MAX_JOINED = 128  # tokens in one joined proposal


class Outbox:
    def __init__(self) -> None:
        self._events: dict[tuple[str, bool], DraftEvent] = {}
        self._load: DraftLoad | None = None
        self._ready = asyncio.Event()
        self._ended = False
        self._fault: SpecdecError | None = None

    @property
    def overflowing(self) -> bool:
        return len(self._events) > MAX_PENDING

    def put(self, event: DraftEvent) -> None:
        key = (event.session_id, isinstance(event, Proposal))
        older = self._events.pop(key, None)
        if isinstance(event, Proposal):
            event = joined(older, event) if isinstance(older, Proposal) else event
        else:
            self._events.pop((event.session_id, True), None)  # told before it ended: of no use any more
        self._events[key] = event
        self._ready.set()

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
        keys = list(self._events)[:most]
        events = [self._events.pop(key) for key in keys]
        load, self._load = self._load, None
        if not self._events and not self._ended:
            self._ready.clear()
        return events, load


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
