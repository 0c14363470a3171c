"""A sweep on the disk: what it is, and a line for every turn as soon as it is measured. An interrupted one goes on where it ended.

plan.json      what is measured, by whom and where; another sweep is refused in this folder
runs.jsonl     a turn a line (record.py); a last line that was cut off is dropped, and of two lines of one turn the later counts
.lock          held while a process measures: two of them would write into each other's lines
report.json, report.csv, memory.csv, report.html    written at the end, and when it is interrupted

Memory holds a place in the file for every turn, and the turns of one cell while they are looked at.
"""

from __future__ import annotations

import fcntl
import json
import os
import weakref
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specdec.bench.experiment import Cell, Turn
from specdec.bench.record import Run, from_json, to_json, turn_of
from specdec.errors import InvalidRequest

# What differs between two sweeps, where the flag has another name.
FLAGS = {"ways": "--compare", "output_tokens": "--max-tokens", "primed": "--endpoint, --state or --cold-prompts"}
PLAN, RUNS, LOCK = "plan.json", "runs.jsonl", ".lock"


class Store:
    """`plan` must hold "sweep": what two parts of one sweep have in common. Raises InvalidRequest that names
    `field`, the flag."""

    def __init__(self, folder: Path, plan: Mapping[str, Any], field: str = "--out") -> None:
        self.folder, self._field = folder, field
        self.turns: dict[Turn, int] = {}  # where its line begins
        self.fingerprint = ""  # of the engine that was measured
        self.notes: list[str] = []
        try:
            folder.mkdir(exist_ok=True)
            self._lock()
            measured = (folder / RUNS).exists() and (folder / RUNS).stat().st_size > 0  # else nobody answered: any sweep may begin
            if measured and (folder / PLAN).exists():
                self._same(json.loads((folder / PLAN).read_text(encoding="utf-8")), plan)
            else:
                _write(folder / PLAN, json.dumps(plan, indent=1) + "\n")
            with (folder / RUNS).open("ab"):
                pass
            self._scan()
        except (OSError, ValueError) as error:
            raise InvalidRequest(field, f"{folder}: {getattr(error, 'strerror', None) or error}") from error

    def _lock(self) -> None:
        """As long as this lives, or its process. Of a process, not of a file: the kernel lets go of it whatever ends the process."""
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        weakref.finalize(self, os.close, handle)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            told = "another specdec bench writes there; wait until it has ended, or name another folder"
            raise InvalidRequest(self._field, f"{self.folder}: {told}") from None
        except OSError:
            return  # a file system without locks

    def _same(self, held: Mapping[str, Any], plan: Mapping[str, Any]) -> None:
        differs = [name for name, value in plan["sweep"].items() if held.get("sweep", {}).get(name) != value]
        if differs:
            flags = dict.fromkeys(FLAGS.get(name, f"--{name.replace('_', '-')}") for name in differs)
            told = f"holds another sweep (other {', '.join(flags)}); name another folder, or repeat its flags to go on with it"
            raise InvalidRequest(self._field, f"{self.folder} {told}")
        self.notes += [
            f"begun with another {what} ({', '.join(differs)}): times of both are put together"
            for what in ("machine", "versions")
            if (differs := _differences(held.get(what) or {}, plan.get(what) or {}))
        ]

    def _scan(self) -> None:
        """Places of whole lines; what follows the last of them is cut off, so that the next one does not continue it."""
        place = end = 0
        with (self.folder / RUNS).open("r+b") as lines:
            for line in lines:
                place, began = place + len(line), place
                try:
                    told = json.loads(line) if line.endswith(b"\n") else None
                    if told is not None:
                        self._note(turn_of(told), began, told["settings"])
                        end = place
                except (ValueError, KeyError, TypeError) as error:
                    raise InvalidRequest(self._field, f"{self.folder / RUNS}: byte {began}: not a turn ({error})") from error
            lines.truncate(end)

    def _note(self, turn: Turn, place: int, settings: Mapping[str, Any]) -> None:
        self._known(settings)
        self.turns[turn] = place

    def _known(self, settings: Mapping[str, Any]) -> None:
        told = str(settings.get("numerics_fingerprint", ""))
        if self.fingerprint and told and told != self.fingerprint:
            raise InvalidRequest(
                self._field, f"{self.folder} was measured on another model or engine ({self.fingerprint}, now {told}); name another folder"
            )
        self.fingerprint = self.fingerprint or told

    def add(self, run: Run) -> None:
        """On the disk when it returns. Raises InvalidRequest, and then nothing of it is there."""
        self._known(run.settings)
        line = (json.dumps(to_json(run), separators=(",", ":")) + "\n").encode()
        try:
            with (self.folder / RUNS).open("ab", buffering=0) as lines:
                place = lines.tell()
                try:
                    written = 0
                    while written < len(line):
                        written += lines.write(line[written:])
                    os.fsync(lines.fileno())
                except OSError:
                    lines.truncate(place)
                    raise
        except OSError as error:
            told = "what was measured before is kept; mend it, and the same command goes on from there"
            raise InvalidRequest(self._field, f"{self.folder / RUNS}: {error.strerror}; {told}") from error
        self.turns[run.turn] = place

    def of(self, cell: Cell) -> list[Run]:
        places = sorted(place for turn, place in self.turns.items() if turn.cell == cell)
        with (self.folder / RUNS).open("rb") as lines:
            found = []
            for place in places:
                lines.seek(place)
                found.append(from_json(json.loads(lines.readline())))
        return found

    def lines(self) -> Iterator[str]:
        """The turns as they are kept, one JSON object each."""
        with (self.folder / RUNS).open(encoding="utf-8") as lines:
            for line in lines:
                yield line.rstrip("\n")

    def write(self, name: str, text: str) -> Path:
        _write(self.folder / name, text)
        return self.folder / name


class Kept:
    """The same in memory, for experiments that are small."""

    def __init__(self, runs: list[Run]) -> None:
        self._by_cell: dict[Cell, list[Run]] = defaultdict(list)
        for run in runs:
            self._by_cell[run.turn.cell].append(run)

    def of(self, cell: Cell) -> list[Run]:
        return self._by_cell.get(cell, [])


def _write(path: Path, text: str) -> None:
    """Whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*before, *now])
    return [f"{name}: {before.get(name)}, now {now.get(name)}" for name in names if before.get(name) != now.get(name)]
