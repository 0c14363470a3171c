"""One small stack for all clients."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.stack import Stack, running
from tests.tiny import save_tiny

FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}


@pytest.fixture(scope="package")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A draft that is the target itself: blocks are accepted, so deltas hold several tokens."""
    model = save_tiny(tmp_path_factory.mktemp("models") / "tiny", seed=0)
    with running(model, model, target=FLOAT64, draft=FLOAT64) as stack:
        yield stack
