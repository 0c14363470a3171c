"""What a front needs of the core. The driver has this shape; so has the scripted one in tests/fakes_driver.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from orchestrator.events import Admitted
from orchestrator.output import GenerationEvent, GenerationStats
from specdec.terms import ModelInfo


class Running(Protocol):
    """One generation on its way. Events that wait for a slow reader come out as one; `Ended` is the last. Raises SpecdecError when the
    generation cannot go on."""

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    def cancel(self) -> None:
        """Frees both pools. Harmless at any time, also after the end."""

    def stop_here(self) -> GenerationStats:
        """Like cancel, for an answer that a stop string ended; returns the counts so far, undelivered tokens included."""


class Backend(Protocol):
    @property
    def draft_available(self) -> bool: ...

    async def model_info(self) -> ModelInfo:
        """The target's model; waits a while for a first target. Raises Unavailable."""

    def start(self, request: Admitted, request_id: str) -> Running:
        """Raises Overloaded, AlreadyExists or Unavailable."""
