"""One call's answers on their way to the client: a first message, deltas and one last message per answer, told apart by their index.

Everything is written by one task, one message after the other: writing waits for the client, and meanwhile each answer is held by itself
when too much of it waits. When an answer cannot go on, the call ends with its status once the text that was held back of the others
is out.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import grpc.aio

from orchestrator.answer import AnswerStream, Delta, Finished
from orchestrator.events import Admitted
from orchestrator.fronts import responses
from orchestrator.fronts.backend import Running
from orchestrator.fronts.meters import RequestMeter
from orchestrator.output import Ended, GenerationEvent, GenerationStats
from specdec.errors import InternalFault, SpecdecError
from specdec.runtime.hangup import waits
from specdec.terms import ModelInfo

Context = grpc.aio.ServicerContext[Any, Any]


class Relay:
    """`answers` and `streams` are in the order of their indices. A message may wait `unread_s` for its reader."""

    def __init__(
        self,
        context: Context,
        meter: RequestMeter,
        info: ModelInfo,
        answers: Sequence[Admitted],
        streams: Sequence[AnswerStream],
        unread_s: float,
    ) -> None:
        self._context, self._meter, self._info, self._unread_s = context, meter, info, unread_s
        self._answers = answers
        self._open = dict(enumerate(streams))  # answers without a last message

    async def _write(self, message: Any) -> None:
        """Whoever takes nothing for so long is hung up on, if that can be done."""
        over = waits(self._unread_s)
        try:
            await self._context.write(message)
        finally:
            over()

    async def begin(self, request_id: str) -> None:
        for index, answer in enumerate(self._answers):
            await self._write(responses.started(index, answer, request_id, self._info))

    async def end(self, how: Ended | GenerationStats) -> None:
        """All answers are complete as they are: nobody was asked for tokens."""
        for index, stream in list(self._open.items()):
            await self._last(index, *stream.finish(how))

    async def follow(self, running: Running) -> None:
        """Until every answer has its last message. Raises what an answer failed with."""
        events = aiter(running)
        try:
            async for index, event in events:
                await self._pass_on(running, index, event)
        except SpecdecError:
            for index, stream in self._open.items():
                if text := stream.flush():
                    await self._write(responses.delta(index, Delta(text=text)))
            raise
        finally:
            if isinstance(events, AsyncGenerator):
                await events.aclose()
        if self._open:
            raise InternalFault("the generation broke off without an end")

    async def _pass_on(self, running: Running, index: int, event: GenerationEvent) -> None:
        stream = self._open[index]
        if isinstance(event, Ended):
            return await self._last(index, *stream.finish(event))
        began = self._meter.now()
        piece = stream.tokens(event)
        self._meter.tokens(len(piece.token_ids), index, began)
        self._meter.said(piece.text, index)
        await self._write(responses.delta(index, piece))
        if stream.stopped is not None:
            await self._last(index, *stream.finish(running.stop_here(index)))

    async def _last(self, index: int, rest: Delta, finished: Finished) -> None:
        del self._open[index]
        self._meter.said(rest.text, index)
        if rest.text:
            await self._write(responses.delta(index, rest))
        await self._write(responses.finished(index, finished, self._answers[index], self._info))
        self._meter.finished(finished.usage)
