"""What a Python user imports.

    async with Client("127.0.0.1:50051") as client:
        async for event in client.generate("Once upon a time", SamplingParams(max_tokens=64), seed=7):
            if isinstance(event, Delta):
                print(event.text, end="")

    with SyncClient("127.0.0.1:50051") as client:
        print(client.complete("Once upon a time", SamplingParams(max_tokens=64)).text)

A prompt is text, token ids, or a chat: a list of {"role", "content"}. Failures are raised as specdec.errors. Abandoning the iterator
cancels the generation and frees its room on the servers.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
import grpc.aio

from specdec import status, terms, wire
from specdec.errors import InvalidRequest, ProtocolFault, Unavailable
from specdec.runtime.channels import open_channel
from specdec.terms import FinishReason, ModelInfo, Origin, SamplingParams, TokenLogprobs
from specdec.v1 import generation_pb2, generation_pb2_grpc

UNARY_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 600.0

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int = 0
    completion_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    discarded_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SpeculativeStats:
    mean_acceptance_length: float = 0.0
    draft_acceptance_rate: float = 0.0
    acceptance_histogram: tuple[int, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    num_spec_steps: int = 0
    num_spec_tokens: int = 0
    hit_rate: float = 0.0
    num_rounds: int = 0
    num_replacements: int = 0


@dataclass(frozen=True, slots=True)
class EffectiveSettings:
    """What was in force, defaults filled in."""

    sampling: SamplingParams
    rejection_method: terms.RejectionMethod
    draft_method: terms.DraftMethod
    num_speculative_tokens: int
    enable_adaptive_verification: bool
    batch_invariant: bool
    numerics_fingerprint: str


@dataclass(frozen=True, slots=True)
class Started:
    """First event of an answer. `seed` repeats the text when it is given with the same request."""

    request_id: str
    seed: int
    prompt_tokens: int
    model: str
    index: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Decided tokens and the text that became final; either may be empty. `origins` one per token, None where not told."""

    token_ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    origins: tuple[Origin | None, ...] = ()
    index: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """Last event of an answer."""

    finish_reason: FinishReason
    stop_reason: str
    usage: Usage
    speculative: SpeculativeStats
    settings: EffectiveSettings
    index: int = 0


Event = Started | Delta | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    origins: tuple[Origin | None, ...]
    started: Started
    finished: Finished


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    info: ModelInfo
    draft_available: bool
    num_speculative_tokens: int


