"""The other orchestrators: how many of their calls wait. Each answers for itself; who does not answer in time is left out and counted."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable

import grpc
import grpc.aio

from orchestrator.discovery import Endpoint, Lookups, Watch, sources
from orchestrator.scaling.signals import Key
from specdec.runtime.channels import open_channel
from specdec.v1 import scaling_pb2, scaling_pb2_grpc

ASK_S = 1.0  # for one answer
FRESH_S = 0.5  # answers so old are told again, so that many who ask cost one question
MAX_SIBLINGS = 64
MOST_WAITING = 1 << 20  # of one sibling: what it says is believed within bounds
log = logging.getLogger(__name__)


class Siblings:
    """`failed` hears the kind of a look-up's failure, `silent` of each answer that did not come."""

    def __init__(
        self,
        entries: Iterable[str],
        orchestrator_id: str,
        *,
        poll_s: float,
        keep_s: float,
        failed: Callable[[str], None],
        silent: Callable[[], None],
    ) -> None:
        self._id, self._silent = orchestrator_id, silent
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._asking: asyncio.Task[dict[Key, int]] | None = None
        self._told: dict[Key, int] = {}
        self._told_s = -FRESH_S
        self._mute: set[str] = set()  # addresses whose silence was logged
        found = sources("orchestrator", tuple(entries), Lookups(), failed, poll_s=poll_s, keep_s=keep_s)
        self._watch = Watch("orchestrator", found, self._follow, failed)

    def run(self) -> None:
        """Needs a running loop."""
        self._follow(self._watch.known)
        self._watch.run()

    async def close(self) -> None:
        await self._watch.close()
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
        self._follow(frozenset())
        await asyncio.gather(*self._closing, return_exceptions=True)

    async def waiting(self) -> dict[Key, int]:
        """Calls of the others that wait, by pool; at most FRESH_S old."""
        if time.monotonic() - self._told_s < FRESH_S:
            return self._told
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(), name="ask the other orchestrators")
        return await asyncio.shield(self._asking)  # one who asks may leave, the others still wait

    async def _ask_all(self) -> dict[Key, int]:
        answers = await asyncio.gather(*(self._ask(name, channel) for name, channel in list(self._channels.items())))
        by_id = {answer.orchestrator_id: answer for answer in answers if answer is not None}
        by_id.pop(self._id, None)
        told = Counter[Key]()
        for answer in by_id.values():
            for entry in answer.pools:
                told[Key(entry.pool, entry.pool_name)] += min(entry.waiting, MOST_WAITING)
        self._told, self._told_s = dict(told), time.monotonic()
        return self._told

    async def _ask(self, name: str, channel: grpc.aio.Channel) -> scaling_pb2.GetWaitingResponse | None:
        stub = scaling_pb2_grpc.ScalingServiceStub(channel)
        try:
            answer: scaling_pb2.GetWaitingResponse = await stub.GetWaiting(scaling_pb2.GetWaitingRequest(), timeout=ASK_S)
        except (grpc.aio.AioRpcError, grpc.aio.UsageError) as error:
            self._silent()
            if name not in self._mute:
                self._mute.add(name)
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
                log.warning("an orchestrator does not say how many calls wait", extra={"peer": name, "reason": reason})
            return None
        self._mute.discard(name)
        return answer

    def _follow(self, endpoints: Iterable[Endpoint]) -> None:
        there = sorted({endpoint.address for endpoint in endpoints if not endpoint.terminating})[:MAX_SIBLINGS]
        for name in set(self._channels) - set(there):
            self._mute.discard(name)
            closing = asyncio.create_task(self._channels.pop(name).close(), name=f"forget {name}")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
        for name in there:
            if name not in self._channels:
                self._channels[name] = open_channel(name, direct=True)
