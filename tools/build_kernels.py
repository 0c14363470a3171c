"""Compiles the engine's kernels and the search of the noise, for this CPU and the lesser one, so that no service waits for it.

Run by `make setup`; standard library only. CXX names the compiler; without one torch and numpy compute instead, so nothing fails here.
In an image: `--installed` compiles beside the package that this Python has installed, and `--required` fails where a CPU could use a
library that is not there.
"""

from __future__ import annotations

import importlib.util
import os
import platform
import runpy
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
X86 = ("x86_64", "AMD64")  # what the libraries are written for


def package(installed: bool) -> Path:
    """The folder of specdec: of this checkout, or where this Python has it installed. Imports nothing of it."""
    if not installed:
        return ROOT / "specdec"
    sys.path = [entry for entry in sys.path if entry and Path(entry).resolve() not in (ROOT, ROOT / "tools")]
    spec = importlib.util.find_spec("specdec")
    if spec is None or not spec.submodule_search_locations:
        sys.exit("--installed: this Python has no specdec installed")
    return Path(spec.submodule_search_locations[0])


def build_all(folder: Path) -> list[str]:
    """Compiles what is not there; returns what is still missing, and why."""
    # By path: importing the package would load torch for seconds.
    build: dict[str, Any] = runpy.run_path(str(folder / "native" / "build.py"))
    missing = []
    for name, otherwise in (("KERNELS", "torch will compute"), ("NOISE", "numpy will compute")):
        library = build[name]
        for kind in build["VARIANTS"]:
            if library.find(kind, library.places()) is not None:
                continue
            started = time.monotonic()
            try:
                library.build(kind, library.places(), os.environ.get("CXX") or None)
            except build["BuildFailed"] as reason:
                missing.append(f"{library.name} ({kind}) are not compiled, {otherwise} instead: {reason}")
                print(missing[-1], flush=True)
            else:
                print(f"{library.name} compiled for {kind} ({time.monotonic() - started:.0f} s)", flush=True)
    return missing


def main() -> int:
    missing = build_all(package("--installed" in sys.argv[1:]))
    return 1 if missing and "--required" in sys.argv[1:] and platform.machine() in X86 else 0


if __name__ == "__main__":
    sys.exit(main())
