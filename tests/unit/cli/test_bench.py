"""`specdec bench` against a scripted orchestrator: what it prints, writes and returns."""

from __future__ import annotations

import errno
import json
import os
import subprocess
from pathlib import Path

import pytest

from specdec.bench import report, system
from specdec.cli.main import main

pytestmark = pytest.mark.unit
SHORT = ["--concurrency", "1,2", "--temperature", "0", "--repeats", "2", "--batch", "1", "--compare", "none,fixed"]


def test_a_table_and_a_file(endpoint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    assert main(["bench", "--endpoint", endpoint, *SHORT, "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "1 stream, T = 0" in text and "2 streams, T = 0" in text and "texts that differ from none: 0" in text
    found = json.loads(out.read_text())
    assert found["command"].startswith("specdec bench --endpoint") and found["machine"]["cores"] and found["versions"]["python"]
    assert found["complete"] and len(found["turns"]) == 8
    assert found["turns"][0]["answers"][0]["token_ids"] == [10, 11, 12]


def test_json_has_the_figures_without_the_raw_times(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", endpoint, *SHORT, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "turns" not in found and [cell["concurrency"] for cell in found["cells"]] == [1, 2]


def test_exit_code_1_when_a_text_differs(endpoint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "same_text", lambda one, other: False)
    assert main(["bench", "--endpoint", endpoint, *SHORT]) == 1
    assert "texts that differ from none: 6" in capsys.readouterr().out


def test_interrupted_it_tells_what_is_there(endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from specdec.bench import experiment

    asked = experiment.ask_all
    turns = 0

    async def interrupted(*a: object, **k: object) -> object:
        nonlocal turns
        turns += 1
        if turns == 6:
            raise KeyboardInterrupt
        return await asked(*a, **k)  # type: ignore[arg-type]

    monkeypatch.setattr(experiment, "ask_all", interrupted)
    out = tmp_path / "part.json"
    assert main(["bench", "--endpoint", endpoint, *SHORT, "--out", str(out)]) == 130
    found = json.loads(out.read_text())
    assert not found["complete"] and 0 < len(found["turns"]) < 8


def test_interrupted_while_the_report_is_made_it_says_so(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    words = ["bench", "--endpoint", endpoint, *SHORT]
    with monkeypatch.context() as patch:
        patch.setattr(report, "report", interrupted)
        assert main([*words, "--out", str(tmp_path / "sweep")]) == 130
        assert "interrupted before the report was there; the same command makes it" in capsys.readouterr().err
    assert main([*words, "--out", str(tmp_path / "sweep")]) == 0 and "going on: 8 turns" in capsys.readouterr().err
    assert (tmp_path / "sweep" / "report.html").exists()


def test_interrupted_while_a_service_loads_it_does_not_outlive_us(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is ready it is not among those that are stopped at the end."""
    begun: list[subprocess.Popen[str]] = []

    def interrupted(process: subprocess.Popen[str]) -> None:
        begun.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(system, "_first_ready_line", interrupted)
    ends = os.pipe()
    running = system.Services(tmp_path, ends[0], system.Models(), {})
    with pytest.raises(KeyboardInterrupt):
        running.start("draft", {}, ["http.server", "--bind", "127.0.0.1", "0"])
    assert begun[0].poll() is not None and not running.running
    for end in ends:
        os.close(end)


def test_a_folder_goes_on_where_it_ended_and_holds_the_page(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec.bench import experiment, plots

    monkeypatch.setattr(plots, "there", lambda: False)
    asked, turns = experiment.ask_all, 0

    async def interrupted(*a: object, **k: object) -> object:
        nonlocal turns
        turns += 1
        if turns == 8:
            raise KeyboardInterrupt
        return await asked(*a, **k)  # type: ignore[arg-type]

    out, words = tmp_path / "sweep", ["bench", "--endpoint", endpoint, *SHORT, "--kinds", "code,chat", "--cold-prompts"]
    with monkeypatch.context() as patch:
        patch.setattr(experiment, "ask_all", interrupted)
        assert main([*words, "--out", str(out)]) == 130
    assert not json.loads((out / "report.json").read_text())["complete"]
    before = (out / "runs.jsonl").read_text().splitlines()
    capsys.readouterr()
    assert main([*words, "--out", str(out)]) == 0
    told = capsys.readouterr()
    assert f"going on: {len(before)} turns" in told.err and "written: " in told.out and "16/16" not in told.err
    after = (out / "runs.jsonl").read_text().splitlines()
    assert after[: len(before)] == before and len(before) == 5 and len(after) == 17, "of the pair that was cut short both are asked again"
    found = json.loads((out / "report.json").read_text())
    assert found["complete"] and "turns" not in found and [cell["kind"] for cell in found["cells"]] == ["code", "code", "chat", "chat"]
    assert (out / "report.csv").read_text().count("\n") == 9
    page = (out / "report.html").read_text()
    assert page.startswith("<!DOCTYPE html>") and found["summary"]["headline"] in page
    assert main([*words, "--max-tokens", "5", "--out", str(out)]) == 2 and "another sweep (other --max-tokens)" in capsys.readouterr().err
    warm = [word for word in words if word != "--cold-prompts"]
    assert main([*warm, "--out", str(out)]) == 2 and "(other --endpoint, --state or --cold-prompts)" in capsys.readouterr().err
    assert main([*words, "--repeats", "3", "--out", str(out)]) == 0 and "going on: 16 turns" in capsys.readouterr().err
    assert (out / "runs.jsonl").read_text().count("\n") == 25, "more repeats narrow the intervals of those that are there"
    headline = json.loads((out / "report.json").read_text())["summary"]["headline"]  # of more repeats: it may be another one
    assert main(["advise", str(out)]) == 0 and headline in capsys.readouterr().out


def test_reports_that_cannot_be_written_are_told_behind_the_figures(
    endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from specdec.bench import store

    def full(path: Path, text: str) -> None:
        if path.name.startswith("report"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(store, "_write", full)
    assert main(["bench", "--endpoint", endpoint, *SHORT, "--out", str(tmp_path / "sweep")]) == 2
    told = capsys.readouterr()
    assert "2 streams, T = 0" in told.out
    assert "report.json: No space left on device; mend it, and the same command writes it again" in told.err


def test_an_open_loop_and_a_grid_of_lengths(endpoint: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arrivals", "poisson", "--rate", "200,400", "--temperature", "0", "--repeats", "1", "--compare", "none,fixed"]
    grid = ["--prompt-tokens", "3", "--max-tokens", "2,3", "--slo-ttft-ms", "1000", "--slo-itl-ms", "500", "--json"]
    assert main(["bench", "--endpoint", endpoint, *words, *grid]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [cell["load"] for cell in found["cells"]] == ["200 questions/s", "400 questions/s"] * 2
    assert {cell["max_tokens"] for cell in found["cells"]} == {2, 3} and found["settings"]["arrivals"] == "poisson"
    assert all(figure["goodput_share"] == 1.0 for cell in found["cells"] for figure in cell["ways"].values())


@pytest.mark.parametrize(
    "words",
    [
        ["--kinds", "code,unknown"],
        ["--prompt-tokens", "0"],
        ["--rate", "1"],
        ["--rate", "0", "--arrivals", "poisson"],
        ["--arrivals", "sometimes"],
        ["--slo-ttft-ms", "0"],
        ["--margin", "2"],
        ["--max-tokens", "16,x"],
        ["--state", "/nowhere"],
        ["--compare", "none,other"],
        ["--concurrency", "0"],
        ["--concurrency", "x"],
        ["--temperature", "-1"],
        ["--repeats", "0"],
        ["--max-tokens", "0"],
        ["--prompts", "/nowhere"],
        ["--out", "/nowhere/at/all"],
    ],
)
def test_refused_flags_are_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", "127.0.0.1:1", *words]) == 2
    assert words[0].removeprefix("--") in capsys.readouterr().err


def test_no_name_is_not_this_folder(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "--endpoint", "127.0.0.1:1", "--out", ""])
    assert "--out: must name" in capsys.readouterr().err


def test_nobody_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", "127.0.0.1:1"]) == 2
    assert "nobody answers" in capsys.readouterr().err
    assert main(["bench", "--target-model", "/nowhere"]) == 2
    assert "make setup" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--temperature", "nan"], "--temperature: must be"),
        (["--prompt-tokens", ""], "--prompt-tokens: must be"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens: must be 1 to"),
        (["--arrivals", "poisson", "--rate", "1e-9"], "--rate: must be 0.001 to"),
        (["--metrics", "draft=h:99999"], "--metrics: 'draft=h:99999'"),
        (["--metrics", "draft=:9"], "--metrics: 'draft=:9'"),
        (["--endpoint", "127.0.0.1:99999"], "--endpoint: must be host:port"),
    ],
)
def test_what_cannot_be_measured_is_refused_by_its_flag(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--endpoint", "127.0.0.1:1", *words]) == 2
    assert told in capsys.readouterr().err


def test_a_place_for_simulated_figures_is_asked_for_before_they_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for out in (tmp_path, tmp_path / "nowhere" / "found.json"):
        assert main(["bench", "--sim", "targets=1", "--seconds", "0.1", "--out", str(out)]) == 2
        told = capsys.readouterr()
        assert f"--out: {out}: " in told.err and "name a file" in told.err and "measured" not in told.err
