"""How long a stream pauses at its client when a process behind it goes: killed (SIGKILL) or stopped (SIGSTOP).

    python -m specdec.bench.failover [--cases target-kill,target-stop,draft-kill,draft-stop,orchestrator-kill] [--repeats 3] [--json]

One stream, with a spare target, one draft, and two orchestrators that share nothing. For every case a system of its own: after a third of
the answer the process that serves the stream is signalled, and the longest time between two arrivals after that is the gap. Beside it the
longest gap of the same stream undisturbed, and the time to the first token of prompt and answer so far: what the prefill elsewhere costs.
`differing` = answers that are not the undisturbed one, token by token. A lost target may cost a second of silence (nothing, if its
connection breaks) and that prefill; a lost draft 100 ms and a round; a lost orchestrator is the client's to leave (FailoverClient).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from specdec.bench.load import load_prompts
from specdec.bench.rounds import add_model_flags
from specdec.bench.scrape import added, scrape
from specdec.bench.system import Models, Service, Services, pools
from specdec.client import Client, Delta, FailoverClient, Started
from specdec.client.requests import Prompt
from specdec.errors import SpecdecError, Unavailable
from specdec.terms import SamplingParams

SEED = 7
COLD = {"PREFIX_CACHE": "false"}  # else what one stream computed would be there for the next
CASES = {
    "target-kill": ("target", signal.SIGKILL),
    "target-stop": ("target", signal.SIGSTOP),
    "draft-kill": ("draft", signal.SIGKILL),
    "draft-stop": ("draft", signal.SIGSTOP),
    "orchestrator-kill": ("orchestrator", signal.SIGKILL),
}


@dataclass(frozen=True, slots=True)
class Stream:
    ids: tuple[int, ...]
    first_token_ms: float
    gaps_ms: tuple[float, ...]  # between arrivals, from the moment of the act on where there is one


@dataclass(frozen=True, slots=True)
class Found:
    case: str
    gap_ms: float
    undisturbed_ms: float
    prefill_ms: float
    differing: bool


async def stream(
    client: Client,
    prompt: Prompt,
    sampling: SamplingParams,
    act: Callable[[], None] | None = None,
    after: int = 0,
    resumed: Sequence[int] = (),
) -> Stream:
    """`act` is called once `after` tokens are here."""
    ids: list[int] = []
    began = last = time.perf_counter()
    first_ms, gaps, acted = 0.0, [], act is None
    options = {"output_token_ids": tuple(resumed)} if resumed else {}
    async with contextlib.aclosing(client.generate(prompt, sampling, seed=SEED, **options)) as events:  # type: ignore[arg-type]
        async for event in events:
            if isinstance(event, Started) or not (isinstance(event, Delta) and event.token_ids):
                continue
            now = time.perf_counter()
            if not ids:
                first_ms = (now - began) * 1e3
            elif acted:
                gaps.append((now - last) * 1e3)
            ids += event.token_ids
            if act is not None and not acted and len(ids) >= after:
                await asyncio.to_thread(act)
                acted = True
            last = time.perf_counter() if act is not None and len(gaps) == 0 else now
    return Stream(tuple(ids), first_ms, tuple(gaps))


async def busy(services: Sequence[Service]) -> Service:
    """The one that holds a session. Raises Unavailable when none does."""
    for service in services:
        if added({}, await scrape(service.metrics), "specdec_sessions") > 0:
            return service
    raise Unavailable("no process of the pool holds the session")


async def measure(running: Services, case: str, prompt: Prompt, sampling: SamplingParams, repeats: int) -> Found:
    """One disturbed stream between undisturbed ones."""
    role, number = CASES[case]
    orchestrators = [service for service in running.running if service.role == "orchestrator"]
    async with FailoverClient([service.endpoint for service in orchestrators]) as client:
        await client.wait_ready(10.0)
        undisturbed = [await stream(client, prompt, sampling) for _ in range(1 + repeats)][1:]
        whole = undisturbed[0]
        after = len(whole.ids) // 3
        fresh = await stream(client, prompt, sampling, resumed=whole.ids[:after])

        def act() -> None:
            victims = [service for service in running.running if service.role == role]
            victim = orchestrators[0] if role == "orchestrator" else asyncio.run(busy(victims))
            os.kill(victim.process.pid, number)

        disturbed = await stream(client, prompt, sampling, act, after)
    return Found(
        case,
        max(disturbed.gaps_ms, default=0.0),
        sorted(max(one.gaps_ms, default=0.0) for one in undisturbed)[len(undisturbed) // 2],
        fresh.first_token_ms,
        disturbed.ids != whole.ids,
    )


def run(models: Models, case: str, prompt: Prompt, sampling: SamplingParams, repeats: int) -> Found:
    with pools(models, target=COLD) as running:
        if models.draft is None and CASES[case][0] == "draft":
            raise Unavailable("there is no draft to lose")
        running.start_target(**COLD)
        targets = ",".join(service.endpoint for service in running.running if service.role == "target")
        for _ in range(2):
            running.start_orchestrator(target=targets, ENABLE_ADAPTIVE_VERIFICATION="false")
        try:
            return asyncio.run(measure(running, case, prompt, sampling, repeats))
        finally:
            for service in running.running:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(service.process.pid, signal.SIGCONT)


def table(found: Sequence[Found]) -> str:
    rows = [["", "gap", "undisturbed", "first token elsewhere", "differing"]]
    rows += [[f.case, *(f"{ms:.0f} ms" for ms in (f.gap_ms, f.undisturbed_ms, f.prefill_ms)), str(int(f.differing))] for f in found]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.failover", description=__doc__.split("\n")[0] if __doc__ else "")
    add_model_flags(parser)
    parser.add_argument("--cases", default=",".join(CASES), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3, help="undisturbed streams of a case (default: %(default)s)")
    args = parser.parse_args(argv)
    cases = args.cases.split(",")
    if unknown := set(cases) - set(CASES):
        parser.error(f"--cases takes {', '.join(CASES)}, not {', '.join(sorted(unknown))}")
    sampling = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, ignore_eos=True)
    try:
        prompt = load_prompts(args.prompts)[0][1]
        found = [run(Models(args.target_model, args.draft_model), case, prompt, sampling, max(1, args.repeats)) for case in cases]
    except SpecdecError as error:
        print(f"failover: {error}", file=sys.stderr)
        return 2
    print(json.dumps([asdict(one) for one in found]) if args.json else table(found))
    return 1 if any(one.differing for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
