"""A scripted orchestrator process that the client and `generate` talk to."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def endpoint() -> Iterator[str]:
    service = Path(__file__).with_name("fake_orchestrator.py")
    with subprocess.Popen([sys.executable, str(service)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        match = re.search(r" port=(\d+)", process.stdout.readline())
        assert match
        yield f"127.0.0.1:{match[1]}"
        process.kill()
