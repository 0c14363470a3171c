"""Which variants of the compiled libraries this machine can run."""

from __future__ import annotations

import pytest

from specdec.native import build
from tests.tools import missing

KINDS = list(build.VARIANTS)


def supported() -> list[str]:
    """Variants that this CPU can run, best first."""
    try:
        return KINDS[KINDS.index(build.variant()) :]
    except build.BuildFailed:
        return []


@pytest.fixture(autouse=True)
def a_cpu_that_runs_them() -> None:
    """For a module whose tests are all about compiled code: import it there."""
    if not supported():
        missing("AVX2", "these tests need a CPU that has it")
