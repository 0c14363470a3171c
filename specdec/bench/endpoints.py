"""What orchestrators say of themselves through the endpoints of their clients. An endpoint may be a balancer's.

One connection an endpoint stays open from look to look, since the next one might lead to another orchestrator. Where a balancer deals out
calls instead, the endpoint is asked again until the one from the look before answers; if it does not come, whoever did is `strange`: what
it has counted is not from between the two looks.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.bench.scrape import Samples, parse
from specdec.client import Client, Credentials, endpoints_of
from specdec.errors import DeadlineExceeded, InvalidRequest, Overloaded, PermissionDenied, Unauthenticated, Unavailable

MOST_CALLS = 16  # of one look at one endpoint
SAME = 4  # answers of one stranger after which no other is expected: the one from before is gone


@dataclass(frozen=True, slots=True)
class Told:
    """By endpoint; None = nobody answers there, and `reasons` says why."""

    samples: Mapping[str, Samples | None]
    reasons: Mapping[str, str]
    strange: frozenset[str]


class Endpoints:
    """`endpoints` = host:port, several with commas. Make and use it inside one event loop. Raises InvalidRequest."""

    def __init__(self, endpoints: str, credentials: Credentials) -> None:
        try:
            names = endpoints_of(endpoints)
        except InvalidRequest as error:
            raise InvalidRequest("--endpoint", error.remedy) from None
        if doubled := [name for name, times in Counter(names).items() if times > 1]:
            raise InvalidRequest("--endpoint", f"{doubled[0]} is named twice; its figures would count twice")
        self._clients = {name: Client(name, credentials) for name in names}
        self._known: dict[str, str] = {}  # endpoint → the process that answered

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients.values()))

    async def look(self) -> Told:
        """Raises PermissionDenied and whatever else asking again will not change."""
        found = await asyncio.gather(*map(self._one, self._clients))
        told: dict[str, Samples | None] = {}
        reasons: dict[str, str] = {}
        strange, owners = set[str](), dict[str, str]()
        for name, samples in zip(self._clients, found, strict=True):
            told[name] = None if isinstance(samples, str) else samples
            if isinstance(samples, str):
                reasons[name] = samples
                continue
            if (process := process_of(samples)) in owners and process:
                raise InvalidRequest("--endpoint", f"{owners[process]} and {name} lead to the same orchestrator, which would count twice")
            strange |= {name} if self._known.get(name, process) != process else set()
            self._known[name] = process
            owners[process] = name
        return Told(told, reasons, frozenset(strange))

    async def _one(self, name: str) -> Samples | str:
        """What is told there, or why nothing is."""
        known, strangers = self._known.get(name), Counter[str]()
        try:
            for _ in range(MOST_CALLS):
                samples = parse(await self._clients[name].get_metrics())
                process = process_of(samples)
                strangers[process] += 1
                if known in (None, process) or strangers[process] == SAME:
                    break
            return samples
        except (Unavailable, DeadlineExceeded, Overloaded) as error:
            return str(error).removeprefix(f"{name}: ")
        except (PermissionDenied, Unauthenticated) as error:
            raise type(error)(f"{name}: {error}") from error


def process_of(samples: Samples) -> str:
    """The id of the process that tells; empty where it does not say."""
    told = (dict(labels).get("service_instance_id", "") for name, labels in samples if name == "target_info")
    return next(told, "")
