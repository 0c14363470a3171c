"""K/V memory of many slots. Exact rollback: a slot's past is a prefix of its memory, so forgetting is only a shorter length.

A slot reserves addresses for the whole window at once and the system gives it pages, zeroed, as they are first written: growing copies
nothing, and closing gives everything back.

At its first fork a slot moves, once, into a file in memory. It goes on writing there, behind what it shares; a fork sees the whole blocks
of its prefix in the file and gets a page of its own wherever it writes, its last, partial block first of all. So the file must keep only
whole blocks that somebody shares; when the slot closes, what lies behind them is given back, and the file goes with the last who sees it.
A slot that was rolled back and is to write where others look becomes a fork of its own file. What a fork wrote is in no file: its own forks
copy it.

A branch is light and short: it reads its first tokens from its slot's memory and has a little of its own for what comes behind them, which
the next branch uses again. A slot keeps what its branches read.

Touching a hole of the file through a private mapping puts a page there as well as here. So a fork touches its blocks when it books them,
whole, and gives the file's pages back at once. Measured on SmolLM2-135M with 500 tokens: the move 45 ms, a fork 2 ms, a step that begins a
block up to 8 ms longer, all other steps as before.

Whatever lies beyond a slot's length is finite: new memory is zero and writers put in finite numbers only. Torch's attention reads whole key
blocks under a mask, and a masked NaN is still a NaN; compiled attention reads a row's own keys alone.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from specdec.engine.branches import BRANCH_TOKENS, check_branch, check_cut, check_graft, check_own
from specdec.engine.cache import BLOCK_TOKENS, KvBudget, OutOfRoom, blocks_of
from specdec.engine.pages import SharedFile, can_share, lazy_zeros

MAX_SLOTS = 4096
MAX_SPARE = 256
BRANCH_CAPACITY = BRANCH_TOKENS + 32  # attention reads on to the end of a block of 32 keys
log = logging.getLogger(__name__)


class Slot:
    """`memory` [layers, 2 * heads, capacity, dim]: keys in the first `heads`, then values; `length` tokens of it count.

    `file`: what the memory is a view of, once forks came of the slot or it of another. `writes_file`: what it writes goes there; otherwise
    its pages are its own up to `touched` tokens, behind those it shares.

    A branch has a `parent`, in whose memory its first `base` tokens are; token t >= base lies at t - base in its own, which holds
    BRANCH_CAPACITY tokens. `branches`: those of this slot, by name.
    """

    __slots__ = ("_heads", "_views", "_width", "base", "branches", "file", "length", "memory", "parent", "touched", "writes_file")

    def __init__(self, memory: Tensor, heads: int, file: ForkedFile | None = None, *, parent: Slot | None = None, base: int = 0) -> None:
        self._heads, self.parent, self.base = heads, parent, base
        self.length, self.touched = base, 0
        self.branches: dict[int, Slot] = {}
        self.use(memory, file)

    def use(self, memory: Tensor, file: ForkedFile | None, writes_file: bool = False) -> None:
        self.memory, self.file, self.writes_file = memory, file, writes_file
        self._width = 0
        self._views: list[tuple[Tensor, Tensor]] = []

    def keys_values(self, keys: int) -> ByLayer:
        """Of each layer the first `keys` keys and values, [1, heads, keys, dim] each. Views; kept until another width is asked for.

        Those of a branch are copied together when a layer is asked for.
        """
        if self.parent is not None:
            return _Joined(self.parent, self, keys)
        if keys != self._width:
            k = self.memory[:, None, : self._heads, :keys].unbind(0)
            v = self.memory[:, None, self._heads :, :keys].unbind(0)
            self._views, self._width = list(zip(k, v, strict=True)), keys
        return self._views

    def written(self, start: int, end: int) -> Tensor:
        """The places of tokens start … end-1, [layers, 2 * heads, n, dim]."""
        return self.memory[:, :, start - self.base : end - self.base]

    def layer(self, layer: int, keys: int) -> Tensor:
        """The first `keys` places of a layer's memory, [1, 2 * heads, keys, dim]."""
        return self.memory[layer, None, :, :keys]


class ByLayer(Protocol):
    """[layer] → keys and values."""

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]: ...


