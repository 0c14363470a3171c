"""What a network between orchestrator and pools costs, and what speculation gives behind it.

    python -m specdec.bench.rtt [--rtt-ms 0,1,5] [--concurrency 1] [--compare none,fixed,auto] [--repeats 3] [--max-tokens 96] [--json]

Starts one target and one draft, and for every round-trip time a proxy before each of them (proxy.py) and an orchestrator that knows the
proxies. At 0 the proxies are there as well, so that all differ in the time alone. Ratios are to `none` behind the same network, in pairs of
turns as in `specdec bench`, and to the same way without delay, of the rates of all turns.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.bench import report
from specdec.bench.experiment import WAYS, Experiment, Outcome, Turn, run
from specdec.bench.load import load_prompts
from specdec.bench.progress import Progress
from specdec.bench.rounds import add_model_flags
from specdec.bench.system import Models, Services, pools
from specdec.bench.tables import number
from specdec.client import Client
from specdec.errors import SpecdecError
from specdec.terms import SamplingParams


@contextlib.contextmanager
def delayed(address: str, rtt_ms: float) -> Iterator[str]:
    """The address of a proxy before `address`, a process of its own."""
    words = [sys.executable, "-m", "specdec.bench.proxy", "--to", address, "--delay-ms", str(rtt_ms / 2)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None and process.stdin is not None
        fields = dict(word.split("=") for word in process.stdout.readline().split()[1:])
        try:
            yield f"{fields['host']}:{fields['port']}"
        finally:
            process.stdin.close()


def measure(running: Services, experiment: Experiment, rtts_ms: Sequence[float]) -> list[dict[str, Any]]:
    found = []
    for rtt_ms in rtts_ms:
        outcome = Outcome(experiment)
        with delayed(running.of("target").endpoint, rtt_ms) as target, delayed(running.of("draft").endpoint, rtt_ms) as draft:
            orchestrator = running.start_orchestrator(target, draft)
            try:
                asyncio.run(_ask(orchestrator.endpoint, outcome, rtt_ms))
            finally:
                running.end(orchestrator)
        told = report.report(outcome, {})
        found.append({"rtt_ms": rtt_ms, **{key: told[key] for key in ("notes", "cells", "differing")}})
    return found


async def _ask(endpoint: str, outcome: Outcome, rtt_ms: float) -> None:
    progress: Progress | None = None

    def tell(turn: Turn, seconds: float | None) -> None:
        nonlocal progress
        progress = progress or Progress([(t.cell, t.way) for t in outcome.experiment.turns()], sys.stderr)
        label = f"{rtt_ms:g} ms, {turn.cell}, {turn.way}"
        if seconds is None:
            progress.begin(label)
        else:
            progress.end(label, seconds)

    async with Client(endpoint) as client:
        await client.wait_ready(10.0)
        try:
            await run(client, outcome, tell)
        finally:
            if progress is not None:
                progress.close()


def table(found: Sequence[dict[str, Any]]) -> str:
    titles = ["", "streams", "way", "tokens/s", "of 0 ms", "ratio to none", "95 %", "first token", "per token", "hits", "differing"]
    base = {(c["concurrency"], way): f["tokens_per_s"] for c in found[0]["cells"] for way, f in c["ways"].items()} if found else {}
    rows = [titles]
    for one in found:
        for cell in one["cells"]:
            for way, figure in cell["ways"].items():
                ratio = figure["ratio"]
                between = f"{ratio['low']:.2f} - {ratio['high']:.2f}" if ratio and ratio["low"] not in (None, ratio["high"]) else ""
                rows.append([
                    f"{one['rtt_ms']:g} ms", str(cell["concurrency"]), way, f"{figure['tokens_per_s']:.1f}",
                    f"{figure['tokens_per_s'] / (base.get((cell['concurrency'], way)) or 1):.2f}x",
                    f"{ratio['mean']:.2f}x" if ratio else "", between, number(figure["first_token_ms_p50"], 0),
                    number(figure["time_per_token_ms_p50"], 1), "" if figure["hit_rate"] is None else f"{figure['hit_rate']:.2f}",
                    "-" if figure["differing"] is None else str(figure["differing"]),
                ])  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(titles))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.rtt", description=__doc__.split("\n")[0] if __doc__ else "")
    add_model_flags(parser)
    parser.add_argument("--rtt-ms", default="0,1,5", help="round-trip times, comma separated (default: %(default)s)")
    parser.add_argument("--concurrency", default="1", help="streams, comma separated (default: %(default)s)")
    parser.add_argument("--compare", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=4, help="questions of a turn (default: %(default)s)")
    args = parser.parse_args(argv)
    try:
        rtts_ms = [float(part) for part in args.rtt_ms.split(",")]
        experiment = Experiment(
            prompts=load_prompts(args.prompts),
            ways=tuple(args.compare.split(",")),
            concurrencies=tuple(int(part) for part in args.concurrency.split(",")),
            temperatures=(args.temperature,),
            repeats=args.repeats,
            batch=args.batch,
            sampling=SamplingParams(max_tokens=args.max_tokens),
            num_speculative_tokens=args.num_speculative_tokens,
        )
    except ValueError as error:
        parser.error(str(error))
    except SpecdecError as error:
        parser.error(str(error))
    if not set(experiment.ways) <= set(WAYS) or min(*rtts_ms, *experiment.concurrencies) < 0 or 0 in experiment.concurrencies:
        parser.error(f"--compare takes {', '.join(WAYS)}; times and streams are not negative")
    try:
        with pools(Models(args.target_model, args.draft_model)) as running:
            found = measure(running, experiment, rtts_ms)
    except SpecdecError as error:
        print(f"rtt: {error}", file=sys.stderr)
        return 2
    notes = dict.fromkeys(note for one in found for note in one["notes"])
    print(json.dumps(found) if args.json else "\n".join([table(found), *(f"note: {note}" for note in notes)]))
    return 1 if any(one["differing"] for one in found) else 0


if __name__ == "__main__":
    sys.exit(main())
