"""Generates specdec/v1 from proto/, or checks that the committed code is what the sources give.

The generator's version is pinned in requirements.lock, so the output is the same on every machine.
"""

from __future__ import annotations

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "proto"
PACKAGE = Path("specdec") / "v1"
SUFFIXES = ("_pb2.py", "_pb2.pyi", "_pb2_grpc.py")


def generate(into: Path) -> None:
    """Write the package specdec/v1 under `into`; proto path equals import path."""
    from grpc_tools import protoc

    well_known = Path(protoc.__file__).parent / "_proto"
    outputs = [f"--{kind}_out={into}" for kind in ("python", "pyi", "grpc_python")]
    protos = [str(path.relative_to(SOURCES)) for path in sorted((SOURCES / PACKAGE).glob("*.proto"))]
    status = protoc.main(["protoc", f"--proto_path={SOURCES}", f"--proto_path={well_known}", *outputs, *protos])
    if status != 0:
        sys.exit("protoc refused the sources, see above")


def generated(under: Path) -> set[str]:
    return {path.name for path in (under / PACKAGE).glob("*") if path.name.endswith(SUFFIXES)}


def write() -> None:
    (ROOT / PACKAGE).mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = generated(Path(scratch))
        for stale in generated(ROOT) - fresh:
            (ROOT / PACKAGE / stale).unlink()
        for name in fresh:
            shutil.copyfile(Path(scratch) / PACKAGE / name, ROOT / PACKAGE / name)


def check() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        names = sorted(generated(Path(scratch)) | generated(ROOT))
        committed, fresh = ROOT / PACKAGE, Path(scratch) / PACKAGE
        _, different, missing = filecmp.cmpfiles(committed, fresh, names, shallow=False)
    for name in (*different, *missing):
        print(f"{PACKAGE / name} is not what proto/ generates; run: make protos")
    return 1 if different or missing else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of write")
    if parser.parse_args().check:
        sys.exit(check())
    write()
