"""Which process is which: a pid alone may belong to somebody else by now, a pid with its start time may not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    started: int  # clock ticks after boot, from /proc; 0 where there is no /proc

    @property
    def alive(self) -> bool:
        """Whether this very process still runs; a zombie does not."""
        return _read(self.pid) == self.started if Path("/proc/self/stat").exists() else _exists(self.pid)

    def send(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, number)


def identify(pid: int) -> ProcessId:
    return ProcessId(pid, _read(pid) or 0)


def wait_gone(processes: Iterable[ProcessId], timeout_s: float) -> list[ProcessId]:
    """Those that still run at the end."""
    deadline = time.monotonic() + timeout_s
    left = [p for p in processes if p.alive]
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = [p for p in left if p.alive]
    return left


def end(processes: Iterable[ProcessId], grace_s: float) -> None:
    """SIGTERM, then SIGKILL for those that are left."""
    waiting = list(processes)
    for process in waiting:
        process.send(signal.SIGTERM)
    for process in wait_gone(waiting, grace_s):
        process.send(signal.SIGKILL)
    wait_gone(waiting, 2.0)


def _read(pid: int) -> int | None:
    """Start time of a process that is not a zombie."""
    try:
        # The command's name stands in parentheses and may hold anything; the fields begin after the last one.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
