"""Where the replicas of a pool are, as far as is known now. A source tells the full set whenever that changes; what it cannot find out it
does not tell: the last set stands. The pool's membership follows the union of its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.discovery.dns import Dns
from orchestrator.discovery.lookup import Lookups
from orchestrator.discovery.names import parse, problem_of
from orchestrator.discovery.source import Endpoint, Source, Static, Trouble
from orchestrator.discovery.watch import Watch

__all__ = ["Endpoint", "Lookups", "Source", "Watch", "problem_of", "sources"]


def sources(
    pool: str, entries: Iterable[str], lookups: Lookups, failed: Callable[[str], None], *, poll_s: float, keep_s: float
) -> list[Source]:
    """Of one pool's setting, whose entries have no problem. `failed` gets the kind of every failure."""
    addresses, names = parse(entries)
    named = [Dns(name, lookups, Trouble(pool, name.host, failed), poll_s=poll_s, keep_s=keep_s) for name in names]
    return [Static(addresses), *named]
