"""A process of an image: its entry point, its command and its environment as the Dockerfile says, on a root that it cannot write to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.stack import READY, START_S
from tests.images.dockerfile import Dockerfile
from tests.images.sandbox import UID, Sandbox

LONGEST_CALL_S = 100
LONGEST_STOP_S = 30


@dataclass(frozen=True, slots=True)
class Image:
    dockerfile: Dockerfile
    name: str
    tree: Path

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        return self.dockerfile.pairs(self.name, "ENV") | {f"SPECDEC_{name}": value for name, value in (more or {}).items()}

    def call(self, words: Sequence[str], mounts: Mapping[str, Path] | None = None) -> subprocess.CompletedProcess[str]:
        """Some program of the image, to its end."""
        command = Sandbox(self.tree, mounts or {}).command(words, self.environment())
        return subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_CALL_S)

    def python(self, code: str) -> subprocess.CompletedProcess[str]:
        return self.call(["python", "-c", code])

    def megabytes(self) -> int:
        """What it adds to its base."""
        return round(sum(size for size, _ in content(self.tree / "opt").values()) / 1e6)

    @contextlib.contextmanager
    def run(self, log: Path, settings: Mapping[str, str], mounts: Mapping[str, Path], command: Sequence[str] = ()) -> Iterator[Container]:
        """What `docker run --read-only --tmpfs /tmp IMAGE [COMMAND]` starts; killed at the end."""
        entry, usual = self.dockerfile.process(self.name)
        words = Sandbox(self.tree, mounts).command([*entry, *(command or usual)], self.environment(settings))
        with log.open("w") as output:
            popen = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
        container = Container(popen, log)
        try:
            yield container
        finally:
            popen.kill()  # and with it, by its death signal, the first process of its namespace, so everything in it
            popen.wait()


@dataclass(slots=True)
class Container:
    popen: subprocess.Popen[bytes]
    log: Path
    port: int = 0
    metrics_port: int = -1

    def wait_ready(self) -> Container:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.popen.poll() is None:
            if found := READY.search(self.log.read_text()):
                self.port, self.metrics_port = int(found[3]), int(found[4])
                assert found[5] == "1", "the service is the container's first process"
                return self
            time.sleep(0.02)
        raise AssertionError(f"it did not come up (exit code {self.popen.poll()}):\n{self.log.read_text()[-4000:]}")

    @property
    def pid(self) -> int:
        """Of the first process, as this machine counts."""
        return int(Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()[0])

    def stop(self) -> int:
        """SIGTERM to the first process; its exit code."""
        os.kill(self.pid, signal.SIGTERM)
        return self.popen.wait(LONGEST_STOP_S)

    def who(self) -> dict[str, str]:
        """What the kernel says about the first process: Uid, Gid, CapEff, NoNewPrivs …"""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def writable(self) -> list[str]:
        """Places of its root where the kernel would let somebody write."""
        found = []
        for line in Path(f"/proc/{self.pid}/mountinfo").read_text().splitlines():
            words = line.split()
            if "ro" not in words[5].split(",") and words[words.index("-") + 1] not in ("proc", "devtmpfs"):
                found.append(words[4])
        return found

    def left_in_tmp(self) -> list[str]:
        return sorted(os.listdir(f"/proc/{self.pid}/root/tmp"))


def unprivileged(who: Mapping[str, str]) -> bool:
    ours = {str(UID)}
    return set(who["Uid"].split()) == set(who["Gid"].split()) == ours and int(who["CapEff"], 16) == 0 and who["NoNewPrivs"] == "1"


def content(tree: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder, with sizes and times of change, so that two looks can be compared."""
    found = {}
    for folder, _, names in os.walk(tree):
        for name in names:
            state = os.lstat(os.path.join(folder, name))
            found[os.path.join(folder, name)] = (state.st_size, state.st_mtime_ns)
    return found
