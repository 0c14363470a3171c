"""Where the replicas of a pool are, as far as is known now. A source tells the full set whenever that changes; what it cannot find out it
does not tell: the last set stands. The pool's membership follows the union of its sources."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from orchestrator.discovery.dns import Dns
from orchestrator.discovery.kubernetes import Kubernetes
from orchestrator.discovery.lookup import Lookups
from orchestrator.discovery.names import Address, Name, Service, entries, pool_names
from orchestrator.discovery.source import Endpoint, Source, Static, Trouble
from orchestrator.discovery.watch import Watch

__all__ = ["Endpoint", "Lookups", "Source", "Watch", "pool_names", "sources"]


def sources(
    pool: str, texts: Iterable[str], lookups: Lookups, failed: Callable[[str], None], *, poll_s: float, keep_s: float
) -> list[Source]:
    """Of one pool's setting, whose entries have no problem. `failed` gets the kind of every failure."""
    found: list[Source] = []
    addresses = []
    for entry in entries(texts):
        match entry:
            case Address():
                addresses.append(entry)
            case Name(host):
                found.append(Dns(entry, lookups, Trouble(pool, host, failed), poll_s=poll_s, keep_s=keep_s))
            case Service(_, service):
                found.append(Kubernetes(entry, Trouble(pool, service, failed)))
    return [Static(addresses), *found]
