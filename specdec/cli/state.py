"""The folder of a running system: what `up` writes and `down` reads.

endpoint          host:port of the orchestrator, written last: when it is there, the system serves; a restart does not change it
processes.json    [{"role", "pid", "port", "metrics_port"}, …] of those that run or are being started again
supervisor.json   who to stop, with start times, so that no stranger is ever hit; written first: from then on the folder is taken
tls/              with `up --tls`: the authority's certificate, and those of services and clients; see authority.py
*.log             standard error of every process
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specdec.cli.pids import ProcessId
from specdec.errors import AlreadyExists, InvalidRequest

ENDPOINT, PROCESSES, SUPERVISOR, TLS = "endpoint", "processes.json", "supervisor.json", "tls"


@dataclass(frozen=True, slots=True)
class ProcessEntry:
    role: str
    pid: int
    port: int
    metrics_port: int


@dataclass(frozen=True, slots=True)
class State:
    folder: Path

    @contextlib.contextmanager
    def free(self) -> Iterator[None]:
        """The folder, made if need be, with nothing of a system in it; whoever else wants it waits until the block ends, in which
        `take` is called. Raises AlreadyExists, InvalidRequest."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise InvalidRequest("--state", f"{self.folder}: {error.strerror or error}; name a folder that may be written") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if self.alive():
                raise AlreadyExists(f"a system runs or starts from {self.folder}; `specdec down --state {self.folder}` stops it")
            self.clear()
            yield
        finally:
            os.close(descriptor)

    def take(self, supervisor: ProcessId) -> None:
        """From here on the folder is the supervisor's, also while it still starts."""
        self._put(SUPERVISOR, json.dumps({"supervisor": asdict(supervisor), "children": []}))

    def write(self, endpoint: str, entries: Sequence[ProcessEntry], supervisor: ProcessId, children: Sequence[ProcessId]) -> None:
        owned = {"supervisor": asdict(supervisor), "children": [asdict(child) for child in children]}
        self._put(SUPERVISOR, json.dumps(owned))
        self._put(PROCESSES, json.dumps([asdict(entry) for entry in entries], indent=1) + "\n")
        self._put(ENDPOINT, endpoint + "\n")

    @property
    def tls(self) -> Path:
        return self.folder / TLS

    def endpoint(self) -> str:
        """Of the system that serves. Raises InvalidRequest."""
        try:
            return (self.folder / ENDPOINT).read_text().strip()
        except OSError:
            raise InvalidRequest("--state", f"no system runs from {self.folder}; start one with `specdec up --state`") from None

    def processes(self) -> tuple[ProcessId | None, list[ProcessId]]:
        """The supervisor and its children as last written; none where nothing readable is."""
        try:
            owned: dict[str, Any] = json.loads((self.folder / SUPERVISOR).read_text())
            return ProcessId(**owned["supervisor"]), [ProcessId(**child) for child in owned["children"]]
        except (OSError, ValueError, KeyError, TypeError):
            return None, []

    def alive(self) -> bool:
        supervisor, children = self.processes()
        return any(p.alive for p in (*children, *([supervisor] if supervisor else ())))

    def unserved(self) -> None:
        """The system stops: nobody is led to it any more, and the folder stays taken until it has ended."""
        with contextlib.suppress(FileNotFoundError):
            (self.folder / ENDPOINT).unlink()

    def clear(self) -> None:
        """Removes what says that something runs, and what it showed; logs stay."""
        shutil.rmtree(self.tls, ignore_errors=True)
        for name in (ENDPOINT, PROCESSES, SUPERVISOR):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()

    def _put(self, name: str, text: str) -> None:
        """Whole or not at all: a reader never sees half a file."""
        temporary = self.folder / f".{name}.{os.getpid()}"
        temporary.write_text(text)
        temporary.replace(self.folder / name)
