"""What tracing costs a token when the collector has hung: it accepts connections and never answers.

    python -m specdec.bench.telemetry [--same] [--sides again,full] [--repeats 8] [--slices 12] [--keep FILE] [--json]

Sides, each against `off`, the services without spans:

    full     every request is traced in all three services: what SPECDEC_OTLP_ENDPOINT alone asks for
    tenth    the same with SPECDEC_OTLP_SAMPLE_RATIO=0.1
    again    without spans as well. What differs here is chance, and no other difference of that size means anything

The sides are asked the same questions in turns, slice by slice, since a machine has its moods by the second; the order rotates. Every
repeat starts all services anew, on the same cores in the same way: the target on one, orchestrator and draft on the next, the client on
the third or, where there are two, the target's.

A process has its luck for life: where its memory lies, how its tables are hashed. Two that do the same differ by several per cent, so
sides in processes of their own take many repeats to be told apart. With --same there is one system for all sides, with the hung
collector, and the caller's trace context says of each request whether it is traced. Then luck is the same, and what is left out is what
a collector costs where nothing is traced. CPU time is that of a side's own slices.

Of each repeat the ratios are taken: of the median and the 99th percentile of the time between two messages of one answer, and of the CPU
time of the three services for a token, which a busy machine disturbs least. Told are their geometric means with 95 % intervals over the
repeats, and what these say of the limits: within, not within, cannot tell. Exit code 0 = all sides are within, 1 = one is not, 3 = one
cannot be told.

Simulated engines leave the CPU to the services, so that what is measured is their own work; times of a real engine are longer and the
ratios nearer to 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.bench import figures, within
from specdec.bench.figures import careful_ratio, percentile
from specdec.bench.system import DRAFT_NICE, TARGET_MODEL, Models, Services, default_pins, own_cpus, pools
from specdec.client import Client
from specdec.client.answers import Delta
from specdec.errors import InvalidRequest, SpecdecError
from specdec.runtime.process import rarely_collect
from specdec.runtime.trace import new_context
from specdec.terms import SamplingParams

OFF, AGAIN = "off", "again"
RATIOS = {"tenth": "0.1", "full": "1.0"}  # SPECDEC_OTLP_SAMPLE_RATIO by side
SIDES = (AGAIN, *RATIOS)
LIMITS = {"median_ms": 1.03, "p99_ms": 1.10}  # the largest ratios that are allowed
NAMES = {"median_ms": "median", "p99_ms": "p99", "cpu_us": "CPU a token"}
READY_S = 30.0
EXIT_CODES = {within.WITHIN: 0, within.NOT_WITHIN: 1, within.CANNOT_TELL: 3}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Of one side in one repeat. A slice = one answer of each stream, at the same time."""

    streams: int = 4
    slices: int = 12
    max_tokens: int = 200
    step_ms: float = 4.0


@dataclass(frozen=True, slots=True)
class Side:
    """What one side took in one repeat. `cpu_us` = of its services, for a token; 0 where the system does not tell."""

    median_ms: float
    p99_ms: float
    cpu_us: float
    gaps: int


@contextlib.contextmanager
def silent_collector() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def system(model: Path, step_ms: float, extra: Mapping[str, str]) -> Iterator[Services]:
    """Simulated engines behind the real services; only the tokenizer of `model` is read."""
    simulated = {"ENGINE_PATH": "sim", "KV_TOKENS": "65536", "PRE_DRAIN_MS": "0", **extra}
    with pools(Models(model, None), target={**simulated, "SIM": f"step_ms={step_ms}"}) as running:
        running.start(
            "draft", {"MODEL": str(model.absolute()), "NICE": DRAFT_NICE, **simulated, "SIM": f"step_ms={step_ms / 4},acceptance=0.7"}
        )
        # What a service finds out about its own times must not decide how much it has to do.
        running.start_orchestrator(ENABLE_ADAPTIVE_VERIFICATION="false", PRE_DRAIN_MS="0", **extra)
        yield running


@contextlib.contextmanager
def client_pinned(cpus: Sequence[int]) -> Iterator[None]:
    """This process where the services leave room: on a core of its own, or on the target's, whose simulated steps are sleep."""
    if len(cpus) < 2:
        yield
        return
    os.sched_setaffinity(0, {cpus[2] if len(cpus) > 2 else int(default_pins(cpus)["target"])})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cpus)


