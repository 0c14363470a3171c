"""What a grammar costs per token. The same prompts through one running service, with and without a grammar, in turn.

    python -m specdec.bench.structured --endpoint 127.0.0.1:50051 [--tokenizer FOLDER] [--max-tokens 96] [--temperature 0] [--repeats 2]

Three kinds of answers, each with and without speculation; for every prompt all six run one after the other, the order rotating, so that a
slow minute of the machine touches all.

    plain    no grammar
    any      a grammar that every text is of: the same text as plain, and so the same acceptance; the difference is the masks
    json     a JSON schema: another text, in which many ids are forced

Times are decode times: of the tokens after the first, per token. `ratios` say what is divided by what. With --tokenizer the masks of the
answers' rows are computed here again, alone, and timed as computing time: no network, no model. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specdec.bench.load import Answer, Question, ask
from specdec.bench.prompts import PROMPTS, Kinded, load_prompts
from specdec.client import Client, Credentials, client_of
from specdec.errors import SpecdecError
from specdec.grammar import GrammarCompiler
from specdec.runtime.dial_flags import add_credentials, credential_fields
from specdec.terms import Grammar, GrammarForm, SamplingParams
from specdec.vocabulary import load_tokenizer

GOAL = 1.15  # a token under a grammar may take this much of one without
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "tags": {"type": "array", "items": {"enum": ["calm", "rough", "open", "closed"]}, "maxItems": 3},
            "note": {"type": "string", "maxLength": 60},
        },
        "required": ["name", "age", "tags", "note"],
        "additionalProperties": False,
    },
    "minItems": 3,
    "maxItems": 8,
}
GRAMMARS: Mapping[str, Grammar | None] = {
    "plain": None,
    "any": Grammar(GrammarForm.REGEX, r"(.|\n)*"),
    "json": Grammar(GrammarForm.JSON_SCHEMA, json.dumps(SCHEMA)),
}
WAYS = [(kind, speculate) for kind in GRAMMARS for speculate in (False, True)]
COMPARED = {
    "masks_without_speculation": ("any, off", "plain, off"),
    "json_without_speculation": ("json, off", "plain, off"),
    "masks_with_speculation": ("any, on", "plain, on"),
    "json_with_speculation": ("json, on", "plain, on"),
    "json_with_over_without_speculation": ("json, on", "json, off"),
    "plain_with_over_without_speculation": ("plain, on", "plain, off"),
}


def label(kind: str, speculate: bool) -> str:
    return f"{kind}, {'on' if speculate else 'off'}"


async def measure(
    endpoint: str, credentials: Credentials, prompts: Sequence[Kinded], sampling: SamplingParams, repeats: int
) -> dict[str, list[Answer]]:
    """Per way, one answer for each prompt and repeat, in the same order."""
    runs: dict[str, list[Answer]] = {label(*way): [] for way in WAYS}
    async with client_of(endpoint, credentials) as client:
        for way in WAYS:  # grammars are compiled, caches filled
            await _once(client, prompts[0], replace(sampling, max_tokens=8), way, 1)
        for number in range(repeats * len(prompts)):
            turn = number % len(WAYS)
            for way in (*WAYS[turn:], *WAYS[:turn]):
                runs[label(*way)].append(await _once(client, prompts[number % len(prompts)], sampling, way, number))
            print(f"\r{number + 1}/{repeats * len(prompts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return runs


async def _once(client: Client, prompt: Kinded, sampling: SamplingParams, way: tuple[str, bool], seed: int) -> Answer:
    kind, speculate = way
    return await ask(client, Question(*prompt, seed), replace(sampling, grammar=GRAMMARS[kind]), {"disable_spec_decode": not speculate})


def summarise(runs: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """`ways`: decode milliseconds per token, and what speculation did; `ratios` of those times, see _ratio; `same_text`: the share of
    answers where plain and any said the same."""
    ways = {name: _way(several) for name, several in runs.items()}
    ratios = {name: _ratio(one, other, runs, ways) for name, (one, other) in COMPARED.items()}
    pairs = [
        (one.token_ids, other.token_ids)
        for mode in ("off", "on")
        for one, other in zip(runs[f"plain, {mode}"], runs[f"any, {mode}"], strict=True)
    ]
    return {
        "unit": "decode milliseconds per token, tokens after the first",
        "goal": f"at most {GOAL} for json_without_speculation and both masks",
        "ways": ways,
        "ratios": ratios,
        "same_text": sum(one == other for one, other in pairs) / len(pairs),
        "speculation_changes_no_text": all(
            one.token_ids == other.token_ids
            for kind in GRAMMARS
            for one, other in zip(runs[f"{kind}, on"], runs[f"{kind}, off"], strict=True)
        ),
    }


def _ratio(one: str, other: str, runs: Mapping[str, Sequence[Answer]], ways: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Of times per token. The median over prompts is hardly moved by a slow minute; the ratio of totals is what was paid."""
    each = [a.per_token_s / b.per_token_s for a, b in zip(runs[one], runs[other], strict=True) if a.per_token_s and b.per_token_s]
    return {
        "compared": f"{one} / {other}",
        "median_of_prompts": round(statistics.median(each), 3) if each else None,
        "of_totals": round(ways[one]["ms_per_token"] / max(1e-9, ways[other]["ms_per_token"]), 3),
    }


