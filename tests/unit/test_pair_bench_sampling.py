"""`specdec bench-step --sampling` names every kind of parameters and times each with and without log-probabilities."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from specdec.bench.sampling import cases, run_bench_sampling
from specdec.cli.main import main
from specdec.cli.system import TARGET_MODEL
from specdec.terms import DraftMethod, SamplingParams

pytestmark = [pytest.mark.pair, pytest.mark.alone]
NO_SAMPLING = {"max_tokens", "stop_token_ids", "ignore_eos", "prompt_logprobs", "logprobs"}  # logprobs: columns of the report


@pytest.fixture(scope="module")
def report():
    return run_bench_sampling(TARGET_MODEL, turns=1, rows=3)


def test_every_case_is_timed_with_and_without_logprobs(report):
    assert report["vocab_size"] == 49152 and report["rows"] == 3
    for name, case in cases(49152).items():
        assert set(report["cases"][name]) == ({""} if case.draft else {"", "logprobs 0", "logprobs 20"})
        assert all(0 < figures["median_ms"] <= figures["p99_ms"] for figures in report["cases"][name].values())


def test_no_field_that_shapes_a_decision_is_left_out():
    default = SamplingParams()
    found = {
        field.name
        for case in cases(49152).values()
        for field in fields(case.params)
        if getattr(case.params, field.name) != getattr(default, field.name)
    }
    assert found == {field.name for field in fields(default)} - NO_SAMPLING
    assert {case.draft for case in cases(49152).values()} == {None, *DraftMethod}


def test_the_command_prints_a_table_or_one_json_object(report, monkeypatch, capsys):
    monkeypatch.setattr("specdec.bench.sampling.run_bench_sampling", lambda model: report)
    assert main(["bench-step", "--sampling", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert main(["bench-step", "--sampling"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + len(report["cases"]) and lines[2].startswith("greedy ") and "logprobs 20" in lines[1]
