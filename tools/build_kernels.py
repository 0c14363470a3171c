"""Compiles the engine's kernels and the search of the noise, for this CPU and the lesser one, so that no service waits for it.

Run by `make setup`; standard library only. CXX names the compiler; without one torch and numpy compute instead, so nothing fails here.
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
    build: dict[str, Any] = runpy.run_path(str(ROOT / "specdec" / "native" / "build.py"))
    for name, otherwise in (("KERNELS", "torch will compute"), ("NOISE", "numpy will compute")):
        library = build[name]
        for kind in build["VARIANTS"]:
            if library.find(kind, library.places()) is not None:
                continue
            started = time.monotonic()
            try:
                library.build(kind, library.places(), os.environ.get("CXX") or None)
            except build["BuildFailed"] as reason:
                print(f"{library.name} ({kind}) are not compiled, {otherwise} instead: {reason}", flush=True)
            else:
                print(f"{library.name} compiled for {kind} ({time.monotonic() - started:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