def _way(runs: Sequence[Answer]) -> dict[str, float]:
    """Total time over total tokens, so long answers weigh more; answers too short to have a rate are left out."""
    kept = [(len(run.token_ids), run.per_token_s) for run in runs if run.per_token_s and len(run.token_ids) >= 16]
    tokens = sum(count for count, _ in kept)
    return {
        "answers": len(kept),
        "tokens": tokens,
        "ms_per_token": round(1e3 * sum(count * seconds for count, seconds in kept) / max(1, tokens), 3),
        "mean_acceptance_length": round(statistics.fmean(run.stats.mean_acceptance_length for run in runs), 3),
        "tokens_per_round": round(statistics.fmean(len(run.token_ids) / max(1, run.stats.num_rounds) for run in runs), 3),
    }


def mask_times(folder: Path, runs: Mapping[str, Sequence[Answer]]) -> dict[str, Any]:
    """Computing time of the rows of the answers without speculation, in microseconds per row: the mask, and the forced ids behind it."""
    tokenizer = load_tokenizer(folder)
    began = time.process_time()
    compiler = GrammarCompiler(tokenizer)
    report: dict[str, Any] = {"compiler_ms": round(1e3 * (time.process_time() - began), 1)}
    for kind, grammar in GRAMMARS.items():
        if grammar is not None:
            report[kind] = _rows(compiler, grammar, [run.token_ids for run in runs[label(kind, False)]])
    return report


def _rows(compiler: GrammarCompiler, grammar: Grammar, answers: Sequence[Sequence[int]]) -> dict[str, float]:
    compiler.compile(grammar)
    compiled, masks, forced, num_forced = list[float](), list[float](), list[float](), 0
    for answer in answers:
        began = time.thread_time()
        constraint = compiler.compile(grammar)
        compiled.append(time.thread_time() - began)
        for length in range(len(answer)):
            began = time.thread_time()
            constraint.at(answer[:length])
            between = time.thread_time()
            num_forced += bool(constraint.forced(answer[:length]))
            masks.append(between - began)
            forced.append(time.thread_time() - between)
    return {
        "rows": len(masks),
        "mask_us_median": round(1e6 * statistics.median(masks), 1),
        "mask_us_mean": round(1e6 * statistics.fmean(masks), 1),
        "mask_us_max": round(1e6 * max(masks), 1),
        "forced_us_mean": round(1e6 * statistics.fmean(forced), 1),
        "rows_with_forced_ids": round(num_forced / len(masks), 3),
        "compile_ms_median": round(1e3 * statistics.median(compiled), 2),
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m specdec.bench.structured", description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--endpoint", required=True)
    add_credentials(parser)
    parser.add_argument("--tokenizer", type=Path, default=None, help="the target's folder: time the masks alone, too")
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSON lines, as for specdec bench")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args(argv)
    sampling = SamplingParams(temperature=args.temperature, max_tokens=args.max_tokens, ignore_eos=True)
    try:
        prompts = load_prompts(args.prompts)
        runs = asyncio.run(measure(args.endpoint, Credentials(**credential_fields(args)), prompts, sampling, args.repeats))
    except SpecdecError as error:
        print(f"structured: {error}", file=sys.stderr)
        return 2
    report = summarise(runs)
    if args.tokenizer is not None:
        report["masks"] = mask_times(args.tokenizer, runs)
    print(json.dumps(report, indent=2))
    return 0 if report["speculation_changes_no_text"] else 1


if __name__ == "__main__":
    sys.exit(main())
