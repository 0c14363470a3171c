"""Starts service processes, waits for their ready lines, tells when one ends, stops them all.

A child dies with its supervisor twice over: the kernel sends it SIGTERM when the supervisor's main thread ends (so children are started
from the main thread only), and it reads end-of-file from a pipe whose other end only the supervisor holds. Whether a child that ends is
started again is keeper.py's affair.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from specdec.cli.pids import ProcessId, identify
from specdec.errors import Unavailable
from specdec.runtime.settings import inherited

_READY = re.compile(r"ready role=(\w+) host=(\S+) port=(\d+) metrics_port=(-?\d+) pid=(\d+).*")
START_TIMEOUT_S = 180.0
PROGRESS_S = 3.0  # between two words about what is still loading
STOP_TIMEOUT_S = 15.0  # per wave, then SIGKILL
KILL_TIMEOUT_S = 5.0
TAIL_LINES = 15
LOADING = "loading"  # how a word about progress begins
MODULES = {"target": "target_service", "draft": "draft_service", "orchestrator": "orchestrator"}
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True, slots=True)
class Plan:
    """One process to be. `settings` are SPECDEC_* values without the prefix."""

    name: str  # unique, e.g. target-0
    role: str
    settings: Mapping[str, str]

    def command_line(self) -> tuple[str, ...]:
        return (sys.executable, "-m", MODULES[self.role])

    def check_line(self) -> tuple[str, ...]:
        """Says what is wrong with its settings, and ends."""
        return (sys.executable, "-m", f"{MODULES[self.role]}.settings")


@dataclass(slots=True)
class Child:
    plan: Plan
    process: subprocess.Popen[str]
    identity: ProcessId
    log: Path
    host: str = ""
    port: int = 0
    metrics_port: int = -1

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Ready:
    child: Child


@dataclass(frozen=True, slots=True)
class Ended:
    child: Child
    code: int


@dataclass(frozen=True, slots=True)
class Signalled:
    number: int


class Interrupted(Exception):
    """A signal came while children were starting."""


class Supervisor:
    """Use as a context manager from the main thread: leaving it stops every child, whatever the reason."""

    def __init__(self, logs: Path, tell: Callable[[str], None]) -> None:
        self._logs, self._tell = logs, tell
        self._events: queue.SimpleQueue[Ready | Ended | Signalled] = queue.SimpleQueue()
        self.children: list[Child] = []
        self._pipe = os.pipe()
        self._old: dict[int, object] = {}

    def __enter__(self) -> Supervisor:
        for number in SIGNALS:
            self._old[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.stop()
        finally:
            for number, handler in self._old.items():
                signal.signal(number, handler)  # type: ignore[arg-type]
            for end in self._pipe:
                with contextlib.suppress(OSError):
                    os.close(end)

    def start(self, plans: Sequence[Plan]) -> list[Child]:
        """All of them at once; returns when all are ready. Raises Unavailable with the last log lines of one that ended, Interrupted."""
        started = [self._spawn(plan) for plan in plans]
        waiting = {child.plan.name: child for child in started}
        began = time.monotonic()
        while waiting:
            event = self.next(PROGRESS_S)
            if isinstance(event, Signalled):
                raise Interrupted
            if isinstance(event, Ended):
                raise Unavailable(_obituary(event))
            if event is not None:
                del waiting[event.child.plan.name]
                self._tell(f"{event.child.plan.name} ready on {event.child.endpoint}, pid {event.child.process.pid}")
            elif time.monotonic() - began < START_TIMEOUT_S:
                self._tell(f"{LOADING}: {', '.join(waiting)}")
            else:
                last = "\n".join(f"{name}, its last lines:\n{tail(child.log)}" for name, child in waiting.items())
                raise Unavailable(f"not ready after {START_TIMEOUT_S:g} s: {last}")
        return started

    def spawn_again(self, plan: Plan) -> Child:
        """Returns at once. The plan names the ports, since peers know them. Its log goes on where that of the one before ended."""
        child = self._spawn(plan, "ab")
        child.host, child.port, child.metrics_port = (plan.settings["HOST"], int(plan.settings["PORT"]), int(plan.settings["METRICS_PORT"]))
        return child

    def next(self, timeout_s: float | None) -> Ready | Ended | Signalled | None:
        """What happened; None when nothing did in that time. No time: waits for ever."""
        try:
            event = self._events.get(timeout=None if timeout_s is None else max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(event, Ended):
            self.children.remove(event.child)
        return event

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Signals raise KeyboardInterrupt in here, as code that does its own waiting expects."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            raise KeyboardInterrupt

        before = {number: signal.signal(number, interrupt) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def stop(self) -> None:
        """The front door first, then what stands behind it; a second signal makes it short."""
        for roles in (("orchestrator",), ("draft", "target")):
            wave = [child for child in self.children if child.plan.role in roles]
            for child in wave:
                child.identity.send(signal.SIGTERM)
            self._wait(wave, STOP_TIMEOUT_S)
            for child in wave:
                child.identity.send(signal.SIGKILL)
            self._wait(wave, KILL_TIMEOUT_S)

    def _wait(self, wave: Sequence[Child], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while any(child.process.poll() is None for child in wave) and time.monotonic() < deadline:
            if isinstance(self.next(0.05), Signalled):
                return

    def _spawn(self, plan: Plan, log_mode: Literal["wb", "ab"] = "wb") -> Child:
        read_end, _ = self._pipe
        environment = environment_of({**plan.settings, "PARENT_PIPE": str(read_end), "DIE_WITH_PARENT": "true"})
        environment.setdefault("OMP_NUM_THREADS", plan.settings.get("THREADS", "1"))
        log = self._logs / f"{plan.name}.log"
        with log.open(log_mode) as errors:
            process = subprocess.Popen(
                plan.command_line(),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=(read_end,),
                process_group=0,  # Ctrl-C reaches the supervisor alone, which then stops its children in order
            )
        child = Child(plan, process, identify(process.pid), log)
        self.children.append(child)
        threading.Thread(target=self._read, args=(child,), name=f"read-{plan.name}", daemon=True).start()
        return child

    def _read(self, child: Child) -> None:
        """Standard output to its end; anything but the ready line goes to the log."""
        assert child.process.stdout is not None
        with child.process.stdout as lines, child.log.open("a") as log:
            for line in lines:
                match = _READY.fullmatch(line.strip())
                if match is None:
                    log.write(line)
                    log.flush()
                    continue
                child.host, child.port, child.metrics_port = match[2], int(match[3]), int(match[4])
                self._events.put(Ready(child))
        self._events.put(Ended(child, child.process.wait()))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._events.put(Signalled(number))  # SimpleQueue.put may be entered again from a signal handler


def environment_of(settings: Mapping[str, str]) -> dict[str, str]:
    """Ours, with these settings."""
    return inherited({f"SPECDEC_{name}": value for name, value in settings.items()})


def how_it_ended(event: Ended) -> str:
    """In one line: what killed it, or its exit code and the last that it said."""
    if event.code < 0:
        return f"killed by {signal.Signals(-event.code).name}"
    said = tail(event.child.log, 1).strip()
    return f"exit code {event.code}" + (f", {said}" if said and event.code else "")


def _obituary(event: Ended) -> str:
    reason = f"exit code {event.code}" if event.code >= 0 else how_it_ended(event)
    return f"{event.child.plan.name} ended ({reason}); its last lines:\n{tail(event.child.log)}"


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    with contextlib.suppress(OSError):
        return "\n".join("  " + line for line in path.read_text(errors="replace").splitlines()[-lines:])
    return ""
