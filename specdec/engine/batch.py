"""What one engine call is asked, and where its rows lie. Knows no model and no tensor of one.

A batch is ragged: segments of any lengths, any slots, any positions, flattened one after the other into rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one slot.

    `start` = absolute position of tokens[0], equal to the slot's length. Rows logits_from … n-1 get logits; logits_from = n asks for none.
    """

    slot: int
    start: int
    tokens: tuple[int, ...]
    logits_from: int


class Lengths(Protocol):
    """Where a batch looks up how long a slot is."""

    def length(self, slot: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Layout:
    """The flattened batch: one entry per row in `tokens` and `positions`; `scored` = rows with logits, of each segment `scored_counts`."""

    segments: tuple[Segment, ...]
    tokens: list[int]
    positions: list[int]
    scored: list[int]
    scored_counts: list[int]

    @property
    def rows(self) -> int:
        return len(self.tokens)


def check(segments: Sequence[Segment], lengths: Lengths, *, vocab_size: int, window: int, max_rows: int) -> None:
    """Raises ValueError, naming the segment, before anything has changed."""
    seen: set[int] = set()
    rows = 0
    for i, segment in enumerate(segments):
        n = len(segment.tokens)
        rows += n
        if n == 0:
            raise ValueError(f"segment {i} has no tokens")
        if segment.slot in seen:
            raise ValueError(f"segment {i}: slot {segment.slot} occurs twice in one call")
        seen.add(segment.slot)
        if segment.start != lengths.length(segment.slot):
            raise ValueError(f"segment {i} starts at {segment.start}, slot {segment.slot} holds {lengths.length(segment.slot)} tokens")
        if segment.start + n > window:
            raise ValueError(f"segment {i} ends at {segment.start + n}, past the window of {window} positions")
        if not 0 <= segment.logits_from <= n:
            raise ValueError(f"segment {i}: logits_from {segment.logits_from} is outside 0..{n}")
        if min(segment.tokens) < 0 or max(segment.tokens) >= vocab_size:
            raise ValueError(f"segment {i} has ids outside 0..{vocab_size - 1}")
    if rows > max_rows:
        raise ValueError(f"{rows} rows in one call, the engine was built for {max_rows}: cut the prefill into smaller pieces")


def lay_out(segments: Sequence[Segment]) -> Layout:
    tokens: list[int] = []
    positions: list[int] = []
    scored: list[int] = []
    counts: list[int] = []
    for segment in segments:
        first, n = len(tokens), len(segment.tokens)
        tokens += segment.tokens
        positions += range(segment.start, segment.start + n)
        scored += range(first + segment.logits_from, first + n)
        counts.append(n - segment.logits_from)
    return Layout(tuple(segments), tokens, positions, scored, counts)
