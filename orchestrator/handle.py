"""The answers of one request on their way to a front: what was decided and not yet fetched, and how each ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Protocol

from orchestrator import events as ev
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.tally import Tally
from specdec.errors import DeadlineExceeded, SpecdecError

MAX_UNDELIVERED = 512  # decided tokens of an answer that may wait for a client before its generation is held


class Feed(Protocol):
    def feed(self, session_id: str, event: ev.Event | None) -> None: ...


class Wake:
    """An asyncio.Event for one task, which knows its loop: asking for the running one is a system call. Needs the running loop."""

    __slots__ = ("_loop", "_set", "_waiter")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._set = False
        self._waiter: asyncio.Future[None] | None = None

    def set(self) -> None:
        self._set = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def take(self) -> bool:
        """Whether it was set; it no longer is."""
        was, self._set = self._set, False
        return was

    def waiter(self) -> asyncio.Future[None]:
        """What to wait for while it is not set."""
        self._waiter = self._loop.create_future()
        return self._waiter


class Undelivered:
    """Of one answer. At most MAX_UNDELIVERED tokens and one round wait: beyond, the generation is told that its reader is behind, and
    once the reader has taken them, that it caught up; always in pairs. A reader that takes nothing for `max_unread_ms` while it is behind
    loses the answer: it keeps nobody's place, and finds what was decided and then the error should it come back. `wake` is set whenever
    there is something to take."""

    def __init__(self, driver: Feed, session_id: str, tally: Tally, wake: Wake, max_unread_ms: float = 60_000.0) -> None:
        self.session_id, self.tally = session_id, tally
        self._max_unread_ms = max_unread_ms
        self._patience: asyncio.TimerHandle | None = None  # runs while the reader is behind
        self.over = False  # nothing more will be taken
        self._driver, self._wake = driver, wake
        self._told: list[ev.Deliver] = []  # nearly always one
        self._num_waiting = 0  # tokens of them
        self._end: Ended | SpecdecError | None = None
        self._behind = False

    def deliver(self, decided: ev.Deliver) -> None:
        self._told.append(decided)
        self._num_waiting += len(decided.tokens)
        self._wake.set()
        if self._num_waiting > MAX_UNDELIVERED and not self._behind:
            self._behind = True
            self._patience = asyncio.get_running_loop().call_later(self._max_unread_ms / 1000, self._give_up)
            self._driver.feed(self.session_id, ev.ReaderBehind())

    def _give_up(self) -> None:
        self.end(
            DeadlineExceeded(
                f"nobody read for {self._max_unread_ms:.0f} ms while {self._num_waiting} tokens waited (SPECDEC_MAX_UNREAD_MS); "
                "resume with output_token_ids"
            )
        )
        self.cancel()

    def end(self, how: Ended | SpecdecError) -> None:
        """The first end is the one that is told."""
        if self._end is None:
            self._end = how
        self._stop_patience()
        self._wake.set()

    @property
    def waiting(self) -> list[int]:
        """Tokens that were decided and not taken."""
        return [token for told in self._told for token in told.tokens]

    @property
    def ending(self) -> Ended | SpecdecError | None:
        """None: it has not ended, or the client had all it wanted."""
        return self._end

    def take(self) -> TokensDecided | Ended | SpecdecError | None:
        """All tokens that wait, as one event; behind the last of them the end; None when there is neither."""
        if self._told:
            return self._take_tokens()
        self.over = self._end is not None
        return self._end

    def _take_tokens(self) -> TokensDecided:
        told, self._told, self._num_waiting = self._told, [], 0
        taken = _one(told[0]) if len(told) == 1 else _together(told)
        if self._end is not None:
            self._wake.set()
        self._stop_patience()
        if self._behind:
            self._behind = False
            self._driver.feed(self.session_id, ev.ReaderCaughtUp())
        return taken

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def cancel(self) -> None:
        self._stop_patience()
        self._driver.feed(self.session_id, ev.Cancelled())


def _one(told: ev.Deliver) -> TokensDecided:
    return TokensDecided(told.tokens, told.logprobs, told.origins, told.prompt_logprobs)


def _together(told: Sequence[ev.Deliver]) -> TokensDecided:
    return TokensDecided(
        tuple([token for one in told for token in one.tokens]),
        tuple([entry for one in told for entry in one.logprobs]),
        tuple([origin for one in told for origin in one.origins]),
        tuple([entry for one in told for entry in one.prompt_logprobs]),
    )


class Handle:
    """Iterate over it, or cancel it: events of all answers, each with its answer's index, those of one answer in order. What waits
    together comes out as one."""

    def __init__(self, answers: Sequence[Undelivered], wake: Wake) -> None:
        self._answers, self._wake = answers, wake

    def cancel(self) -> None:
        """Frees both pools. Harmless after the end."""
        for answer in reversed(self._answers):  # who waits for answer 0 must not start when it goes
            answer.cancel()

    def stop_here(self, index: int) -> GenerationStats:
        """The client has all it wants of this answer (a stop string was completed): frees both pools and returns the counts. Undelivered
        tokens are among the decided ones; no further event of this answer comes."""
        answer = self._answers[index]
        answer.over = True
        stats = answer.tally.stats()
        answer.cancel()
        return stats

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokensDecided | Ended]]:
        """Ends after the last answer's `Ended`; raises SpecdecError when one cannot go on, after everything that was decided."""
        failure: SpecdecError | None = None
        while failure is None and not all([answer.over for answer in self._answers]):
            while not self._wake.take():
                await self._wake.waiter()
            for index, answer in enumerate(self._answers):
                event = None if answer.over else answer.take()
                if isinstance(event, SpecdecError):
                    failure = failure or event
                elif event is not None:
                    yield index, event
        if failure is not None:
            raise failure