class Client:
    """One lazy connection to `host:port`. Make it and use it inside one running event loop."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self._channel: grpc.aio.Channel | None = None
        self._made: Any = None

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()
            self._channel = self._made = None

    async def wait_ready(self, timeout_s: float) -> None:
        """Until the connection is open. Raises Unavailable."""
        self._stub()
        assert self._channel is not None
        try:
            await asyncio.wait_for(self._channel.channel_ready(), timeout_s)
        except TimeoutError:
            raise Unavailable(f"nobody answers at {self.endpoint} after {timeout_s:g} s; is the service up?") from None

    def _stub(self) -> Any:
        if self._made is None:
            self._channel = open_channel(self.endpoint)
            self._made = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self._made

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
        traceparent: str = "",
        **options: Any,
    ) -> AsyncGenerator[Event]:
        """Streams Started, any number of Delta, Finished, per answer. `options`: fields of GenerateRequest, see `generate_request`."""
        request = generate_request(prompt, sampling, **options)
        metadata = (("traceparent", traceparent),) if traceparent else ()
        call = self._stub().Generate(request, timeout=timeout_s, metadata=metadata)
        open_answers = request.n or 1
        try:
            async for message in call:
                event = event_from_wire(message)
                open_answers -= isinstance(event, Finished)
                yield event
            if open_answers:
                raise ProtocolFault("the stream ended before the answer did")
        except grpc.aio.AioRpcError as failure:
            raise status.error_from_rpc(failure) from failure
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        """The whole answer of a request with one."""
        if options.get("n", 1) != 1:
            raise InvalidRequest("n", "complete() returns one answer; use generate() for several")
        started: Started | None = None
        deltas: list[Delta] = []
        async with contextlib.aclosing(self.generate(prompt, sampling, **options)) as events:
            async for event in events:
                if isinstance(event, Started):
                    started = event
                elif isinstance(event, Delta):
                    deltas.append(event)
                elif started is not None:
                    return _collect(started, deltas, event)
        raise ProtocolFault("the answer has no first or no last message")

    async def get_model_info(self) -> ServiceInfo:
        reply = await self._unary("GetModelInfo", generation_pb2.GetModelInfoRequest())
        return ServiceInfo(wire.model_info_from_wire(reply.info), reply.draft_available, reply.num_speculative_tokens)

    async def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, add_special_tokens: bool = True) -> tuple[int, ...]:
        request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.messages.CopyFrom(_messages(prompt))
        return tuple((await self._unary("Tokenize", request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        return str((await self._unary("Detokenize", request)).text)

    async def _unary(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=UNARY_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            raise status.error_from_rpc(failure) from failure


class SyncClient:
    """The same without async, for scripts: one event loop of its own, driven only while a call waits."""

    def __init__(self, endpoint: str) -> None:
        self._client = Client(endpoint)
        self._runner = asyncio.Runner()

    def __enter__(self) -> SyncClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._run(self._client.close)
        self._runner.close()

    def generate(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Iterator[Event]:
        events = self._client.generate(prompt, sampling, **options)
        try:
            while True:
                try:
                    yield self._run(events.__anext__)
                except StopAsyncIteration:
                    return
        finally:
            self._run(events.aclose)

    def complete(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any) -> Completion:
        return self._run(lambda: self._client.complete(prompt, sampling, **options))

    def get_model_info(self) -> ServiceInfo:
        return self._run(self._client.get_model_info)

    def tokenize(self, prompt: str | Sequence[Mapping[str, str]], *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return self._run(lambda: self._client.tokenize(prompt, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self._run(lambda: self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def _run(self, call: Callable[[], Awaitable[_T]]) -> _T:
        async def inside() -> _T:
            return await call()

        return self._runner.run(inside())


def generate_request(
    prompt: Prompt,
    sampling: SamplingParams | None = None,
    *,
    rejection_method: terms.RejectionMethod | None = None,
    draft_method: terms.DraftMethod | None = None,
    template_args: Mapping[str, str] | None = None,
    **fields: Any,
) -> generation_pb2.GenerateRequest:
    """`fields` as in the proto: output_token_ids, seed, n, priority, stop, include_stop_str_in_output, skip_special_tokens,
    num_speculative_tokens, enable_adaptive_verification, disable_spec_decode, model, request_id. None = unset = the service's default."""
    request = generation_pb2.GenerateRequest()
    for name, value in fields.items():
        try:
            request.MergeFrom(generation_pb2.GenerateRequest(**{name: value}))  # None leaves it unset
        except (ValueError, TypeError) as error:
            raise InvalidRequest(name, str(error)) from error
    if isinstance(prompt, str):
        request.text = prompt
    elif prompt and isinstance(prompt[0], Mapping):
        request.messages.CopyFrom(_messages(prompt, template_args))  # type: ignore[arg-type]
    else:
        try:
            request.token_ids.CopyFrom(generation_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
        except (ValueError, TypeError) as error:
            raise InvalidRequest("prompt.token_ids", f"must be ids from 0 to {2**32 - 1}") from error
    if sampling is not None:
        request.sampling.CopyFrom(wire.sampling_to_wire(sampling))
    if rejection_method is not None:
        request.rejection_sample_method = wire.rejection_method_to_wire(rejection_method)
    if draft_method is not None:
        request.draft_sample_method = wire.draft_method_to_wire(draft_method)
    return request


def event_from_wire(message: generation_pb2.GenerateResponse) -> Event:
    kind = message.WhichOneof("event")
    if kind == "started":
        m = message.started
        return Started(m.request_id, m.seed, m.prompt_tokens, m.model, message.index)
    if kind == "delta":
        d = message.delta
        logprobs = tuple(wire.logprobs_from_wire(entry) for entry in d.logprobs)
        origins = tuple(wire.origin_from_wire(origin) for origin in d.origins)
        return Delta(tuple(d.token_ids), d.text, logprobs, origins, message.index)
    if kind == "finished":
        return _finished(message.finished, message.index)
    raise ProtocolFault("response: no event that is known here")


def _finished(m: generation_pb2.Finished, index: int) -> Finished:
    reason = wire.finish_from_wire(m.finish_reason)
    if reason is None:
        raise ProtocolFault("finished: no reason given")
    usage = Usage(**_fields(Usage, m.usage))
    stats = SpeculativeStats(**_fields(SpeculativeStats, m.speculative))
    rejection, draft = wire.methods_from_wire(m.settings.rejection_sample_method, m.settings.draft_sample_method)
    settings = EffectiveSettings(
        sampling=wire.sampling_from_wire(m.settings.sampling),
        rejection_method=rejection,
        draft_method=draft,
        num_speculative_tokens=m.settings.num_speculative_tokens,
        enable_adaptive_verification=m.settings.enable_adaptive_verification,
        batch_invariant=m.settings.batch_invariant,
        numerics_fingerprint=m.settings.numerics_fingerprint,
    )
    return Finished(reason, m.stop_reason, usage, stats, settings, index)


def _fields(cls: type, message: Any) -> dict[str, Any]:
    values = {f.name: getattr(message, f.name) for f in dataclasses.fields(cls)}
    return {name: value if isinstance(value, int | float) else tuple(value) for name, value in values.items()}


def _messages(turns: Sequence[Mapping[str, str]], template_args: Mapping[str, str] | None = None) -> generation_pb2.Messages:
    try:
        chat = [generation_pb2.Message(role=turn["role"], content=turn["content"]) for turn in turns]
    except (KeyError, TypeError) as error:
        raise InvalidRequest("prompt.messages", 'each turn must be {"role": text, "content": text}') from error
    return generation_pb2.Messages(messages=chat, template_args=template_args or {})


def _collect(started: Started, deltas: Sequence[Delta], finished: Finished) -> Completion:
    return Completion(
        text="".join(delta.text for delta in deltas),
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        origins=tuple(origin for delta in deltas for origin in delta.origins),
        started=started,
        finished=finished,
    )
