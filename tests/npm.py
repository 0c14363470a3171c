"""Node with packages from npm beside it, installed once from a lock."""

from __future__ import annotations

import fcntl
import subprocess
from pathlib import Path

from tests.tools import ROOT, missing, require_tool


def node_with(folder: Path) -> str:
    """Path of Node; `folder` has the packages of its package-lock.json afterwards."""
    program = require_tool("node")
    stamp, wanted = folder / "node_modules" / ".lock-used", (folder / "package-lock.json").read_text()
    (ROOT / ".tools").mkdir(exist_ok=True)
    with (ROOT / ".tools" / ".npm-lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # tests may run on two workers
        if not stamp.is_file() or stamp.read_text() != wanted:
            _install(program, folder)
            stamp.write_text(wanted)
    return program


def _install(program: str, folder: Path) -> None:
    npm = Path(program).resolve().parent.parent / "lib/node_modules/npm/bin/npm-cli.js"  # where the wheel keeps it
    command = [program, str(npm)] if npm.is_file() else [require_tool("npm")]
    options = ["ci", "--ignore-scripts", "--no-progress", "--prefer-offline"]
    done = subprocess.run([*command, *options], cwd=folder, capture_output=True, text=True, timeout=100)
    if done.returncode:
        reason = next((line for line in done.stderr.splitlines() if "error" in line), f"npm ended with {done.returncode}")
        missing(f"a package of {folder.relative_to(ROOT)}", f"npm ci needs a package registry ({reason.strip()})")
