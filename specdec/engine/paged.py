"""K/V of many slots in one pool of blocks on an accelerator, behind the same interface as kv.KvStore and counted by the same books.

A slot is a list of blocks of 64 tokens. A fork shares the whole blocks of its prefix and copies the last, partial one. Who is to write into
a block that others see gets another first. Block 0 belongs to nobody and stays zero: tables are padded with it. Whatever the pool holds is
finite, since it begins as zeros and writers put in finite numbers only.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.engine.branches import check_branch, check_cut, check_graft, check_own
from specdec.engine.cache import BLOCK_TOKENS, KvBudget, OutOfRoom, blocks_of

MAX_SLOTS = 4096


class PagedSlot:
    """`blocks[i]` holds tokens 64 i … 64 i + 63; `length` tokens count. A branch is a fork at `base` tokens of its `parent`, which keeps
    them; `branches`: those of this slot, by name."""

    __slots__ = ("base", "blocks", "branches", "length", "parent")

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.length = self.base = 0
        self.parent: PagedSlot | None = None
        self.branches: dict[int, PagedSlot] = {}

    def places(self, start: int, end: int) -> list[int]:
        """Rows of the pool of tokens start … end-1."""
        return [self.blocks[t // BLOCK_TOKENS] * BLOCK_TOKENS + t % BLOCK_TOKENS for t in range(start, end)]


class PagedStore:
    """`pool` [layers, blocks, 64, 2 * heads, dim]: keys in the first `heads`, then values. All of it is taken at once."""

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device, *, total_tokens: int) -> None:
        if total_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens {total_tokens} must be at least one block of {BLOCK_TOKENS}")
        self._room = KvBudget(total_tokens)
        self.total_tokens = self._room.total_tokens
        self.pool = torch.zeros(layers, self._room.total_blocks + 1, BLOCK_TOKENS, 2 * heads, dim, dtype=dtype, device=device)
        self.device: torch.device | None = device
        self.token_bytes = layers * 2 * heads * dim * dtype.itemsize
        self.room_bytes = self.pool.nbytes
        self._free = list(range(self._room.total_blocks, 0, -1))
        self._seen_by: Counter[int] = Counter()
        self._slots: dict[int, PagedSlot] = {}
        self._names = itertools.count()

    @property
    def used_tokens(self) -> int:
        return self._room.used_tokens

    def open(self) -> int:
        if len(self._slots) >= MAX_SLOTS:
            raise OutOfRoom(f"{MAX_SLOTS} slots are open")
        name = next(self._names)
        self._slots[name] = PagedSlot()
        return name

    def fork(self, slot: int, length: int) -> int:
        parent = self._slots[slot]
        if not 0 <= length <= parent.length:
            raise ValueError(f"slot {slot} holds {parent.length} tokens, {length} of them cannot be shared")
        name = self.open()
        if not self._room.fork(name, slot, length):
            del self._slots[name]
            raise OutOfRoom(f"no room for a fork of {length} tokens: {self._left()}")
        child = self._slots[name]
        child.blocks, child.length = parent.blocks[: length // BLOCK_TOKENS], length
        self._seen_by.update(child.blocks)
        if length % BLOCK_TOKENS:
            child.blocks.append(self._copied(parent.blocks[length // BLOCK_TOKENS]))
        return name

    def branch(self, slot: int, length: int) -> int:
        parent = self._slots[slot]
        check_branch(slot, length, parent)
        name = self.fork(slot, length)
        branch = parent.branches[name] = self._slots[name]
        branch.parent, branch.base = parent, length
        return name

    def graft(self, slot: int, branch: int) -> None:
        held, grown = self._slots[slot], self._slots[branch]
        check_graft(slot, branch, held, grown)
        before, held.length = held.length, grown.base
        try:
            self.reserve({slot: grown.length})
        except OutOfRoom:
            held.length = before
            raise
        layers = self.pool.flatten(1, 2)
        here, there = (torch.tensor(s.places(grown.base, grown.length), device=self.pool.device) for s in (held, grown))
        layers.index_copy_(1, here, layers.index_select(1, there))
        held.length = grown.length
        self.close(branch)

    def close(self, slot: int) -> None:
        held = self._slots.pop(slot)
        for branch in list(held.branches):
            self.close(branch)
        if held.parent is not None:
            del held.parent.branches[slot]
        self._let_go(held.blocks)
        self._room.release(slot)

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def truncate(self, slot: int, length: int) -> None:
        held = self._slots[slot]
        check_cut(slot, length, held)
        held.length = length
        assert self.length(slot) == length

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Blocks for what each slot writes next, up to `ends[slot]` tokens, seen by nobody else. Raises OutOfRoom, changing nothing."""
        check_own(ends, self._slots)
        writes = {slot: (self._slots[slot].length, end) for slot, end in ends.items()}
        if not self._room.write(writes):
            wanted = sum(end - start for start, end in writes.values())
            raise OutOfRoom(f"no room for {wanted} more tokens of K/V: {self._left()}")
        for slot, (start, _) in writes.items():  # first what goes back, so that the pool is never short of what the books promise
            self._part(self._slots[slot], start)
        for slot, end in ends.items():
            blocks = self._slots[slot].blocks
            blocks += [self._taken() for _ in range(blocks_of(end) - len(blocks))]

    def _part(self, slot: PagedSlot, start: int) -> None:
        """Drops blocks past `start` that others see; of the one `start` lies in, it gets a copy."""
        first, inside = divmod(start, BLOCK_TOKENS)
        if all(self._seen_by[block] == 1 for block in slot.blocks[first:]):
            return
        here, rest = slot.blocks[first : first + bool(inside)], slot.blocks[first + bool(inside) :]
        del slot.blocks[first + len(here) :]
        self._let_go(rest)
        if here and self._seen_by[here[0]] > 1:
            slot.blocks[first] = self._copied(here[0])
            self._let_go(here)

    def slot(self, slot: int) -> PagedSlot:
        return self._slots[slot]

    def _taken(self) -> int:
        block = self._free.pop()
        self._seen_by[block] = 1
        return block

    def _copied(self, block: int) -> int:
        copy = self._taken()
        self.pool[:, copy].copy_(self.pool[:, block])
        return copy

    def _let_go(self, blocks: list[int]) -> None:
        for block in blocks:
            self._seen_by[block] -= 1
            if not self._seen_by[block]:
                del self._seen_by[block]
                self._free.append(block)

    def _left(self) -> str:
        return f"{self.total_tokens - self.used_tokens} of {self.total_tokens} are free"


def flat(pool: Tensor, layer: int) -> Tensor:
    """One layer by token: [blocks * 64, 2 * heads, dim]."""
    return pool[layer].flatten(0, 1)
