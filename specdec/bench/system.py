"""The services as processes of one measurement: target on one core, draft and orchestrator on the next, gone when it ends.

`specdec up` is the way to run a system; this one gives a measurement what it needs beside it: metrics ports, settings of single services,
and several orchestrators over the same pools.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from specdec.errors import InvalidRequest, Unavailable
from specdec.runtime.extras import need
from specdec.runtime.settings import inherited

MODULES = {"target": "target_service", "draft": "draft_service", "orchestrator": "orchestrator"}
TARGET_MODEL, DRAFT_MODEL = Path("models/smollm2-135m"), Path("models/smollm2-draft")
START_S = 180.0
STOP_S = 10.0
DRAFT_DTYPE = "int4"  # the draft service's default
DRAFT_NICE = "10"  # the draft may fill every gap of a core, and must not make the others wait
TAIL = 2000  # characters of a log that is told of
_READY = re.compile(r"ready role=\w+ host=(\S+) port=(\d+) metrics_port=(-?\d+) ")


@dataclass(frozen=True, slots=True)
class Models:
    """`draft` None = the target alone."""

    target: Path = TARGET_MODEL
    draft: Path | None = DRAFT_MODEL

    def check(self) -> None:
        """Raises NotInstalled where nothing can compute, InvalidRequest for a folder that holds no model."""
        need("model")
        for flag, folder in (("--target-model", self.target), ("--draft-model", self.draft)):
            if folder is not None and not (folder / "config.json").is_file():
                raise InvalidRequest(
                    flag, f"{folder} holds no model (no config.json); name a folder that does, or start where `make setup` made models/"
                )


@dataclass(frozen=True, slots=True)
class Service:
    role: str
    process: subprocess.Popen[str]
    endpoint: str
    metrics: str  # host:port


@dataclass(slots=True)
class Services:
    logs: Path
    pipe: int  # a descriptor that closes with this process, and the services with it
    models: Models
    pins: Mapping[str, str]
    running: list[Service] = field(default_factory=list)

    def of(self, role: str) -> Service:
        """The newest of a role."""
        return next(service for service in reversed(self.running) if service.role == role)

    @property
    def orchestrator(self) -> Service:
        return self.of("orchestrator")

    def start(self, role: str, settings: Mapping[str, str], words: Sequence[str] = ()) -> Service:
        """`words` = what runs the service, behind `python -m`. Raises Unavailable with the end of the log."""
        common = {"HOST": "127.0.0.1", "PORT": "0", "METRICS_PORT": "0", "DRAIN_MS": "1000", "PARENT_PIPE": str(self.pipe)}
        pin = {"CPU_AFFINITY": self.pins[role]} if role in self.pins else {}
        merged = {**common, **pin, **settings}
        environment = inherited({f"SPECDEC_{name}": value for name, value in merged.items()})
        environment["OMP_NUM_THREADS"] = merged.get("THREADS", "1")
        log = self.logs / f"{role}-{len(self.running)}.log"
        with log.open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", *(words or (MODULES[role],))],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                pass_fds=(self.pipe,),
                process_group=0,  # Ctrl-C is for the measurement, which then stops them
            )
        try:
            match = _first_ready_line(process)
        except BaseException:  # Ctrl-C: nobody knows of it yet, so nobody else would end it
            process.kill()
            process.communicate()
            raise
        if match is None:
            process.kill()
            told = f"the {role} did not start (exit code {process.wait()}); the end of its log:"
            raise Unavailable(f"{told}\n{log.read_text(errors='replace')[-TAIL:]}")
        service = Service(role, process, f"{match[1]}:{match[2]}", f"{match[1]}:{match[3]}")
        self.running.append(service)
        return service

    def start_target(self, **settings: str) -> Service:
        return self.start("target", {"MODEL": str(self.models.target.absolute()), **settings})

    def start_draft(self, **settings: str) -> Service:
        assert self.models.draft is not None
        return self.start("draft", {"MODEL": str(self.models.draft.absolute()), "NICE": DRAFT_NICE, **settings})

    def start_orchestrator(self, target: str = "", draft: str = "", **settings: str) -> Service:
        """`target`, `draft`: other addresses than the newest of the pools."""
        drafts = [draft] if draft else [s.endpoint for s in self.running if s.role == "draft"]
        addresses = {"TARGETS": target or self.of("target").endpoint, "DRAFTS": ",".join(drafts)}
        return self.start("orchestrator", {"TOKENIZER": str(self.models.target.absolute()), **addresses, **settings})

    def end(self, service: Service) -> None:
        self.running.remove(service)
        service.process.terminate()
        try:
            service.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            service.process.kill()
            service.process.wait()
        if service.process.stdout is not None:
            service.process.stdout.close()

    def stop(self) -> None:
        """The front door first."""
        for service in list(reversed(self.running)):
            self.end(service)


def own_cpus() -> list[int]:
    """Those that this process may use; none where the system does not tell."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def default_pins(cpus: Sequence[int] | None = None) -> dict[str, str]:
    """The target has a core to itself; draft and orchestrator share the next. Nothing is pinned on one core. `cpus`: default own_cpus()."""
    cpus = own_cpus() if cpus is None else cpus
    return {"target": str(cpus[0]), "draft": str(cpus[1]), "orchestrator": str(cpus[1])} if len(cpus) > 1 else {}


@contextlib.contextmanager
def pools(models: Models, pins: Mapping[str, str] | None = None, target: Mapping[str, str] | None = None) -> Iterator[Services]:
    """A target and, if there is a model for it, a draft. `target` = settings of its own."""
    models.check()
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as logs:
        running = Services(Path(logs), read_end, models, default_pins() if pins is None else pins)
        try:
            running.start_target(**(target or {}))
            if models.draft is not None:
                running.start_draft()
            yield running
        finally:
            running.stop()
            os.close(read_end)
            os.close(write_end)


@contextlib.contextmanager
def services(models: Models, pins: Mapping[str, str] | None = None, **orchestrator: str) -> Iterator[Services]:
    """The pools and one orchestrator that has found them."""
    with pools(models, pins) as running:
        running.start_orchestrator(**orchestrator)
        yield running


def _first_ready_line(process: subprocess.Popen[str]) -> re.Match[str] | None:
    """Waits at most START_S; None when the process ended before it was ready, or was ended for taking longer."""
    assert process.stdout is not None
    patience = threading.Timer(START_S, process.kill)
    patience.daemon = True
    patience.start()
    try:
        return next((match for line in process.stdout if (match := _READY.search(line))), None)
    finally:
        patience.cancel()
