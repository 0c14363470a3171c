"""The script for a GPU runs to its end on the code that a GPU runs, and says what is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from specdec.bench import gpu_check
from specdec.engine import model, padded

SECTIONS = {"machine", "exactness", "speculation", "replayed_steps", "forks", "generic", "invariance", "tiny", "tiny launched"}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(model, "_device", lambda config: torch.device("cpu"))


@pytest.mark.pair
def test_it_runs(tmp_path, capsys):
    file = tmp_path / "out" / "report.json"
    assert gpu_check.main(["--device", "cpu", "--tiny", "--output", str(file)]) == 0
    report = json.loads(file.read_text())
    assert report == json.loads(capsys.readouterr().out)
    assert report["failed"] == [] and set(report) >= SECTIONS
    assert report["exactness"]["ids_that_differ"] == 0
    assert all(case["equal"] for case in report["speculation"].values())
    assert report["speculation"]["itself_t1"]["accepted"] > report["speculation"]["another_t1"]["accepted"]
    assert {"step_ms_by_rows", "share_of_floor_by_rows", "modelled", "scripted_acceptance", "prefill_ms"} <= set(report["tiny"])


@pytest.mark.pair
def test_what_is_wrong_is_told_and_the_rest_runs(monkeypatch):
    """Attention that lets every row of a call see the whole call."""
    mask = padded.PaddedAttention._mask
    monkeypatch.setattr(
        padded.PaddedAttention, "_mask", lambda self, sees, blocks: mask(self, sees.amax(2, keepdim=True).expand_as(sees), blocks)
    )
    for slow in ("speed", "launched", "invariance", "generic"):
        monkeypatch.setattr(gpu_check, slow, named(slow, lambda *_: {}))
    report = gpu_check.run("cpu", tiny=True)
    assert {"exactness", "speculation", "replayed_steps", "forks"} <= set(report["failed"])
    assert "disagree" in report["exactness"]["error"] and report["tiny"] == {} and "machine" not in report["failed"]


def named(name, function):
    function.__name__ = name
    return function


def test_no_section_begins_too_late():
    report = gpu_check.run("cpu", tiny=True, seconds=0.0)
    assert report["failed"] == [] and "skipped" in report["exactness"]


def test_without_a_gpu_it_says_so(capsys):
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit):
            gpu_check.main([])
        assert "sees no GPU" in capsys.readouterr().err
