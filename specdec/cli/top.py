"""`specdec top`: what a running system does at this moment, from the metrics ports of its processes, or from what its orchestrators tell
their clients."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.bench.scrape import Samples, scrape
from specdec.cli.connection import add_credentials, credentials_of
from specdec.cli.state import PROCESSES
from specdec.cli.top_view import Look, Table, plain, tables
from specdec.errors import InvalidRequest, Unavailable
from specdec.runtime.extras import need

if TYPE_CHECKING:
    from rich.console import Group

    from specdec.bench.endpoints import Endpoints

HELP = "a live view of a running system, from its metrics"
DESCRIPTION = """\
Shows answers in progress, tokens per second, what is kept of the proposals by slot, where blocks come from, batches, KV room, replicas and
everything that fell back to something slower. The processes are those of `specdec up --state DIR`, or the metrics ports given by name
(SPECDEC_METRICS_PORT of each service). With --endpoint nothing else has to be reached: the orchestrators tell what they count (where
SPECDEC_SHOW_METRICS lets clients see it), and what only targets and drafts know is left out, and said. Rates are those of the last
interval. Ctrl-C ends it. The live view needs the extra `tools`; --once, and an output that is no terminal, do not."""
MAX_PORTS = 256
HOST = "127.0.0.1"
ALARMING = ("OFF", "partly", "NO", "away")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--state", type=Path, metavar="DIR", help="the folder given to `up`")
    where.add_argument("--metrics", metavar="HOST:PORT,…", help="metrics ports of the processes")
    where.add_argument("--endpoint", metavar="HOST:PORT[,…]", help="the orchestrator as its clients reach it; of several the sum")
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="time between two looks (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one plain table after one interval, and end")
    add_credentials(parser.add_argument_group("with --endpoint"))


def run(arguments: argparse.Namespace) -> int:
    if not 0.1 <= arguments.interval <= 60:
        raise InvalidRequest("--interval", "must be 0.1 to 60 seconds")
    with _looking(arguments) as look_again:
        return _watch(arguments, look_again)


def _watch(arguments: argparse.Namespace, look_again: Callable[[], Look]) -> int:
    before = look_again()
    if arguments.once:
        time.sleep(arguments.interval)
        # What a script reads is whole; only a terminal's lines are cut, since they would wrap.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(plain(tables(before, look_again()), width), end="")
        return 0
    if sys.stdout.isatty():
        need("tools")
        return _live(arguments, before, look_again)
    with _heard_interrupts() as rest:
        while True:
            rest(arguments.interval)
            after = look_again()
            print(plain(tables(before, after)), flush=True)
            before = after


@contextlib.contextmanager
def _looking(arguments: argparse.Namespace) -> Iterator[Callable[[], Look]]:
    """How to look; the first look raises Unavailable where nobody answers."""
    if arguments.endpoint is None:
        yield _first(lambda: _look(arguments), "are these metrics ports, and is the system up?")
        return
    from specdec.bench.endpoints import Endpoints

    async def opened() -> Endpoints:
        return Endpoints(arguments.endpoint, credentials_of(arguments))

    with asyncio.Runner() as runner:  # its loop outlives a look, and so do the connections
        endpoints = runner.run(opened())
        try:
            yield _first(lambda: runner.run(_told(endpoints)), "is the service up?")
        finally:
            runner.run(endpoints.close())


def _first(look_again: Callable[[], Look], hint: str) -> Callable[[], Look]:
    """Whoever is gone later is shown as away; if nobody was ever there, it is said at once."""
    seen = False

    def checked() -> Look:
        nonlocal seen
        found = look_again()
        if not seen and all(samples is None for samples in found.samples.values()):
            reasons = "; ".join(f"{address}: {reason}" for address, reason in found.reasons.items())
            raise Unavailable(reasons or f"nobody answers at {', '.join(found.samples)}; {hint}")
        seen = True
        return found

    return checked


async def _told(endpoints: Endpoints) -> Look:
    told = await endpoints.look()
    return Look(time.monotonic(), told.samples, told.strange, told.reasons)


def addresses(arguments: argparse.Namespace) -> list[str]:
    """Read anew for each look: a process that is started again has another port."""
    if arguments.metrics is not None:
        found = [entry.strip() for entry in arguments.metrics.split(",") if entry.strip()]
        for entry in found:
            host, _, port = entry.rpartition(":")
            if not host or not port.isdecimal():
                raise InvalidRequest("--metrics", f"{entry!r}: must be HOST:PORT, several with commas between")
    else:
        try:
            entries = json.loads((arguments.state / PROCESSES).read_text())
            found = [f"{HOST}:{int(entry['metrics_port'])}" for entry in entries if int(entry["metrics_port"]) > 0]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unavailable(f"nothing runs from {arguments.state} ({PROCESSES}: {getattr(error, 'strerror', None) or error})") from error
    if not 0 < len(found) <= MAX_PORTS:
        raise InvalidRequest(
            "--metrics", f"{len(found)} metrics ports; 1 to {MAX_PORTS} are looked at (SPECDEC_METRICS_PORT, 0 = any free one)"
        )
    return list(dict.fromkeys(found))


def _look(arguments: argparse.Namespace) -> Look:
    return asyncio.run(look(addresses(arguments)))


async def look(where: Sequence[str]) -> Look:
    async def one(address: str) -> Samples | None:
        try:
            return await scrape(address)
        except Unavailable:
            return None

    found = await asyncio.gather(*map(one, where))
    return Look(time.monotonic(), dict(zip(where, found, strict=True)))


def _live(arguments: argparse.Namespace, before: Look, look_again: Callable[[], Look]) -> int:
    """On the terminal's other screen, so that the one before is there again whatever ends this."""
    from rich.live import Live

    with _heard_interrupts() as rest, Live(_group(tables(before, before)), screen=True, auto_refresh=False) as live:
        while True:
            rest(arguments.interval)
            after = look_again()
            live.update(_group(tables(before, after)), refresh=True)
            before = after


@contextlib.contextmanager
def _heard_interrupts() -> Iterator[Callable[[float], None]]:
    """Ctrl-C ends the view at its next rest, or in it; a second one ends it wherever it is. Raised inside a look it would end in whichever
    task or thread runs at that moment, and be told with all its stack. `asyncio.run` leaves a handler alone that is not Python's own; with
    its own it cancels the look, which may just be over, and the Ctrl-C with it. Yields how to rest, in seconds."""
    heard = resting = False

    def interrupt(number: int, frame: object) -> None:
        nonlocal heard
        if heard or resting:
            raise KeyboardInterrupt
        heard = True

    def rest(seconds: float) -> None:
        nonlocal resting
        resting = True
        try:
            if heard:
                raise KeyboardInterrupt
            time.sleep(seconds)
        finally:
            resting = False

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield rest
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        raise KeyboardInterrupt


def _group(found: Sequence[Table]) -> Group:
    from rich.console import Group, RenderableType
    from rich.table import Table as Drawn
    from rich.text import Text

    parts: list[RenderableType] = []
    for table in found:
        parts.append(Text(table.title if table.rows else f"{table.title}: none", style="bold" if table.rows else "dim"))
        drawn = Drawn(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for column in table.columns:
            drawn.add_column(column, no_wrap=True, overflow="ellipsis")
        for row in table.rows:
            drawn.add_row(*(Text(cell, style="bold red" if cell in ALARMING else "") for cell in row))
        parts += [drawn] if table.rows else []
    return Group(*parts)
