"""The engine's compiled kernels, in every variant that this CPU can run."""

from __future__ import annotations

import pytest

from specdec.engine.native.kernels import Kernels
from specdec.native import build
from specdec.native.build import KERNELS
from tests.compiled import supported
from tests.tools import missing


@pytest.fixture(scope="module")
def libraries() -> dict[str, Kernels]:
    try:
        return {kind: Kernels(KERNELS.find(kind, KERNELS.places()) or KERNELS.build(kind, KERNELS.places())) for kind in supported()}
    except build.BuildFailed as reason:
        missing(f"the engine's compiled kernels ({reason})", "run make setup, or make ci-tools on Debian")
        raise


@pytest.fixture(params=supported())
def library(request: pytest.FixtureRequest, libraries: dict[str, Kernels]) -> Kernels:
    return libraries[request.param]
