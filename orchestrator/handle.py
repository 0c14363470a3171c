"""One answer on its way to a front: what was decided and not yet fetched, and how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Protocol

from orchestrator import events as ev
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.tally import Tally
from specdec import terms
from specdec.errors import SpecdecError

MAX_UNDELIVERED = 512  # decided tokens that may wait for a client before its generation is held


class Feed(Protocol):
    def feed(self, session_id: str, event: ev.Event | None) -> None: ...


class Handle:
    """Iterate over it, or cancel it. Events that wait together come out as one.

    At most MAX_UNDELIVERED tokens and one round wait: beyond, the generation is told that its reader is behind, and once the reader
    has taken them, that it caught up; always in pairs.
    """

    def __init__(self, driver: Feed, session_id: str, tally: Tally) -> None:
        self.session_id = session_id
        self._driver, self._tally = driver, tally
        self._tokens: list[int] = []
        self._logprobs: list[terms.TokenLogprobs] = []
        self._origins: list[terms.Origin] = []
        self._end: Ended | SpecdecError | None = None
        self._wake = asyncio.Event()
        self._behind = False

    def cancel(self) -> None:
        """Frees both pools. Harmless after the end."""
        self._driver.feed(self.session_id, ev.Cancelled())

    def stop_here(self) -> GenerationStats:
        """The client has all it wants (a stop string was completed): frees both pools and returns the counts. Undelivered tokens are
        among the decided ones."""
        stats = self._tally.stats()
        self.cancel()
        return stats

    async def __aiter__(self) -> AsyncIterator[TokensDecided | Ended]:
        """Ends after `Ended`; raises SpecdecError when the answer cannot go on, after everything that was decided."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._tokens:
                yield self._take()
            if isinstance(self._end, SpecdecError):
                raise self._end
            if self._end is not None:
                yield self._end
                return

    def _take(self) -> TokensDecided:
        taken = TokensDecided(tuple(self._tokens), tuple(self._logprobs), tuple(self._origins))
        self._tokens, self._logprobs, self._origins = [], [], []
        if self._behind:
            self._behind = False
            self._driver.feed(self.session_id, ev.ReaderCaughtUp())
        return taken

    def deliver(self, decided: ev.Deliver) -> None:
        self._tokens += decided.tokens
        self._logprobs += decided.logprobs
        self._origins += decided.origins
        self._wake.set()
        if len(self._tokens) > MAX_UNDELIVERED and not self._behind:
            self._behind = True
            self._driver.feed(self.session_id, ev.ReaderBehind())

    def end(self, how: Ended | SpecdecError) -> None:
        """The first end is the one that is told."""
        if self._end is None:
            self._end = how
        self._wake.set()
