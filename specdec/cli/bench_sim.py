"""`specdec bench --sim`: an orchestrator between simulated pools."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from specdec.cli import paint
from specdec.errors import InvalidRequest
from specdec.runtime.settings import no_color

MOST_SECONDS = 3600.0
TITLES = (
    "targets", "drafts", "sessions", "orchestrators", "rounds/s", "per CPU-s", "CPU", "load side", "with block", "tokens/round",
    "added ms", "p99", "to client ms", "p99", "differing",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("simulated pools")
    group.add_argument(
        "--sim",
        action="append",
        metavar="NAME=N,…",
        help="measure orchestrators between simulated pools and clients instead: targets, drafts, sessions, orchestrators, acceptance, "
        "step-ms, row-ms, rtt-ms, draft-ms, hits, block, tokens, prompt, adaptive; once for each line of the table",
    )
    group.add_argument("--seconds", type=float, default=10.0, metavar="S", help="of each measurement (default: %(default)g)")
    group.add_argument("--profile", action="store_true", help="sample where the orchestrators' CPU time goes")


def run(arguments: argparse.Namespace) -> int:
    from specdec.bench import machine
    from specdec.bench.sim.run import run as measure
    from specdec.bench.sim.run import scenario

    if not 0.1 <= arguments.seconds <= MOST_SECONDS:
        raise InvalidRequest("--seconds", f"must be 0.1 to {MOST_SECONDS:g}, got {arguments.seconds:g}")
    if not os.path.isdir("/proc/self"):
        raise InvalidRequest("--sim", "needs Linux: CPU times are read from /proc")
    scenarios = [scenario(text) for text in arguments.sim]
    if arguments.out is not None:
        _may_be_written(arguments.out)
    found = []
    for wanted in scenarios:
        found.append(measure(wanted, arguments.seconds, arguments.profile))
        if not arguments.json:
            print(f"measured {len(found)} of {len(scenarios)}", file=sys.stderr, flush=True)
    command = shlex.join(["specdec", *arguments.argv])
    told = {"simulated": True, "command": command, "machine": machine.machine(), "versions": machine.versions(), "measured": found}
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(told) + "\n", encoding="utf-8")
    print(json.dumps(told) if arguments.json else text(found, sys.stdout.isatty() and not no_color()))
    return 1 if any(one["differing"] or one["failed"] or one["broken"] for one in found) else 0


def _may_be_written(out: Path) -> None:
    """Before minutes of measuring. Raises InvalidRequest."""
    try:
        with out.open("a"):
            pass
    except OSError as error:
        raise InvalidRequest("--out", f"{out}: {error.strerror}; with --sim name a file, e.g. found.json") from error


def text(found: list[dict[str, Any]], colour: bool) -> str:
    parts = [paint.heading("simulated: real orchestrators, no models", colour), paint.table([list(TITLES), *map(_row, found)])]
    for one in found:
        if "profile" in one:
            shares = ", ".join(f"{name} {share:.0%}" for name, share in one["profile"]["sections"].items())
            parts.append(f"CPU time of {one['scenario']['sessions']} sessions: {shares}")
    base = found[0]
    for one in found[1:]:
        times = one["scenario"]["targets"] / base["scenario"]["targets"]
        if times > 1:
            linear = one["session_rounds_per_s"] / base["session_rounds_per_s"] / times
            parts.append(f"{base['scenario']['targets']} to {one['scenario']['targets']} targets: {linear:.0%} of linear")
    return "\n".join(parts)


def _row(one: dict[str, Any]) -> list[str]:
    told = one["scenario"]
    return [
        *(str(told[name]) for name in ("targets", "drafts", "sessions", "orchestrators")),
        f"{one['session_rounds_per_s']:.0f}",
        f"{one['session_rounds_per_cpu_s']:.0f}",
        " ".join(f"{share:.0%}" for share in one["orchestrator_cpu"]),
        f"{one['load_side_cpu']:.0%}",
        f"{one['rounds_with_block']:.0%}",
        f"{one['tokens_per_round']:.2f}",
        *(f"{one[name][which]:.1f}" if one[name] else "" for name in ("added_ms", "to_client_ms") for which in ("p50", "p99")),
        str(one["differing"] + one["failed"]),
    ]
