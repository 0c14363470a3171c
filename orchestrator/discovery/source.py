"""What every kind of discovery is, and the simplest one."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from orchestrator.discovery.names import DEFAULT_POOL, Address

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`address` = host:port. `uid` names the process behind it where the source knows that: another one under the same address is another
    replica. A `terminating` one finishes what it holds and takes nothing more. `pool_name` = which of the pools of its kind it is in."""

    address: str
    uid: str = ""
    terminating: bool = False
    pool_name: str = DEFAULT_POOL


class Trouble:
    """What one source cannot find out: every failure is counted, a streak of failures of one kind is logged once, and so is its end."""

    def __init__(self, pool: str, subject: str, count: Callable[[str], None]) -> None:
        """`count` gets the kind: one of a small closed set of words, a metric's label."""
        self._pool, self._subject, self._count = pool, subject, count
        self._kind = ""

    def failed(self, kind: str, what: str, *, stands: bool = True) -> None:
        """`stands`: what was known counts all the same."""
        self._count(kind)
        if kind != self._kind:
            message = "discovery fails: what was known stands" if stands else "discovery finds nothing"
            log.warning(message, extra={"pool": self._pool, "entry": self._subject, "reason": what})
        self._kind = kind

    def over(self) -> None:
        if self._kind:
            log.info("discovery answers again", extra={"pool": self._pool, "entry": self._subject})
        self._kind = ""


class Source(Protocol):
    @property
    def known(self) -> frozenset[Endpoint]:
        """The last set; at the start what needs no asking."""

    @property
    def answered_s(self) -> float | None:
        """When whoever knows answered last, by time.monotonic; the start until then. None: nobody is asked."""

    def changes(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Full sets, each other than the one before, the first other than what was `known`. Ends when there can be no change. Raises
        nothing that another try could mend: that is its Trouble."""


class Static:
    """Addresses that are written down."""

    def __init__(self, entries: Iterable[Address]) -> None:
        self.known = frozenset(Endpoint(entry.address, pool_name=entry.pool_name) for entry in entries)
        self.answered_s: float | None = None

    async def changes(self) -> AsyncIterator[frozenset[Endpoint]]:
        """None."""
        for never in frozenset[frozenset[Endpoint]]():
            yield never