class _Joined:
    """The first `keys` keys and values of a branch."""

    def __init__(self, parent: Slot, branch: Slot, keys: int) -> None:
        self._parent, self._branch, self._keys = parent, branch, keys

    def __getitem__(self, layer: int, /) -> tuple[Tensor, Tensor]:
        base = self._branch.base
        whole = torch.cat([self._parent.layer(layer, base), self._branch.layer(layer, self._keys - base)], 2)
        keys, values = whole.chunk(2, 1)
        return keys, values


class ForkedFile:
    """The file of a slot that was forked. `extent`: tokens whose pages may be there."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, extent: int) -> None:
        self.pages, self.extent = SharedFile(shape, dtype), extent
        layers, heads, self._capacity, dim = shape
        self._parts, self._token = layers * heads, dim * dtype.itemsize

    def keep(self, tokens: int) -> None:
        """Gives back what lies behind them."""
        self.give_back(tokens, self.extent)
        self.extent = min(tokens, self.extent)

    def give_back(self, start: int, end: int) -> None:
        """The pages of tokens start … end-1, which nobody needs."""
        if start < end:
            starts = range(0, self._parts * self._capacity, self._capacity)
            self.pages.give_back([((first + start) * self._token, (first + end) * self._token) for first in starts])


class KvStore:
    """`heads` = K/V heads of a layer, `window` = longest slot, `total_tokens` = bound over all slots.

    Room is counted in blocks of 64 tokens, as KvBudget does and by it. What a slot once grew to stays counted until it closes, as its pages
    do. Where the system has no files in memory a fork is a copy; it is counted as if it shared.
    """

    def __init__(self, layers: int, heads: int, dim: int, dtype: torch.dtype, *, window: int, total_tokens: int) -> None:
        if total_tokens < BLOCK_TOKENS:
            raise ValueError(f"kv_tokens {total_tokens} must be at least one block of {BLOCK_TOKENS}")
        # One block more than needed: heads a power of two apart would share cache sets.
        self._shape = (layers, 2 * heads, (blocks_of(window) + 1) * BLOCK_TOKENS, dim)
        self._branch_shape = (layers, 2 * heads, BRANCH_CAPACITY, dim)
        self._heads, self._dtype = heads, dtype
        self._room = KvBudget(total_tokens)
        self.total_tokens = self._room.total_tokens
        self.device: torch.device | None = None
        self.token_bytes = layers * 2 * heads * dim * dtype.itemsize
        self.room_bytes = self.total_tokens * self.token_bytes
        self._slots: dict[int, Slot] = {}
        self._spare: list[Tensor] = []  # memory of branches that are gone
        self._names = itertools.count()

    @property
    def used_tokens(self) -> int:
        return self._room.used_tokens

    def open(self) -> int:
        self._require_a_name()
        name = next(self._names)
        self._slots[name] = Slot(lazy_zeros(self._shape, self._dtype), self._heads)
        return name

    def fork(self, slot: int, length: int) -> int:
        parent = self._slots[slot]
        if not 0 <= length <= parent.length:
            raise ValueError(f"slot {slot} holds {parent.length} tokens, {length} of them cannot be shared")
        self._require_a_name()
        name = next(self._names)
        if not self._room.fork(name, slot, length):
            raise OutOfRoom(f"no room for a fork of {length} tokens: {self._free()}")
        child = self._slots[name] = self._forked(parent, length, self._room.shared_tokens(name), self._room.shared_tokens(slot))
        self._touch(child, length, blocks_of(length) * BLOCK_TOKENS, self._room.family_tokens(name))
        return name

    def _forked(self, parent: Slot, length: int, shared: int, extent: int) -> Slot:
        """A slot whose first `shared` tokens are the parent's pages, and the rest a copy. `extent`: tokens that the parent has room for."""
        child = None
        if shared and can_share():
            try:
                file = parent.file or self._moved(parent, extent)
                child = Slot(file.pages.private(), self._heads, file)
            except OSError as error:  # descriptors or mappings are used up
                log.warning("a fork is copied instead of shared: %s", error)
        if child is None:
            child, shared = Slot(lazy_zeros(self._shape, self._dtype), self._heads), 0
        child.memory[:, :, shared:length].copy_(parent.memory[:, :, shared:length])
        child.length = length
        child.touched = shared
        return child

    def _touch(self, slot: Slot, start: int, end: int, kept: int) -> None:
        """Makes a fork's pages up to token `end` its own, zero from token `start` on. The file keeps `kept` tokens."""
        if slot.file is None or slot.writes_file or end <= slot.touched:
            return
        slot.memory[:, :, max(start, slot.touched) : end].zero_()
        slot.file.give_back(max(slot.touched, kept), end)
        slot.touched = end

    def _moved(self, slot: Slot, extent: int) -> ForkedFile:
        """Into a file, in which it owns every page."""
        file = ForkedFile(self._shape, self._dtype, extent)
        memory = file.pages.shared()
        memory[:, :, : slot.length].copy_(slot.memory[:, :, : slot.length])
        slot.use(memory, file, writes_file=True)
        return file

    def branch(self, slot: int, length: int) -> int:
        parent = self._slots[slot]
        check_branch(slot, length, parent)
        self._require_a_name()
        name = next(self._names)
        if not self._room.grow(name, BRANCH_TOKENS):
            raise OutOfRoom(f"no room for a branch: {self._free()}")
        memory = self._spare.pop() if self._spare else lazy_zeros(self._branch_shape, self._dtype)
        self._slots[name] = parent.branches[name] = Slot(memory, self._heads, parent=parent, base=length)
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
        held.written(grown.base, grown.length).copy_(grown.written(grown.base, grown.length))
        held.length = grown.length
        self.close(branch)

    def close(self, slot: int) -> None:
        held = self._slots.pop(slot)
        for branch in list(held.branches):
            self.close(branch)
        if held.parent is not None:
            del held.parent.branches[slot]
            if len(self._spare) < MAX_SPARE:
                self._spare.append(held.memory)
        if held.file is not None:
            held.file.extent = max(held.file.extent, self._room.shared_tokens(slot))
            kept = self._room.kept_tokens(slot)
            if kept:  # else the file goes as a whole
                held.file.keep(kept)
        self._room.release(slot)

    def length(self, slot: int) -> int:
        return self._slots[slot].length

    def truncate(self, slot: int, length: int) -> None:
        held = self._slots[slot]
        check_cut(slot, length, held)
        held.length = length
        assert self.length(slot) == length

    def reserve(self, ends: Mapping[int, int]) -> None:
        """Room, and memory of their own, for what each slot writes next, up to `ends[slot]` tokens. Raises OutOfRoom, changing nothing."""
        check_own(ends, self._slots)
        writes = {slot: (self._slots[slot].length, end) for slot, end in ends.items() if self._slots[slot].parent is None}
        parting = [slot for slot, (start, _) in writes.items() if self._room.must_part(slot, start)]
        extents = {slot: self._room.shared_tokens(slot) for slot in parting}
        if not self._room.write(writes):
            wanted = sum(end - start for start, end in writes.values())
            raise OutOfRoom(f"no room for {wanted} more tokens of K/V: {self._free()}")
        for slot in parting:
            self._part(self._slots[slot], self._room.shared_tokens(slot), extents[slot])
        for slot in parting:  # after the last has what it needs
            file = self._slots[slot].file
            if file is not None:
                file.keep(self._room.family_tokens(slot))
        for slot, (start, end) in writes.items():
            if self._slots[slot].file is not None:
                self._touch(self._slots[slot], start, blocks_of(end) * BLOCK_TOKENS, self._room.family_tokens(slot))

    def _part(self, slot: Slot, shared: int, extent: int) -> None:
        """Only its first `shared` tokens stay in the file that it has reached into up to `extent`; what follows becomes its own."""
        if slot.file is None:
            return
        slot.file.extent = max(slot.file.extent, extent)
        before, first, memory, file = slot.memory, shared, slot.memory, slot.file
        if slot.writes_file:
            slot.touched = extent
            try:
                memory = file.pages.private()
            except OSError:
                memory, first = lazy_zeros(self._shape, self._dtype), 0
        memory[:, :, first : slot.length].copy_(before[:, :, first : slot.length].clone())
        memory[:, :, slot.length : extent].zero_()
        slot.use(memory, file)

    def slot(self, slot: int) -> Slot:
        return self._slots[slot]

    def _require_a_name(self) -> None:
        if len(self._slots) >= MAX_SLOTS:
            raise OutOfRoom(f"{MAX_SLOTS} slots are open")

    def _free(self) -> str:
        return f"{self.total_tokens - self.used_tokens} of {self.total_tokens} are free"
