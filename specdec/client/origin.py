"""Where an answer may go on: with the model that it began with. To another vocabulary its ids mean another text, and other weights would
decide something else behind them, without a word.

The orchestrator that an answer begins at is asked for its model beside the request, each one that the answer is to go on at before it. A
busy client does not ask twice as often for that: what an orchestrator told is believed for KNOWN_S, unless a call there fails. Where the
first one does not tell its model, names are compared alone.
"""

from __future__ import annotations

import asyncio
from typing import Any, Self

from specdec.client.answers import Started
from specdec.client.calls import UNARY_TIMEOUT_S, Client
from specdec.errors import DeadlineExceeded, Mismatch, SpecdecError, Unavailable
from specdec.terms import ModelInfo

KNOWN_S = 5.0


class Models:
    """What the orchestrators of one client serve."""

    def __init__(self) -> None:
        self._told: dict[Client, tuple[float, ModelInfo]] = {}  # when, loop time

    async def at(self, client: Client) -> ModelInfo:
        """As it is at this moment. Raises what a call does; Unavailable instead of DeadlineExceeded."""
        try:
            info = (await client.get_model_info()).info
        except DeadlineExceeded:
            raise Unavailable(f"{client.endpoint} does not tell its model in {UNARY_TIMEOUT_S:g} s; has it a target?") from None
        self._told[client] = asyncio.get_running_loop().time(), info
        return info

    async def lately(self, client: Client) -> ModelInfo | None:
        """As it was a moment ago. None where it does not tell."""
        told_s, info = self._told.get(client, (0.0, None))
        if info is not None and asyncio.get_running_loop().time() < told_s + KNOWN_S:
            return info
        try:
            return await self.at(client)
        except SpecdecError:
            return None

    def forget(self, client: Client) -> None:
        self._told.pop(client, None)


class Origin:
    """The model that one answer began with."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._asked: asyncio.Task[ModelInfo | None] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: Any) -> None:
        if self._asked is not None:
            self._asked.cancel()
            await asyncio.gather(self._asked, return_exceptions=True)

    async def admits(self, client: Client, first: Started | None) -> None:
        """Before each try. `first` = what the answer began with, None where it begins there. Raises Mismatch where it must not go on, and
        what asking does."""
        if first is None:
            await self.__aexit__()
            self._asked = asyncio.create_task(self._models.lately(client))
            return
        begun, here = await self.known(), await self._models.at(client)
        if begun.goes_on_at(here) if begun is not None else first.model == here.model:
            return
        what = "another model of that name" if first.model == here.model else f"an answer of {first.model!r}"
        remedy = "ask for a new answer, or name orchestrators of one model alone"
        raise Mismatch(f"{client.endpoint} serves {here.model!r}; {what} cannot go on there: {remedy}")

    async def known(self) -> ModelInfo | None:
        """Before anything is told: a model that is asked for later may be another one."""
        return None if self._asked is None else await self._asked
