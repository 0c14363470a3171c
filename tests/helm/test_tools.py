"""tools/helm.py: what it leaves behind, and what it says where its programs do not run."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helm.programs import HELM_3, HELM_4, folders
from tests.tools import ROOT


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The script's names, with a folder of its own and a fetch that finishes the first bundle and is interrupted in the second."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    names = runpy.run_path(str(ROOT / "tools" / "helm.py"))
    monkeypatch.setitem(names["prepare"].__globals__, "TOOLS", tmp_path / "tools")
    fetched: list[str] = []

    def fetch(bundle: Any, scratch: Path) -> None:
        (scratch / "fresh").mkdir()
        fetched.append(bundle.helm)
        if len(fetched) == 2:
            raise KeyboardInterrupt

    monkeypatch.setitem(names["prepare"].__globals__, "fetch", fetch)
    return {**names, "fetched": fetched}


def test_folders_are_whole_or_absent(tool: dict[str, Any], tmp_path: Path) -> None:
    """An interrupted run leaves what it completed; the next one continues; a third does nothing."""
    with pytest.raises(KeyboardInterrupt):
        tool["prepare"]()
    assert sorted(path.name for path in (tmp_path / "tools").iterdir()) == [".lock", f"helm-{HELM_3}"]
    tool["prepare"]()
    tool["prepare"]()
    assert sorted(path.name for path in (tmp_path / "tools").iterdir()) == [".lock", f"helm-{HELM_3}", f"helm-{HELM_4}"]
    assert tool["fetched"] == [HELM_3, HELM_4, HELM_4]


def test_another_machine_is_told(tool: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(Exception, match="Linux on x86_64"):
        tool["prepare"]()


def test_what_is_there_costs_nothing() -> None:
    """The programs are the versions that they are called; nothing is asked of a registry."""
    for version, folder in folders().items():
        told = subprocess.run(
            [f"{folder}/helm", "version", "--short"], capture_output=True, text=True, env={"HOME": "/nonexistent"}, timeout=30
        )
        assert told.stdout.startswith(f"v{version}+")
    unreachable = {"PIP_NO_INDEX": "1", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, str(ROOT / "tools" / "helm.py")], env=unreachable, capture_output=True, text=True, timeout=30)
    assert json.loads(done.stdout) == folders()
