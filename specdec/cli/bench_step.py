"""`specdec bench-step`: the time of one engine step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specdec.cli.system import TARGET_MODEL
from specdec.errors import InvalidRequest

HELP = "time one engine step at several row counts"
DESCRIPTION = """\
Times forward and head of one engine step for each number of rows per session, and sampling apart, in milliseconds. Ratios between lines of
one run mean something on a shared machine; absolute times hardly do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=TARGET_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--rows", default="1,6,8,16", metavar="N,…", help="rows per session, contiguous (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1, metavar="S", help="sessions in the step (default: %(default)s)")
    parser.add_argument("--start", type=int, default=128, metavar="N", help="tokens already in context (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of an operation (default: %(default)s)")
    parser.add_argument("--sampling", choices=("greedy", "t1", "topp"), default="greedy", help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")


def run(arguments: argparse.Namespace) -> int:
    try:
        rows = [int(part) for part in arguments.rows.split(",")]
    except ValueError:
        rows = []
    if not rows or min(rows) < 1:
        raise InvalidRequest("--rows", "must be positive whole numbers, comma separated")
    for flag, value, low in (("--sessions", arguments.sessions, 1), ("--start", arguments.start, 0), ("--threads", arguments.threads, 1)):
        if value < low:
            raise InvalidRequest(flag, f"must be at least {low}")
    if not (arguments.model / "config.json").is_file():
        raise InvalidRequest("--model", f"{arguments.model} holds no model (no config.json); run `make setup`, or name a folder that does")
    from specdec.bench.step import run_bench_step  # torch comes with it

    report = run_bench_step(
        model=arguments.model,
        rows=rows,
        sessions=arguments.sessions,
        start=arguments.start,
        threads=arguments.threads,
        sampling=arguments.sampling,
    )
    if arguments.json:
        print(json.dumps(report))
        return 0
    for count, milliseconds in report["rows"].items():
        print(f"{count:>4} rows  {milliseconds:8.2f} ms")
    print(f"sampling {report['sampling_ms_per_row']:.3f} ms a row ({arguments.sampling})")
    return 0
