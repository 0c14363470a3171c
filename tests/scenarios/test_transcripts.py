"""Every transcript plays as written. `pytest tests/scenarios --rewrite-transcripts` writes them anew; review the diff."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.transcript import replay

SCENARIOS = sorted(Path(__file__).parent.glob("*.txt"))


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda p: p.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    text = path.read_text()
    played = replay(text)
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(played)
        return
    assert played == text


def test_a_changed_transcript_fails() -> None:
    """The broken twin: an altered expectation does not pass."""
    text = SCENARIOS[0].read_text()
    altered = text.replace("num_proposed=", "num_proposed=1", 1) if "num_proposed=" in text else text + "x"
    assert replay(text) != altered
