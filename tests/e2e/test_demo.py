"""The README's first command on the real pair, as a pipe sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.pair, pytest.mark.alone, pytest.mark.timeout(180)]


def test_demo_shows_who_decided_and_prints_the_table() -> None:
    command = [sys.executable, "-m", "specdec.cli.main", "demo", "--max-tokens", "24"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\x1b" not in done.stdout and "‹" in done.stdout
    titles, _, *rows = done.stdout.splitlines()[-7:]
    assert [title.strip() for title in titles.split("  ") if title.strip()] == [
        "prompt", "tokens", "first token", "tokens/s with", "without", "ratio", "acceptance length", "identical",
    ]  # fmt: skip
    assert [row.split()[0] for row in rows] == ["code", "json", "chat", "creative", "average"]
    assert all(row.endswith("yes") for row in rows)
