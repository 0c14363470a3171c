"""A client of several orchestrators: an answer that breaks off on one goes on exactly on the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, Unpack

from specdec.client.answers import Event
from specdec.client.calls import GENERATE_TIMEOUT_S, Client
from specdec.client.credentials import OPEN, Credentials
from specdec.client.origin import Models, Origin
from specdec.client.requests import Options, Prompt
from specdec.client.resuming import Resuming
from specdec.errors import InvalidRequest, Mismatch, Overloaded, Unavailable
from specdec.terms import SamplingParams

FIRST_PAUSE_S, LAST_PAUSE_S = 0.1, 2.0  # between two rounds through all endpoints
MAX_REASONS = 3  # that are told, of endpoints where nobody answers


class FailoverClient(Client):
    """Used as Client is.

        async with FailoverClient(["10.0.0.1:50051", "10.0.0.2:50051"]) as client:
            answer = await client.complete("Once upon a time", SamplingParams(max_tokens=64))

    An orchestrator that is gone, stops, or has no target left is left for the next; no token is repeated or missing. Events are those of
    one answer: one Started, one Finished, whose usage counts all tokens and whose statistics are sums over all parts (legs.py says what a
    part that broke off cannot tell). With several answers those that are unfinished go on one after the other. A connection that is
    silent for 40 s (keepalive) counts as gone. An answer goes on with the model that it began with alone (origin.py): an orchestrator that
    serves another one is left for the next.

    `retry_s`: for so long without any news all endpoints are tried again and again; then the last error is raised, Unavailable or
    Overloaded, or Mismatch where somebody serves another model. `connect` makes the client of one endpoint.
    """

    def __init__(self, endpoints: Sequence[str], *, retry_s: float = 10.0, connect: Callable[[str], Client] = Client) -> None:
        if isinstance(endpoints, str) or not endpoints:
            raise InvalidRequest("endpoints", f"must be a list of host:port with at least one entry, got {endpoints!r}")
        super().__init__(", ".join(endpoints))
        self._clients, self._retry_s = [connect(endpoint) for endpoint in endpoints], retry_s
        self._at = 0  # who answered last
        self._models = Models()

    async def close(self) -> None:
        await asyncio.gather(*(client.close() for client in self._clients))

    async def wait_ready(self, timeout_s: float) -> None:
        """Until one is. Raises Unavailable."""
        reasons: list[str] = []
        waits = [asyncio.create_task(client.wait_ready(timeout_s)) for client in self._clients]
        try:
            for done in asyncio.as_completed(waits):
                try:
                    return await done
                except Unavailable as error:
                    reasons.append(str(error))
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        told = "; ".join(sorted(reasons)[:MAX_REASONS])
        raise Unavailable(f"{told} … ({len(reasons)} endpoints)" if len(reasons) > MAX_REASONS else told)

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
        traceparent: str = "",
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event]:
        now = asyncio.get_running_loop().time
        resuming, until, tries = Resuming(sampling, options), now() + timeout_s, _Tries(self._retry_s, len(self._clients))
        async with Origin(self._models) as origin:
            while not resuming.over:
                client, told, (params, rest) = self._clients[self._at], resuming.events, resuming.next()
                try:
                    await origin.admits(client, resuming.first)
                    left_s = max(0.001, until - now())
                    async with contextlib.aclosing(
                        client.generate(prompt, params, timeout_s=left_s, traceparent=traceparent, **rest)
                    ) as events:
                        async for event in events:
                            await origin.known()
                            for news in resuming.take(event):
                                yield news
                except (Unavailable, Overloaded, Mismatch) as error:
                    self._models.forget(client)
                    if resuming.events > told:
                        tries.progress()
                    pause_s = tries.failed(error, now())
                    if pause_s is None or now() + pause_s >= until:
                        for news in resuming.gives_up():
                            yield news
                        raise
                    self._at = (self._at + 1) % len(self._clients)
                    await asyncio.sleep(pause_s)

    async def _unary(self, method: str, request: Any) -> Any:
        for last in (*[False] * (len(self._clients) - 1), True):
            try:
                return await self._clients[self._at]._unary(method, request)
            except Unavailable:
                self._at = (self._at + 1) % len(self._clients)
                if last:
                    raise


class _Tries:
    """How long to go on trying. Pure: time is an argument."""

    def __init__(self, retry_s: float, endpoints: int) -> None:
        self._retry_s, self._endpoints = retry_s, endpoints
        self._since_s: float | None = None  # of the first failure in a row
        self._failed = self._strangers = 0

    def progress(self) -> None:
        self._since_s, self._failed, self._strangers = None, 0, 0

    def failed(self, error: Unavailable | Overloaded | Mismatch, now_s: float) -> float | None:
        """Seconds until the next endpoint is tried; None: it is over, also when each serves another model. Nobody pauses before all were
        tried once."""
        self._failed += 1
        self._strangers = self._strangers + 1 if isinstance(error, Mismatch) else 0
        if self._strangers == self._endpoints:
            return None
        self._since_s = now_s if self._since_s is None else self._since_s
        rounds = self._failed // self._endpoints
        if self._failed % self._endpoints:
            return 0.0
        pause_s = min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** (rounds - 1))
        if isinstance(error, Overloaded):
            pause_s = max(pause_s, error.retry_after_ms / 1000)
        return pause_s if now_s + pause_s < self._since_s + self._retry_s else None


def client_of(endpoints: str, credentials: Credentials = OPEN) -> Client:
    """The client of `host:port`, or of several with commas between them. Raises InvalidRequest."""
    names = endpoints_of(endpoints)
    if len(names) == 1:
        return Client(names[0], credentials)
    return FailoverClient(names, connect=lambda name: Client(name, credentials))


def endpoints_of(endpoints: str) -> list[str]:
    """Each `host:port` of a list with commas. Raises InvalidRequest."""
    names = [name.strip() for name in endpoints.split(",")]
    for name in names:
        if name.startswith(("http://", "https://")):
            raise InvalidRequest("endpoint", f"must be host:port without {name.partition('/')[0]}//, got {endpoints!r}")
        host, _, port = name.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequest("endpoint", f"must be host:port, or several with commas between them, got {endpoints!r}")
    return names
