"""K/V memory of many slots. Exact rollback: a slot's past is a prefix of its memory, so forgetting is only a shorter length.

A slot reserves addresses for the whole window at once and the system gives it pages, zeroed, as they are first written: growing copies
nothing, and closing gives everything back. Huge pages are declined, since one of them holds thousands of tokens of a single head.

Whatever lies beyond a slot's length is finite: new memory is zero and writers put in finite numbers only. Attention reads whole key blocks
under a mask, and a masked NaN is still a NaN.
"""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Mapping

import torch
from torch import Tensor

from specdec.engine.cache import BLOCK_TOKENS, OutOfRoom, blocks_of

MAX_SLOTS = 4096


class Slot:
    """`memory` [layers, 2 * heads, capacity, dim]: keys in the first `heads`, then values; `length` tokens of it count."""

    __slots__ = ("_heads", "_views", "_width", "blocks", "length", "memory")

    def __init__(self, memory: Tensor, heads: int) -> None:
        self.memory, self._heads = memory, heads
        self.length = self.blocks = self._width = 0
        self._views: list[tuple[Tensor, Tensor]] = []

    def keys_values(self, keys: int) -> list[tuple[Tensor, Tensor]]:
        """Of each layer the first `keys` keys and values, [1, heads, keys, dim] each. Views; kept until another width is asked for."""
        if keys != self._width:
            k = self.memory[:, None, : self._heads, :keys].unbind(0)
            v = self.memory[:, None, self._heads :, :keys].unbind(0)
            self._views, self._width = list(zip(k, v, strict=True)), keys
        return self._views

    def written(self, start: int, end: int) -> Tensor:
        """The places of tokens start … end-1, [layers, 2 * heads, n, dim]."""
        return self.memory[:, :, start:end]


class KvStore:
    """`heads` = K/V heads of a layer, `window` = longest slot, `total_tokens` = bound over all slots.

    Room is counted in blocks of 64 tokens. What a slot once grew to stays counted until it closes, as its pages do.
    """

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype, *, window: int, total_tokens: int) -> None:
        if total_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens {total_tokens} must be at least one block of {BLOCK_TOKENS}")
        # One block more than needed: heads a power of two apart would share cache sets.
        self._shape = (layers, 2 * heads, (blocks_of(window) + 1) * BLOCK_TOKENS, dim)
        self._heads, self._dtype = heads, dtype
        self.total_tokens = total_tokens // BLOCK_TOKENS * BLOCK_TOKENS
        self.used_tokens = 0
        self._slots: dict[int, Slot] = {}
        self._names = itertools.count()

    def open(self) -> int:
        if len(self._slots) >= MAX_SLOTS:
            raise OutOfRoom(f"{MAX_SLOTS} slots are open")
        name = next(self._names)
        self._slots[name] = Slot(_lazy_zeros(self._shape, self._dtype), self._heads)
        return name

    def fork(self, slot: int, length: int) -> int:
        held = self._slots[slot]
        if not 0 <= length <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} tokens, {length} of them cannot be shared")
        name = self.open()
        self.reserve({name: length})
        self._slots[name].written(0, length).copy_(held.written(0, length))
        self._slots[name].length = length
        return name

    def close(self, slot: int) -> None:
        self.used_tokens -= self._slots.pop(slot).blocks * BLOCK_TOKENS

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def truncate(self, slot: int, length: int) -> None:
        held = self._slots[slot]
        if not 0 <= length <= held.length:
            raise ValueError(f"slot {slot} holds {held.length} tokens and cannot be cut to {length}")
        held.length = length
        assert self.length(slot) == length

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Room for `ends[slot]` tokens of each slot. Raises OutOfRoom, changing nothing."""
        more = {slot: max(0, blocks_of(end) - self._slots[slot].blocks) for slot, end in ends.items()}
        wanted = sum(more.values()) * BLOCK_TOKENS
        if self.used_tokens + wanted > self.total_tokens:
            free = self.total_tokens - self.used_tokens
            raise OutOfRoom(f"{wanted} more tokens of K/V wanted, {free} of {self.total_tokens} are free")
        for slot, blocks in more.items():
            self._slots[slot].blocks += blocks
        self.used_tokens += wanted

    def slot(self, slot: int) -> Slot:
        return self._slots[slot]


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory only where they are written."""
    count = 1
    for side in shape:
        count *= side
    pages = mmap.mmap(-1, count * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
