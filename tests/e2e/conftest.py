"""Stacks for the files that only ask questions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.drafts import FLOAT64, FORGIVING, EveryDraft, every_draft
from tests.e2e.raw import RawClient
from tests.e2e.stack import Stack, running
from tests.tiny import save_tiny
from tests.tools import require_model

WINDOW = 256


@pytest.fixture(scope="package")
def questioned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A tiny model in float64 that drafts for itself; its window is WINDOW tokens. Nothing in it is killed or restarted. The target has
    proved that a row has the same bits in any batch, so that texts which differ count as defects."""
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0, window=WINDOW)
    with running(model, model, target=FLOAT64 | {"SELF_TEST": "true"}, draft=FLOAT64, orchestrator=FORGIVING) as stack:
        yield stack


@pytest.fixture(scope="package")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The same with a window for answers that last a while. Tests stop only orchestrators that they add."""
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0)
    with running(model, model, target=FLOAT64, draft=FLOAT64, orchestrator=FORGIVING) as stack:
        yield stack


@pytest.fixture(scope="module")
def client(questioned: Stack) -> Iterator[RawClient]:
    with RawClient(questioned.endpoint) as client:
        yield client


@pytest.fixture(scope="package")
def drafts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EveryDraft]:
    """One target, four orchestrators; drafts that are always, hardly ever and never right, and none."""
    with every_draft(tmp_path_factory.mktemp("models")) as drafts:
        yield drafts


@pytest.fixture(scope="package")
def pair() -> Iterator[Stack]:
    """The real models on the int8 engine. Nothing in it is killed or restarted."""
    with running(require_model("smollm2-135m"), require_model("smollm2-draft"), orchestrator=FORGIVING) as stack:
        yield stack
