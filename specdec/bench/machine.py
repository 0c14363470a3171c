"""What a measurement was made on: processor, cores, memory, versions. Nothing that names the machine or its place."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("specdec", "grpcio", "protobuf", "numpy", "torch", "transformers", "tokenizers", "uvloop")
CPU_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")


def machine() -> dict[str, Any]:
    """`cores` = those this process may use, of `cores_of_machine`."""
    fields = _cpuinfo()
    features = set(fields.get("flags", fields.get("Features", "")).split())
    return {
        "processor": fields.get("model name", platform.machine()),
        "features": [name for name in CPU_FEATURES if name in features],
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_of_machine": os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
    }


def versions(packages: tuple[str, ...] = PACKAGES) -> dict[str, str]:
    """Of Python and of the packages that are installed here."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (OSError, ValueError, AttributeError):
        return None
