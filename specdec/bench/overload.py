"""What is left of the peak when far more is asked than can be served.

    python -m specdec.bench.overload --endpoint HOST:PORT [--seconds 60] [--factor 10] [--pids target=PID,orchestrator=PID] [--json]

First the peak: a closed loop at each of `--concurrency`, the best of them is the capacity. Then Poisson arrivals at `factor` times the
capacity in requests per second, over several connections, whether or not anything is answered (an open loop: a closed one would slow down
with the service). Goodput = tokens of answers that came to their end, per second; those still under way when the time is up count nothing.
Latencies are those of answers that came to their end. Memory is the resident set of the processes named by `--pids`, on this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.bench.figures import percentile
from specdec.bench.load import PROMPTS, load_prompts
from specdec.client import Client, Credentials, Delta, Finished, Prompt, client_of
from specdec.errors import InvalidRequest, Overloaded, SpecdecError
from specdec.runtime.dial_flags import add_credentials, credential_fields
from specdec.terms import SamplingParams

MAX_OPEN = 4000  # calls under way; below the most that a service takes at once, so that it is admission that refuses
PAGE_KIB = 4
MAX_TOLD = 120  # characters of an error
SEED = 7


@dataclass(slots=True)
class Seen:
    """What became of the calls of one phase; `now` 0 = its beginning."""

    began: float = field(default_factory=time.perf_counter)
    asked: int = 0
    tokens: int = 0  # of whole answers
    first_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    refused_s: list[float] = field(default_factory=list)
    retry_ms: list[int] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    not_sent: int = 0
    seconds: float = 0.0

    def close(self) -> None:
        self.seconds = time.perf_counter() - self.began

    @property
    def goodput(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def answers_per_s(self) -> float:
        return len(self.total_s) / self.seconds if self.seconds else 0.0


class Crowd:
    """Calls over several connections, prompts in turn."""

    def __init__(self, clients: Sequence[Client], prompts: Sequence[Prompt], sampling: SamplingParams, deadline_s: float) -> None:
        self._clients, self._prompts, self._sampling, self._deadline_s = clients, prompts, sampling, deadline_s
        self._number = 0

    async def ask(self, seen: Seen) -> None:
        self._number += 1
        client, prompt = self._clients[self._number % len(self._clients)], self._prompts[self._number % len(self._prompts)]
        seen.asked += 1
        began, first_s, tokens = time.perf_counter(), None, 0
        try:
            stream = client.generate(prompt, self._sampling, timeout_s=self._deadline_s, seed=self._number)
            async with contextlib.aclosing(stream) as events:
                async for event in events:
                    if isinstance(event, Delta):
                        first_s = first_s or time.perf_counter() - began
                        tokens += len(event.token_ids)
                    elif isinstance(event, Finished):
                        seen.tokens += tokens
                        seen.total_s.append(time.perf_counter() - began)
                        seen.first_s.append(first_s or seen.total_s[-1])
        except Overloaded as error:
            seen.refused_s.append(time.perf_counter() - began)
            seen.retry_ms.append(error.retry_after_ms)
        except SpecdecError as error:
            if seen.seconds:
                return  # ended with the phase
            seen.others[f"{type(error).__name__}: {error}"[:MAX_TOLD]] += 1

    async def closed(self, concurrency: int, seconds: float) -> Seen:
        """So many at a time, each asks again when it is answered."""
        seen = Seen()
        until = seen.began + seconds

        async def one() -> None:
            while time.perf_counter() < until:
                asked = seen.asked
                await self.ask(seen)
                if seen.asked > asked and seen.refused_s:
                    await asyncio.sleep(0.01)

        await _for(seconds, [asyncio.create_task(one()) for _ in range(concurrency)])
        seen.close()
        return seen

    async def open(self, per_s: float, seconds: float) -> Seen:
        """Poisson arrivals."""
        seen, calls, chance = Seen(), set[asyncio.Task[None]](), random.Random(SEED)
        due = seen.began
        while (due := due + chance.expovariate(per_s)) < seen.began + seconds:
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            if len(calls) >= MAX_OPEN:
                seen.not_sent += 1
                continue
            calls.add(task := asyncio.create_task(self.ask(seen)))
            task.add_done_callback(calls.discard)
        seen.close()
        await _for(0.0, list(calls))
        return seen


async def _for(seconds: float, tasks: Sequence[asyncio.Task[None]]) -> None:
    """Lets them run so long, then ends them."""
    if tasks:
        await asyncio.wait(tasks, timeout=seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def memory_mib(pids: Mapping[str, int]) -> dict[str, float]:
    """Resident set by name."""
    return {name: int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_KIB / 1024 for name, pid in pids.items()}


async def measure(crowd: Crowd, arguments: argparse.Namespace) -> dict[str, Any]:
    best: Seen | None = None
    peaks = {}
    for concurrency in arguments.concurrency:
        seen = await crowd.closed(concurrency, arguments.peak_seconds)
        peaks[concurrency] = round(seen.goodput, 1)
        if best is None or seen.goodput > best.goodput:
            best = seen
    assert best is not None
    if not best.total_s:
        raise InvalidRequest("--peak-seconds", f"no answer ended in {arguments.peak_seconds} s; give it more, or fewer tokens")
    before = memory_mib(arguments.pids)
    over = await crowd.open(arguments.factor * best.answers_per_s, arguments.seconds)
    return {
        "peak_tokens_per_s": peaks,
        "capacity_answers_per_s": round(best.answers_per_s, 2),
        "peak_latency_s": _latencies(best),
        "asked_per_s": round(over.asked / over.seconds, 1),
        "goodput_tokens_per_s": round(over.goodput, 1),
        "goodput_of_peak": round(over.goodput / best.goodput, 3),
        "answered": len(over.total_s),
        "latency_s": _latencies(over),
        "refused": len(over.refused_s),
        "refusal_s": {"p50": percentile(over.refused_s, 0.5), "p99": percentile(over.refused_s, 0.99)},
        "retry_after_ms": {"least": min(over.retry_ms, default=0), "most": max(over.retry_ms, default=0)},
        "others": dict(over.others),
        "not_sent": over.not_sent,
        "memory_mib": {"before": before, "after": memory_mib(arguments.pids)},
    }


def _latencies(seen: Seen) -> dict[str, float]:
    return {
        f"{what}_{name}": round(percentile(values, share), 3)
        for what, values in (("first", seen.first_s), ("total", seen.total_s))
        for name, share in (("p50", 0.5), ("p99", 0.99))
    }


def lines_of(told: Mapping[str, Any]) -> Iterator[str]:
    for key, value in told.items():
        yield f"{key.replace('_', ' '):24} {json.dumps(value) if isinstance(value, dict) else value}"


async def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    prompts = [prompt for _, prompt in load_prompts(arguments.prompts)]
    sampling = SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=True)
    async with contextlib.AsyncExitStack() as stack:
        credentials = Credentials(**credential_fields(arguments))
        clients = [await stack.enter_async_context(client_of(arguments.endpoint, credentials)) for _ in range(arguments.connections)]
        await clients[0].wait_ready(10.0)
        return await measure(Crowd(clients, prompts, sampling, arguments.deadline_s), arguments)


def _numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _pids(text: str) -> dict[str, int]:
    return {name: int(pid) for name, pid in (word.split("=") for word in text.split(",") if word)}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="specdec.bench.overload", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--endpoint", required=True, help="host:port of an orchestrator")
    add_credentials(parser)
    parser.add_argument("--seconds", type=float, default=60.0, help="of overload")
    parser.add_argument("--factor", type=float, default=10.0, help="times the capacity")
    parser.add_argument("--peak-seconds", type=float, default=15.0, help="at each concurrency")
    parser.add_argument("--concurrency", type=_numbers, default=[8, 32], help="of the closed loops, comma separated")
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--deadline-s", type=float, default=600.0, help="of every call")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines, as of `specdec bench`")
    parser.add_argument("--pids", type=_pids, default={}, help="name=pid, comma separated, whose memory is told")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args(words)
    try:
        told = asyncio.run(_run(arguments))
    except SpecdecError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(told, indent=2) if arguments.json else "\n".join(lines_of(told)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
