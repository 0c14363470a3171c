"""Causal attention over slots, bit for bit the same for a row whatever is computed beside it.

A float sum depends on the order of its terms, and a kernel picks the order by its shape. So the shape of the call that computes a row, the
row's place in it and the number of keys follow from the row's own position alone: queries go in blocks at absolute multiples of QUERY_ROWS,
padded when a call has only some of their rows, and a block sees the keys up to the end of its KEY_BLOCK, masked past each row's own. Where
a call begins or ends and who the neighbours are never shows. Blocks of one slot with equal key counts share a kernel call as its batch
dimension, which the CPU kernel walks one entry at a time.

Blocks of 4: measured against 8 on one core, a lone row costs 34 instead of 57 us at 192 keys, and six rows that start anywhere touch 2.25
blocks of 4 (79 us) instead of 1.63 of 8 (91 us). Query heads that share a K/V head are folded into the block's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.batch import Layout
from specdec.engine.kv import ByLayer, KvStore

QUERY_ROWS = 4
KEY_BLOCK = 32


class Inputs(NamedTuple):
    """A batch on the device: ids and positions of its rows, and which rows are scored."""

    tokens: Tensor
    positions: Tensor
    scored: Tensor

    @classmethod
    def of(cls, layout: Layout) -> Inputs:
        return cls(torch.tensor(layout.tokens), torch.tensor(layout.positions), torch.tensor(layout.scored, dtype=torch.int64))


class RowAttention(Protocol):
    """What a model computes attention with: Attention here, or padded.PaddedAttention. `plan`: what its method `plan` answered."""

    def write(self, plan: Any, layer: int, keys_values: Tensor) -> None: ...
    def attend(self, plan: Any, layer: int, rows: Tensor, scale: float | None = None) -> Tensor: ...
    def sums(self, plan: Any) -> Sequence[Tensor]: ...


class Group(NamedTuple):
    """Query blocks of one slot that see the same keys. `keys_values[layer]` = keys and values, [1, kv, keys, dim] each;
    `mask` [blocks, 1, rows * fold, keys]."""

    blocks: int
    keys_values: ByLayer
    mask: Tensor


class Plan(NamedTuple):
    """Where the rows of a batch go. `into`: for every (block, kv head, row of the block, query head of it) the index of (row, head);
    `back`: its inverse. `written[segment]` = the places of new keys and values, [layers, 2 * kv, n, dim]; `writable[layer][segment]` = the
    same by layer; `counts[segment]` = its rows."""

    inputs: Inputs
    groups: list[Group]
    blocks: list[int]
    into: Tensor
    back: Tensor
    written: list[Tensor]
    writable: list[tuple[Tensor, ...]]
    counts: list[int]

    def placed(self) -> Plan:
        """Where it is computed: here."""
        return self


class Attention:
    """`heads` query heads on `kv_heads` K/V heads; queries come in rows of `row_heads` heads, of which the first `heads` are queries."""

    def __init__(self, heads: int, kv_heads: int, window: int, dtype: torch.dtype, row_heads: int | None = None) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} K/V heads evenly")
        self.heads, self.kv_heads, self._dtype = heads, kv_heads, dtype
        self._row_heads = row_heads or heads
        self._fold = heads // kv_heads
        self._masks = self._make_masks(min(window, 1024))
        self._window = window
        head = torch.arange(heads).view(kv_heads, 1, self._fold)
        self._head_of = head.expand(kv_heads, QUERY_ROWS, self._fold)

    def _make_masks(self, width: int) -> Tensor:
        """[KEY_BLOCK * fold, width + KEY_BLOCK], 0 or -inf. Its last `keys` columns are the mask of all blocks that see `keys` keys."""
        width = -(-width // KEY_BLOCK) * KEY_BLOCK
        mask = torch.zeros(KEY_BLOCK, width + KEY_BLOCK, dtype=self._dtype)
        mask[:, width:].masked_fill_(torch.ones(KEY_BLOCK, KEY_BLOCK, dtype=torch.bool).triu(1), float("-inf"))
        return mask.repeat_interleave(self._fold, 0)

    def plan(self, layout: Layout, store: KvStore) -> Plan:
        """Once per call, for all layers."""
        groups: list[Group] = []
        places: list[int] = []  # row of the batch → row of the padded blocks
        padded = 0
        for segment in layout.segments:
            position, end = segment.start, segment.start + len(segment.tokens)
            slot = store.slot(segment.slot)
            while position < end:
                keys = (position // KEY_BLOCK + 1) * KEY_BLOCK
                first = position // QUERY_ROWS * QUERY_ROWS
                stop = min(keys, end)
                blocks = -(-(stop - first) // QUERY_ROWS)
                places += range(padded + position - first, padded + stop - first)
                groups.append(Group(blocks, slot.keys_values(keys), self._mask(first % KEY_BLOCK, blocks, keys)))
                padded += blocks * QUERY_ROWS
                position = stop
        into, back = self._indices(torch.tensor(places), padded)
        counts = [len(segment.tokens) for segment in layout.segments]
        written = [store.slot(s.slot).written(s.start, s.start + len(s.tokens)) for s in layout.segments]
        writable = list(zip(*[places.unbind(0) for places in written], strict=True))
        return Plan(Inputs.of(layout), groups, [group.blocks for group in groups], into, back, written, writable, counts)

    def _mask(self, row: int, blocks: int, keys: int) -> Tensor:
        if keys + KEY_BLOCK > self._masks.shape[1]:
            self._masks = self._make_masks(min(self._window, 2 * keys))
        rows = self._masks[row * self._fold : (row + blocks * QUERY_ROWS) * self._fold, self._masks.shape[1] - keys :]
        return rows.view(blocks, 1, QUERY_ROWS * self._fold, keys)

    def _indices(self, places: Tensor, padded: int) -> tuple[Tensor, Tensor]:
        """Padding points at row 0: any row will do, since nobody reads what comes of it."""
        source = torch.zeros(padded, dtype=torch.int64)
        source[places] = torch.arange(len(places))
        into = source.view(-1, 1, QUERY_ROWS, 1) * self._row_heads + self._head_of
        block, row = places // QUERY_ROWS, places % QUERY_ROWS
        head = torch.arange(self.heads)
        kv, folded = head // self._fold, head % self._fold
        back = ((block[:, None] * self.kv_heads + kv) * QUERY_ROWS + row[:, None]) * self._fold + folded
        return into.flatten(), back.flatten()

    def sums(self, plan: Plan) -> list[Tensor]:
        """Not all finite when some key or value that the plan's rows wrote is not."""
        return [written.sum() for written in plan.written]

    def write(self, plan: Plan, layer: int, keys_values: Tensor) -> None:
        """keys_values [rows, 2 * kv, dim], finite → the slots."""
        by_head = keys_values.transpose(0, 1)
        if len(plan.counts) == 1:
            plan.writable[layer][0].copy_(by_head)
        else:
            torch._foreach_copy_(plan.writable[layer], torch.split(by_head, plan.counts, 1))

    def attend(self, plan: Plan, layer: int, rows: Tensor, scale: float | None = None) -> Tensor:
        """rows [rows, row_heads, dim], contiguous → [rows, heads * dim]. The layer's keys and values are in the slots.

        `scale` multiplies the scores; None = 1 / sqrt(dim).
        """
        n, _, dim = rows.shape
        folded = rows.view(-1, dim).index_select(0, plan.into).view(-1, self.kv_heads, QUERY_ROWS * self._fold, dim)
        parts = []
        for q, (blocks, keys_values, mask) in zip(torch.split(folded, plan.blocks), plan.groups, strict=True):
            k, v = keys_values[layer]
            if blocks > 1:
                k, v = k.expand(blocks, -1, -1, -1), v.expand(blocks, -1, -1, -1)
            parts.append(F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.reshape(-1, dim).index_select(0, plan.back).view(n, self.heads * dim)
