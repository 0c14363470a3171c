"""Accounts of KV room: two that a target may decide by, and slots that hold it to them."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec.engine import KvBudget
from tests.fakes import ScriptedKv, ScriptedRow


class Pool:
    """KV accounting token by token, in the shape of specdec.engine.KvBudget. A resident holds cells; forks hold their donor's."""

    def __init__(self, total_tokens: int, watermark: float = 1.0) -> None:
        self.total_tokens, self._watermark = total_tokens, watermark
        self.cells: dict[int, list[int]] = {}
        self.releases: list[int] = []
        self._names = itertools.count()

    @property
    def held(self) -> dict[int, int]:
        return {resident: len(cells) for resident, cells in self.cells.items()}

    @property
    def used_tokens(self) -> int:
        return len(set(itertools.chain.from_iterable(self.cells.values())))

    def can_admit(self, tokens: int, reserve_tokens: int) -> bool:
        return self.used_tokens + tokens + reserve_tokens <= self._watermark * self.total_tokens

    def grow(self, session: int, tokens: int) -> bool:
        held = self.cells.get(session, [])
        more = max(0, tokens - len(held))
        if self.used_tokens + more > self.total_tokens:
            return False
        self.cells[session] = held + list(itertools.islice(self._names, more))
        return True

    def fork(self, child: int, parent: int, tokens: int) -> bool:
        assert child not in self.cells and tokens <= len(self.cells[parent])
        self.cells[child] = self.cells[parent][:tokens]
        return True

    def write(self, writes: Mapping[Hashable, tuple[int, int]]) -> bool:
        [(session, (start, end))] = writes.items()
        assert isinstance(session, int)
        before = self.cells[session]
        others = set(itertools.chain.from_iterable(cells for name, cells in self.cells.items() if name != session))
        self.cells[session] = before[:start] + [next(self._names) if cell in others else cell for cell in before[start:]]
        if self.used_tokens <= self.total_tokens and self.grow(session, end):
            return True
        self.cells[session] = before
        return False

    def held_alone(self, sessions: Collection[Hashable]) -> int:
        others = itertools.chain.from_iterable(cells for name, cells in self.cells.items() if name not in sessions)
        return self.used_tokens - len(set(others))

    def release(self, session: int) -> None:
        del self.cells[session]  # KeyError = released twice
        self.releases.append(session)


class BlockPool(KvBudget):
    """The engine's own accounting, with blocks so small that a short text has many."""

    def __init__(self, total_tokens: int) -> None:
        super().__init__(total_tokens, block_tokens=4, watermark=1.0)
        self.releases: list[int] = []

    @property
    def held(self) -> dict[Any, int]:
        return {resident: self._blocks(resident) * self.block_tokens for resident in self._own}

    def release(self, session: Any) -> None:
        assert session in self._own, "released twice"
        self.releases.append(session)
        super().release(session)


@dataclass
class BoundedKv(ScriptedKv):
    """Slots with the room that the engine's store would give them: what was booked before is never refused."""

    total_tokens: int = 0

    def __post_init__(self) -> None:
        self.room = KvBudget(self.total_tokens, block_tokens=4)

    def fork(self, slot: int, length: int) -> int:
        name = super().fork(slot, length)
        if not self.room.fork(name, slot, length):
            raise AssertionError("no room for a fork that was booked")
        return name

    def close(self, slot: int) -> None:
        super().close(slot)
        self.room.release(slot)

    def reserve(self, rows: Sequence[ScriptedRow]) -> None:
        """As a forward does with its segments."""
        if not self.room.write({row.slot: (row.start, row.start + len(row.tokens)) for row in rows}):
            raise AssertionError("no room for rows that were booked")
