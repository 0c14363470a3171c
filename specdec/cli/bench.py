"""`specdec bench`: does speculation pay, and is the text the same? The same questions in several ways, in turn."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.cli import bench_flags, bench_sim, paint
from specdec.cli.connection import connected, endpoint_of
from specdec.errors import InvalidRequest, SpecdecError
from specdec.runtime.settings import no_color

if TYPE_CHECKING:
    from specdec.bench.experiment import Outcome
    from specdec.bench.report import Asked
    from specdec.bench.store import Store
    from specdec.bench.watch import Process

HELP = "decide with your own traffic whether speculation pays"
DESCRIPTION = """\
Asks the same questions without speculation (none), with a fixed block length (fixed) and with the service's choice (auto), in short turns
whose order rotates, in every cell of the grid: kind, temperature, length of prompt and answer, and load. Prints for each cell tokens per
second, the ratio to none with its 95 % interval over the repeats, times, acceptance, how many texts differ from those of none, and a
verdict: pays, neutral or costs, with what to set and why. A way that the service does not serve is left out with a note. Without --endpoint
a target, a draft and an orchestrator are started on this machine and stopped at the end. With --out DIR raw times are kept as they come, an
interrupted sweep goes on where it ended, also with more --repeats, and report.html is for whoever decides. Exit code 1 if a text differs
where equality is promised. Ctrl-C prints and writes what is there."""
add_arguments = bench_flags.add_arguments


def run(arguments: argparse.Namespace) -> int:
    if arguments.sim:
        return bench_sim.run(arguments)
    from specdec.bench import machine
    from specdec.bench.experiment import Outcome
    from specdec.bench.store import Store

    outcome, asked = Outcome(bench_flags.experiment(arguments)), bench_flags.asked(arguments)
    about = {"command": shlex.join(["specdec", *arguments.argv]), "machine": machine.machine(), "versions": machine.versions()}
    with _folder(arguments.out) as folder:
        work = _Work(outcome, asked, about, Store(folder, {**about, "sweep": bench_flags.sweep(outcome.experiment)}), arguments)
        outcome.notes.extend(work.store.notes)
        code, failure = 0, None
        try:
            with _endpoint(arguments) as (endpoint, processes):
                asyncio.run(_measure(endpoint, processes, work))
        except (KeyboardInterrupt, asyncio.CancelledError):  # nobody else cancels it
            code = 130
        except SpecdecError as error:
            code, failure = 2, error
        try:
            differing = _show(work) if work.store.turns else 0
        except KeyboardInterrupt:
            print(f"interrupted before the report was there{_goes_on(work, '; the same command makes it')}", file=sys.stderr)
            return 130
        if code == 130 and not work.store.turns:
            print("interrupted before a turn was measured", file=sys.stderr)
    if failure is not None:
        raise failure
    return code or (1 if differing else 0)


@dataclass(frozen=True, slots=True)
class _Work:
    outcome: Outcome
    asked: Asked
    about: dict[str, Any]
    store: Store
    arguments: argparse.Namespace


@contextlib.contextmanager
def _folder(out: Path | None) -> Iterator[Path]:
    """Where turns are kept: --out, or a folder for this time. An hour of measuring must not end at a folder that is not there."""
    if out is not None and not _is_file(out):
        yield out
        return
    if out is not None:
        try:
            with out.open("a"):
                pass
        except OSError as error:
            raise InvalidRequest("--out", f"{out}: {error.strerror}") from error
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as name:
        yield Path(name)


def _is_file(out: Path) -> bool:
    return out.is_file() or (out.suffix == ".json" and not out.is_dir())


@contextlib.contextmanager
def _endpoint(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Process]]]:
    """The orchestrator, and who can be looked at. A system of its own keeps no prompts, so that every way pays for them."""
    from specdec.bench import watch

    if arguments.endpoint is not None or arguments.state is not None:
        known = watch.of_state(arguments.state) if arguments.state is not None else []
        yield endpoint_of(arguments), known + watch.of_metrics(arguments.metrics or "")
        return
    from specdec.bench.system import Models, pools

    models = Models(arguments.target_model, arguments.draft_model)
    models.check()
    print("starting a target, a draft and an orchestrator; loading the models takes some seconds", file=sys.stderr, flush=True)
    with pools(models, target={"PREFIX_CACHE": "false"}) as running:
        running.start_orchestrator()
        processes = [watch.Process(s.role, f"{s.role}-0", s.process.pid, s.metrics) for s in running.running]
        yield running.orchestrator.endpoint, processes


async def _measure(endpoint: str, processes: Sequence[Process], work: _Work) -> None:
    from specdec.bench.experiment import Done, Turn, run
    from specdec.bench.progress import Progress
    from specdec.bench.record import run_of
    from specdec.bench.watch import Watch

    progress: Progress | None = None
    known = frozenset(work.store.turns)
    if known:
        print(f"going on: {len(known)} turns are in {work.store.folder}", file=sys.stderr, flush=True)

    def tell(turn: Turn, seconds: float | None) -> None:
        nonlocal progress
        if progress is None:  # the ways are known once the service has been asked
            progress = Progress([(t.cell, t.way) for t in work.outcome.experiment.left(known)], sys.stderr)
            for note in work.outcome.notes:
                print(note, file=sys.stderr, flush=True)
        label = f"{turn.cell}, {turn.way}"
        if seconds is None:
            progress.begin(label)
        else:
            progress.end(label, seconds)

    def keep(done: Done) -> None:
        work.store.add(run_of(done))

    async with connected(endpoint, work.arguments) as client:
        watch = Watch(processes)
        try:
            async with watch.sampling():
                await run(client, work.outcome, tell, keep, known, watch.look if processes else None)
        finally:
            work.outcome.notes.extend(f"{name}: its metrics could not be read" for name in sorted(watch.missing))
            if progress is not None:
                progress.close()


def _show(work: _Work) -> int:
    """Prints and writes what was found; the number of texts that differ. Raises InvalidRequest where it cannot be written."""
    from specdec.bench.report import report

    found = report(work.outcome, work.about, work.store, work.asked)
    try:
        told = _write(found, work)
    except OSError as error:  # what was measured is told all the same
        _print(found, work, [])
        place = f"{error.filename or work.arguments.out}: {error.strerror}"
        raise InvalidRequest("--out", f"{place}; mend it, and the same command writes it again") from error
    _print(found, work, told)
    return int(found["differing"])


def _print(found: dict[str, Any], work: _Work, told: list[str]) -> None:
    from specdec.bench import tables

    if work.arguments.json:
        print(json.dumps(found))
        return
    colour = sys.stdout.isatty() and not no_color()
    if found["simulated"]:
        print("simulated: nothing here says how fast a model is")
    for cell in found["cells"]:
        print(paint.heading(tables.headline(cell), colour))
        print(paint.table(tables.table(cell)))
        print("\n".join(tables.reasons(cell)) + "\n")
    print(paint.heading(found["summary"]["headline"], colour))
    if found["slices"]:
        print(paint.table(tables.slices(found["slices"])))
    print("\n".join(found["summary"]["sentences"]))
    if found["memory"]:
        print(paint.table(tables.memory(found["memory"])))
    for note in found["notes"]:
        print(f"note: {note}")
    if not work.outcome.complete:
        print(f"note: not complete: ended before the last turn{_goes_on(work, '; the same command goes on from here')}")
    print("\n".join([*told, f"texts that differ from {work.outcome.experiment.baseline}: {found['differing']}"]), flush=True)


def _goes_on(work: _Work, told: str) -> str:
    """What is told where turns are kept; nothing of a folder for this time."""
    return told if work.arguments.out is not None and not _is_file(work.arguments.out) else ""


def _write(found: dict[str, Any], work: _Work) -> list[str]:
    """What is told of it."""
    out = work.arguments.out
    if out is None:
        return []
    if _is_file(out):
        with out.open("w", encoding="utf-8") as file:  # turn by turn: all of them may be more than memory holds
            file.write(json.dumps(found)[:-1] + ', "turns": [')
            for number, line in enumerate(work.store.lines()):
                file.write(("," if number else "") + line)
            file.write("]}\n")
        return [f"written: {out}"]
    from specdec.bench import page, tables

    text, notes = page.page(found)
    written = [
        work.store.write("report.json", json.dumps(found) + "\n"),
        work.store.write("report.csv", tables.as_csv(found["cells"])),
        *([work.store.write("memory.csv", tables.memory_csv(found["memory"]))] if found["memory"] else []),
        work.store.write("report.html", text),
    ]
    return [*notes, *(f"written: {path}" for path in written)]