async def gaps(client: Client, traffic: Traffic, seed: int, traced: bool | None = None) -> list[float]:
    """ms between the messages of each answer, one of each stream. `traced` = the caller's word; None: it leaves that to the service."""
    found: list[float] = []
    sampling = SamplingParams(max_tokens=traffic.max_tokens, ignore_eos=True)

    async def one(seed: int) -> None:
        last, word = 0.0, "" if traced is None else str(new_context(traced))
        async for event in client.generate("Once upon a time", sampling, seed=seed, num_speculative_tokens=3, traceparent=word):
            if isinstance(event, Delta):
                now = time.perf_counter()
                if last:
                    found.append(1e3 * (now - last))
                last = now

    await asyncio.gather(*(one(seed + stream) for stream in range(traffic.streams)))
    return found


def cpu_s(running: Services) -> float:
    """CPU time of its processes so far; 0 where the system does not tell. Linux does: MAKE_PROCESS_CPUCLOCK of the kernel's
    posix-timers.h."""
    try:
        return sum(time.clock_gettime(~service.process.pid << 3 | 2) for service in running.running)
    except (OSError, AttributeError):
        return 0.0


async def slices(systems: Mapping[str, Services], traffic: Traffic, number: int, same: bool) -> dict[str, Side]:
    """They are asked in turns. `same`: they are one system, and the caller says what is traced."""
    seen: dict[str, list[float]] = {side: [] for side in systems}
    spent_s = dict.fromkeys(systems, 0.0)
    traced = {side: side in RATIOS if same else None for side in systems}
    async with contextlib.AsyncExitStack() as exit:
        clients = {side: await exit.enter_async_context(Client(one.orchestrator.endpoint)) for side, one in systems.items()}
        async with asyncio.timeout(READY_S):
            for client in clients.values():
                await client.wait_ready(READY_S)
                while not (await client.get_model_info()).draft_available:
                    await asyncio.sleep(0.05)
        for side, client in clients.items():
            await gaps(client, traffic, 0, traced[side])  # not counted
        for turn in range(traffic.slices):
            for side in within.order(tuple(systems), number * traffic.slices + turn):
                before_s = cpu_s(systems[side])
                seen[side] += await gaps(clients[side], traffic, traffic.streams * (1 + number * traffic.slices + turn), traced[side])
                spent_s[side] += cpu_s(systems[side]) - before_s
    tokens = traffic.slices * traffic.streams * traffic.max_tokens
    return {
        side: Side(statistics.median(found), percentile(found, 0.99), 1e6 * spent_s[side] / tokens, len(found))
        for side, found in seen.items()
    }


def repeat(model: Path, sides: Sequence[str], number: int, traffic: Traffic, same: bool) -> dict[str, Side]:
    """`off` and the others; all services are started anew."""
    systems: dict[str, Services] = {}
    with silent_collector() as url, contextlib.ExitStack() as exit:
        for side in within.order((OFF, *sides), number):
            ratio = RATIOS.get("full" if same else side)
            extra = {"OTLP_ENDPOINT": url, "OTLP_SAMPLE_RATIO": ratio} if ratio else {}
            shared = next(iter(systems.values()), None) if same else None
            systems[side] = shared or exit.enter_context(system(model, traffic.step_ms, extra))
        return asyncio.run(slices({side: systems[side] for side in (OFF, *sides)}, traffic, number, same))


# ---------------------------------------------------------------- what they say


Repeat = Mapping[str, Side]
"""By side, `off` among them."""


def judged(repeats: Sequence[Repeat], sides: Sequence[str]) -> dict[str, Any]:
    """By side: its ratios to `off` by repeat, their mean and interval, the word for each limit, and one for the side; and one word for all
    sides."""
    found: dict[str, Any] = {}
    for side in sides:
        told: dict[str, Any] = {}
        for name in NAMES:
            ours, others = ([getattr(one[key], name) for one in repeats] for key in (side, OFF))
            ratio = careful_ratio(ours, others)
            pairs = [round(a / b, 4) for a, b in zip(ours, others, strict=True) if a > 0 and b > 0]
            told[name] = {"pairs": pairs, "ratio": None if ratio is None else asdict(ratio)}
            if name in LIMITS:
                told[name] |= {"limit": LIMITS[name], "word": within.word(ratio, LIMITS[name])}
                told[name]["repeats_for"] = within.repeats_for(pairs, LIMITS[name])
        found[side] = told | {"word": within.together([told[name]["word"] for name in LIMITS])}
    return {"repeats": len(repeats), "sides": found, "word": within.together([one["word"] for one in found.values()])}


def lines(repeats: Sequence[Repeat], found: Mapping[str, Any]) -> list[str]:
    told = [f"{found['repeats']} repeats"]
    for name in (OFF, *found["sides"]):
        median, p99, cpu, gaps = (statistics.median(getattr(one[name], key) for one in repeats) for key in (*NAMES, "gaps"))
        told.append(f"  {name:<6} median {median:6.2f} ms   p99 {p99:6.2f} ms   CPU {cpu:5.0f} us a token   {gaps:.0f} gaps a repeat")
    for side, ratios in found["sides"].items():
        told += ["", f"{side} against off: {ratios['word']}"]
        for name in NAMES:
            told += [
                f"  {NAMES[name]:<12}{_ratio(ratios[name])}",
                f"    by repeat {' '.join(f'{pair:.3f}' for pair in ratios[name]['pairs'])}",
            ]
    return told


