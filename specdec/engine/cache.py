"""Accounting of K/V room by session, in whole blocks. Knows no tensor, so a service decides with it on its event loop.

Booked room follows the rows that will be written, not the tokens that will be kept: a session that holds L tokens and is about to verify a
block of K needs room for L + K + 1 before the call.
"""

from __future__ import annotations

from collections.abc import Hashable

from specdec.errors import EngineFault

BLOCK_TOKENS = 64  # the store's memory grows in these steps, so finer accounting would promise room that is not there


class OutOfRoom(EngineFault):
    """A K/V store was asked for more than its bound. Whoever books with KvBudget first never sees this."""


def blocks_of(tokens: int, block_tokens: int = BLOCK_TOKENS) -> int:
    return -(-tokens // block_tokens)


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
        self._blocks: dict[Hashable, int] = {}

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
        held = self._blocks.get(session, 0)
        more = blocks_of(tokens, self.block_tokens) - held
        if more <= 0:
            return True
        if self.used_blocks + more > self.total_blocks:
            return False
        self._blocks[session] = held + more
        self.used_blocks += more
        return True

    def release(self, session: Hashable) -> None:
        """Gives a session's room back; unknown sessions are ignored."""
        self.used_blocks -= self._blocks.pop(session, 0)
