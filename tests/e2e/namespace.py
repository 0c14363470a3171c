"""A process behind a cable that can be pulled: a network namespace of its own, joined to this one by a pair of virtual devices.

Where `Namespace.missing()` is empty, run a program with the words of `enter` in front of it; it listens on `address`. `pull`: packets are
dropped, both ways, and nobody is told. `plug` undoes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from pathlib import Path

TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
MADE_S = 5.0


def call(*words: str) -> str:
    """What went wrong; empty when nothing did."""
    done = subprocess.run(words, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"`{' '.join(words)}`: {done.stderr.strip()}"


class Namespace:
    """Addresses are of 198.18.0.0/15, which is for tests of networks (RFC 2544), one pair of them per process of ours."""

    def __init__(self) -> None:
        number = os.getpid() % 16_000
        network = f"198.18.{number // 64}.{{}}"
        self.address, self._ours = network.format(4 * (number % 64) + 2), network.format(4 * (number % 64) + 1)
        self._device = f"sd{number}"
        self._holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stderr=subprocess.DEVNULL)
        self.enter = ["nsenter", f"--target={self._holder.pid}", "--net"]

    @staticmethod
    def missing() -> str:
        """What stands in the way on this machine, by name; empty = nothing."""
        for tool, package in TOOLS.items():
            if shutil.which(tool) is None:
                return f"the program {tool} ({package})"
        try:
            with Namespace():
                return ""
        except OSError as error:
            return str(error)

    def __enter__(self) -> Namespace:
        try:
            self._wait()
            self._join()
        except OSError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        call("ip", "link", "delete", self._device)
        self._holder.kill()
        self._holder.wait()

    def pull(self) -> None:
        self._must(*self.enter, "ip", "link", "set", "eth0", "down")

    def plug(self) -> None:
        self._must(*self.enter, "ip", "link", "set", "eth0", "up")

    def _wait(self) -> None:
        deadline = time.monotonic() + MADE_S
        while self._holder.poll() is None and time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{self._holder.pid}/ns/net") != os.readlink("/proc/self/ns/net"):
                    return
            time.sleep(0.002)
        raise OSError("the right to make network namespaces (CAP_SYS_ADMIN)")

    def _join(self) -> None:
        self._must("ip", "link", "add", self._device, "type", "veth", "peer", "name", "eth0", "netns", str(self._holder.pid))
        self._must("ip", "address", "add", f"{self._ours}/30", "dev", self._device)
        self._must("ip", "link", "set", self._device, "up")
        self._must(*self.enter, "ip", "address", "add", f"{self.address}/30", "dev", "eth0")
        self._must(*self.enter, "ip", "link", "set", "lo", "up")
        self.plug()
        if not Path(f"/sys/class/net/{self._device}").exists() and Path("/sys/class/net").exists():
            raise OSError("virtual Ethernet devices (veth)")

    @staticmethod
    def _must(*words: str) -> None:
        if reason := call(*words):
            raise OSError(reason)
