"""Templates render what was reviewed; a change is written down by `python -m tests.helm.golden` and read as a diff."""

from __future__ import annotations

import pytest

from tests.helm.golden import FOLDER, files
from tests.helm.objects import COMPONENTS


@pytest.mark.parametrize("name", [*(f"{component}.yaml" for component in COMPONENTS), "digests.txt"])
def test_renders_are_those_that_were_reviewed(name: str) -> None:
    written = FOLDER / name
    assert written.is_file() and files()[name] == written.read_text(), "rewrite with: .venv/bin/python -m tests.helm.golden"