def _ratio(told: Mapping[str, Any]) -> str:
    if told["ratio"] is None:
        return "not told by this system"
    mean, low, high = (told["ratio"][name] for name in ("mean", "low", "high"))
    between = "one repeat, so no interval" if low is None else f"{low:.3f} to {high:.3f}"
    line = f"{mean:.3f} ({between})"
    if "limit" in told:
        line += f", limit {told['limit']:.2f}: {told['word']}"
        if told["word"] == within.CANNOT_TELL and told["ratio"]["low"] is not None:
            line += f"; about {told['repeats_for'] or f'more than {figures.MOST_REPEATS}'} repeats would tell"
    return line


# ---------------------------------------------------------------- repeats of earlier runs


def kept(path: Path | None, about: Mapping[str, Any]) -> list[Repeat]:
    """What `keep` wrote. Raises InvalidRequest where it was measured otherwise."""
    found: list[Repeat] = []
    for line in path.read_text().splitlines() if path is not None and path.exists() else ():
        try:
            told = json.loads(line)
            repeat, asked = {name: Side(**one) for name, one in told["found"].items()}, told["about"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequest("--keep", f"{path} holds something else than repeats of this command: {error!r}") from error
        if asked != about:
            raise InvalidRequest("--keep", f"{path} was measured with {asked}, not with {dict(about)}; name another file")
        found.append(repeat)
    return found


def keep(path: Path | None, about: Mapping[str, Any], repeat: Repeat) -> None:
    if path is not None:
        with path.open("a") as file:
            file.write(json.dumps({"about": about, "found": {name: asdict(one) for name, one in repeat.items()}}) + "\n")


def parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.telemetry", description=(__doc__ or "").split("\n")[0])
    usual = Traffic()
    parser.add_argument("--model", type=Path, default=TARGET_MODEL, help="folder with the tokenizer (default: %(default)s)")
    parser.add_argument("--sides", default="again,full", help=f"compared with off, of {', '.join(SIDES)} (default: %(default)s)")
    parser.add_argument("--same", action="store_true", help="one system for all sides; the caller says what is traced")
    parser.add_argument("--repeats", type=int, default=8, help="each starts all services anew (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=usual.streams, help="default: %(default)s")
    parser.add_argument(
        "--slices",
        type=int,
        default=usual.slices,
        help="of each side in a repeat, an answer of each stream; best twice the sides, or a multiple of it (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=int, default=usual.max_tokens, help="of an answer (default: %(default)s)")
    parser.add_argument("--step-ms", type=float, default=usual.step_ms, help="time of a simulated target's step (default: %(default)s)")
    parser.add_argument("--keep", type=Path, default=None, help="file of repeats: those of earlier runs count, this run's are added")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    arguments.sides = tuple(arguments.sides.split(","))
    if (unknown := set(arguments.sides) - set(SIDES)) or len(set(arguments.sides)) < len(arguments.sides):
        parser.error(f"--sides takes {', '.join(SIDES)}, each once{f', not {unknown.pop()!r}' if unknown else ''}")
    if arguments.same and "tenth" in arguments.sides:
        parser.error("--sides: with --same the caller's word decides, so there is no tenth")
    for name in ("repeats", "streams", "slices"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} must be at least 1")
    return arguments


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parsed(argv)
    traffic = Traffic(arguments.streams, arguments.slices, arguments.max_tokens, arguments.step_ms)
    about = {"same": arguments.same, "sides": list(arguments.sides), "traffic": asdict(traffic)}
    rarely_collect()
    try:
        repeats = kept(arguments.keep, about)
        with client_pinned(own_cpus()):
            for number in range(len(repeats), len(repeats) + arguments.repeats):
                repeats.append(repeat(arguments.model, arguments.sides, number, traffic, arguments.same))
                keep(arguments.keep, about, repeats[-1])
    except (SpecdecError, TimeoutError) as error:
        print(f"specdec.bench.telemetry: {error or 'the services did not find each other in time'}", file=sys.stderr)
        return 2
    found = judged(repeats, arguments.sides)
    if arguments.json:
        measured = [{name: asdict(one) for name, one in each.items()} for each in repeats]
        print(json.dumps({**about, **found, "measured": measured}))
    else:
        print("\n".join(lines(repeats, found)))
    return EXIT_CODES[found["word"]]


if __name__ == "__main__":
    sys.exit(main())
