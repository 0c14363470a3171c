"""`specdec bench-step`: the time of one engine step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from specdec.cli.system import TARGET_MODEL
from specdec.errors import InvalidRequest
from specdec.runtime.extras import need

HELP = "time one engine step at several row counts"
DESCRIPTION = """\
Times forward and head of one engine step for each number of rows per session, and sampling apart, in milliseconds. With --sampling alone:
the sampling of a row for every kind of parameters. Ratios between lines of one run mean something on a shared machine; absolute times
hardly do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", type=Path, default=TARGET_MODEL, metavar="DIR", help="default: %(default)s")
    parser.add_argument("--rows", default="1,6,8,16", metavar="N,…", help="rows per session, contiguous (default: %(default)s)")
    parser.add_argument("--sessions", type=int, default=1, metavar="S", help="sessions in the step (default: %(default)s)")
    parser.add_argument("--start", type=int, default=128, metavar="N", help="tokens already in context (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="threads of an operation (default: %(default)s)")
    parser.add_argument(
        "--sampling",
        nargs="?",
        choices=("greedy", "t1", "topp", "all"),
        const="all",
        default="greedy",
        help="how the rows of a step are sampled (default: %(default)s); without a value, or all: no step, but every kind of parameters",
    )
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
    need("model")
    if not (arguments.model / "config.json").is_file():
        raise InvalidRequest(
            "--model",
            f"{arguments.model} holds no model (no config.json); name a folder that does, or start where `make setup` made models/",
        )
    return _every_kind(arguments) if arguments.sampling == "all" else _step(arguments, rows)


def _every_kind(arguments: argparse.Namespace) -> int:
    from specdec.bench.sampling import run_bench_sampling  # torch comes with it

    report = run_bench_sampling(arguments.model)
    if arguments.json:
        print(json.dumps(report))
        return 0
    print(f"milliseconds a row of {report['vocab_size']:,} ids, median and p99 of {report['rows']} rows")
    columns = ("", "logprobs 0", "logprobs 20")
    print(f"{'':38}" + "".join(f"{column or 'plain':>18}" for column in columns))
    for name, figures in report["cases"].items():
        shown = (figures[column] for column in columns if column in figures)
        print(f"{name:38}" + "".join(f"{f['median_ms']:11.3f} {f['p99_ms']:6.3f}" for f in shown))
    return 0


def _step(arguments: argparse.Namespace, rows: list[int]) -> int:
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
