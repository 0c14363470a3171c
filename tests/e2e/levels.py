"""Memory and descriptors of processes over time (Linux: /proc), and whether they level off."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

STRETCHES = 8


@dataclass(frozen=True)
class Level:
    at_s: float
    descriptors: int
    memory_mb: float  # resident


def level_of(pid: int) -> Level:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Level(time.monotonic(), len(os.listdir(f"/proc/{pid}/fd")), pages * os.sysconf("SC_PAGE_SIZE") / 1e6)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Least squares: how much the second value grows per unit of the first. 0 for fewer than two points."""
    count = len(points)
    mean_x, mean_y = (sum(point[i] for point in points) / max(1, count) for i in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@dataclass
class Levels:
    """`pids` by name."""

    pids: Mapping[str, int]
    seen: dict[str, list[Level]] = field(default_factory=dict)

    def read(self) -> None:
        for name, pid in self.pids.items():
            self.seen.setdefault(name, []).append(level_of(pid))

    def grown(self, descriptors: int, memory_mb: float) -> list[str]:
        """Who has more than so much more at the last reading than at the first."""
        found: list[str] = []
        for name, levels in self.seen.items():
            first, last = levels[0], levels[-1]
            if last.descriptors - first.descriptors > descriptors:
                found.append(f"{name}: {first.descriptors} → {last.descriptors} descriptors")
            if last.memory_mb - first.memory_mb > memory_mb:
                found.append(f"{name}: {first.memory_mb:.0f} → {last.memory_mb:.0f} MB")
        return found

    def slopes(self, name: str) -> tuple[float, float]:
        """Descriptors and MB per minute, of the least in each stretch of the time: a crowd that comes and goes is no growth."""
        levels = self.seen.get(name, [])
        size = max(1, -(-len(levels) // STRETCHES))
        stretches = [levels[i : i + size] for i in range(0, len(levels), size)]
        per_second = (slope([(x[0].at_s, min(getattr(y, what) for y in x)) for x in stretches]) for what in ("descriptors", "memory_mb"))
        descriptors, memory = per_second
        return 60 * descriptors, 60 * memory
