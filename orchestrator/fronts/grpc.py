"""specdec.v1.GenerationService: what clients of every language call. Converts, calls, converts.

One request is one call: what its answers say (relay.py), then the status. An error is the status alone, after the text that was held
back. A client that goes away cancels the call, which frees both pools.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.answer import AnswerStream
from orchestrator.events import Admitted
from orchestrator.fronts.backend import Backend
from orchestrator.fronts.meters import Meters, RequestMeter
from orchestrator.fronts.relay import Context, Relay
from orchestrator.fronts.requests import MAX_DETOKENIZE_IDS, MAX_N, Defaults, parse, text_or_chat
from orchestrator.fronts.showing import Showing
from orchestrator.fronts.textwork import Prepared, TextWork, encode, is_sentence, prepare
from orchestrator.output import Ended, GenerationStats
from orchestrator.request import admit, check_ids, check_resumed, is_complete, others
from orchestrator.text import TextModel
from specdec import wire
from specdec.runtime.trace import current_traceparent
from specdec.terms import FinishReason, ModelInfo
from specdec.v1 import generation_pb2 as pb
from specdec.v1 import generation_pb2_grpc


@dataclass(frozen=True, slots=True)
class _Admitted:
    """A request that is complete and sound. `complete` = how it ends if it needs no target."""

    info: ModelInfo
    answers: tuple[Admitted, ...]
    streams: tuple[AnswerStream, ...]
    complete: Ended | GenerationStats | None


class GenerationServicer(generation_pb2_grpc.GenerationServiceServicer):
    """Handlers raise SpecdecError; the server's interceptor makes a status of it."""

    def __init__(
        self,
        backend: Backend,
        text: TextModel,
        defaults: Defaults,
        meters: Meters,
        unread_s: float = 120.0,
        show_metrics: bool = False,
    ) -> None:
        """A client that takes nothing for `unread_s` is hung up on where that harms nobody else. `show_metrics`: to all of them."""
        self._unread_s = unread_s
        self._showing = Showing(meters.telemetry.for_clients if show_metrics else None)
        self._backend, self._text, self._defaults, self._meters = backend, text, defaults, meters
        self._work, self._grammars = TextWork(), TextWork()

    def register(self, server: Any) -> None:
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(self, server)

    def close(self) -> None:
        self._work.close()
        self._grammars.close()
        self._showing.close()

    # Writes and does not yield: a generator that the call abandons would clean up whenever the collector likes.
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> None:
        with self._meters.request(current_traceparent.get(), chat=request.HasField("messages")) as meter:
            await self._generate(request, context, meter)

    async def _generate(self, message: pb.GenerateRequest, context: Context, meter: RequestMeter) -> None:
        """Its place first: an overloaded service has no time for the text of those that it turns away."""
        n = message.n if 1 <= message.n <= MAX_N else 1
        with self._backend.arriving(n, message.ByteSize(), message.priority, context.time_remaining()) as deadline_ms:
            admitted = await self._admitted(message, meter)
        request_id = message.request_id or secrets.token_hex(16)
        relay = Relay(context, meter, admitted.info, admitted.answers, admitted.streams, self._unread_s)
        if admitted.complete is not None:
            await relay.begin(request_id)
            await relay.end(admitted.complete)
            return
        running = self._backend.start(admitted.answers, request_id, deadline_ms)
        try:
            meter.admitted()
            await relay.begin(request_id)
            await relay.follow(running)
        finally:
            running.cancel()

    async def _admitted(self, message: pb.GenerateRequest, meter: RequestMeter) -> _Admitted:
        vocabulary = self._text.vocabulary
        request = parse(message, self._defaults, vocabulary.size, vocabulary.eos_ids)
        if request.output_ids:
            check_resumed(request.output_ids, await self._backend.model_info())
        prepared = await self._work.run(partial(prepare, self._text, request), message.ByteSize(), placed=True)
        if meter.keeps_content:
            meter.asked(_words(message))
        constrained = request.sampling.grammar is not None
        sentence = constrained and await self._grammars.run(partial(is_sentence, self._text, request))
        info = await self._backend.model_info()
        adaptive = self._defaults.adaptive if request.adaptive is None else request.adaptive
        first = admit(
            request,
            prepared.prompt,
            info,
            session_id=secrets.token_hex(8),
            seed=secrets.randbits(64),
            num_speculative_tokens=self._defaults.block_length(adaptive),
            adaptive=adaptive,
            traceparent=meter.span.traceparent,
        )
        answers = (first, *others(first, [secrets.token_hex(8) for _ in range(request.n - 1)]))
        return _Admitted(info, answers, prepared.streams, _complete(prepared, sentence, first))

    async def GetModelInfo(self, request: pb.GetModelInfoRequest, context: Context) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            info=wire.model_info_to_wire(await self._backend.model_info()),
            draft_available=self._backend.draft_available,
            num_speculative_tokens=self._defaults.block_length(self._defaults.adaptive),
        )

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        prompt = text_or_chat(request)
        special = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._work.run(partial(encode, self._text, prompt, special), request.ByteSize()))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        wire.bounded(request.token_ids, MAX_DETOKENIZE_IDS, "token_ids", "MAX_DETOKENIZE_IDS")
        ids = tuple(request.token_ids)
        check_ids(ids, self._text.vocabulary.size, "token_ids")
        decode = partial(self._text.decode, ids, request.skip_special_tokens)
        return pb.DetokenizeResponse(text=await self._work.run(decode, request.ByteSize()))

    async def GetMetrics(self, request: pb.GetMetricsRequest, context: Context) -> pb.GetMetricsResponse:
        return pb.GetMetricsResponse(text=await self._showing.text())


def _words(message: pb.GenerateRequest) -> str:
    """Of the prompt, for a span that keeps content."""
    if message.HasField("messages"):
        return "\n".join(f"{said.role}: {said.content}" for said in message.messages.messages)
    return message.text or f"{len(message.token_ids.ids)} token ids"


def _complete(prepared: Prepared, sentence: bool, admitted: Admitted) -> Ended | GenerationStats | None:
    """How answers end that need no target: a resumed one that had only its last message to come, a sentence that the grammar lets nothing
    follow, a prompt as long as the window. Log-probabilities of the prompt are not told again: they came with the first delta."""
    if prepared.streams[0].stopped is not None:
        return GenerationStats()
    if sentence:
        return Ended(FinishReason.STOP, None, GenerationStats())
    if is_complete(admitted):
        return Ended(FinishReason.LENGTH, None, GenerationStats())
    return None
