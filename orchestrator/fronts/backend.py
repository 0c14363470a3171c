"""What a front needs of the core. The driver has this shape; so has the scripted one in tests/fakes_driver.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from orchestrator.events import Admitted
from orchestrator.output import GenerationEvent, GenerationStats
from specdec.terms import ModelInfo


class Running(Protocol):
    """The answers of one request on their way: events with the index of their answer. Those of one answer that wait for a slow reader
    come out as one; its `Ended` is its last. Raises SpecdecError when an answer cannot go on."""

    def __aiter__(self) -> AsyncIterator[tuple[int, GenerationEvent]]: ...

    def cancel(self) -> None:
        """Frees both pools of all answers. Harmless at any time, also after the end."""

    def stop_here(self, index: int) -> GenerationStats:
        """Like cancel, for one answer, which a stop string ended; returns the counts so far, undelivered tokens included."""


class Backend(Protocol):
    @property
    def draft_available(self) -> bool: ...

    async def model_info(self) -> ModelInfo:
        """The target's model; waits a while for a first target. Raises Unavailable."""

    def arriving(self, answers: int, size: int, priority: int, left_s: float | None) -> AbstractContextManager[float]:
        """Around all work on a request of so many answers and bytes before `start`: who has no place there costs nothing. `left_s` = time
        that its client still waits, None = for ever. Yields the deadline for `start`. Raises Overloaded, DeadlineExceeded."""

    def start(self, answers: Sequence[Admitted], request_id: str, deadline_ms: float) -> Running:
        """The answers of one request, all or none. Raises Overloaded, AlreadyExists, DeadlineExceeded or Unavailable."""
