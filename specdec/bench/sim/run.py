"""`specdec bench --sim`: what an orchestrator costs and where it ends, between simulated pools and clients that cost next to nothing.

The orchestrators are real processes; their CPU time is read from /proc. All pools and clients live in this process, so that the two sides
never share an account. Every figure is labelled simulated: nothing here says how fast a model is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

import uvloop

from specdec.bench.figures import percentile
from specdec.bench.sim import folder as sim_folder
from specdec.bench.sim.load import Seen, Slot, Wish, connect
from specdec.bench.sim.path import Paths
from specdec.bench.sim.pools import Counts, Draft, Target, Wheel, beats
from specdec.bench.system import Models, Service, Services
from specdec.errors import InvalidRequest, Unavailable
from specdec.simulation import Simulation
from specdec.terms import ModelInfo

BOUNDS = {
    "targets": (1, 64),
    "drafts": (0, 64),
    "sessions": (1, 10_000),
    "orchestrators": (1, 16),
    "block": (0, 16),
    "prompt": (4, 100_000),
    "adaptive": (0, 1),
    "tokens": (2, 100_000),
}
WARM_S = 2.0
START_S = 20.0  # until every session has had its first tokens
STAGGER_S = 1.0
PERCENTILES = (0.5, 0.99)
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Scenario:
    """`draft_ms` = a draft's step, one token of each session; `hits` = how often the draft's other guess is how a block ends; `tokens`,
    `prompt`: of each answer; `adaptive` 1 = the orchestrator chooses each block's length, up to `block`."""

    targets: int = 1
    drafts: int = 1
    sessions: int = 16
    orchestrators: int = 1
    acceptance: float = 0.6
    step_ms: float = 20.0
    row_ms: float = 0.02
    rtt_ms: float = 0.0
    draft_ms: float = 2.0
    hits: float = 0.6
    block: int = 4
    tokens: int = 256
    prompt: int = 32
    adaptive: int = 0

    def check(self) -> None:
        for name, (low, high) in BOUNDS.items():
            if not low <= getattr(self, name) <= high:
                raise InvalidRequest("--sim", f"{name}={getattr(self, name)} must be {low} to {high}")
        for name in ("acceptance", "hits"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise InvalidRequest("--sim", f"{name}={getattr(self, name):g} must lie in [0, 1]")
        for name in ("step_ms", "row_ms", "rtt_ms", "draft_ms"):
            if not 0.0 <= getattr(self, name) <= 60_000:
                raise InvalidRequest("--sim", f"{name}={getattr(self, name):g} must be 0 to 60000")


def scenario(text: str) -> Scenario:
    """`name=number,…`, dashes or underscores. Raises InvalidRequest."""
    kinds: dict[str, type[int] | type[float]] = {
        entry.name: int if entry.type == "int" else float for entry in dataclasses.fields(Scenario)
    }
    values: dict[str, Any] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = part.partition("=")
        name = name.replace("-", "_")
        if name not in kinds:
            raise InvalidRequest("--sim", f"{part!r}: known are {', '.join(name.replace('_', '-') for name in kinds)}")
        try:
            values[name] = kinds[name](number)
        except ValueError:
            raise InvalidRequest("--sim", f"{part!r}: must be a number") from None
    found = Scenario(**values)
    found.check()
    return found


def run(wanted: Scenario, seconds: float, profile: bool = False, settings: dict[str, str] | None = None) -> dict[str, Any]:
    """The figures, as one object. `settings` of the orchestrators, without SPECDEC_. Raises Unavailable when nothing comes of it."""
    with tempfile.TemporaryDirectory(prefix="specdec-sim-") as name:
        return uvloop.run(_run(wanted, seconds, File(name), profile, settings or {}))


async def _run(wanted: Scenario, seconds: float, folder: File, profile: bool, settings: dict[str, str]) -> dict[str, Any]:
    vocabulary = sim_folder.write(folder)
    simulation = Simulation(acceptance=wanted.acceptance, step_ms=wanted.step_ms, row_ms=wanted.row_ms)
    paths = Paths(simulation, vocabulary.size)
    counts, seen = Counts(), Seen()
    async with _pools(wanted, paths, vocabulary, counts) as (targets, drafts), _orchestrators(
        wanted, folder, targets, drafts, profile, settings
    ) as running:  # fmt: skip
        wish = Wish(wanted.prompt, wanted.tokens, wanted.block if wanted.drafts else 0, bool(wanted.adaptive))
        slots = await connect([service.endpoint for service in running], wanted.sessions, paths, wish, seen)
        await _begin(slots, seen, wanted.step_ms)
        found = await _measure(running, counts, seen, seconds, folder if profile else None)
        for slot in slots:
            slot.stopped = True
    return {"simulated": True, "scenario": dataclasses.asdict(wanted), **found}


@contextlib.asynccontextmanager
async def _pools(wanted: Scenario, paths: Paths, vocabulary: Any, counts: Counts) -> AsyncIterator[tuple[list[str], list[str]]]:
    info = ModelInfo(
        model="simulated",
        vocab_size=vocabulary.size,
        vocabulary_fingerprint=vocabulary.fingerprint,
        eos_token_ids=vocabulary.eos_ids,
        max_model_len=1 << 20,
        boot_id="simulated",
        numerics_fingerprint="simulated",
        batch_invariant=True,
        dtype="simulated",
        kv_total_tokens=1 << 24,
        max_num_speculative_tokens=16,
        max_sessions=65_536,
    )
    wheel = Wheel()
    targets = [Target(info, paths, counts, wheel, wanted.rtt_ms) for _ in range(wanted.targets)]
    drafts = [Draft(info, paths, counts, wheel, wanted.rtt_ms, token_ms=wanted.draft_ms, hits=wanted.hits) for _ in range(wanted.drafts)]
    servers = [*targets, *drafts]
    for server in servers:
        await server.start()
    beating = asyncio.create_task(beats(list(servers)))
    try:
        yield [server.endpoint for server in targets], [server.endpoint for server in drafts]
    finally:
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in servers))


