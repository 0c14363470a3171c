"""Real processes for a test: targets, drafts, one orchestrator, over loopback. Killed with the test, whatever happens."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests import scraped

START_S = 120.0
READY = re.compile(r"ready role=(\w+) host=(\S+) port=(\d+) metrics_port=(-?\d+) pid=(\d+)")


@dataclass
class Process:
    role: str
    popen: subprocess.Popen[bytes]
    log: Path
    host: str = "127.0.0.1"
    port: int = 0
    metrics_port: int = -1

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    def kill(self, number: int = signal.SIGKILL) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.popen.wait(30)

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def metrics(self) -> dict[str, float]:
        """Samples of the Prometheus port: `name{labels}` -> value."""
        return scraped.samples(self.metrics_port, self.host)

    def metric(self, name: str) -> float:
        """Sum over all labels of one metric."""
        return scraped.total(self.metrics_port, name, self.host)


def start(role: str, module: str, settings: dict[str, str], folder: Path, inside: Sequence[str] = ()) -> Process:
    """Starts one service; returns at once. `wait_ready` completes it. `inside`: the words of a program that runs it somewhere else."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECDEC_")}
    environment |= {"OMP_NUM_THREADS": "1", "SPECDEC_PARENT_PIPE": str(_PIPE[0])} | {f"SPECDEC_{k}": v for k, v in settings.items()}
    log = folder / f"{role}-{time.monotonic_ns()}.log"
    with log.open("w") as stderr, log.with_suffix(".out").open("w") as stdout:
        popen = subprocess.Popen(
            [*inside, sys.executable, "-m", module], env=environment, stdout=stdout, stderr=stderr, cwd=_ROOT, pass_fds=_PIPE[:1]
        )
    return Process(role, popen, log)


_ROOT = Path(__file__).resolve().parents[2]
_PIPE = os.pipe()  # its other end closes with this process. The kernel's death signal would follow the thread that called `start`.


def wait_ready(process: Process) -> Process:
    """Reads the ready line. Raises with the end of the log when the process does not come up."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if match := READY.search(process.log.with_suffix(".out").read_text()):
            process.host, process.port, process.metrics_port = match[2], int(match[3]), int(match[4])
            return process
        if process.popen.poll() is not None:
            break
        time.sleep(0.02)
    raise AssertionError(f"{process.role} did not come up (exit code {process.popen.poll()}):\n{process.log_tail()}")


@dataclass
class Stack:
    folder: Path
    target_model: Path
    draft_model: Path | None
    target_settings: dict[str, str] = field(default_factory=dict)
    draft_settings: dict[str, str] = field(default_factory=dict)
    orchestrator_settings: dict[str, str] = field(default_factory=dict)
    targets: list[Process] = field(default_factory=list)
    drafts: list[Process] = field(default_factory=list)
    orchestrators: list[Process] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return self.orchestrators[0].endpoint

    def begin_target(self, module: str = "target_service", inside: Sequence[str] = (), **more: str) -> Process:
        settings = {"MODEL": str(self.target_model), **self.target_settings, **more}
        self.targets.append(start("target", module, settings, self.folder, inside))
        return self.targets[-1]

    def begin_draft(self, **more: str) -> Process:
        settings = {"MODEL": str(self.draft_model), **self.draft_settings, **more}
        self.drafts.append(start("draft", "draft_service", settings, self.folder))
        return self.drafts[-1]

    def add_orchestrator(self, **more: str) -> Process:
        settings = {
            "TOKENIZER": str(self.target_model),
            "TARGETS": ",".join(p.endpoint for p in self.targets),
            "DRAFTS": ",".join(p.endpoint for p in self.drafts),
            "ENABLE_ADAPTIVE_VERIFICATION": "false",  # else the machine's speed would decide which blocks a test sees
            **self.orchestrator_settings,
            **more,
        }
        self.orchestrators.append(wait_ready(start("orchestrator", "orchestrator", settings, self.folder)))
        return self.orchestrators[-1]

    def defects(self) -> list[str]:
        """Log lines of any process, living or not, that tell of a defect. F147: BlockingIOError is the noise of several loops."""
        lines = [line for log in self.folder.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
        signs = ("Traceback", "exception was never retrieved", "BlockingIOError")
        return [line for line in lines if any(sign in line for sign in signs)]

    def stop(self) -> None:
        for process in (*self.orchestrators, *self.drafts, *self.targets):
            process.kill(signal.SIGCONT)
            process.kill()


@contextlib.contextmanager
def running(
    target_model: Path,
    draft_model: Path | None,
    *,
    targets: int = 1,
    drafts: int = 1,
    target: dict[str, str] | None = None,
    draft: dict[str, str] | None = None,
    orchestrator: dict[str, str] | None = None,
) -> Iterator[Stack]:
    with tempfile.TemporaryDirectory(prefix="specdec-test-") as name:
        stack = Stack(Path(name), target_model, draft_model, target or {}, draft or {}, orchestrator or {})
        try:
            for _ in range(targets):
                stack.begin_target()
            for _ in range(drafts if draft_model is not None else 0):
                stack.begin_draft()
            for process in (*stack.targets, *stack.drafts):
                wait_ready(process)
            stack.add_orchestrator()
            yield stack
        finally:
            stack.stop()
