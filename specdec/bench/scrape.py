"""What a service's metrics port says, and what was added between two looks at it."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from specdec.errors import Unavailable

TIMEOUT_S = 5.0
_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


async def scrape(address: str) -> Samples:
    """`address` = host:port. Raises Unavailable."""
    return parse(await asyncio.to_thread(_fetch, address))


def _fetch(address: str) -> str:
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:
        raise Unavailable(f"no metrics at {address}: {error}") from error


def parse(text: str) -> Samples:
    """Prometheus' text format, without time stamps."""
    matches = (_SAMPLE.fullmatch(line) for line in text.splitlines() if not line.startswith("#"))
    return {(m[1], frozenset(_LABEL.findall(m[2] or ""))): float(m[3]) for m in matches if m is not None}


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