@contextlib.asynccontextmanager
async def _orchestrators(
    wanted: Scenario, folder: File, targets: Sequence[str], drafts: Sequence[str], profile: bool, settings: dict[str, str]
) -> AsyncIterator[list[Service]]:
    read_end, write_end = os.pipe()
    services = Services(folder, read_end, Models(folder, None), {})
    common = {
        "TOKENIZER": str(folder),
        "TARGETS": ",".join(targets),
        "DRAFTS": ",".join(drafts),
        "MAX_RUNNING": str(max(256, wanted.sessions)),
        "MAX_WAITING": "10000",
        "LOG_LEVEL": "warning",
        **settings,
    }
    try:
        for number in range(wanted.orchestrators):
            words = ("specdec.bench.sim.profile", "orchestrator", str(folder / f"profile-{number}.json")) if profile else ("orchestrator",)
            await asyncio.to_thread(services.start, "orchestrator", common, words)
        yield services.running
    finally:
        await asyncio.to_thread(services.stop)
        os.close(read_end)
        os.close(write_end)


async def _begin(slots: Sequence[Slot], seen: Seen, step_ms: float) -> None:
    """Starts every session, spread over a second or a step, and waits until all of them run."""
    pause = max(STAGGER_S, step_ms / 1000) / len(slots)
    for slot in slots:
        slot.start()
        await asyncio.sleep(pause)
    deadline = time.monotonic() + START_S
    while not all(slot.began for slot in slots):
        if time.monotonic() > deadline or seen.failed:
            raise Unavailable(f"not every session got a first token within {START_S:g} s ({seen.failed} failed: {seen.reason!r})")
        await asyncio.sleep(0.1)
    await asyncio.sleep(WARM_S)


async def _measure(running: Sequence[Service], counts: Counts, seen: Seen, seconds: float, profile: File | None) -> dict[str, Any]:
    for kind in (counts, seen):
        for entry in dataclasses.fields(kind):
            setattr(kind, entry.name, type(getattr(kind, entry.name))())
    pids = [service.process.pid for service in running]
    _toggle(pids, profile)
    began, cpu_before, own_before = time.perf_counter(), [cpu_s(pid) for pid in pids], time.process_time()
    await asyncio.sleep(seconds)
    took, own_s = time.perf_counter() - began, time.process_time() - own_before
    cpu = [after - before for after, before in zip((cpu_s(pid) for pid in pids), cpu_before, strict=True)]
    told, saw = dataclasses.replace(counts), dataclasses.replace(seen)
    _toggle(pids, profile)
    total_cpu = max(sum(cpu), 1e-9)
    found = {
        "seconds": took,
        "session_rounds_per_s": told.rounds / took,
        "session_rounds_per_cpu_s": told.rounds / total_cpu,
        "cpu_ms_per_session_round": 1000 * total_cpu / max(1, told.rounds),
        "tokens_per_s": told.decided / took,
        "tokens_per_round": told.decided / max(1, told.rounds),
        "accepted_per_round": told.accepted / max(1, told.rounds),
        "rounds_with_block": told.spec_rounds / max(1, told.rounds),
        "rounds_of_its_own": told.own_rounds / max(1, told.rounds),
        "orchestrator_cpu": [spent / took for spent in cpu],
        "load_side_cpu": own_s / took,
        "answers": saw.answers,
        "differing": saw.differing,
        "failed": saw.failed,
        "reason": saw.reason.decode(errors="replace"),
        "broken": told.broken,
        "messages_to_pools_per_s": told.messages_in / took,
        "messages_from_pools_per_s": told.messages_out / took,
        "messages_to_clients_per_s": saw.messages / took,
        "added_ms": _percentiles(told.added_s),
        "to_client_ms": _percentiles(saw.delay_s),
    }
    if profile is not None:
        await asyncio.sleep(0.5)
        found["profile"] = _shares(sorted(profile.glob("profile-*.json")))
    return found


def _toggle(pids: Sequence[int], profile: File | None) -> None:
    for pid in pids if profile is not None else ():
        os.kill(pid, signal.SIGUSR1)


def cpu_s(pid: int) -> float:
    """CPU time of a process so far, all its threads."""
    words = File(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(words[11]) + int(words[12])) / TICKS


def _percentiles(values: list[float]) -> dict[str, float]:
    return {f"p{100 * share:g}": 1000 * percentile(values, share) for share in PERCENTILES} if values else {}


def _shares(files: Sequence[File]) -> dict[str, Any]:
    """Of all processes together."""
    told = [json.loads(file.read_text()) for file in files]
    total = max(1, sum(one["samples"] for one in told))
    merged: dict[str, dict[str, float]] = {}
    for kind in ("sections", "functions"):
        sums: dict[str, float] = {}
        for one in told:
            for name, count in one[kind].items():
                sums[name] = sums.get(name, 0.0) + count / total
        merged[kind] = dict(sorted(sums.items(), key=lambda entry: -entry[1]))
    return {"samples": total, **merged}
