"""The tree of files that images are made from, and the wheels that stand for the registry."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
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


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """A folder for a build: hundreds of megabytes, gone at the end. Skips by name where this machine lacks the rights to build."""
    if (reason := missing()) is not None:
        skipped(*reason)
    folder = tmp_path / "workshop"
    context.export(ROOT, folder / "context", tracked())
    yield folder
    shutil.rmtree(folder)


def offline(dockerfile: Dockerfile, workshop: Path, extras: Sequence[str] = (), quick: bool = True) -> Builder:
    """From the sources as they are in the tree, and packages as .venv has them. `quick`: no bytecode, no kernels."""
    names = wheelhouse.needed([*requirements(ROOT / "pyproject.toml", list(extras)), "setuptools"])
    wheelhouse.fill(workshop / "wheelhouse", names)
    outside = OFFLINE | (QUICK if quick else {})
    return Builder(dockerfile, workshop / "context", workshop / "stages", outside, {"/wheelhouse": workshop / "wheelhouse"})


def online(dockerfile: Dockerfile, workshop: Path) -> Builder:
    """As an engine would: packages from the registry that this machine's pip is set up for."""
    theirs = {name: value for name, value in os.environ.items() if name.startswith("PIP_") and name != "PIP_FIND_LINKS"}
    return Builder(dockerfile, workshop / "context", workshop / "stages", theirs)
