"""`specdec down`: stops what `specdec up --state DIR` started."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from specdec.cli import pids
from specdec.cli.state import State

HELP = "stop what `up --state DIR` started"
DESCRIPTION = """\
Stops the system of a state folder and removes its endpoint and processes.json; logs stay. Says so, and succeeds, when nothing runs there.
Only processes that are the very ones written down are signalled: a pid that belongs to somebody else by now is left alone."""
SUPERVISOR_S = 45.0  # it stops its children in two waves, each with its own grace
CHILDREN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state", type=Path, required=True, metavar="DIR", help="the folder given to `up`")


def run(arguments: argparse.Namespace) -> int:
    state = State(arguments.state.absolute())
    supervisor, children = state.processes()
    running = [p for p in (*children, *([supervisor] if supervisor else ())) if p.alive]
    if not running:
        state.clear()
        print(f"nothing runs from {arguments.state}")
        return 0
    if supervisor is not None and supervisor.alive:
        supervisor.send(signal.SIGTERM)
        if pids.wait_gone([supervisor], SUPERVISOR_S):
            supervisor.send(signal.SIGKILL)
    pids.end(children, CHILDREN_S)
    state.clear()
    print(f"stopped {len(running)} process{'es' if len(running) > 1 else ''}")
    return 0
