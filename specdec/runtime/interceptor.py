"""The server's one interceptor: who may call, trace context in, faults to status, `rpc.server.call.duration` out.

Handlers may be async generators or coroutines that call context.write; both come out as what they were. A handler just raises one of
specdec.errors and the caller gets its status. A defect becomes INTERNAL and a log line. A cancellation that is not the caller's own is
answered too; left alone it would keep the caller waiting for ever (grpc/grpc#29248). A write that fails is the caller hanging up.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from specdec import status
from specdec.errors import InternalFault, InvalidRequest, Overloaded, SpecdecError
from specdec.runtime.arriving import REQUEST_S, YOUNG_S, Arriving
from specdec.runtime.guard import Guard
from specdec.runtime.hangup import HangUp, OpenCall, current_call
from specdec.runtime.telemetry import Telemetry
from specdec.runtime.trace import current_traceparent, parse

OWN_PREFIX = "/specdec.v1."
RETRY_MS = 1000
MAX_OTHERS = 64  # streams of reflection; and of its and health's calls those whose request is on its way
Context = grpc.aio.ServicerContext[Any, Any]
log = logging.getLogger(__name__)


@dataclass(slots=True)
class About:
    """One call. `owner` = whose token came with it."""

    method: str
    traceparent: str
    owner: str = ""


@dataclass(slots=True)
class _Record:
    code: str = "OK"


class CallInterceptor(grpc.aio.ServerInterceptor):
    """Watches our own methods; of health and reflection only that they hold no place in silence. A caller without a good token is answered
    before anything of its request is read. A method of one request reads it as the first of a stream, which is the same on the wire: gRPC
    itself would wait for it for ever, and before it says that there is a call."""

    def __init__(self, telemetry: Telemetry, most_calls: int | None = None, guard: Guard | None = None) -> None:
        """`most_calls` at once; more are refused. None = no limit."""
        self._duration = telemetry.histogram("rpc.server.call.duration")
        self._guard = guard or Guard(telemetry)
        self._most, self.running = most_calls, 0
        self._arriving, self._others = Arriving(), Arriving((MAX_OTHERS,), (REQUEST_S, YOUNG_S))
        self._streams = 0  # of others
        self.hang_up = HangUp()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None:
            return None
        if not method.startswith(OWN_PREFIX):
            return _made(handler, self._of_others(_inner(handler), handler.request_streaming))
        metadata = handler_call_details.invocation_metadata or ()
        sent = next((value for key, value in metadata if key == "traceparent"), "")
        about = About(method.removeprefix("/"), sent if isinstance(sent, str) and parse(sent) else "")
        try:
            about.owner = self._guard.token_owner(metadata)
        except SpecdecError as refusal:
            handler = _refusing(refusal)
        return self._wrapped(handler, about)

    def _wrapped(self, handler: Any, about: About) -> grpc.RpcMethodHandler[Any, Any]:
        inner = _inner(handler)
        if not handler.request_streaming:
            inner = _first_of(self._arriving, inner)
        return _made(handler, self._generator(inner, about) if inspect.isasyncgenfunction(inner) else self._coroutine(inner, about))

    def _generator(self, inner: Callable[..., AsyncGenerator[Any]], about: About) -> Callable[..., AsyncIterator[Any]]:
        async def call(requests: Any, context: Context) -> AsyncIterator[Any]:
            # Closed here and now: an abandoned generator would run its finally blocks whenever the collector likes.
            async with self._around(context, about), contextlib.aclosing(inner(requests, context)) as items:
                async for item in items:
                    yield item

        return call

    def _coroutine(self, inner: Callable[..., Awaitable[Any]], about: About) -> Callable[..., Awaitable[Any]]:
        async def call(requests: Any, context: Context) -> Any:
            async with self._around(context, about):
                return await inner(requests, context)

        return call

    def _of_others(self, inner: Callable[..., Any], streamed: bool) -> Callable[..., Any]:
        """Health and reflection."""
        if not streamed:
            inner = _first_of(self._others, inner)

        @contextlib.asynccontextmanager
        async def around(context: Context) -> AsyncIterator[None]:
            self._streams += streamed
            try:
                if self._streams > MAX_OTHERS and streamed:
                    raise Overloaded(f"{MAX_OTHERS} such streams are open (MAX_OTHERS); end one first", RETRY_MS)
                yield
            except SpecdecError as refusal:
                await status.abort(context, refusal)
            finally:
                self._streams -= streamed

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            async with around(context), contextlib.aclosing(inner(requests, context)) as items:
                async for item in items:
                    yield item

        async def call(requests: Any, context: Context) -> Any:
            async with around(context):
                return await inner(requests, context)

        return generate if inspect.isasyncgenfunction(inner) else call

    @contextlib.asynccontextmanager
    async def _around(self, context: Context, about: About) -> AsyncIterator[None]:
        current_traceparent.set(about.traceparent)  # the handler runs in a task of its own, so this ends with the call
        with self._opened(context) as call, self._recorded(about) as record:
            try:
                try:
                    if self._most is not None and self.running > self._most:
                        raise Overloaded(f"{self._most} calls run here, the most at once", RETRY_MS)
                    call.at_end.append(self._guard.enter(context, about.owner))
                    yield
                finally:
                    call.through()
                record.code = _code(context)
            except GeneratorExit:
                record.code = "CANCELLED"
                raise
            except asyncio.CancelledError:
                record.code = "CANCELLED"
                if context.cancelled() or context.done() or _being_cancelled():
                    raise
                log.error("%s: work was cancelled from inside", about.method)
                await status.abort(context, InternalFault("the work for this call was cancelled inside the service"))
            except grpc.aio.AbortError:
                record.code = _code(context)
                raise
            except grpc.aio.InternalError as error:  # a batch of operations failed: a server's only do when the call is over
                if not context.done():  # should it not be over, its caller is not to wait for ever; else this fails as well
                    record.code = "INTERNAL"
                    with contextlib.suppress(grpc.aio.InternalError):
                        await status.abort(context, InternalFault("an answer could not be sent"))
                record.code = "CANCELLED"
                raise asyncio.CancelledError from error
            except Exception as error:
                record.code = status.code_of(error).name
                if not isinstance(error, SpecdecError) or isinstance(error, InternalFault):
                    log.exception("%s failed", about.method)
                await status.abort(context, error)

    @contextlib.contextmanager
    def _recorded(self, about: About) -> Iterator[_Record]:
        """Counts the call as running, and its duration with its status."""
        record, started = _Record(), time.perf_counter()
        self.running += 1
        try:
            yield record
        finally:
            self.running -= 1
            labels = status.rpc_labels(status.method_label(about.method), record.code, served=True)
            self._duration.record(time.perf_counter() - started, labels)

    @contextlib.contextmanager
    def _opened(self, context: Any) -> Iterator[OpenCall]:
        """A call is over when its status is out, not when its handler is through: a client that does not read may be long in between.
        gRPC sends the status in the handler's task. A callback of the context would be a cycle of objects for each call."""
        call = self.hang_up.opened(context.peer())
        task = asyncio.current_task()
        assert task is not None
        task.add_done_callback(lambda _: call.over())
        current_call.set(call)
        try:
            yield call
        except grpc.aio.AbortError as error:
            call.aborted = error
            raise


