"""Whether anybody drafts, said once whenever it changes."""

from __future__ import annotations

import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Speculation:
    """`configured`: drafts are to be expected at all. `serves` says whether one can be used now."""

    def __init__(self, configured: bool, serves: Callable[[], bool]) -> None:
        self._configured, self._serves = configured, serves
        self._told: bool | None = None

    @property
    def enabled(self) -> bool:
        return self._serves()

    def look(self) -> None:
        """After everything that may have changed it, and when a request arrives."""
        if (enabled := self._serves()) == self._told:
            return
        self._told = enabled
        if enabled:
            log.info("speculation is on")
        elif self._configured:
            log.warning("speculation is off: every draft is away or shut out, the targets decide alone")
        else:
            log.info("speculation is off: SPECDEC_DRAFTS names no draft, the targets decide alone")
