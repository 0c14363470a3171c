"""The skip rule itself, and the gate for what import-linter cannot say."""

from __future__ import annotations

import ast
import runpy
from pathlib import Path

import pytest

from tests import tools

WALLS = Path(tools.ROOT) / "tools" / "walls.py"


def test_a_missing_tool_skips_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "IN_CI", False)
    with pytest.raises(pytest.skip.Exception, match="no-such-program"):
        tools.require_tool("no-such-program")


def test_a_missing_tool_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tools, "IN_CI", True)
    with pytest.raises(pytest.fail.Exception, match="no-such-program"):
        tools.require_tool("no-such-program")


@pytest.mark.parametrize("name", ["buf", "node"])
def test_the_lock_brings_the_tools(name: str) -> None:
    assert Path(tools.require_tool(name)).is_file()


@pytest.mark.parametrize(
    ("source", "used"),
    [
        ("import os\nos.environ['A']", "os.environ"),
        ("from os import getenv", "os.getenv"),
        ("def f():\n    import opentelemetry.sdk.trace", "opentelemetry.sdk.trace"),
        ("from specdec.v1 import target_pb2", "specdec.v1.target_pb2"),
    ],
)
def test_the_walls_see_every_way_of_use(source: str, used: str) -> None:
    walls = runpy.run_path(str(WALLS))
    assert used in [name for _, name in walls["uses"](ast.parse(source))]


def test_a_model_folder_is_whole_or_as_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tools.ROOT / "tools"))
    models = runpy.run_path(str(tools.ROOT / "tools" / "prepare_models.py"))
    folder = tmp_path / "model"

    def interrupted(out: Path, scratch: Path) -> None:
        (out / "weights").write_text("half")
        raise KeyboardInterrupt

    models["build"](folder, "first", lambda out, _: (out / "weights").write_text("whole"))
    with pytest.raises(KeyboardInterrupt):
        models["build"](folder, "second", interrupted)
    assert (folder / "weights").read_text() == "whole"
    assert models["is_current"](folder, "first")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
