"""Files that are read as one value and read again when they change. Knows nothing of what is in them.

Files that belong together are rarely replaced in one moment: between a new certificate and its new key the pair makes no sense. So the last
good value stays in use, one log line tells why (again only when the reason changes), and every look tries again until all is well.
Kubernetes swaps a symbolic link for a mounted secret: a file is known by what the link leads to.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

REREAD_S = 1.0  # between two looks
FRESH_NS = 2_000_000_000  # a file this young may change again without its time of change telling
_T = TypeVar("_T")
_Seen = tuple[tuple[int, int, int, int], ...]
log = logging.getLogger(__name__)


class Watched(Generic[_T]):
    """`read` raises ValueError or OSError for what makes no sense; the first reading raises them to the caller."""

    def __init__(self, what: str, paths: Sequence[Path], read: Callable[[], _T]) -> None:
        self._what, self._paths, self._read = what, tuple(paths), read
        self._lock = threading.Lock()
        self._trouble = ""
        self._seen = self._look() if all(path.exists() for path in self._paths) else ()
        self.value = read()

    def refresh(self) -> None:
        """Reads again when there is something new. Blocks for as long as the files take: call it off the event loop."""
        with self._lock:
            try:
                seen = self._look()
                if seen == self._seen and not self._trouble:
                    return
                value = self._read()
            except (ValueError, OSError) as error:
                self._tell(str(error))
                return
            changed = value != self.value or bool(self._trouble)
            self.value, self._seen, self._trouble = value, seen, ""
            if changed:
                log.info("%s: read again", self._what)

    def _tell(self, reason: str) -> None:
        if reason != self._trouble:
            log.error("%s: cannot be used, the last good one stays in use: %s", self._what, reason)
        self._trouble = reason

    def _look(self) -> _Seen:
        stats = [path.stat() for path in self._paths]
        young = time.time_ns() - FRESH_NS
        # A young file gets a mark that no later look repeats: it is read once more when it has come to rest.
        return tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns if s.st_mtime_ns < young else -time.monotonic_ns()) for s in stats)
