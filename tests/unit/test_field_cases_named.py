"""docs/field-cases.md promises a test for every case it lists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "field-cases.md"
NUMBER = re.compile(r"(?<![0-9a-z])[Ff](\d{2,3})(?!\d)")


def test_every_listed_case_is_named_by_a_test() -> None:
    listed, _, _ = DOCUMENT.read_text().partition("## What does not apply")
    rows = [line.split("|")[1] for line in listed.splitlines() if line.startswith("| F")]
    wanted = {number for ids in rows for number in NUMBER.findall(ids)}
    folders = ("unit", "scenarios", "service", "e2e", "helm/checks")  # not what the clients' packages bring along
    sources = (path.read_text() for folder in folders for path in (TESTS / folder).rglob("*.py") if path.name != Path(__file__).name)
    named = {number for text in sources for number in NUMBER.findall(text.replace("_", " "))}
    assert len(wanted) > 80
    assert sorted(wanted - named, key=int) == []
