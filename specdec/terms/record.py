"""Dataclasses of which a round makes dozens: frozen to the type checker, plain at run time.

A frozen dataclass sets each field by a call of object.__setattr__, which makes it three times as dear to build. Nobody changes a term, and
mypy sees to that; they compare and hash by value like frozen ones.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as record
else:

    def record(*, frozen: bool, slots: bool) -> Any:
        """As `dataclass`, for `frozen=True`."""
        return dataclasses.dataclass(slots=slots, unsafe_hash=frozen)


__all__ = ["record"]
