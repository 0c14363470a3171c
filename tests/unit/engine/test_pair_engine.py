"""The engine on the real pair: what it costs and what it claims."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest
import torch

from specdec.bench.agreement import agreement, encode, engine_scorer, greedy_texts, load_prompts, plain_scorer
from specdec.bench.step import run_bench_step
from specdec.engine import Engine, EngineConfig, load_engine
from tests.tools import MODELS
from tests.unit.engine.play import Turn, played, text, whole

pytestmark = [pytest.mark.pair, pytest.mark.alone]
TARGET, DRAFT = MODELS / "smollm2-135m", MODELS / "smollm2-draft"


@pytest.fixture(scope="module")
def target() -> Engine:
    return load_engine(EngineConfig(TARGET, self_test=False))


def test_a_row_is_the_same_in_any_batch(target):
    tokens = text(560, vocab=49152)
    reference = whole(target, tokens)
    for start, turns in (
        (500, [Turn(6, (1, 2), (1, 4), before=True), Turn(1), Turn(20, (5,)), Turn(3), Turn(8, (), (2,))]),
        (61, [Turn(1), Turn(5, (9, 9)), Turn(2, (), (6,))]),
    ):
        rows = played(target, tokens, start, turns, chunk=190)
        assert torch.equal(rows, reference[start : start + len(rows)])


def test_load_and_self_test_are_quick_and_small():
    """In a process of its own, as a service has it. Processor time, since the machine may be busy."""
    code = (
        "import re, time, json\n"
        "from specdec.engine import EngineConfig, load_engine\n"
        "from specdec.engine.invariance import examine\n"
        f"engine = load_engine(EngineConfig({str(TARGET)!r}, self_test=False))\n"
        "loaded = time.process_time()\n"
        "exact = examine(engine)\n"
        "now = int(open('/proc/self/statm').read().split()[1]) * 4096 >> 20\n"
        # Not ru_maxrss: that starts at the size of whoever started the process.
        "peak = int(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1]) >> 10\n"
        "print(json.dumps([exact, loaded, time.process_time() - loaded, now, peak]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=100)
    exact, load_s, test_s, resident_mb, peak_mb = json.loads(done.stdout)
    assert exact is True
    assert load_s < 10 and test_s < 2
    assert resident_mb < 900 and peak_mb < 1500


def test_the_draft_scores_its_own_vocabulary():
    engine = load_engine(EngineConfig(DRAFT, reduced_head=True))
    assert engine.info.batch_invariant and engine.info.path == "lean" and engine.info.dtype == "int8"
    assert engine.info.draft_ids is not None and len(engine.info.draft_ids) == 12002
    assert whole(engine, text(9, vocab=49152)).shape == (9, 12002)


def test_agreement_with_float32_is_that_of_plain_per_row_int8(target):
    prompts = encode(TARGET, load_prompts(None)[:2])
    exact = load_engine(EngineConfig(TARGET, dtype="float32", self_test=False))
    texts = greedy_texts(exact, prompts, 60)
    report = agreement(texts, engine_scorer(exact), {"ours": engine_scorer(target), "yardstick": plain_scorer(TARGET)})
    assert report["positions"] >= 60
    assert report["ours"]["agreement_percent"] > 80
    assert report["ours"]["kl"] < 2 * report["yardstick"]["kl"] + 0.02


def test_bench_step_reports_every_row_count():
    began = time.monotonic()
    report = run_bench_step(DRAFT, [1, 2], sessions=2, sampling="topp")
    assert set(report["rows"]) == {"1", "2"} and all(ms > 0 for ms in report["rows"].values())
    assert report["sampling_ms_per_row"] > 0 and time.monotonic() - began < 60
