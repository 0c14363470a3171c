"""One line that says how far it is and how long it will take: rewritten on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable, Hashable, Sequence
from typing import TextIO

WIDTH = 24
EVERY_S = 30.0  # between two lines where nothing can be rewritten
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """`work` = a key for every piece to be done; pieces with equal keys take about the same time."""

    def __init__(self, work: Sequence[Hashable], stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._work, self._stream, self._clock = list(work), stream, clock
        self._took: dict[Hashable, list[float]] = {}
        self._done = 0
        self._said_at = clock()
        self._terminal = stream.isatty()

    def begin(self, label: str) -> None:
        if self._terminal:
            self._write(label)

    def end(self, label: str, seconds: float) -> None:
        self._took.setdefault(self._work[self._done], []).append(seconds)
        self._done += 1
        if self._terminal:
            self._write(label)
        elif self._clock() - self._said_at >= EVERY_S or self._done == len(self._work):
            self._write(label)
            self._said_at = self._clock()

    def close(self) -> None:
        if self._terminal:
            self._stream.write(CLEAR_LINE)
            self._stream.flush()

    def left_s(self) -> float | None:
        """What is left takes as long as its like did, or as all did on the mean where nothing like it is done; None before the first."""
        if not self._took:
            return None
        mean = statistics.fmean(seconds for several in self._took.values() for seconds in several)
        means = {key: statistics.fmean(several) for key, several in self._took.items()}
        return sum(means.get(key, mean) for key in self._work[self._done :])

    def _write(self, label: str) -> None:
        total = max(1, len(self._work))
        filled = WIDTH * self._done // total
        left = self.left_s()
        time_left = "" if left is None else f", {_clock_time(left)} left"
        bar, count = f"[{'#' * filled}{'.' * (WIDTH - filled)}]", f"{self._done}/{len(self._work)}"
        if not self._terminal:
            self._stream.write(f"{bar} {count} {label}{time_left}\n")
        else:  # what wraps could not be written over; of a narrow terminal the time left has the first place
            most = shutil.get_terminal_size().columns - 1
            room = most - len(f"{bar} {count} {time_left}")
            line = f"{bar} {count} {label[: max(0, room)]}{time_left}" if room >= 0 else f"{count}{time_left}"[:most]
            self._stream.write(f"{CLEAR_LINE}{line}")
        self._stream.flush()


def _clock_time(seconds: float) -> str:
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}" if whole >= 3600 else f"{whole // 60}:{whole % 60:02}"
