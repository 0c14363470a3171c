"""The calls themselves, for asyncio."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Unpack

import grpc
import grpc.aio

from specdec import status, wire
from specdec.client.answers import Completion, Event, Finished, ServiceInfo, completions_of, event_from_wire
from specdec.client.credentials import OPEN, Credentials
from specdec.client.requests import CallOptions, Options, Prompt, generate_request, tokenize_request
from specdec.errors import DeadlineExceeded, InvalidRequest, ProtocolFault, SpecdecError, Unavailable, Unsupported
from specdec.runtime.channels import open_channel
from specdec.runtime.diagnosis import why
from specdec.terms import SamplingParams
from specdec.v1 import generation_pb2, generation_pb2_grpc

UNARY_TIMEOUT_S = 10.0
GENERATE_TIMEOUT_S = 600.0


class Client:
    """One lazy connection to `host:port`. Make it and use it inside one running event loop. Its first use raises InvalidRequest where the
    credentials make no sense."""

    def __init__(self, endpoint: str, credentials: Credentials = OPEN) -> None:
        self.endpoint, self._credentials = endpoint, credentials
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
            reason = await why(self.endpoint, self._credentials.tls)
            silent = f"takes connections and says nothing in gRPC for {timeout_s:g} s; is this the port of an orchestrator?"
            raise Unavailable(f"{self.endpoint}: {reason or silent}") from None

    def _stub(self) -> Any:
        if self._made is None:
            self._credentials.check(self.endpoint)
            self._channel = open_channel(self.endpoint, self._credentials.channel(), self._credentials.tls_server_name)
            self._made = generation_pb2_grpc.GenerationServiceStub(self._channel)
        return self._made

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        *,
        timeout_s: float = GENERATE_TIMEOUT_S,
        traceparent: str = "",
        **options: Unpack[Options],
    ) -> AsyncGenerator[Event]:
        """Streams Started, any number of Delta, Finished, per answer; those of several answers come mixed, told apart by `index`."""
        request = generate_request(prompt, sampling, **options)
        metadata = (*self._credentials.metadata(), *((("traceparent", traceparent),) if traceparent else ()))
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
            raise await self._fault(failure) from failure
        finally:
            call.cancel()

    async def complete(self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions]) -> Completion:
        """The whole answer of a request with one."""
        if options.get("n", 1) not in (None, 1):
            raise InvalidRequest("n", "complete() returns one answer; use completions() for several")
        (answer,) = await self.completions(prompt, sampling, **options)
        return answer

    async def completions(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[CallOptions]
    ) -> tuple[Completion, ...]:
        """All `n` answers, whole, in order of their index. Each tells its own seed; the prompt's log-probabilities are on the first."""
        async with contextlib.aclosing(self.generate(prompt, sampling, **options)) as stream:
            events = [event async for event in stream]
        return completions_of(events, options.get("n") or 1)

    async def get_model_info(self) -> ServiceInfo:
        reply = await self._unary("GetModelInfo", generation_pb2.GetModelInfoRequest())
        return ServiceInfo(wire.model_info_from_wire(reply.info), reply.draft_available, reply.num_speculative_tokens)

    async def get_metrics(self) -> str:
        """What the orchestrator that answers counts, in Prometheus' text format; of several, that of one of them. `target_info` tells by
        service_instance_id which. Raises PermissionDenied where the service does not show it (SPECDEC_SHOW_METRICS), and Unsupported
        where it is older than this call."""
        try:
            return str((await self._unary("GetMetrics", generation_pb2.GetMetricsRequest())).text)
        except Unsupported as error:
            raise Unsupported(
                "GetMetrics", f"no orchestrator answers at {self.endpoint}, or one that is older than this call; read its metrics port"
            ) from error

    async def tokenize(
        self,
        prompt: str | Sequence[Mapping[str, str]],
        *,
        add_special_tokens: bool = True,
        template_args: Mapping[str, Any] | None = None,
        add_generation_prompt: bool | None = None,
    ) -> tuple[int, ...]:
        """Ids of a text or a chat, as a request with it would use them. `add_special_tokens` is for a text alone."""
        request = tokenize_request(prompt, add_special_tokens, template_args, add_generation_prompt)
        return tuple((await self._unary("Tokenize", request)).token_ids)

    async def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        try:
            request = generation_pb2.DetokenizeRequest(token_ids=token_ids, skip_special_tokens=skip_special_tokens)
        except (ValueError, TypeError) as error:
            raise InvalidRequest("token_ids", "must be a list of token ids, whole numbers from 0 on") from error
        return str((await self._unary("Detokenize", request)).text)

    async def _unary(self, method: str, request: Any) -> Any:
        try:
            return await getattr(self._stub(), method)(request, timeout=UNARY_TIMEOUT_S, metadata=self._credentials.metadata())
        except grpc.aio.AioRpcError as failure:
            fault = await self._fault(failure)
            if isinstance(fault, DeadlineExceeded) and (reason := await why(self.endpoint, self._credentials.tls)):
                fault = DeadlineExceeded(f"{self.endpoint}: {reason}")  # while gRPC was still trying to connect
            raise fault from failure

    async def _fault(self, failure: grpc.aio.AioRpcError) -> SpecdecError:
        """gRPC calls a handshake that failed UNAVAILABLE, like everything else; what a service says has details. So has a refusal of a
        field as UNIMPLEMENTED: without any the method is unknown there."""
        if failure.code() is grpc.StatusCode.UNIMPLEMENTED and not failure.trailing_metadata():
            told = f"{self.endpoint} does not know this call: it is no orchestrator (a target or a draft?), or an older one"
            return Unsupported("endpoint", told)
        if failure.code() is not grpc.StatusCode.UNAVAILABLE or failure.trailing_metadata():
            return status.error_from_rpc(failure)
        reason = await why(self.endpoint, self._credentials.tls)
        return Unavailable(f"{self.endpoint}: {reason or f'the connection broke: {failure.details()}'}")
