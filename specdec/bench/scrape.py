"""What a service's metrics port says, and what was added between two looks at it."""

from __future__ import annotations

import asyncio
import math
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException

from specdec.errors import Unavailable

TIMEOUT_S = 5.0
MOST_BYTES = 1 << 26
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(address: str) -> Samples:
    """`address` = host:port. Raises Unavailable."""
    told = parse(await asyncio.to_thread(_fetch, address))
    if not told:
        raise Unavailable(f"no metrics at {address}: whoever answers there tells something else")
    return told


def _fetch(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read(MOST_BYTES).decode()
            if answer.length:  # the rest of the last number is missing
                raise ValueError("the answer ends early, or is too long")
            return str(text)
    except (OSError, ValueError, HTTPException) as error:
        raise Unavailable(f"no metrics at {address}: {error or type(error).__name__}") from error


def parse(text: str) -> Samples:
    """Prometheus' text format, without time stamps. What is no number, or no finite one, is left out."""
    matches = [m for line in text.splitlines() if not line.startswith("#") and (m := _SAMPLE.fullmatch(line)) is not None]
    return {(m[1], frozenset(_LABEL.findall(m[2] or ""))): value for m in matches if (value := _finite(m[3])) is not None}


def _finite(said: str) -> float | None:
    try:
        value = float(said)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True)
class Total:
    """Of a histogram, a summed difference: `seconds` in `count` observations."""

    seconds: float = 0.0
    count: float = 0.0

    def __sub__(self, other: Total) -> Total:
        return Total(self.seconds - other.seconds, self.count - other.count)


def added(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """To a sample, or to the sum of all of that name that have these labels; buckets' own label apart."""
    wanted = set(labels.items())
    return sum(value - before.get(key, 0.0) for key, value in after.items() if key[0] == name and wanted <= key[1])


def added_to(before: Samples, after: Samples, histogram: str, **labels: str) -> Total:
    return Total(added(before, after, f"{histogram}_sum", **labels), added(before, after, f"{histogram}_count", **labels))
