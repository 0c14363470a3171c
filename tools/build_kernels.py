"""Compiles the engine's kernels, for this CPU and the lesser one, so that no service pays for it when it starts.

Run by `make setup`; standard library only. CXX names the compiler; without one the engine computes with torch, so nothing fails here.
"""

from __future__ import annotations

import os
import runpy
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    # By path: importing the package would load torch for seconds.
    build: dict[str, Any] = runpy.run_path(str(ROOT / "specdec" / "engine" / "native" / "build.py"))
    folders, failed = build["places"](), build["BuildFailed"]
    for kind in build["VARIANTS"]:
        if build["find"](kind, folders) is not None:
            continue
        started = time.monotonic()
        try:
            build["build"](kind, folders, os.environ.get("CXX") or None)
        except failed as reason:
            print(f"kernels ({kind}) are not compiled, torch will compute instead: {reason}", flush=True)
        else:
            print(f"kernels compiled for {kind} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
