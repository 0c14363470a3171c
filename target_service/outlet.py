"""What waits to be written to one stream. Bounded: the engine never waits for a reader, a reader that is too slow loses its stream."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specdec.errors import Overloaded, SpecdecError
from specdec.terms import Answer, Result

RETRY_AFTER_MS = 1000
MAX_BATCH_LOGPROBS = 1_000_000  # of prompts, alternatives included: some 10 MB, far below the limit of a message


@dataclass(frozen=True, slots=True)
class Batch:
    """Answers that belong into one message; `rows` and `engine_us` of the engine step behind them, 0 without one."""

    answers: Sequence[Answer] = ()
    rows: int = 0
    engine_us: int = 0


def packed(answers: Sequence[Answer], rows: int, engine_us: int) -> Iterator[Batch]:
    """The answers in order, in one batch unless long prompts' log-probabilities come together. A single answer is never too long."""
    batch: list[Answer] = []
    size = 0
    for answer in answers:
        entries = answer.outcome.prompt_logprobs if isinstance(answer.outcome, Result) else ()
        more = len(entries) * (1 + len(entries[0].top_ids)) if entries else 0
        if batch and size + more > MAX_BATCH_LOGPROBS:
            yield Batch(batch, rows, engine_us)
            batch, size = [], 0
        batch.append(answer)
        size += more
    yield Batch(batch, rows, engine_us)


class Outlet:
    """`offer` never blocks; one writer calls `take`. `caught_up` is called when the reader is no longer behind."""

    def __init__(self, max_unread: int, caught_up: Callable[[], None] = lambda: None) -> None:
        self._max_unread, self._caught_up = max_unread, caught_up
        self._batches: collections.deque[Batch] = collections.deque()
        self._unread = 0
        self._wake = asyncio.Event()
        self._ended = False
        self._fault: SpecdecError | None = None
        self._failed = asyncio.Event()

    @property
    def behind(self) -> bool:
        """Half of what may be unread is. What nobody asked for waits then: results of Steps are as many as their sessions, the others are
        not, and a reader that is late for a moment keeps its stream."""
        return 2 * self._unread > self._max_unread

    def offer(self, batch: Batch) -> None:
        self._unread += len(batch.answers)
        if self._unread > self._max_unread:
            self.fail(
                Overloaded(f"more than {self._max_unread} results are unread; read faster, then open the stream again", RETRY_AFTER_MS)
            )
        if self._fault is None:
            self._batches.append(batch)
        self._wake.set()

    def fail(self, fault: SpecdecError) -> None:
        """What waits is lost; the stream ends with this status."""
        self._fault = self._fault or fault
        self._batches.clear()
        self._failed.set()
        self._wake.set()

    async def failed(self) -> None:
        """Returns when the stream has a fault, although its writer may still be waiting for the reader."""
        await self._failed.wait()

    def end(self) -> None:
        """The stream ends once everything is written."""
        self._ended = True
        self._wake.set()

    async def take(self, until: float) -> Batch | None:
        """The next batch; an empty one at loop time `until`; None at the end. Raises the fault the stream ended with."""
        while True:
            if self._fault is not None:
                raise self._fault
            if self._batches:
                batch, was_behind = self._batches.popleft(), self.behind
                self._unread -= len(batch.answers)
                if was_behind and not self.behind:
                    self._caught_up()
                return batch
            if self._ended:
                return None
            self._wake.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._wake.wait()
            except TimeoutError:
                return Batch()
