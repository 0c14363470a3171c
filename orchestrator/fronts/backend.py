"""What a front needs of the core. The driver has this shape; so has the scripted one in tests/fakes_driver.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
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

    def start(self, answers: Sequence[Admitted], request_id: str) -> Running:
        """The answers of one request, all or none. Raises Overloaded, AlreadyExists or Unavailable."""
