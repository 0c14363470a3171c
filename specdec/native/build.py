"""Compiles the libraries of ours once per kind of CPU. Standard library only, and no import of ours: `make setup` runs it without torch.

A library lies beside its sources, or in ~/.cache/specdec where that cannot be written. Its name carries a hash over the sources and the
flags, so a library that is there is current; it is written under another name and renamed, so two who build at once do no harm. Behind its
last byte comes a hash of the rest: loading a file that was cut short would end the process.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
COMPILERS = ("g++", "c++", "clang++")
# No contraction: a * b + c is two roundings on every CPU, unless the source says fma.
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")
VARIANTS = {
    "avx512vnni": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni"),
    "avx2": ("-mavx2", "-mfma"),
}
_NEEDED = {
    "avx512vnni": {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"},
    "avx2": {"avx2", "fma"},
}
LONGEST_S = 300
SEAL_BYTES = 16
log = logging.getLogger(__name__)


class BuildFailed(Exception):
    """There is no library, and why."""


def variant(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The best one for this CPU. Raises BuildFailed."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError as error:
        raise BuildFailed(f"what this CPU can do is unknown: {error}") from error
    flags = next((set(line.partition(":")[2].split()) for line in lines if line.startswith("flags")), set())
    for name in VARIANTS:
        if _NEEDED[name] <= flags:
            return name
    raise BuildFailed("this CPU has no AVX2")


def is_whole(library: Path) -> bool:
    try:
        content = library.read_bytes()
    except OSError:
        return False
    return content[-SEAL_BYTES:] == _seal(content[:-SEAL_BYTES])


def _seal(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=SEAL_BYTES).digest()


class Library:
    """What `name`.cpp in the folder `sources`, and what lies beside it, compile to."""

    def __init__(self, name: str, sources: Path) -> None:
        self.name, self.sources = name, sources

    def source_hash(self) -> str:
        """Of everything that decides what it computes, on any CPU."""
        digest = hashlib.blake2b(" ".join(FLAGS).encode(), digest_size=8)
        for path in sorted(self.sources.iterdir()):
            digest.update(f"\n{path.name}\n".encode() + path.read_bytes())
        return digest.hexdigest()

    def places(self) -> list[Path]:
        """Where it is looked for, and put: the first that can be written."""
        return [self.sources.parent / "built", Path.home() / ".cache" / "specdec"]

    def file_name(self, kind: str) -> str:
        flags = hashlib.blake2b(" ".join(VARIANTS[kind]).encode(), digest_size=4).hexdigest()
        return f"{self.name}-{kind}-{self.source_hash()}-{flags}.so"

    def find(self, kind: str, folders: Sequence[Path]) -> Path | None:
        name = self.file_name(kind)
        return next((folder / name for folder in folders if is_whole(folder / name)), None)

    def build(self, kind: str, folders: Sequence[Path], compiler: str | None = None) -> Path:
        """Compiles, whether or not a library is there. Raises BuildFailed."""
        chosen = compiler or next((name for name in COMPILERS if shutil.which(name)), None)
        if chosen is None:
            raise BuildFailed(f"no C++ compiler: none of {', '.join(COMPILERS)} is on the path")
        reasons = []
        for folder in folders:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                handle, scratch = tempfile.mkstemp(prefix=".building-", suffix=".so", dir=folder)
            except OSError as error:
                reasons.append(str(error))
                continue
            os.close(handle)
            try:
                self._compile(chosen, kind, scratch)
                content = Path(scratch).read_bytes()
                Path(scratch).write_bytes(content + _seal(content))
                os.chmod(scratch, 0o644)
                os.replace(scratch, folder / self.file_name(kind))
            finally:
                Path(scratch).unlink(missing_ok=True)
            return folder / self.file_name(kind)
        raise BuildFailed(f"the library can be written nowhere: {'; '.join(reasons)}")

    def _compile(self, compiler: str, kind: str, out: str) -> None:
        source = f'-DSPECDEC_SOURCE="{self.source_hash()}"'
        command = [*shlex.split(compiler), *FLAGS, *VARIANTS[kind], source, str(self.sources / f"{self.name}.cpp"), "-o", out]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.SubprocessError) as error:
            raise BuildFailed(f"{compiler} does not run: {error}") from error
        if done.returncode != 0:
            raise BuildFailed(f"{compiler} failed: {(done.stderr.strip() or done.stdout.strip())[-2000:]}")

    def ready(self, compiler: str | None = None) -> Path:
        """This CPU's, compiled if need be. Raises BuildFailed."""
        kind, folders = variant(), self.places()
        return self.find(kind, folders) or self.build(kind, folders, compiler)


KERNELS = Library("kernels", PACKAGE / "engine" / "native" / "src")  # an engine's step
NOISE = Library("noise", PACKAGE / "native" / "src")  # a row's winner
