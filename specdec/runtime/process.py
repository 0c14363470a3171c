"""What a process does to itself before it loads anything: its CPUs, its priority, and how it learns that its parent is gone."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable

from specdec.runtime.settings import CommonSettings, SettingsError

_PR_SET_PDEATHSIG = 1
COLLECT_EVERY = (100_000, 4, 50)  # new objects; young collections until a middle one; middle ones until a full one


def prepare(settings: CommonSettings) -> None:
    """Call from the main thread, before threads exist: affinity and priority are inherited by threads made later, and the kernel sends the
    death signal when the *thread* that made this process ends."""
    if settings.die_with_parent:
        die_with_parent(signal.SIGTERM)
    if settings.cpu_affinity and hasattr(os, "sched_setaffinity"):
        try:
            os.sched_setaffinity(0, settings.cpu_affinity)
        except OSError as error:
            usable = ",".join(map(str, sorted(os.sched_getaffinity(0))))
            raise SettingsError(f"SPECDEC_CPU_AFFINITY: {error.strerror}; this process may use {usable}") from error
    if settings.nice:
        os.nice(settings.nice)


def die_with_parent(signal_number: int) -> None:
    """Linux only; elsewhere the pipe does the work. Ends at once where the parent died before this call."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0) != 0:
        return
    if os.getppid() != parent:
        os.kill(os.getpid(), signal_number)


def rarely_collect() -> None:
    """For a process that makes small objects all the time and few cycles: what was loaded is never looked at again, and young objects only
    by the hundred thousand. Python's default, every 700 of them and often all there are, costs a sixth of an orchestrator's time and pauses
    of 50 ms among a thousand sessions. Call it when everything is loaded."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_EVERY)


def watch_pipe(descriptor: int, gone: Callable[[], object]) -> threading.Thread:
    """Calls `gone` from a thread when the other end of the pipe closes: the parent, and whoever inherited its end, are gone.

    Unlike the death signal this also works when the parent is not the direct parent, and on every Unix.
    """

    def wait() -> None:
        with contextlib.suppress(OSError):
            while os.read(descriptor, 1):
                pass
        gone()

    thread = threading.Thread(target=wait, name="parent-pipe", daemon=True)
    thread.start()
    return thread
