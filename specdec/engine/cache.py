"""Accounting of K/V room by session, in whole blocks. Knows no tensor, so a service decides with it on its event loop.

Booked room follows the rows that will be written, not the tokens that will be kept: a session that holds L tokens and is about to verify a
block of K needs room for L + K + 1 before the call.

A fork shares the whole blocks of its prefix with its parent. They lie in the parent's memory, which makes a family: its room is what the
member that reaches furthest into it needs, booked once. All else is a member's own. What a fork wrote itself is in nobody's reach, so a
fork of a fork shares only what its parent shares.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from typing import TypeVar

from specdec.errors import EngineFault

Session = TypeVar("Session", bound=Hashable)

BLOCK_TOKENS = 64  # the store's memory grows in these steps, so finer accounting would promise room that is not there


class OutOfRoom(EngineFault):
    """A K/V store was asked for more than its bound. Whoever books with KvBudget first never sees this."""


def blocks_of(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    return -(-tokens // block_tokens)


class _Family:
    """`reach[member]` = blocks of the shared memory it uses, from the start. Only `owner` writes there; None when it is gone."""

    __slots__ = ("owner", "reach")

    def __init__(self, owner: Hashable, blocks: int) -> None:
        self.owner: Hashable | None = owner
        self.reach: dict[Hashable, int] = {owner: blocks}

    @property
    def blocks(self) -> int:
        return max(self.reach.values(), default=0)

    def reach_of_others(self, member: Hashable) -> int:
        return max((blocks for other, blocks in self.reach.items() if other != member), default=0)


class KvBudget:
    """Room of one engine. `watermark` = share of all blocks that new sessions may fill; the rest is for those already admitted to grow."""

    def __init__(self, total_tokens: int, *, block_tokens: int = BLOCK_TOKENS, watermark: float = 0.9) -> None:
        if block_tokens < 1 or total_tokens < block_tokens:
            raise ValueError(f"total_tokens {total_tokens} must hold at least one block of block_tokens {block_tokens} >= 1")
        if not 0.0 < watermark <= 1.0:
            raise ValueError(f"watermark {watermark} must lie in (0, 1]")
        self.block_tokens, self.watermark = block_tokens, watermark
        self.total_blocks = total_tokens // block_tokens
        self.total_tokens = self.total_blocks * block_tokens
        self.used_blocks = 0
        self._own: dict[Hashable, int] = {}
        self._families: dict[Hashable, _Family] = {}

    @property
    def used_tokens(self) -> int:
        return self.used_blocks * self.block_tokens

    @property
    def utilization(self) -> float:
        return self.used_blocks / self.total_blocks

    def can_admit(self, tokens: int, reserve_tokens: int) -> bool:
        """May a new session with `tokens` now, and `reserve_tokens` to grow into, come in under the watermark?"""
        wanted = blocks_of(tokens + reserve_tokens, self.block_tokens)
        return self.used_blocks + wanted <= int(self.watermark * self.total_blocks)

    def grow(self, session: Hashable, tokens: int) -> bool:
        """Books room for `tokens` in all; a session never shrinks. False = no room, and nothing changed."""
        if tokens < 0:
            raise ValueError(f"tokens {tokens} must not be negative")
        return self._grow({session: tokens})

    def fork(self, child: Hashable, parent: Hashable, tokens: int) -> bool:
        """A new session with the first `tokens` tokens of another. False = no room for the child's own part, and nothing changed."""
        held = self._blocks(parent)
        if not 0 <= tokens <= held * self.block_tokens:
            raise ValueError(f"tokens {tokens} must lie within the {held * self.block_tokens} booked for {parent!r}")
        if child in self._own:
            raise ValueError(f"session {child!r} has room already")
        family = self._families.get(parent)
        shared = min(tokens // self.block_tokens, held if family is None else family.reach[parent])
        own = blocks_of(tokens, self.block_tokens) - shared
        if self.used_blocks + own > self.total_blocks:
            return False
        self._own[child] = own
        self.used_blocks += own
        if shared:
            if family is None:
                family = self._families[parent] = _Family(parent, held)
                self._own[parent] = 0
            self._families[child] = family
            family.reach[child] = shared
        return True

    def shared_tokens(self, session: Hashable) -> int:
        """Tokens from the start that lie in memory others may share; everything, for a session that forks come from."""
        family = self._families.get(session)
        return 0 if family is None else family.reach[session] * self.block_tokens

    def family_tokens(self, session: Hashable) -> int:
        """How far any member reaches into the memory that `session` shares."""
        family = self._families.get(session)
        return 0 if family is None else family.blocks * self.block_tokens

    def kept_tokens(self, session: Hashable) -> int:
        """How far the others reach into it: what must stay when `session` leaves."""
        family = self._families.get(session)
        return 0 if family is None else family.reach_of_others(session) * self.block_tokens

    def held_alone(self, sessions: Collection[Hashable]) -> int:
        """Tokens that would be free if all of these were released."""
        families = {id(family): family for session in sessions if (family := self._families.get(session)) is not None}
        blocks = sum(self._own.get(session, 0) for session in sessions)
        for family in families.values():
            blocks += family.blocks - max((reach for member, reach in family.reach.items() if member not in sessions), default=0)
        return blocks * self.block_tokens

    def must_part(self, session: Hashable, start: int) -> bool:
        """Would writing from token `start` on change what others share with it, or what it shares with others?"""
        family = self._families.get(session)
        if family is None:
            return False
        reach = family.reach_of_others(session) if family.owner == session else family.reach[session]
        return start < reach * self.block_tokens

    def write(self, writes: Mapping[Session, tuple[int, int]]) -> bool:
        """Books for {session: (start, end)}: it will write tokens start … end-1. Who must part does. False = no room, nothing changed."""
        saved = None
        for session, (start, _) in writes.items():
            if self.must_part(session, start):
                saved = saved or self._state()
                self._part(session, start // self.block_tokens)
        if self._grow({session: end for session, (_, end) in writes.items()}):
            return True
        if saved is not None:
            self.used_blocks, self._own, self._families = saved
        return False

    def release(self, session: Hashable) -> None:
        """Gives a session's room back; unknown sessions are ignored. What it shared stays booked while others share it."""
        self.used_blocks -= self._own.pop(session, 0)
        family = self._families.pop(session, None)
        if family is not None:
            self.used_blocks -= family.blocks
            del family.reach[session]
            family.owner = None if family.owner == session else family.owner
            self.used_blocks += family.blocks

    def _blocks(self, session: Hashable) -> int:
        family = self._families.get(session)
        return self._own.get(session, 0) + (0 if family is None else family.reach[session])

    def _grow(self, ends: Mapping[Session, int]) -> bool:
        more = {}
        for session, end in ends.items():
            blocks = blocks_of(end, self.block_tokens) - self._blocks(session)
            if blocks > 0:
                more[session] = blocks
        wanted = sum(more.values())
        if self.used_blocks + wanted > self.total_blocks:
            return False
        for session, blocks in more.items():
            family = self._families.get(session)
            if family is not None and family.owner == session:  # nobody reaches further than the owner, so its growth is the family's
                family.reach[session] += blocks
            else:
                self._own[session] = self._own.get(session, 0) + blocks
        self.used_blocks += wanted
        return True

    def _part(self, session: Hashable, keep: int) -> None:
        """It shares its first `keep` blocks still, and owns the others."""
        family = self._families[session]
        before, moved = family.blocks, family.reach[session] - keep
        family.reach[session] = keep
        family.owner = None if family.owner == session else family.owner
        self._own[session] += moved
        self.used_blocks += moved + family.blocks - before

    def _state(self) -> tuple[int, dict[Hashable, int], dict[Hashable, _Family]]:
        """A copy deep enough to go back to."""
        copies: dict[int, _Family] = {}
        for family in self._families.values():
            if id(family) not in copies:
                copy = copies[id(family)] = _Family(None, 0)
                copy.owner, copy.reach = family.owner, dict(family.reach)
        return self.used_blocks, dict(self._own), {session: copies[id(f)] for session, f in self._families.items()}
