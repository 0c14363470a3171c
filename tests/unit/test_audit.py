"""The audit of the dependencies: what it sees, each with a lock that is wrong in one way."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

from tests.tools import ROOT

AUDIT: dict[str, Any] = runpy.run_path(str(Path(ROOT) / "tools" / "audit.py"))


@pytest.mark.parametrize(
    "line", ["a>=1", "a", "a==1 ; python_version < '4'", "git+https://example.org/a", "https://example.org/a.whl", "-e ."]
)
def test_a_line_that_pins_nothing(line: str) -> None:
    found, complaints = AUDIT["pins"](f"# a comment\nb==2\n{line}\n")
    assert found == {"b": "2"} and len(complaints) == 1 and ":3:" in complaints[0]


def test_twice_is_once_too_often() -> None:
    assert "twice" in AUDIT["pins"]("a_b==1\nA-b==2\n")[1][0]


def test_what_the_project_asks_for_and_the_lock_lacks() -> None:
    project = {"project": {"dependencies": ["a>=2", "b>=1"], "optional-dependencies": {"dev": ["c"]}}}
    complaints = list(AUDIT["wanted"](project, {"a": "1.9", "b": "1.0"}))
    assert len(complaints) == 2 and "holds 1.9" in complaints[0] and "does not hold" in complaints[1]


def test_what_is_installed_and_what_is_locked() -> None:
    complaints = list(AUDIT["different"]({"a": "1", "b": "2", "c": "3"}, {"a": "1+cpu", "b": "2.1", "other": "5"}))
    assert [c.split()[0] for c in complaints] == ["b", "c==3"]
