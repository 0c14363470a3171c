"""One service process: one uvloop, one gRPC server, health, reflection, metrics, an orderly end.

    def main() -> int:
        return serve("target", Settings, build)

    async def build(settings: Settings, runtime: Runtime) -> Service:
        ...load the model off the loop, make the servicer...
        return Service(add=lambda server: add_TargetServiceServicer_to_server(servicer, server), close=servicer.close)

Order of events: signal handlers, sockets (health answers, `liveness` SERVING, everything else NOT_SERVING and calls UNAVAILABLE), build,
SERVING, the ready line on stdout. SIGTERM or SIGINT: NOT_SERVING and `draining`, PRE_DRAIN_MS in which everything is still taken (whoever
sends us work hears of it later than we do), new calls refused, `drain` up to DRAIN_MS (`give_up` after it), running calls up to what is
left of it, `close`, exit 0. A second signal changes nothing. `liveness` stays SERVING while loading and draining: a process that is not
ready must not be restarted for it. A failed start or `Runtime.fail`, also one in the middle of a drain, exits 1 after a one-line reason.

Health answers on the main port and, with HEALTH_PORT, on a plaintext port of its own that serves nothing else and knows no call limit.
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
from functools import partial
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health as health_names
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from specdec import status
from specdec.errors import EngineFault, SpecdecError, Unavailable
from specdec.runtime import logs, process
from specdec.runtime.channels import MAX_CALL_BYTES, MAX_MESSAGE_BYTES, server_options
from specdec.runtime.hangup import fall_silent, stop_listening
from specdec.runtime.health import LIVENESS, MAX_WATCHERS, READINESS, Health
from specdec.runtime.interceptor import OWN_PREFIX, CallInterceptor
from specdec.runtime.listening import Listening, check, joined
from specdec.runtime.names import GRPC_SERVICES
from specdec.runtime.security import FrontSettings
from specdec.runtime.settings import CommonSettings, SettingsError, load
from specdec.runtime.telemetry import Telemetry

ALIVE_POLL_S = 0.25
MAX_CONCURRENT_CALLS = 4096  # of our own methods; beyond: RESOURCE_EXHAUSTED at once
SPARE_CALLS = 2 * MAX_WATCHERS  # room for health and reflection beside them
CALLS_POLL_S = 0.02
HEALTH_STOP_S = 0.5  # for probes and refusals that are being answered when all else is over
FLUSH_S = 1.0  # for calls to end after `drain` says that the work is done, or `give_up` that it never will be
ORPHAN_S = 1.0  # a process without a parent drains for nobody
CLOSE_S = 3.0  # for `close`, after the streams ended
log = logging.getLogger(__name__)
_CHANGES = {
    (LIVENESS, False): (logging.ERROR, "not alive: the work hangs; whoever watches liveness restarts this process"),
    (LIVENESS, True): (logging.INFO, "alive again"),
    (READINESS, False): (logging.WARNING, "not ready: nobody is there to do the work"),
    (READINESS, True): (logging.INFO, "ready"),
}

S = TypeVar("S", bound=CommonSettings)


@dataclass
class Service:
    """What a build hands back."""

    add: Callable[[Any], None]  # registers the servicers: add_XServicer_to_server(servicer, server)
    draining: Callable[[], None] | None = None  # the first thing at SIGTERM, before anything is refused: tell the peers
    drain: Callable[[], Awaitable[None]] | None = None  # returns when running work is done
    give_up: Callable[[], None] | None = None  # `drain` took too long: tells the running calls, which then have FLUSH_S to end
    close: Callable[[], Awaitable[None]] | None = None  # after the last call
    alive: Callable[[], bool] = lambda: True  # polled; False turns `liveness` off, EngineFault ends the process
    ready: Callable[[], bool] = lambda: True  # polled; False turns `readiness` off


@dataclass
class Runtime:
    """What a build gets."""

    role: str
    telemetry: Telemetry
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    failed: asyncio.Event = field(default_factory=asyncio.Event)
    reason: str = ""

    def fail(self, reason: str) -> None:
        """The process cannot go on: drains nothing and exits 1. Call it on the loop."""
        self.reason = self.reason or reason
        self.failed.set()
        self.stopping.set()


Build = Callable[[S, Runtime], Awaitable[Service]]


def serve(role: str, cls: type[S], build: Build[S]) -> int:
    """Runs the service to its end; returns the exit code. 2 = the settings are wrong."""
    logs.configure(role)
    try:
        settings = load(cls)
        check(settings)
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
        return Telemetry(
            self.role,
            host=s.host,
            metrics_port=s.metrics_port,
            otlp_endpoint=s.otlp_endpoint,
            sample_ratio=s.otlp_sample_ratio,
            push_s=s.otlp_metrics_ms / 1000,
        )

    def _orphaned(self) -> None:
        """On the thread that watched the pipe, which also sees to it that a busy loop does not outlive the parent by much."""
        log.warning("the parent is gone")
        self.loop.call_soon_threadsafe(self.runtime.fail, "the parent is gone")
        time.sleep(ORPHAN_S)
        os._exit(1)

    async def _serve(self, telemetry: Telemetry) -> int:
        try:
            self.listening = Listening(self.settings, telemetry)
        except SettingsError as error:
            return self._failed(str(error))
        self.methods, self.health = _Methods(), Health()
        telemetry.gauge("specdec.ready", lambda: int(self.health.serving(READINESS)))
        self.health.set(LIVENESS, True)
        self._set_ready(False)
        server = self._main_server(telemetry)
        probes = grpc.aio.server(options=server_options())
        health_pb2_grpc.add_HealthServicer_to_server(self.health, probes)
        try:
            port = self._listen(partial(self.listening.add_port, server), "PORT", self.settings.port)
            health_port = -1
            if self.settings.health_port >= 0:
                health_port = self._listen(probes.add_insecure_port, "HEALTH_PORT", self.settings.health_port)
        except Unavailable as error:
            return self._failed(str(error))
        await server.start()
        await probes.start()
        service = await self._build()
        if service is None:
            await asyncio.gather(self._end(server, port), probes.stop(0))
            return self._failed(self.runtime.reason) if self.runtime.reason else self._exit_now(telemetry)
        service.add(self.methods)
        self.methods.refusal = None
        self._set_ready(True, service)
        self._say_ready(port, health_port)
        watchers = [asyncio.create_task(self._watch(service)), asyncio.create_task(self.listening.watch())]
        await self.runtime.stopping.wait()
        await self._stop(server, port, service)
        for watcher in watchers:
            watcher.cancel()
        await probes.stop(HEALTH_STOP_S)
        return self._failed(self.runtime.reason) if self.runtime.reason else 0

    def _main_server(self, telemetry: Telemetry) -> grpc.aio.Server:
        self.interceptor = CallInterceptor(telemetry, MAX_CONCURRENT_CALLS, self.listening.guard)
        server = grpc.aio.server(
            interceptors=[self.interceptor],
            options=server_options(MAX_CALL_BYTES if isinstance(self.settings, FrontSettings) else MAX_MESSAGE_BYTES),
            maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS + SPARE_CALLS,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        names = GRPC_SERVICES[self.role]
        if self.settings.reflection:
            reflection.enable_server_reflection((*names, health_names.SERVICE_NAME, reflection.SERVICE_NAME), server)
        server.add_generic_rpc_handlers((self.methods,))
        return server

    def _listen(self, add_port: Callable[[str], int], name: str, port: int) -> int:
        """The port it listens on. Raises Unavailable."""
        address = joined(self.settings.host, port)
        try:
            return add_port(address)
        except RuntimeError:
            raise Unavailable(f"cannot listen on {address} (SPECDEC_{name}); is the port in use?") from None

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

    async def _stop(self, server: grpc.aio.Server, port: int, service: Service) -> None:
        """Readiness first, so that balancers look away; then work gets its time; then the calls; then what is below them."""
        log.info("stopping")
        self._set_ready(False)
        if service.draining is not None:
            service.draining()
        await self._unless_failed(asyncio.sleep(self.settings.pre_drain_ms / 1000))
        deadline = time.monotonic() + self.settings.drain_ms / 1000
        self.methods.refusal = Unavailable("this process is stopping; send the call to another one")
        if service.drain is not None:
            drained = await self._unless_failed(service.drain(), self.settings.drain_ms / 1000)
            if not drained and service.give_up is not None:
                service.give_up()
            if drained or service.give_up is not None:
                deadline = min(deadline, time.monotonic()) + FLUSH_S
        await self._unless_failed(self._calls_ended(), max(0.0, deadline - time.monotonic()))
        await self._end(server, port)
        if service.close is not None:
            try:
                await asyncio.wait_for(service.close(), CLOSE_S)
            except TimeoutError:
                log.warning("close took longer than %s s", CLOSE_S)
            except Exception:
                log.exception("close failed")

    async def _calls_ended(self) -> None:
        """Calls are refused meanwhile."""
        while self.interceptor.running:
            await asyncio.sleep(CALLS_POLL_S)

    async def _statuses_out(self) -> None:
        while len(self.interceptor.hang_up) or self.health.watched:
            await asyncio.sleep(CALLS_POLL_S)

    async def _end(self, server: grpc.aio.Server, port: int) -> None:
        """A server of gRPC that stops refuses nothing: what reaches it meanwhile is CANCELLED, as if its caller had done that. So nothing
        reaches it any more when it stops: calls on their way see their connection end, which is UNAVAILABLE."""
        until = time.monotonic() + (0.0 if self.runtime.reason else HEALTH_STOP_S)
        with contextlib.suppress(OSError):  # no descriptor is left: it ends all the same
            stop_listening(port)
        self.health.end()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._statuses_out(), max(0.0, until - time.monotonic()))
        with contextlib.suppress(OSError):
            fall_silent(port)
        await server.stop(max(0.0, until - time.monotonic()))

    async def _unless_failed(self, work: Awaitable[None], timeout_s: float | None = None) -> bool:
        """Whether the work was done: in time, and before the process failed."""
        working, failed = asyncio.ensure_future(work), asyncio.create_task(self.runtime.failed.wait())
        done, _ = await asyncio.wait((working, failed), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        for task in (working, failed):
            task.cancel()
        outcome, _ = await asyncio.gather(working, failed, return_exceptions=True)
        if working in done and isinstance(outcome, Exception):
            log.error("the end of running work cannot be waited for", exc_info=outcome)
        return working in done and outcome is None

    def _set_ready(self, serving: bool, service: Service | None = None) -> None:
        for name in ("", *GRPC_SERVICES[self.role]):
            self.health.set(name, serving)
        self.health.set(READINESS, serving and (service is None or service.ready()))

    async def _watch(self, service: Service) -> None:
        """Asks the service how it is, to the end of the process. Nobody waits for the answer but this task."""
        while True:
            await asyncio.sleep(ALIVE_POLL_S)
            try:
                self._note(LIVENESS, service.alive())
                self._note(READINESS, not self.runtime.stopping.is_set() and service.ready())
            except EngineFault as error:
                self.health.set(LIVENESS, False)
                self.runtime.fail(str(error))
                return
            except Exception:
                log.exception("the check for being alive failed")
                self.health.set(LIVENESS, False)

    def _note(self, name: str, serving: bool) -> None:
        """A change that the end of the process does not explain is a line."""
        if self.health.serving(name) != serving and not self.runtime.stopping.is_set():
            level, words = _CHANGES[name, serving]
            log.log(level, words)
        self.health.set(name, serving)

    def _say_ready(self, port: int, health_port: int) -> None:
        host, metrics_port = self.settings.host, self.runtime.telemetry.metrics_port
        line = f"ready role={self.role} host={host} port={port} metrics_port={metrics_port} pid={os.getpid()} health_port={health_port}"
        print(line, flush=True)
        log.info("takes calls", extra={"host": host, "port": port, "metrics_port": metrics_port, "health_port": health_port})

    def _failed(self, reason: str) -> int:
        print(f"{self.role}: {reason}", file=sys.stderr, flush=True)
        return 1


class _Methods(grpc.GenericRpcHandler):
    """Our methods, which appear after the server has started. Calls get `refusal` while there is one."""

    def __init__(self) -> None:
        self.refusal: Unavailable | None = Unavailable("this process is starting; come back when its health says SERVING")
        self._handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: Any) -> None:
        """What generated code calls beside the generic way; the generic handlers are enough."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any] | None:
        if self.refusal is not None and handler_call_details.method.startswith(OWN_PREFIX):
            return grpc.stream_stream_rpc_method_handler(_refusing(self.refusal))
        found = (handler.service(handler_call_details) for handler in self._handlers)
        return next((method for method in found if method is not None), None)


def _refusing(refusal: Unavailable) -> Callable[..., Awaitable[None]]:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await status.abort(context, refusal)

    return refuse
