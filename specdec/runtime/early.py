"""Signals from the first moment on. Importing an engine takes seconds, and the first process of a container ignores every signal that it
has no handler for: without one, a stop that comes early is lost. `server` takes over once it runs."""

from __future__ import annotations

import os
import signal
from types import FrameType


def leave_on_signals() -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    os._exit(0)  # nothing has begun; and an interpreter in the middle of an import does not end well