def _refusing(refusal: SpecdecError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(requests: Any, context: Any) -> None:
        raise refusal

    return grpc.stream_stream_rpc_method_handler(refuse)  # a stream is read by its handler, and this one does not


def _inner(handler: Any) -> Any:
    """What the servicer does."""
    kind = ("stream" if handler.request_streaming else "unary") + "_" + ("stream" if handler.response_streaming else "unary")
    return getattr(handler, kind)


def _made(handler: Any, behaviour: Callable[..., Any]) -> grpc.RpcMethodHandler[Any, Any]:
    """The handler with another behaviour, which reads its requests itself."""
    make = grpc.stream_stream_rpc_method_handler if handler.response_streaming else grpc.stream_unary_rpc_method_handler
    made: grpc.RpcMethodHandler[Any, Any] = make(behaviour, _reader(handler.request_deserializer), handler.response_serializer)
    return made


def _first_of(arriving: Arriving, inner: Callable[..., Any]) -> Callable[..., Any]:
    """What takes one request, as what takes a stream of them."""
    if inspect.isasyncgenfunction(inner):

        async def generate(requests: Any, context: Context) -> AsyncIterator[Any]:
            async with contextlib.aclosing(inner(await arriving.request(context), context)) as items:
                async for item in items:
                    yield item

        return generate

    async def call(requests: Any, context: Context) -> Any:
        return await inner(await arriving.request(context), context)

    return call


def _reader(deserialize: Callable[[bytes], Any] | None) -> Callable[[bytes], Any] | None:
    """gRPC answers bytes that are no message with UNKNOWN; the caller's mistake has to be told as one."""
    if deserialize is None:
        return None

    def read(raw: bytes) -> Any:
        try:
            return deserialize(raw)
        except status.Unreadable as error:
            raise InvalidRequest("request", f"must be a message of the published protocol: {error}") from error

    return read


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _code(context: Context) -> str:
    code = context.code()
    if isinstance(code, int):
        return status.CODES.get(code, grpc.StatusCode.UNKNOWN).name
    return code.name if code is not None else "OK"
