"""specdec.v1.GenerationService: what clients of every language call. Converts, calls, converts.

One answer is one call: a first message, deltas, one last message, then the status. An error is the status alone, after the text that
was held back. Writing waits for the client (the generation is held when too much waits), and a client that goes away cancels the call,
which frees both pools.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import grpc.aio

from orchestrator.answer import AnswerStream, Delta, Finished
from orchestrator.events import Admitted
from orchestrator.fronts import responses
from orchestrator.fronts.backend import Backend, Running
from orchestrator.fronts.meters import Meters, RequestMeter
from orchestrator.fronts.requests import MAX_DETOKENIZE_IDS, Defaults, parse, text_or_chat
from orchestrator.fronts.textwork import TextWork, encode, prepare
from orchestrator.output import Ended, GenerationStats
from orchestrator.request import admit, check_ids, is_complete
from orchestrator.text import TextModel
from specdec import wire
from specdec.errors import InternalFault, SpecdecError
from specdec.runtime.trace import current_traceparent
from specdec.terms import FinishReason, ModelInfo
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Handlers raise SpecdecError; the server's interceptor makes a status of it."""

    def __init__(self, backend: Backend, text: TextModel, defaults: Defaults, meters: Meters) -> None:
        self._backend, self._text, self._defaults, self._meters = backend, text, defaults, meters
        self._work = TextWork()

    def register(self, server: Any) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def close(self) -> None:
        self._work.close()

    # Writes and does not yield: a generator that the call abandons would clean up whenever the collector likes.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._meters.request(current_traceparent.get(), chat=request.HasField("messages")) as meter:
            await self._generate(request, context, meter)

    async def _generate(self, message: pb.GenerateRequest, context: Context, meter: RequestMeter) -> None:
        vocabulary = self._text.vocabulary
        request = parse(message, self._defaults, vocabulary.size, vocabulary.eos_ids)
        prompt, answer = await self._work.run(partial(prepare, self._text, request))
        info = await self._backend.model_info()
        request_id = request.request_id or secrets.token_hex(16)
        admitted = admit(
            request,
            prompt,
            info,
            session_id=secrets.token_hex(8),
            seed=secrets.randbits(64),
            num_speculative_tokens=self._defaults.num_speculative_tokens,
            traceparent=meter.span.traceparent,
        )
        started = responses.started(admitted, request_id, info)
        if (complete := _complete(answer, admitted)) is not None:
            await context.write(started)
            await _last(context, *complete, admitted, info)
            return
        running = self._backend.start(admitted, request_id)
        try:
            meter.admitted()
            await context.write(started)
            await _last(context, *await _relay(running, answer, context, meter), admitted, info)
        finally:
            running.cancel()

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            info=wire.model_info_to_wire(await self._backend.model_info()),
            draft_available=self._backend.draft_available,
            num_speculative_tokens=self._defaults.num_speculative_tokens,
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        prompt = text_or_chat(request)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._work.run(partial(encode, self._text, prompt, special)))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        wire.bounded(request.token_ids, MAX_DETOKENIZE_IDS, "token_ids", "MAX_DETOKENIZE_IDS")
        ids = tuple(request.token_ids)
        check_ids(ids, self._text.vocabulary.size, "token_ids")
        return pb.DetokenizeResponse(text=await self._work.run(partial(self._text.decode, ids, request.skip_special_tokens)))


def _complete(answer: AnswerStream, admitted: Admitted) -> tuple[Delta, Finished] | None:
    """The end of an answer that needs no target: a resumed one that had only its last message to come, or a prompt as long as the
    window."""
    if answer.stopped is not None:
        return answer.finish(GenerationStats())
    if is_complete(admitted):
        return answer.finish(Ended(FinishReason.LENGTH, None, GenerationStats()))
    return None


async def _relay(running: Running, answer: AnswerStream, context: Context, meter: RequestMeter) -> tuple[Delta, Finished]:
    """Passes deltas on until the answer ends; returns what the last messages say."""
    events = aiter(running)
    try:
        async for event in events:
            if isinstance(event, Ended):
                return answer.finish(event)
            piece = answer.tokens(event)
            meter.tokens(len(piece.token_ids))
            await context.write(responses.delta(piece))
            if answer.stopped is not None:
                return answer.finish(running.stop_here())
    except SpecdecError:
        if text := answer.flush():
            await context.write(responses.delta(Delta(text=text)))
        raise
    finally:
        if isinstance(events, AsyncGenerator):
            await events.aclose()
    raise InternalFault("the generation broke off without an end")


async def _last(context: Context, rest: Delta, finished: Finished, admitted: Admitted, info: ModelInfo) -> None:
    if rest.text:
        await context.write(responses.delta(rest))
    await context.write(responses.finished(finished, admitted, info))
