"""`specdec bench`: does speculation pay, and is the text the same? The same questions in several ways, in turn."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import bench_sim, paint, system
from specdec.cli.connection import add_credentials, connected
from specdec.errors import InvalidRequest, SpecdecError
from specdec.runtime.settings import no_color
from specdec.terms import SamplingParams

if TYPE_CHECKING:
    from specdec.bench.experiment import Experiment, Outcome

HELP = "compare ways to speculate on one running service"
DESCRIPTION = """\
Asks the same questions without speculation (none), with a fixed block length (fixed) and with the service's choice (auto), in short turns
whose order rotates, for every number of streams and every temperature. Prints a table for each: tokens per second, the ratio to none with
its 95 % interval over the repeats, times, acceptance, and how many texts differ from those of none. A way that the service does not serve
is left out with a note. Without --endpoint a target, a draft and an orchestrator are started on this machine and stopped at the end.
Exit code 1 if a text differs where equality is promised. Ctrl-C prints and writes what is there."""
MOST = {"--concurrency": 1024, "--repeats": 10_000, "--batch": 10_000, "--max-tokens": 1 << 20}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--endpoint", metavar="HOST:PORT", help="the orchestrator (default: a system of its own)")
    add_credentials(parser)
    parser.add_argument("--prompts", type=Path, metavar="FILE", help='JSON lines with "prompt" or "messages" (default: twenty built in)')
    parser.add_argument("--concurrency", default="1,4,8", metavar="N,…", help="streams at once (default: %(default)s)")
    parser.add_argument("--temperature", default="0,1", metavar="T,…", help="default: %(default)s")
    parser.add_argument("--compare", default="none,fixed,auto", metavar="WAY,…", help="default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=128, metavar="N", help="per answer (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="pairs behind a ratio's interval (default: %(default)s)")
    parser.add_argument(
        "--batch", type=int, default=4, metavar="N", help="questions of a turn, at least one a stream (default: %(default)s)"
    )
    parser.add_argument("--ignore-eos", action="store_true", help="every answer has --max-tokens tokens")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON: figures, raw times, machine, versions, command")
    parser.add_argument("--json", action="store_true", help="the figures as one JSON object instead of tables")
    system.add_arguments(parser)
    bench_sim.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.sim:
        return bench_sim.run(arguments)
    from specdec.bench.experiment import Outcome

    outcome = Outcome(_experiment(arguments))
    if arguments.out is not None:
        _claim(arguments.out)
    code, failure = 0, None
    try:
        with _endpoint(arguments) as endpoint:
            asyncio.run(_measure(endpoint, outcome, arguments))
    except KeyboardInterrupt:
        code = 130
    except SpecdecError as error:
        code, failure = 2, error
    differing = _show(outcome, arguments) if outcome.done else 0
    if failure is not None:
        raise failure
    return code or (1 if differing else 0)


def _experiment(arguments: argparse.Namespace) -> Experiment:
    from specdec.bench.experiment import WAYS, Experiment
    from specdec.bench.load import PROMPTS, load_prompts

    ways = tuple(dict.fromkeys(part.strip() for part in arguments.compare.split(",")))
    if not set(ways) <= set(WAYS):
        raise InvalidRequest("--compare", f"must name some of {', '.join(WAYS)}, comma separated; got {arguments.compare!r}")
    temperatures = _numbers("--temperature", arguments.temperature, float)
    for flag, value in (("--repeats", arguments.repeats), ("--batch", arguments.batch), ("--max-tokens", arguments.max_tokens)):
        _bounded(flag, value)
    concurrencies = _numbers("--concurrency", arguments.concurrency, int)
    for value in concurrencies:
        _bounded("--concurrency", value)
    for temperature in temperatures:
        SamplingParams(temperature=temperature).check(1 << 32)
    return Experiment(
        prompts=load_prompts(arguments.prompts or PROMPTS),
        ways=ways,
        concurrencies=concurrencies,
        temperatures=temperatures,
        repeats=arguments.repeats,
        batch=arguments.batch,
        sampling=SamplingParams(max_tokens=arguments.max_tokens, ignore_eos=arguments.ignore_eos),
        num_speculative_tokens=arguments.num_speculative_tokens,
    )


def _bounded(flag: str, value: int) -> None:
    if not 1 <= value <= MOST[flag]:
        raise InvalidRequest(flag, f"must be 1 to {MOST[flag]}, got {value}")


def _numbers(flag: str, said: str, kind: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(dict.fromkeys(kind(part) for part in said.split(",")))
    except ValueError:
        raise InvalidRequest(flag, f"must be numbers, comma separated, got {said!r}") from None


def _claim(path: Path) -> None:
    """An hour of measuring must not end at a folder that is not there."""
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise InvalidRequest("--out", f"{path}: {error.strerror}") from error


@contextlib.contextmanager
def _endpoint(arguments: argparse.Namespace) -> Iterator[str]:
    if arguments.endpoint is not None:
        yield arguments.endpoint
        return
    from specdec.bench.system import Models, services

    with services(Models(arguments.target_model, arguments.draft_model)) as running:
        yield running.orchestrator.endpoint


async def _measure(endpoint: str, outcome: Outcome, arguments: argparse.Namespace) -> None:
    from specdec.bench.experiment import Turn, run
    from specdec.bench.progress import Progress

    progress: Progress | None = None

    def tell(turn: Turn, seconds: float | None) -> None:
        nonlocal progress
        if progress is None:  # the ways are known once the service has been asked
            progress = Progress([(t.cell, t.way) for t in outcome.experiment.turns()], sys.stderr)
            for note in outcome.notes:
                print(note, file=sys.stderr, flush=True)
        label = f"{turn.cell}, {turn.way}"
        if seconds is None:
            progress.begin(label)
        else:
            progress.end(label, seconds)

    async with connected(endpoint, arguments) as client:
        try:
            await run(client, outcome, tell)
        finally:
            if progress is not None:
                progress.close()


def _show(outcome: Outcome, arguments: argparse.Namespace) -> int:
    """Prints and writes what was found; the number of texts that differ."""
    from specdec.bench import machine
    from specdec.bench.report import headline, report, table

    command = shlex.join(["specdec", *arguments.argv])
    found = report(outcome, {"command": command, "machine": machine.machine(), "versions": machine.versions()})
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(found) + "\n", encoding="utf-8")
    if arguments.json:
        print(json.dumps({key: value for key, value in found.items() if key != "turns"}))
        return int(found["differing"])
    colour = sys.stdout.isatty() and not no_color()
    for cell in found["cells"]:
        print(paint.heading(headline(cell), colour))
        print(paint.table(table(cell)) + "\n")
    for note in found["notes"]:
        print(f"note: {note}")
    if not outcome.complete:
        print("note: not complete: ended before the last turn")
    print(f"texts that differ from {outcome.experiment.baseline}: {found['differing']}", flush=True)
    return int(found["differing"])
