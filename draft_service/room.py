"""The room for keys and values, as the drafter sees it."""

from __future__ import annotations

from typing import Protocol


class Room(Protocol):
    """The part of specdec.engine.KvBudget that is used here."""

    @property
    def total_tokens(self) -> int: ...

    @property
    def used_tokens(self) -> int: ...

    def can_admit(self, tokens: int, reserve_tokens: int) -> bool:
        """Whether a new session leaves enough for the others to grow."""

    def grow(self, session: int, tokens: int) -> bool:
        """Books room for `tokens` tokens of a session in all; False, changing nothing, when there is none."""

    def release(self, session: int) -> None: ...
