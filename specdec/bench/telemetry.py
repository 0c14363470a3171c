"""What tracing costs a token when the collector has hung: it accepts connections and never answers.

    python -m specdec.bench.telemetry [--repeats 7] [--streams 4] [--max-tokens 200] [--step-ms 4] [--json]

Two systems of simulated engines run side by side, one without spans and one that traces every request, all three services of it, to the
silent collector. The same requests go to them in turns; the time between two messages of one answer is what a client feels. Printed are
the medians over the turns of each side's median and 99th percentile, the CPU time of its three services for a token (which a busy machine
changes little), and the ratios. Exit code 1 where the median is more than 3 % or the 99th percentile more than 10 % worse.

Simulated engines leave the CPU to the services, so that what is measured is their own work; times of a real engine are longer and the
ratios nearer to 1.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from specdec.bench.figures import percentile
from specdec.bench.system import TARGET_MODEL, Models, Services, pools
from specdec.client import Client
from specdec.client.answers import Delta
from specdec.errors import SpecdecError
from specdec.runtime.trace import new_context
from specdec.terms import SamplingParams

MOST_MEDIAN, MOST_P99 = 1.03, 1.10  # ratios that pass
SIDES = ("off", "hung")


@dataclass(frozen=True, slots=True)
class Side:
    """Of one side, medians over the turns. `cpu_us` = of its services, for a token; 0 where the system does not tell."""

    median_ms: float
    p99_ms: float
    cpu_us: float


@contextlib.contextmanager
def silent_collector() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def system(model: Path, step_ms: float, extra: Mapping[str, str]) -> Iterator[Services]:
    """Simulated engines behind the real services; only the tokenizer of `model` is read."""
    simulated = {"ENGINE_PATH": "sim", "KV_TOKENS": "65536", **extra}
    with pools(Models(model, None), {}, {**simulated, "SIM": f"step_ms={step_ms}"}) as running:
        running.start("draft", {"MODEL": str(model.absolute()), **simulated, "SIM": f"step_ms={step_ms / 4},acceptance=0.7"})
        running.start_orchestrator(**extra)
        yield running


async def gaps(client: Client, streams: int, max_tokens: int, seed: int) -> list[float]:
    """ms between the messages of each answer."""
    found: list[float] = []
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)

    async def one(number: int) -> None:
        context = str(new_context(sampled=True))
        last = 0.0
        async for event in client.generate("Once upon a time", sampling, seed=seed + number, num_speculative_tokens=3, traceparent=context):
            if isinstance(event, Delta):
                now = time.perf_counter()
                if last:
                    found.append(1e3 * (now - last))
                last = now

    await asyncio.gather(*(one(number) for number in range(streams)))
    return found


def cpu_s(running: Services) -> float:
    """User and system time of its processes so far (Linux)."""
    ticks = 0
    for service in running.running:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(") ")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def turns(systems: Mapping[str, Services], repeats: int, streams: int, max_tokens: int) -> dict[str, Side]:
    """The order within a pair of turns alternates."""
    seen: dict[str, list[tuple[float, float, float]]] = {side: [] for side in systems}
    async with contextlib.AsyncExitStack() as exit:
        clients = {side: await exit.enter_async_context(Client(one.orchestrator.endpoint)) for side, one in systems.items()}
        for client in clients.values():
            await client.wait_ready(30)
            while not (await client.get_model_info()).draft_available:
                await asyncio.sleep(0.05)
            await gaps(client, streams, max_tokens // 4, 0)
        for turn, order in zip(range(repeats), itertools.cycle((SIDES, SIDES[::-1]))):  # noqa: B905 - one of them has no end
            for side in order:
                before = cpu_s(systems[side])
                measured = await gaps(clients[side], streams, max_tokens, 100 * turn)
                spent_us = 1e6 * (cpu_s(systems[side]) - before) / (streams * max_tokens)
                seen[side].append((statistics.median(measured), percentile(measured, 0.99), spent_us))
    return {side: Side(*(statistics.median(column) for column in zip(*rows, strict=True))) for side, rows in seen.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.telemetry", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, default=TARGET_MODEL, help="folder with the tokenizer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--step-ms", type=float, default=4.0, help="time of a simulated target's step")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(argv)
    try:
        with (
            silent_collector() as url,
            system(arguments.model, arguments.step_ms, {}) as off,
            system(arguments.model, arguments.step_ms, {"OTLP_ENDPOINT": url}) as hung,
        ):
            found = asyncio.run(turns({"off": off, "hung": hung}, arguments.repeats, arguments.streams, arguments.max_tokens))
    except SpecdecError as error:
        print(f"specdec.bench.telemetry: {error}", file=sys.stderr)
        return 2
    off_, hung_ = found["off"], found["hung"]
    median, p99, cpu = hung_.median_ms / off_.median_ms, hung_.p99_ms / off_.p99_ms, hung_.cpu_us / (off_.cpu_us or 1.0)
    if arguments.json:
        ratios = {"median_ratio": median, "p99_ratio": p99, "cpu_ratio": cpu}
        print(json.dumps({**{side: asdict(one) for side, one in found.items()}, **ratios}))
    else:
        for side, one in found.items():
            print(f"{side:<5} median {one.median_ms:7.3f} ms   p99 {one.p99_ms:7.3f} ms   CPU {one.cpu_us:6.0f} us a token")
        print(f"ratio median {median:7.3f}      p99 {p99:7.3f}      CPU {cpu:6.3f}")
    return 0 if median <= MOST_MEDIAN and p99 <= MOST_P99 else 1


if __name__ == "__main__":
    sys.exit(main())
