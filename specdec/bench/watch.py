"""What is seen beside the answers: where rounds spend their time, by the services' metrics, and the memory of their processes where they
are on this machine. One look behind every turn, and two a second while turns run, for what only lives as long as they do.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.bench.scrape import Samples, Total, added_to, scrape
from specdec.errors import InvalidRequest, Unavailable

ROUND, STEP = "specdec_round_duration_seconds", "specdec_step_duration_seconds"
KV, MEMORY = "specdec_kv_cache_utilization", "specdec_memory_bytes"
SOURCES = {  # phase → (role, histogram, label)
    "wire": ("orchestrator", ROUND, "wire"),
    "queue": ("orchestrator", ROUND, "queue"),
    "engine": ("orchestrator", ROUND, "engine"),
    "sample": ("target", ROUND, "sample"),
    "wait": ("orchestrator", ROUND, "wait"),
    "text": ("orchestrator", ROUND, "text"),
    "draft": ("draft", STEP, ""),
}
ROLES = ("target", "draft", "orchestrator")
SETTLE_S = 0.05  # metrics are recorded a moment after what they tell of
SAMPLE_S = 0.5
MIB = 1 << 20
KIB_OF = {"VmRSS": "resident_mib", "VmHWM": "peak_mib", "RssFile": "mapped_mib"}


@dataclass(frozen=True, slots=True)
class Process:
    """`pid` None = not on this machine; `metrics` = host:port, empty where there is none."""

    role: str
    name: str
    pid: int | None = None
    metrics: str = ""


def of_state(folder: Path, host: str = "127.0.0.1") -> list[Process]:
    """Of `specdec up --state`. Raises InvalidRequest."""
    try:
        told = json.loads((folder / "processes.json").read_text(encoding="utf-8"))
        counts: Counter[str] = Counter()
        found = []
        for entry in told:
            role, port = str(entry["role"]), int(entry["metrics_port"])
            found.append(Process(role, f"{role}-{counts[role]}", int(entry["pid"]), f"{host}:{port}" if port > 0 else ""))
            counts[role] += 1
        return found
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(
            "--state", f"{folder} is not the folder of a running `specdec up` ({getattr(error, 'strerror', None) or error})"
        ) from error


def of_metrics(text: str) -> list[Process]:
    """`role=host:port,…`, one for every process. Raises InvalidRequest."""
    found, counts = list[Process](), Counter[str]()
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        role, _, address = part.partition("=")
        host, _, port = address.rpartition(":")
        if role not in ROLES or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise InvalidRequest("--metrics", f"{part!r} is not role=host:port, with role one of {', '.join(ROLES)}")
        found.append(Process(role, f"{role}-{counts[role]}", None, address))
        counts[role] += 1
    return found


def memory_of(pid: int) -> dict[str, float]:
    """MiB: resident, its peak, and what of it are mapped files (code, weights that are mapped). Empty where there is no such process, or
    no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = {key: value.split() for key, _, value in (line.partition(":") for line in lines)}
    return {name: round(int(fields[key][0]) / 1024, 1) for key, name in KIB_OF.items() if key in fields}


class Watch:
    """`look()` = what happened since the look before."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self._processes = list(processes)
        self._before: dict[str, Samples] = {}
        self._kv: dict[str, float] = {}
        self._engine: dict[str, dict[str, float]] = {}  # MiB by kind, the most of each
        self._first: dict[str, float] = {}
        self.missing: set[str] = set()  # processes whose metrics cannot be read

    async def look(self) -> Mapping[str, Any]:
        await asyncio.sleep(SETTLE_S)
        after = await self._scraped()
        phases = {name: total for name in SOURCES if (total := self._phase(after, name)) is not None}
        self._levels(after)
        self._before, told = after, self._memory()
        self._kv, self._engine = {}, {}
        counts = Counter(process.role for process in self._processes)
        return {"processes": dict(counts), "memory": told, "phases": {name: [round(t.seconds, 6), t.count] for name, t in phases.items()}}

    @contextlib.asynccontextmanager
    async def sampling(self) -> AsyncIterator[None]:
        """Looks at levels meanwhile."""
        self._first = {process.name: memory_of(process.pid).get("resident_mib", 0.0) for process in self._processes if process.pid}
        self._before = await self._scraped()
        task = asyncio.create_task(self._sample())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _sample(self) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            self._levels(await self._scraped(("target", "draft")))

    def _levels(self, told: Mapping[str, Samples]) -> None:
        for name, samples in told.items():
            for (metric, labels), value in samples.items():
                if metric == KV:
                    self._kv[name] = max(self._kv.get(name, 0.0), value)
                elif metric == MEMORY:
                    most, kind = self._engine.setdefault(name, {}), f"{dict(labels).get('kind', 'other')}_mib"
                    most[kind] = max(most.get(kind, 0.0), round(value / MIB, 2))

    async def _scraped(self, roles: Sequence[str] = ROLES) -> dict[str, Samples]:
        asked = [process for process in self._processes if process.metrics and process.role in roles]
        told = await asyncio.gather(*(scrape(process.metrics) for process in asked), return_exceptions=True)
        found = {}
        for process, samples in zip(asked, told, strict=True):
            if isinstance(samples, Unavailable):
                self.missing.add(process.name)
            elif isinstance(samples, BaseException):
                raise samples
            else:
                found[process.name] = samples
        return found

    def _phase(self, after: Mapping[str, Samples], name: str) -> Total | None:
        """Of all processes of the role that tell it."""
        role, histogram, label = SOURCES[name]
        labels = {"phase": label} if label else {}
        told = [
            added_to(self._before.get(process.name, {}), after[process.name], histogram, **labels)
            for process in self._processes
            if process.role == role and process.name in after
        ]
        return Total(sum(t.seconds for t in told), sum(t.count for t in told)) if told else None

    def _memory(self) -> list[dict[str, Any]]:
        """`before_mib` = before the first turn: code and weights; `kv_share` = the most of the room for keys and values that was in use.
        What an engine tells of itself: `weights_mib`; `kv_mib`, that room; `kv_used_mib`, the most that was booked of it; on a GPU
        `device_mib` and `device_peak_mib`."""
        found = []
        for process in self._processes:
            held = memory_of(process.pid) if process.pid else {}
            kv = {"kv_share": round(self._kv[process.name], 4)} if process.name in self._kv else {}
            engine = self._engine.get(process.name, {})
            if held or kv or engine:
                before = {"before_mib": self._first[process.name]} if self._first.get(process.name) else {}
                found.append({"name": process.name, "role": process.role, **before, **held, **engine, **kv})
        return found
