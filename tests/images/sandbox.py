"""A root folder made of this machine's /usr and /etc, read-only, and a tree of our own: what a container engine would give a process.

`missing()` says what stands in the way of one on this machine. Needs Linux, root, and the Python that .venv was made from.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

TOOLS = {"unshare": "util-linux", "setpriv": "util-linux", "mount": "mount"}
FROM_HOST = ("bin", "sbin", "lib", "lib32", "lib64", "etc", "usr")  # links to /usr on most systems
DEVICES = ("null", "zero", "full", "random", "urandom")
UID = 10001
TMP_BYTES = 64 << 20


@dataclass(slots=True)
class Sandbox:
    """`tree`: what the image adds to its base. `mounts`: further folders by the place where they are seen, read-only."""

    tree: Path
    mounts: Mapping[str, Path] = field(default_factory=dict)

    def command(self, words: Sequence[str], environment: Mapping[str, str], *, workdir: str = "/", writable: bool = False) -> list[str]:
        """Runs `words` as process 1 of a namespace of its own, with this environment alone. `writable`: as root, with a tree that it may
        change, as a builder does; else as UID without any right, on a root where nothing but /tmp can be written."""
        # The kernel forgets the death signal that unshare asks for when the user id changes, so it is asked for again.
        rights = [] if writable else [
            "setpriv", "--pdeathsig=KILL", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--no-new-privs", "--bounding-set=-all",
            "--inh-caps=-all",
        ]  # fmt: skip
        inner = [*rights, "env", "-i", f"--chdir={workdir}", *(f"{name}={value}" for name, value in environment.items()), *words]
        script = [*self._mounts(writable), f"exec chroot {shlex.quote(str(self.tree))} {shlex.join(inner)}"]
        return [
            "setpriv",
            "--pdeathsig=KILL",
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "--",
            "sh",
            "-ec",
            "\n".join(script),
        ]

    def _mounts(self, writable: bool) -> list[str]:
        lines = [_bound(self.tree, self.tree, read_only=False)]
        for name in FROM_HOST:
            host, place = Path("/", name), self.tree / name
            if host.is_symlink():
                if not place.is_symlink():
                    place.symlink_to(os.readlink(host))
            elif host.is_dir():
                place.mkdir(exist_ok=True)
                lines.append(_bound(host, place))
        lines.append(_bound(base_python(), self.tree / "usr/local"))
        # Also where it lies here: its shared library is looked for there.
        for place, folder in {str(base_python()): base_python(), **self.mounts}.items():
            (self.tree / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
            lines.append(_bound(folder, self.tree / place.lstrip("/")))
        for name in ("proc", "dev", "tmp", "root"):
            (self.tree / name).mkdir(exist_ok=True)
        lines.append(f"mount -t proc proc {shlex.quote(str(self.tree / 'proc'))}")
        lines.append(f"mount -t tmpfs -o size=64k tmpfs {shlex.quote(str(self.tree / 'dev'))}")
        for name in DEVICES:
            node = self.tree / "dev" / name
            lines.append(f"touch {shlex.quote(str(node))}; " + _bound(Path("/dev", name), node, read_only=False))
        lines.append(f"mount -t tmpfs -o size={TMP_BYTES},mode=1777 tmpfs {shlex.quote(str(self.tree / 'tmp'))}")
        if not writable:
            lines.append(f"mount -o remount,bind,ro {shlex.quote(str(self.tree))}")
            lines.append(f"mount -o remount,ro {shlex.quote(str(self.tree / 'dev'))}")
        return lines


def _bound(source: Path, place: Path, read_only: bool = True) -> str:
    source_, place_ = shlex.quote(str(source)), shlex.quote(str(place))
    return f"mount --bind {source_} {place_}" + (f"; mount -o remount,bind,ro {place_}" if read_only else "")


def base_python() -> Path:
    """The Python that .venv was made from, seen as /usr/local as in the images of Python: with `python` and pip."""
    return Path(sys.base_prefix)


def missing() -> tuple[str, str] | None:
    """(what stands in the way on this machine, what helps); None = nothing."""
    for tool, package in TOOLS.items():
        if shutil.which(tool) is None:
            return f"the program {tool}", f"install {package}"
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "the right to mount (CAP_SYS_ADMIN)", "run as root"
    python = base_python() / "bin" / "python"
    if not python.exists() or subprocess.run([python, "-m", "pip", "--version"], capture_output=True).returncode:
        return f"{python} with pip", "make .venv from a Python with both"
    return None
