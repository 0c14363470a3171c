"""One service process: one uvloop, one gRPC server, health, reflection, metrics, an orderly end.

    def main() -> int:
        return serve("target", Settings, build)

    async def build(settings: Settings, runtime: Runtime) -> Service:
        ...load the model off the loop, make the servicer...
        return Service(add=lambda server: add_TargetServiceServicer_to_server(servicer, server), close=servicer.close)

Order of events: signal handlers, sockets (health answers, `liveness` SERVING, everything else NOT_SERVING and calls UNAVAILABLE), build,
SERVING, the ready line on stdout. SIGTERM or SIGINT: NOT_SERVING, new calls refused, `drain` up to DRAIN_MS (`give_up` after it), running
calls up to what is left of it, `close`, exit 0. A second signal changes nothing. `liveness` stays SERVING while loading and draining: a
process that is not ready must not be restarted for it. A failed start or `Runtime.fail` exits 1 after a one-line reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec import status
from specdec.errors import SpecdecError, Unavailable
from specdec.runtime import logs, process
from specdec.runtime.channels import server_options
from specdec.runtime.interceptor import OWN_PREFIX, CallInterceptor
from specdec.runtime.names import GRPC_SERVICES
from specdec.runtime.settings import CommonSettings, load
from specdec.runtime.telemetry import Telemetry

LIVENESS = "liveness"
ALIVE_POLL_S = 1.0
MAX_CONCURRENT_CALLS = 4096  # beyond: RESOURCE_EXHAUSTED at once
FLUSH_S = 1.0  # for calls to end after `drain` says that the work is done, or `give_up` that it never will be
ORPHAN_S = 1.0  # a process without a parent drains for nobody
CLOSE_S = 3.0  # for `close`, after the streams ended
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
log = logging.getLogger(__name__)

S = TypeVar("S", bound=CommonSettings)


@dataclass
class Service:
    """What a build hands back."""

    add: Callable[[Any], None]  # registers the servicers: add_XServicer_to_server(servicer, server)
    draining: Callable[[], None] | None = None  # the first thing at SIGTERM, before anything is refused: tell the peers
    drain: Callable[[], Awaitable[None]] | None = None  # returns when running work is done
    give_up: Callable[[], None] | None = None  # `drain` took too long: tells the running calls, which then have FLUSH_S to end
    close: Callable[[], Awaitable[None]] | None = None  # after the last call
    alive: Callable[[], bool] = lambda: True  # polled every second; False turns `liveness` off


@dataclass
class Runtime:
    """What a build gets."""

    role: str
    telemetry: Telemetry
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def fail(self, reason: str) -> None:
        """The process cannot go on: drains nothing and exits 1. Call it on the loop."""
        self.reason = self.reason or reason
        self.stopping.set()


Build = Callable[[S, Runtime], Awaitable[Service]]


def serve(role: str, cls: type[S], build: Build[S]) -> int:
    """Runs the service to its end; returns the exit code. 2 = the settings are wrong."""
    logs.configure(role)
    try:
        settings = load(cls)
        process.prepare(settings)
    except SpecdecError as error:
        print(f"{role}: {error}", file=sys.stderr, flush=True)
        return 2
    logs.configure(role, settings.log_level)
    return run_service(role, settings, build)


def run_service(role: str, settings: S, build: Build[S]) -> int:
    host = _Host(role, settings, build)
    with contextlib.suppress(KeyboardInterrupt):
        return uvloop.run(host.run())
    return 130


class _Host(Generic[S]):
    def __init__(self, role: str, settings: S, build: Build[S]) -> None:
        self.role, self.settings, self.build = role, settings, build

    async def run(self) -> int:
        self.loop = asyncio.get_running_loop()
        try:
            telemetry = self._telemetry()
        except OSError as error:
            return self._failed(f"metrics port {self.settings.metrics_port}: {error.strerror or error}")
        self.runtime = Runtime(self.role, telemetry)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self.runtime.stopping.set)
        if self.settings.parent_pipe >= 0:
            process.watch_pipe(self.settings.parent_pipe, self._orphaned)
        try:
            return await self._serve(telemetry)
        finally:
            await asyncio.to_thread(telemetry.close)

    def _telemetry(self) -> Telemetry:
        s = self.settings
        return Telemetry(self.role, host=s.host, metrics_port=s.metrics_port, otlp_endpoint=s.otlp_endpoint)

    def _orphaned(self) -> None:
        """On the thread that watched the pipe, which also sees to it that a busy loop does not outlive the parent by much."""
        log.warning("the parent is gone")
        self.loop.call_soon_threadsafe(self.runtime.fail, "the parent is gone")
        time.sleep(ORPHAN_S)
        os._exit(1)

    async def _serve(self, telemetry: Telemetry) -> int:
        self.methods = _Methods()
        self.health = health.aio.HealthServicer()
        server = grpc.aio.server(
            interceptors=[CallInterceptor(telemetry)],
            options=server_options(),
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = GRPC_SERVICES[self.role]
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        server.add_generic_rpc_handlers((self.methods,))
        try:
            port = server.add_insecure_port(f"{self.settings.host}:{self.settings.port}")
        except RuntimeError:
            return self._failed(f"cannot listen on {self.settings.host}:{self.settings.port}; is the port in use?")
        await server.start()
        await self.health.set(LIVENESS, SERVING)
        await self._set_ready(NOT_SERVING)
        service = await self._build()
        if service is None:
            await server.stop(0)
            return self._failed(self.runtime.reason) if self.runtime.reason else self._exit_now(telemetry)
        service.add(self.methods)
        self.methods.open = True
        await self._set_ready(SERVING)
        self._say_ready(port)
        watcher = asyncio.create_task(self._watch_alive(service))
        await self.runtime.stopping.wait()
        watcher.cancel()
        await self._stop(server, service)
        return self._failed(self.runtime.reason) if self.runtime.reason else 0

    async def _build(self) -> Service | None:
        """The built service; None when a signal came first or the build failed (then `reason` is set)."""
        building = asyncio.ensure_future(self.build(self.settings, self.runtime))
        stopped = asyncio.create_task(self.runtime.stopping.wait())
        await asyncio.wait((building, stopped), return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not building.done():
            building.cancel()
            return None
        error = building.exception()
        if error is None:
            return building.result()
        log.error("start failed", exc_info=None if isinstance(error, SpecdecError) else error)
        self.runtime.reason = (
            f"start failed: {error}" if isinstance(error, SpecdecError) else f"start failed: {type(error).__name__}: {error}"
        )
        return None

    def _exit_now(self, telemetry: Telemetry) -> int:
        """A signal during the build: a thread may be deep inside a model load and cannot be stopped, so the process ends without it."""
        log.info("stopped while starting")
        telemetry.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    async def _stop(self, server: grpc.aio.Server, service: Service) -> None:
        """Readiness first, so that balancers look away; then work gets its time; then the calls; then what is below them."""
        log.info("stopping")
        deadline = time.monotonic() + (0 if self.runtime.reason else self.settings.drain_ms / 1000)
        await self._set_ready(NOT_SERVING)  # not enter_graceful_shutdown: that would turn liveness off as well
        if service.draining is not None:
            service.draining()
        self.methods.open = False
        if service.drain is not None and not self.runtime.reason:
            try:
                await asyncio.wait_for(service.drain(), max(0.0, deadline - time.monotonic()))
                deadline = min(deadline, time.monotonic() + FLUSH_S)
            except TimeoutError:
                if service.give_up is not None:
                    service.give_up()
                    deadline = time.monotonic() + FLUSH_S
        await server.stop(max(0.0, deadline - time.monotonic()))
        if service.close is not None:
            try:
                await asyncio.wait_for(service.close(), CLOSE_S)
            except TimeoutError:
                log.warning("close took longer than %s s", CLOSE_S)
            except Exception:
                log.exception("close failed")

    async def _set_ready(self, state: Any) -> None:
        for name in ("", *GRPC_SERVICES[self.role]):
            await self.health.set(name, state)

    async def _watch_alive(self, service: Service) -> None:
        while True:
            await asyncio.sleep(ALIVE_POLL_S)
            try:
                state = SERVING if service.alive() else NOT_SERVING
            except Exception:
                log.exception("the check for being alive failed")
                state = NOT_SERVING
            await self.health.set(LIVENESS, state)

    def _say_ready(self, port: int) -> None:
        host, metrics_port = self.settings.host, self.runtime.telemetry.metrics_port
        print(f"ready role={self.role} host={host} port={port} metrics_port={metrics_port} pid={os.getpid()}", flush=True)

    def _failed(self, reason: str) -> int:
        print(f"{self.role}: {reason}", file=sys.stderr, flush=True)
        return 1


class _Methods(grpc.GenericRpcHandler):
    """Our methods, which appear after the server has started. Until then, and while draining, calls get UNAVAILABLE."""

    def __init__(self) -> None:
        self.open = False
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """What generated code calls beside the generic way; the generic handlers are enough."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if not self.open and handler_call_details.method.startswith(OWN_PREFIX):
            return grpc.stream_stream_rpc_method_handler(_not_now)
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((method for method in found if method is not None), None)


async def _not_now(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    await status.abort(context, Unavailable("this process is starting or stopping; try another or come back"))
