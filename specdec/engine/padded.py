"""Causal attention for an accelerator: one kernel call for many sessions, padded to the longest.

A GPU wants few, large calls: segments of a few rows go together, padded to the most rows and keys among them, and each long piece of a
prefill goes alone. Keys and values are gathered from the pool's blocks first; that moves what attention reads a second time, which is
little beside the weights. The kernel's shape follows the batch, so a row's bits may depend on its neighbours: not batch-invariant, and
the self-test measures whether it shows.

Everything a step needs to know about its rows goes to the device in one transfer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.engine.attention import Inputs
from specdec.engine.batch import Layout, Segment
from specdec.engine.cache import BLOCK_TOKENS, blocks_of
from specdec.engine.paged import PagedStore, flat

SHORT = 32  # rows of a segment that is computed together with others
EVEN_BLOCKS = 4  # a table has a multiple of so many: fewer shapes, and those that recur can be replayed


class PaddedGroup(NamedTuple):
    """Segments computed together. `table` [segments * blocks]: their blocks; `mask` [segments, 1, rows * fold, keys], 0 or -inf."""

    segments: int
    table: Tensor
    mask: Tensor


class PaddedPlan(NamedTuple):
    """`into`: for every (segment, kv head, padded row, query head of it) the index of (row, head); `back`: its inverse; `sizes`: how many
    of `into` each group has; `where`: rows of the pool that the batch's keys and values go to."""

    inputs: Inputs
    groups: list[PaddedGroup]
    sizes: list[int]
    into: Tensor
    back: Tensor
    where: Tensor


class Shape(NamedTuple):
    """What decides which kernels a step runs. `counts`: lengths of the lists in HostPlan.numbers; `groups`: (segments, rows, blocks)."""

    counts: tuple[int, ...]
    groups: tuple[tuple[int, int, int], ...]


class HostPlan:
    """A step on the host: `shape`, and all its numbers in one tensor."""

    def __init__(self, attention: PaddedAttention, shape: Shape, numbers: Tensor) -> None:
        self._attention, self.shape, self.numbers = attention, shape, numbers

    def placed(self) -> PaddedPlan:
        """On the device, after one transfer."""
        return self._attention.placed(self.shape, self._attention.moved(self.numbers))


