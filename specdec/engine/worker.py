"""The thread that owns the engine. The event loop hands it one call at a time and is never blocked by it.

Everything that touches an engine, loading included, goes through `run`: torch keeps its thread settings per thread, and K/V has no locks.
Whatever happens on the thread, a caller hears of it. A call that asks the interpreter to exit fails with EngineFault: passed on to the
event loop it would end that in silence, with a code that looks like success. Once the thread itself is gone all calls fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

from specdec.errors import EngineFault

P = ParamSpec("P")
R = TypeVar("R")
Call = tuple["Future[Any]", Callable[[], Any]]
log = logging.getLogger(__name__)


class EngineThread:
    """One dedicated thread, which starts with the first call. `clock`: seconds, never going back. Callers bound how many calls wait."""

    def __init__(self, name: str = "engine", clock: Callable[[], float] = time.monotonic) -> None:
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)  # `leave` says why it may be left behind
        self._clock = clock
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # between a call that comes and an end that drops what waits
        self._started = self._closed = False
        self._gone = ""  # what ended the thread
        self._running_since: float | None = None

    @property
    def running_since(self) -> float | None:
        """When the call now running began, by the clock; None when idle. A watcher tells a long step from a hung one by it."""
        return self._running_since

    def alive(self, longest_s: float) -> bool:
        """False while a call runs for longer than that. Raises EngineFault when the thread is gone: it will not come back."""
        if self._gone:
            raise EngineFault(self._gone)
        since = self._running_since
        return since is None or self._clock() - since <= longest_s

    async def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """fn(*args, **kwargs) on the thread; calls queue in order, and what fn raises is raised here. Raises EngineFault when the thread is
        gone, RuntimeError after `close`.

        Cancelling the caller drops a queued call; a running one finishes on the thread and its result is lost.
        """
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise RuntimeError("the engine's thread is closed")
            if self._gone:
                raise EngineFault(self._gone)
            if not self._started:
                self._started = True
                self._thread.start()
            self._calls.put((future, lambda: fn(*args, **kwargs)))
        return await asyncio.wrap_future(future)

    def close(self, wait: bool = True) -> None:
        """No more calls; queued ones are cancelled. With `wait`, returns after the running one."""
        with self._lock:
            self._closed = True
            for future, _ in self._drop():
                future.cancel()
            self._calls.put(None)
        if wait and self._started:
            self._thread.join()

    def leave(self, code: int) -> int:
        """The exit code of a process that ends with this thread. One that is stuck in a call cannot be stopped, and would crash in what the
        interpreter takes down around it: then the process ends here, and not with 0."""
        if self._running_since is not None:
            print("the engine is stuck in a step; the process ends without it", file=sys.stderr, flush=True)
            sys.stdout.flush()
            os._exit(code or 1)
        self.close()
        return code

    def _drop(self) -> list[Call]:
        dropped = []
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    dropped.append(call)
        return dropped

    def _work(self) -> None:
        call: Call | None = None
        try:
            while (call := self._calls.get()) is not None:
                self._run(*call)
                call = None  # a result belongs to its caller alone
        except BaseException as error:  # not a call's: nobody else would ever hear of it
            log.critical("the engine's thread ended", exc_info=error)
            with self._lock:
                self._gone = f"the engine's thread ended: {type(error).__name__}: {error}"
                waiting = self._drop()
            for future, _ in (*([call] if isinstance(call, tuple) else ()), *waiting):
                if not future.done():
                    future.set_exception(EngineFault(self._gone))

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        self._running_since = self._clock()
        try:
            result = call()
        except BaseException as error:
            self._running_since = None
            if not isinstance(error, Exception):
                error = EngineFault(f"the engine asked the process to end: {type(error).__name__}: {error}")
            future.set_exception(error)
        else:
            self._running_since = None
            future.set_result(result)
