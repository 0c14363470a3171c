"""The tree of files that images are made from, and the wheels that stand for the registry."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.images import context, wheelhouse
from tests.images.builder import Builder
from tests.images.dockerfile import Dockerfile, read
from tests.images.sandbox import missing
from tests.tools import ROOT
from tests.tools import missing as skipped
from tools.image_requirements import requirements

OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheelhouse", "PIP_CONFIG_FILE": "/dev/null"}
QUICK = {"PIP_COMPILE": "0", "CXX": "true"}  # no bytecode; and a compiler that makes empty libraries, which an orchestrator never loads


def tracked() -> list[str]:
    """Paths of the files that the repository holds, with those that are about to be added."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [path for path in listed if (ROOT / path).is_file()]


@pytest.fixture(scope="session")
def dockerfile() -> Dockerfile:
    return read(ROOT / "Dockerfile")


def builder(dockerfile: Dockerfile, folder: Path, extras: Sequence[str] = (), quick: bool = True) -> Builder:
    """Offline, from the sources as they are in the tree. Skips by name where this machine lacks the rights."""
    if (reason := missing()) is not None:
        skipped(*reason)
    context.export(ROOT, folder / "context", tracked())
    names = wheelhouse.needed([*requirements(ROOT / "pyproject.toml", list(extras)), "setuptools"])
    wheelhouse.fill(folder / "wheelhouse", names)
    outside = OFFLINE | (QUICK if quick else {})
    return Builder(dockerfile, folder / "context", folder / "stages", outside, {"/wheelhouse": folder / "wheelhouse"})
