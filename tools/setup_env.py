"""Creates .venv from requirements.lock and installs the package into it in editable mode.

Run by `make setup` with the system's Python; standard library only. A stamp, written last, names the
content that was installed, so a second run costs nothing and an interrupted one is completed.
"""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import time
from pathlib import Path

from registry import SetupFailed, finish, run_pip

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
STAMP = VENV / ".specdec-installed"
OLDEST_PYTHON = (3, 11)


def content_key() -> str:
    """What the environment depends on: the pins, the package's metadata, where it lies, the Python."""
    import tomllib

    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    parts = (LOCK.read_text(), repr(pyproject["project"]), repr(pyproject["tool"]["setuptools"]), str(ROOT))
    return hashlib.sha256("\0".join((*parts, sys.version)).encode()).hexdigest()


def is_current(key: str) -> bool:
    return STAMP.is_file() and STAMP.read_text() == key and PYTHON.exists()


def create_venv() -> None:
    """Make .venv unless a usable one is there; an unusable rest of an interrupted run is replaced."""
    if PYTHON.exists() and subprocess.run([PYTHON, "-m", "pip", "--version"], capture_output=True).returncode == 0:
        return
    print(f"creating {VENV.name} with Python {sys.version.split()[0]}", flush=True)
    made = subprocess.run([sys.executable, "-m", "venv", "--clear", VENV], capture_output=True, text=True)
    if made.returncode != 0:
        raise SetupFailed(f"{made.stdout}{made.stderr}\nPython could not create {VENV} (Debian: install python3-venv).")


def install(key: str) -> None:
    started = time.monotonic()
    STAMP.unlink(missing_ok=True)
    pins = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    print(f"installing {len(pins)} pinned packages (some minutes the first time)", flush=True)
    run_pip(PYTHON, ["install", "-r", str(LOCK)], "the pinned packages", expected=len(pins))
    run_pip(PYTHON, ["install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)], "the package itself")
    STAMP.write_text(key)
    print(f"environment ready ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; try: make setup PYTHON=python3.11")
        return 1
    key = content_key()
    if is_current(key):
        return 0
    with (ROOT / ".setup.lock").open("w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)  # two terminals may run `make` at once
        if not is_current(key):
            create_venv()
            install(key)
    return 0


if __name__ == "__main__":
    finish(main)
