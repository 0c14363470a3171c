"""Does speculation pay here? The same prompts through one running service, with and without it, in turn.

    python -m specdec.bench.compare --endpoint 127.0.0.1:50051 [--prompts FILE] [--max-tokens 112] [--temperature 0] [--repeats 1]

For every prompt the two ways run one after the other, the order alternating, so that a slow minute of the machine touches both. Rates are
decode rates: tokens after the first, over the time after the first. Prints a table and, with --json, one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.client import Client, Credentials, Delta, Finished, client_of
from specdec.runtime.dial_flags import add_credentials, credential_fields
from specdec.terms import SamplingParams

PROMPTS = Path(__file__).with_name("prompts.jsonl")


@dataclass(frozen=True, slots=True)
class Run:
    """One answer: `ttft_s` from asking to the first token, `rate` in tokens per second after it."""

    token_ids: tuple[int, ...]
    ttft_s: float
    rate: float
    mean_acceptance_length: float
    hit_rate: float
    tokens_per_round: float


async def run_once(client: Client, prompt: str, sampling: SamplingParams, **options: Any) -> Run:
    asked = time.perf_counter()
    first = last = 0.0
    first_count = 0
    ids: list[int] = []
    async for event in client.generate([{"role": "user", "content": prompt}], sampling, **options):
        if isinstance(event, Delta) and event.token_ids:
            last = time.perf_counter()
            if not ids:
                first, first_count = last, len(event.token_ids)
            ids += event.token_ids
        elif isinstance(event, Finished):
            stats = event.speculative
            rate = (len(ids) - first_count) / (last - first) if last > first else 0.0
            per_round = len(ids) / max(1, stats.num_rounds)
            return Run(tuple(ids), first - asked, rate, stats.mean_acceptance_length, stats.hit_rate, per_round)
    raise RuntimeError("the stream had no end")


async def compare(
    endpoint: str, credentials: Credentials, prompts: Sequence[dict[str, str]], sampling: SamplingParams, k: int | None, repeats: int
) -> list[dict[str, Any]]:
    """One row per prompt and repeat."""
    rows = []
    async with client_of(endpoint, credentials) as client:
        await run_once(client, "Warm up.", sampling, num_speculative_tokens=k, seed=1)
        for repeat in range(repeats):
            for number, prompt in enumerate(prompts):
                runs: dict[bool, Run] = {}
                for speculate in (True, False) if (number + repeat) % 2 else (False, True):
                    block = k if speculate else 0
                    runs[speculate] = await run_once(client, prompt["prompt"], sampling, num_speculative_tokens=block, seed=number)
                rows.append(_row(prompt["kind"], runs[False], runs[True]))
                print(f"\r{len(rows)}/{repeats * len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def _row(kind: str, off: Run, on: Run) -> dict[str, Any]:
    return {
        "kind": kind,
        "tokens": len(on.token_ids),
        "off_tokens_per_s": off.rate,
        "on_tokens_per_s": on.rate,
        "off_ttft_s": off.ttft_s,
        "on_ttft_s": on.ttft_s,
        "ratio": on.rate / off.rate if off.rate else 0.0,
        "mean_acceptance_length": on.mean_acceptance_length,
        "tokens_per_round": on.tokens_per_round,
        "hit_rate": on.hit_rate,
        "identical": on.token_ids == off.token_ids,
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Per kind and over all: total tokens over total time, so long answers weigh more. Left out are answers of under 16 tokens, and those
    that came in one message."""
    kept = [row for row in rows if row["tokens"] >= 16 and row["on_tokens_per_s"] > 0 and row["off_tokens_per_s"] > 0]
    kinds = [*sorted({row["kind"] for row in kept}), "all"] if kept else []
    return {kind: _summary([row for row in kept if kind in (row["kind"], "all")]) for kind in kinds} | {
        "identical": all(row["identical"] for row in rows)
    }


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    on = sum(row["tokens"] / row["on_tokens_per_s"] for row in rows)
    off = sum(row["tokens"] / row["off_tokens_per_s"] for row in rows)
    tokens = sum(row["tokens"] for row in rows)
    return {
        "answers": len(rows),
        "off_tokens_per_s": round(tokens / off, 2),
        "on_tokens_per_s": round(tokens / on, 2),
        "ratio": round(off / on, 3),
        "mean_acceptance_length": round(statistics.fmean(row["mean_acceptance_length"] for row in rows), 3),
        "tokens_per_round": round(statistics.fmean(row["tokens_per_round"] for row in rows), 3),
        "hit_rate": round(statistics.fmean(row["hit_rate"] for row in rows), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.compare", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--endpoint", required=True)
    add_credentials(parser)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help='JSON lines with "kind" and "prompt"')
    parser.add_argument("--max-tokens", type=int, default=112)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--num-speculative-tokens", type=int, default=None)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    prompts = [json.loads(line) for line in args.prompts.read_text().splitlines() if line.strip()]
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens)
    rows = asyncio.run(
        compare(args.endpoint, Credentials(**credential_fields(args)), prompts, sampling, args.num_speculative_tokens, args.repeats)
    )
    summary = summarise(rows)
    if args.json:
        print(json.dumps({"summary": summary, "rows": rows}))
    else:
        _print_table(summary)
    return 0 if summary["identical"] else 1


def _print_table(summary: dict[str, Any]) -> None:
    print(f"{'kind':10} {'answers':>7} {'off tok/s':>10} {'on tok/s':>10} {'ratio':>7} {'accept':>7} {'tok/rnd':>8} {'hits':>6}")
    for kind, row in summary.items():
        if isinstance(row, dict):
            print(
                f"{kind:10} {row['answers']:>7} {row['off_tokens_per_s']:>10} {row['on_tokens_per_s']:>10} {row['ratio']:>7}"
                f" {row['mean_acceptance_length']:>7} {row['tokens_per_round']:>8} {row['hit_rate']:>6}"
            )
    print("texts identical:", "yes" if summary["identical"] else "NO")


if __name__ == "__main__":
    sys.exit(main())
