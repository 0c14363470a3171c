"""Stand-ins that ship beside the interfaces they replace.

`ScriptedEngine` has the shape of `specdec.engine.Engine`; its next-token logits are a pure function of the whole prefix, so any mix-up of
sessions, positions or cached tokens changes what it says. It logs every call and can raise, hang or answer NaN on demand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec.hashing import prefix_hash

Script = Callable[[Sequence[int]], torch.Tensor]
"""Prefix → logits [vocab_size] of the next token."""


def hashed_script(vocab_size: int, scale: float = 3.0) -> Script:
    """Normal logits drawn from the hash of the prefix: every prefix has its own distribution, and its own argmax."""

    def logits(prefix: Sequence[int]) -> torch.Tensor:
        rng = np.random.Generator(np.random.Philox(key=prefix_hash(prefix)))
        return torch.from_numpy(rng.standard_normal(vocab_size) * scale)

    return logits


def table_script(vocab_size: int, choose: Callable[[Sequence[int]], int]) -> Script:
    """All mass on the token `choose` names for the prefix."""

    def logits(prefix: Sequence[int]) -> torch.Tensor:
        row = torch.zeros(vocab_size, dtype=torch.float64)
        row[choose(prefix)] = 30.0
        return row

    return logits


@dataclass(frozen=True, slots=True)
class ScriptedInfo:
    """The fields of specdec.engine.EngineInfo."""

    vocab_size: int
    window: int
    eos_ids: tuple[int, ...] = ()
    dtype: str = "float64"
    path: str = "scripted"
    batch_invariant: bool = True
    numerics_fingerprint: str = "scripted"
    kv_total_tokens: int = 4096
    draft_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ScriptedRow:
    """What the engine was asked for one segment. `prefix` = everything in the slot before the segment."""

    slot: int
    start: int
    tokens: tuple[int, ...]
    logits_from: int
    prefix: tuple[int, ...]

    @property
    def rows(self) -> int:
        return len(self.tokens)


@dataclass
class ScriptedKv:
    """Slots as lists of ids; refuses what the real store refuses."""

    slots: dict[int, list[int]] = field(default_factory=dict)
    branches: dict[int, tuple[int, int]] = field(default_factory=dict)  # slot and base
    opened: int = 0
    closed: int = 0

    def open(self) -> int:
        self.opened += 1
        self.slots[self.opened] = []
        return self.opened

    def fork(self, slot: int, length: int) -> int:
        if length > len(self.slots[slot]):
            raise AssertionError(f"slot {slot} holds {len(self.slots[slot])} tokens, {length} of them cannot be shared")
        name = self.open()
        self.slots[name] = self.slots[slot][:length]
        return name

    def branch(self, slot: int, length: int) -> int:
        assert slot not in self.branches, f"slot {slot} is a branch and cannot have any"
        name = self.fork(slot, length)
        self.branches[name] = (slot, length)
        return name

    def graft(self, slot: int, branch: int) -> None:
        parent, base = self.branches[branch]
        assert parent == slot and base >= self.read(slot, branch), "another branch reads what would change"
        self.slots[slot] = self.slots[branch]
        self.close(branch)

    def read(self, slot: int, but: int = 0) -> int:
        """Tokens of a slot that its branches read."""
        return max((base for name, (parent, base) in self.branches.items() if parent == slot and name != but), default=0)

    def close(self, slot: int) -> None:
        del self.slots[slot]  # KeyError = released twice
        self.closed += 1
        self.branches.pop(slot, None)
        for branch in [name for name, (parent, _) in self.branches.items() if parent == slot]:
            self.close(branch)

    def length(self, slot: int) -> int:
        return len(self.slots[slot])

    def truncate(self, slot: int, length: int) -> None:
        if length > len(self.slots[slot]):
            raise AssertionError(f"slot {slot} cannot be truncated from {len(self.slots[slot])} up to {length}")
        if length < max(self.read(slot), self.branches.get(slot, (0, 0))[1]):
            raise AssertionError(f"slot {slot} cannot be truncated to {length}: a branch reads it, or it is one")
        del self.slots[slot][length:]


class ScriptedEngine:
    """`raises`: exception of the next forward. `hang`: forward waits for this event. `nan_when`: prefix → the row after it is not finite.
    `log`: one list of ScriptedRow per forward. `on_forward`: called with those rows before the answer is made."""

    def __init__(
        self, script: Script, *, vocab_size: int, window: int = 512, eos_ids: tuple[int, ...] = (), kv_total_tokens: int = 4096
    ) -> None:
        self.info: Any = ScriptedInfo(vocab_size, window, eos_ids, kv_total_tokens=kv_total_tokens)
        self.kv: Any = ScriptedKv()
        self.script = script
        self.log: list[list[ScriptedRow]] = []
        self.raises: BaseException | None = None
        self.hang: threading.Event | None = None
        self.nan_when: Callable[[Sequence[int]], bool] | None = None
        self.nan_value = float("nan")
        self.on_forward: Callable[[list[ScriptedRow]], None] | None = None

    def forward(self, segments: Sequence[Any]) -> list[torch.Tensor]:
        rows = [ScriptedRow(s.slot, s.start, tuple(s.tokens), s.logits_from, tuple(self.kv.slots[s.slot])) for s in segments]
        if len({row.slot for row in rows}) != len(rows):
            raise AssertionError("two segments of one slot in one call")
        self.log.append(rows)
        if self.on_forward is not None:
            self.on_forward(rows)
        if self.hang is not None:
            self.hang.wait()
        if self.raises is not None:
            raise self.raises
        return [self._segment(row) for row in rows]

    def _segment(self, row: ScriptedRow) -> torch.Tensor:
        """[rows - logits_from, vocab_size]"""
        if row.start != len(row.prefix):
            raise AssertionError(f"slot {row.slot} holds {len(row.prefix)} tokens, the segment starts at {row.start}")
        if not row.tokens:
            raise AssertionError("empty segment")
        held = self.kv.slots[row.slot]
        out = []
        for offset, token in enumerate(row.tokens):
            held.append(token)
            if offset >= row.logits_from:
                out.append(self._row(held))
        return torch.stack(out) if out else torch.empty(0, self.info.vocab_size, dtype=torch.float64)

    def _row(self, prefix: Sequence[int]) -> torch.Tensor:
        if self.nan_when is not None and self.nan_when(prefix):
            return torch.full((self.info.vocab_size,), self.nan_value, dtype=torch.float64)
        return self.script(prefix)
