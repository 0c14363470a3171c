"""The chart's README: its table is that of values.yaml, its examples render, what it points at is there."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import yaml

from specdec.cli.main import main
from tests.helm.drawing import leaves
from tests.helm.node_tools import write_table
from tests.helm.objects import render
from tests.helm.programs import CHART, helm

README = CHART / "README.md"


def test_the_table_is_that_of_the_values(tmp_path: Path) -> None:
    """Every value has its comment, every comment its value, and the table says the same. Rewrite: python -m tests.helm.golden"""
    copied = Path(shutil.copy(README, tmp_path))
    write_table(copied)
    assert copied.read_text() == README.read_text()


def test_every_key_of_the_schema_is_in_the_table() -> None:
    """Whole or as a part of a documented object; a pool's keys are those of its component, settings are listed in the schema."""
    told = set(re.findall(r"^\| `([\w.]+)`", README.read_text(), re.M))
    for path in leaves():
        parts = [".".join(path[:i]) for i in range(1, len(path) + 1)]
        within = any(key.startswith(f"{parts[-1]}.") for key in told)
        assert "pools" in path or within or told & set(parts), parts[-1]


def test_its_example_of_values_renders() -> None:
    for text in re.findall(r"```yaml\n(.*?)```", README.read_text(), re.S):
        values = yaml.safe_load(text)
        found = render(values)
        assert all(pod.main["image"].startswith("registry.example.com/specdec-") for pod in found.services)
        assert not any("initContainers" in pod.spec for pod in found.services), "nothing is downloaded"


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", README.read_text()):
        assert (CHART / link).exists(), link


def test_flags_in_the_notes_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    """With everything on, the notes say how to call; the commands have each flag."""
    done = helm("install", "demo", str(CHART), "--dry-run=client", "-f", str(CHART / "ci" / "mtls-values.yaml"))
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for command in ("generate", "top"):
        (line,) = re.findall(rf"^  specdec {command} .*", notes, re.MULTILINE)
        flags = set(re.findall(r"--[a-z-]+", line))
        assert {"--endpoint", "--tls-ca", "--tls-server-name", "--tls-cert", "--token-file"} <= flags, line
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known = capsys.readouterr().out
        assert [flag for flag in flags if flag not in known] == []
    assert "orchestrator.config.showMetrics is not true" in notes
