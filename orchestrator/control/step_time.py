"""What an engine step takes, by its rows. Pure.

Theory. More rows never take less time, and where the kernel works in blocks the time is a staircase: rows up to the next edge are nearly
free. So each count of rows has a running mean of its own, and the means are made monotone by pooling neighbours that contradict each other
(isotonic regression, weighted by how much was seen). Between counts that were seen a straight line; beyond the last one the mean slope.
One step in many is slow for reasons of its own (the machine did something else), so what is far above the mean counts only in part.
"""

from __future__ import annotations

FINE = 128  # rows told apart one by one; beyond that in eighths of a power of two
MEMORY = 30.0  # steps a mean remembers
ENOUGH = 3.0  # steps of so many rows until their mean is believed
BESIDE = 0.06  # part of a count that others may differ from it to lend it their means: the best of many is else one that was underrated
OUTLIER = 1.5  # of the mean: what is above counts as this
ROUGH, HEAVIER = 0.01, 0.05  # part of a mean, and of its weight among its neighbours, by which it may have moved since the curve was made
MIN_SLOPE = 0.002  # of a step's time, per row, where nothing was seen


class StepTime:
    def __init__(self) -> None:
        self._mean: dict[int, float] = {}
        self._seen: dict[int, float] = {}
        self._curve: list[tuple[int, float]] | None = None
        self._fitted: dict[int, tuple[float, float]] = {}  # the means that the curve was made of, and their weights

    def learn(self, rows: int, took_ms: float) -> None:
        """A step of `rows` rows took so long."""
        key = _key(rows)
        seen, mean = self._seen.get(key, 0.0), self._mean.get(key, took_ms)
        weight = 1 / min(seen + 1, MEMORY)
        self._mean[key] = mean + weight * (min(took_ms, OUTLIER * mean) - mean)
        self._seen[key] = min(seen + 1, MEMORY)
        if self._curve is not None and not self._fits(key):
            self._curve = None

    def _fits(self, key: int) -> bool:
        """Whether the curve is still about that of these means."""
        mean, seen = self._fitted.get(key, (0.0, 0.0))
        return abs(self._mean[key] - mean) <= ROUGH * mean and self._seen[key] <= (1 + HEAVIER) * seen

    @property
    def known(self) -> bool:
        return bool(self._mean)

    def saw(self, rows: int) -> bool:
        """Often enough to be believed."""
        return self._seen.get(_key(rows), 0.0) >= ENOUGH

    def below(self, rows: int) -> float:
        """Milliseconds of the most rows that were seen and are not more; a hope for what these take."""
        fewer = [ms for key, ms in (self._curve if self._curve is not None else self._fit()) if key <= rows]
        return fewer[-1] if fewer else self.at(rows)

    def at(self, rows: float) -> float:
        """Milliseconds; 0 when nothing is known."""
        return self.upwards(rows, 1)[0]

    def upwards(self, rows: float, count: int) -> list[float]:
        """Milliseconds of `rows`, of one more, and so on, `count` of them."""
        curve = self._curve if self._curve is not None else self._fit()
        if not curve:
            return [0.0] * count
        (least, shortest), (most, longest) = curve[0], curve[-1]
        slope = max((longest - shortest) / max(1, most - least), MIN_SLOPE * longest)
        times, i = [], 0
        for m in range(count):
            at = rows + m
            if at <= least:
                times.append(shortest)
            elif at >= most:
                times.append(longest + slope * (at - most))
            else:
                while curve[i + 1][0] <= at:
                    i += 1
                (x0, y0), (x1, y1) = curve[i], curve[i + 1]
                times.append(y0 + (y1 - y0) * (at - x0) / (x1 - x0))
        return times

    def _around(self, key: int) -> tuple[float, float]:
        """Mean and weight of a count of rows and its nearest neighbours."""
        reach = int(BESIDE * key)
        near = [k for k in range(key - reach, key + reach + 1) if k in self._mean] if reach and key <= FINE else [key]
        weight = sum(self._seen[k] for k in near)
        return sum(self._mean[k] * self._seen[k] for k in near) / weight, weight

    def _fit(self) -> list[tuple[int, float]]:
        blocks: list[list[float]] = []  # weighted mean, weight, counts of rows in it
        keys = sorted(self._mean)
        for key in keys:
            blocks.append([*self._around(key), 1])
            while len(blocks) > 1 and blocks[-2][0] >= blocks[-1][0]:
                mean, weight, count = blocks.pop()
                total = blocks[-1][1] + weight
                blocks[-1] = [(blocks[-1][0] * blocks[-1][1] + mean * weight) / total, total, blocks[-1][2] + count]
        levels = [mean for mean, _, count in blocks for _ in range(int(count))]
        self._curve, self._fitted = list(zip(keys, levels, strict=True)), {key: (self._mean[key], self._seen[key]) for key in keys}
        return self._curve


def _key(rows: int) -> int:
    if rows <= FINE:
        return rows
    grain = 1 << (rows.bit_length() - 4)
    return rows // grain * grain
