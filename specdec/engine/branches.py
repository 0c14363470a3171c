"""What a branch may be asked, wherever its keys and values are. Raises ValueError, before anything has changed.

Rules
1. A branch hangs on a slot that is none itself, and reads its first `base` tokens there. As long as it lives they stay.
2. It holds at most BRANCH_TOKENS tokens of its own and is never cut below `base`.
3. A graft may not change what another branch reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

BRANCH_TOKENS = 64


class Branching(Protocol):
    """The part of a slot that is used here. `base` = 0 when it is no branch."""

    base: int
    length: int

    @property
    def parent(self) -> Any: ...

    @property
    def branches(self) -> Mapping[int, Branching]: ...


def check_branch(slot: int, length: int, held: Branching) -> None:
    if held.parent is not None:
        raise ValueError(f"slot {slot} is a branch and cannot have any")
    if not 0 <= length <= held.length:
        raise ValueError(f"slot {slot} holds {held.length} tokens, a branch cannot read {length} of them")


def check_graft(slot: int, branch: int, held: Branching, grown: Branching) -> None:
    if grown.parent is not held:
        raise ValueError(f"slot {branch} is no branch of slot {slot}")
    read = max((other.base for name, other in held.branches.items() if name != branch), default=0)
    if read > grown.base:
        raise ValueError(f"slot {slot} cannot change from token {grown.base} on: another branch reads {read} tokens of it")


def check_cut(slot: int, length: int, held: Branching) -> None:
    if not 0 <= length <= held.length:
        raise ValueError(f"slot {slot} holds {held.length} tokens and cannot be cut to {length}")
    if length < held.base:
        raise ValueError(f"slot {slot} is a branch behind {held.base} tokens and cannot be cut to {length}")
    read = max((branch.base for branch in held.branches.values()), default=0)
    if length < read:
        raise ValueError(f"slot {slot} cannot be cut to {length}: a branch reads {read} tokens of it")


def check_own(ends: Mapping[int, int], slots: Mapping[int, Branching]) -> None:
    """`ends[slot]`: how long each is to become."""
    for slot, end in ends.items():
        held = slots[slot]
        if held.parent is not None and end - held.base > BRANCH_TOKENS:
            raise ValueError(f"slot {slot} is a branch behind {held.base} tokens and cannot hold {end}: {BRANCH_TOKENS} more at most")
