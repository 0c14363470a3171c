"""What every peer script shares: its flags, the passes it times, and the one JSON line it prints.

    python SCRIPT --model DIR [--draft DIR] --prompts FILE --max-tokens N --streams 1,4,8 [flags of its own]

FILE holds lines with "token_ids". For each number of streams the first prompts are answered, so many at a time, each with exactly N
tokens, greedily, end-of-sequence ids being ordinary ones. Timed is the whole pass, prompts included; a short pass before it warms up.
Standard library only: it runs in every environment.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

WARM_UP_TOKENS = 8
FEWEST_PROMPTS = 4  # of a pass, so that one stream sees one prompt of each kind
MOST_PROMPTS = 8

Ids = list[int]
Generate = Callable[[Sequence[Ids], int, int], list[Ids]]
"""prompts, tokens an answer, streams → the new ids of each."""


def parser(description: str) -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(description=description)
    flags.add_argument("--model", type=Path, required=True)
    flags.add_argument("--draft", type=Path, default=None)
    flags.add_argument("--prompts", type=Path, required=True)
    flags.add_argument("--max-tokens", type=int, default=96)
    flags.add_argument("--streams", default="1,4,8")
    flags.add_argument("--threads", type=int, default=2)
    return flags


def read_prompts(path: Path) -> list[Ids]:
    return [json.loads(line)["token_ids"] for line in path.read_text().splitlines() if line.strip()]


def prompts_of(prompts: Sequence[Ids], streams: int) -> Sequence[Ids]:
    """FEWEST_PROMPTS for one stream, MOST_PROMPTS for several; as many as there are streams at least, where there are so many."""
    return prompts[: FEWEST_PROMPTS if streams == 1 else max(MOST_PROMPTS, streams)]


def waves(prompts: Sequence[Ids], streams: int) -> Iterator[Sequence[Ids]]:
    """For engines that take a batch: all answers are equally long, so waves are as good as a closed loop."""
    for start in range(0, len(prompts), streams):
        yield prompts[start : start + streams]


def timed(generate: Generate, prompts: Sequence[Ids], max_tokens: int, streams: int) -> dict[str, Any]:
    """One cell. `short` = answers that have fewer tokens than asked for; they count with what they have."""
    asked = prompts_of(prompts, streams)
    generate(asked[:streams], WARM_UP_TOKENS, streams)
    began = time.perf_counter()
    answers = generate(asked, max_tokens, streams)
    seconds = time.perf_counter() - began
    tokens = sum(len(answer) for answer in answers)
    print(f"  {streams} streams: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s", file=sys.stderr, flush=True)
    short = sum(len(answer) != max_tokens for answer in answers)
    return {"streams": streams, "tokens": tokens, "seconds": round(seconds, 4), "short": short, "answers": answers}


def run(options: argparse.Namespace, load: Callable[[], Generate], packages: Sequence[str], most_streams: int | None = None) -> None:
    """Loads, measures, prints. `most_streams`: what the peer can do at once."""
    prompts = read_prompts(options.prompts)
    began = time.perf_counter()
    generate = load()
    load_s = time.perf_counter() - began
    counts = [int(part) for part in options.streams.split(",")]
    cells = [timed(generate, prompts, options.max_tokens, n) for n in counts if most_streams is None or n <= most_streams]
    say({"load_s": round(load_s, 2), "versions": versions(packages), "cells": cells})


def say(report: dict[str, Any]) -> None:
    """The last line of standard output is the report, whatever libraries wrote before it."""
    print("\n" + json.dumps(report), flush=True)


def versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "?"
    return found