class PaddedAttention:
    """`heads` query heads on `kv_heads` K/V heads; queries come in rows of `row_heads` heads, of which the first `heads` are queries."""

    def __init__(
        self, heads: int, kv_heads: int, dtype: torch.dtype, device: torch.device, store: PagedStore, row_heads: int | None = None
    ) -> None:
        if heads % kv_heads:
            raise ValueError(f"{heads} query heads cannot share {kv_heads} K/V heads evenly")
        self.heads, self.kv_heads, self._dtype, self._device = heads, kv_heads, dtype, device
        self._row_heads, self._fold = row_heads or heads, heads // kv_heads
        self._pool = store.pool
        self._head_of = torch.arange(heads, device=device).view(1, kv_heads, 1, self._fold)
        head = torch.arange(heads, device=device)
        self._kv_of, self._folded = head // self._fold, head % self._fold

    def plan(self, layout: Layout, store: PagedStore) -> HostPlan:
        """Once per call, for all layers."""
        drafts = [_Draft(group, layout, store) for group in _grouped(layout.segments)]
        where = [row for s in layout.segments for row in store.slot(s.slot).places(s.start, s.start + len(s.tokens))]
        lists = [layout.tokens, layout.positions, layout.scored, where, *self._places(drafts, layout)]
        lists += [part for draft in drafts for part in (draft.source, draft.sees, draft.table)]
        numbers = torch.tensor([number for numbers in lists for number in numbers], dtype=torch.int64)
        shape = Shape(tuple(map(len, lists)), tuple((draft.segments, draft.rows, draft.blocks) for draft in drafts))
        return HostPlan(self, shape, numbers.pin_memory() if self._device.type == "cuda" else numbers)

    def moved(self, numbers: Tensor) -> Tensor:
        return numbers.to(self._device, non_blocking=True)

    def placed(self, shape: Shape, numbers: Tensor) -> PaddedPlan:
        """numbers: HostPlan.numbers on the device. Waits for nothing, and does the same for every plan of this shape."""
        tokens, positions, scored, where, pad, first, rows, *parts = torch.split(numbers, list(shape.counts))
        groups, into = [], []
        for i, (segments, padded_rows, blocks) in enumerate(shape.groups):
            source, sees, table = parts[3 * i : 3 * i + 3]
            groups.append(PaddedGroup(segments, table, self._mask(sees.view(segments, 1, padded_rows, 1), blocks)))
            into.append((source.view(segments, 1, padded_rows, 1) * self._row_heads + self._head_of).flatten())
        back = first[:, None] + (self._kv_of * rows[:, None] + pad[:, None]) * self._fold + self._folded
        sizes = [len(part) for part in into]
        return PaddedPlan(Inputs(tokens, positions, scored), groups, sizes, torch.cat(into), back.flatten(), where)

    def _places(self, drafts: Sequence[_Draft], layout: Layout) -> tuple[list[int], list[int], list[int]]:
        """Of each row of the batch: its row in its padded segment, where that segment begins in the output, the segment's padded rows."""
        pads, firsts, rows = [0] * layout.rows, [0] * layout.rows, [0] * layout.rows
        begin = 0
        for draft in drafts:
            for first_row, n in draft.members:
                for i in range(n):
                    pads[first_row + i], firsts[first_row + i], rows[first_row + i] = i, begin, draft.rows
                begin += draft.rows * self.heads
        return pads, firsts, rows

    def _mask(self, sees: Tensor, blocks: int) -> Tensor:
        """sees [segments, 1, rows, 1] → [segments, 1, rows * fold, keys]"""
        hidden = torch.arange(blocks * BLOCK_TOKENS, device=self._device) > sees
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device).masked_fill_(hidden, float("-inf"))
        return mask.repeat_interleave(self._fold, 2)

    def sums(self, plan: PaddedPlan) -> list[Tensor]:
        """Not finite when some key or value that the plan's rows wrote is not."""
        written = self._pool.flatten(1, 2).index_select(1, plan.where)
        return [written.sum()]

    def write(self, plan: PaddedPlan, layer: int, keys_values: Tensor) -> None:
        """keys_values [rows, 2 * kv, dim], finite → the slots."""
        flat(self._pool, layer).index_copy_(0, plan.where, keys_values)

    def attend(self, plan: PaddedPlan, layer: int, rows: Tensor, scale: float | None = None) -> Tensor:
        """rows [rows, row_heads, dim], contiguous → [rows, heads * dim]. The layer's keys and values are in the slots.

        `scale` multiplies the scores; None = 1 / sqrt(dim).
        """
        n, _, dim = rows.shape
        folded = rows.view(-1, dim).index_select(0, plan.into)
        parts = []
        for q, group in zip(torch.split(folded, plan.sizes), plan.groups, strict=True):
            held = self._pool[layer].index_select(0, group.table).view(group.segments, -1, 2 * self.kv_heads, dim).transpose(1, 2)
            queries = q.view(group.segments, self.kv_heads, -1, dim)
            keys, values = held[:, : self.kv_heads], held[:, self.kv_heads :]
            parts.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=group.mask, scale=scale).reshape(-1, dim))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out.index_select(0, plan.back).view(n, self.heads * dim)


class _Draft:
    """A group on the host. `members`: (first row in the batch, rows) of each segment; padded rows repeat row 0 and see key 0."""

    def __init__(self, group: Sequence[tuple[int, Segment]], layout: Layout, store: PagedStore) -> None:
        self.members = [(first, len(segment.tokens)) for first, segment in group]
        self.segments = len(group)
        self.rows = max(n for _, n in self.members)
        self.blocks = -(-max(_blocks(segment) for _, segment in group) // EVEN_BLOCKS) * EVEN_BLOCKS
        self.source: list[int] = []
        self.sees: list[int] = []
        self.table: list[int] = []
        for first, segment in group:
            n, blocks = len(segment.tokens), store.slot(segment.slot).blocks[: _blocks(segment)]
            self.source += [*range(first, first + n), *[first] * (self.rows - n)]
            self.sees += [*range(segment.start, segment.start + n), *[0] * (self.rows - n)]
            self.table += [*blocks, *[0] * (self.blocks - len(blocks))]


def _blocks(segment: Segment) -> int:
    return blocks_of(segment.start + len(segment.tokens))


def _grouped(segments: Sequence[Segment]) -> list[list[tuple[int, Segment]]]:
    """(first row, segment) by group: long ones alone, short ones with those that have at most four times as many keys."""
    groups: dict[tuple[int, int], list[tuple[int, Segment]]] = {}
    first = 0
    for i, segment in enumerate(segments):
        short = len(segment.tokens) <= SHORT
        key = (-1, (_blocks(segment).bit_length() + 1) // 2) if short else (i, 0)
        groups.setdefault(key, []).append((first, segment))
        first += len(segment.tokens)
    return list(groups.values())


def to_host(*tensors: Tensor) -> list[Tensor]:
    """One wait for all of them."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return list(tensors)
    hosts = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True) for tensor in tensors]
    torch.cuda.current_stream().synchronize()
    return hosts
