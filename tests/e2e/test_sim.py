"""Simulated pools around real orchestrators, and simulated engines inside real services: the text is the same everywhere."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from specdec.bench.sim import folder, run
from specdec.bench.sim.path import Path as Text
from specdec.simulation import Simulation
from specdec.terms import SamplingParams
from tests.e2e.ask import Ask, answers
from tests.e2e.stack import running

pytestmark = pytest.mark.faults
TOKENS = 48


def test_a_real_service_with_a_simulated_engine_says_the_same_with_and_without_speculation(tmp_path: Path) -> None:
    vocabulary = folder.write(tmp_path)
    settings = {"ENGINE_PATH": "sim", "KV_TOKENS": "4096"}
    target, draft = {"SIM": "step-ms=2,row_ms=0"}, {"SIM": "step-ms=0.2,row_ms=0,acceptance=0.7"}
    with running(tmp_path, tmp_path, target=settings | target, draft=settings | draft) as stack:
        prompts = [[20 + i, 30, 40 + i] for i in range(4)]
        got = {}
        for k in (0, 4):
            asks = [
                Ask(prompt, SamplingParams(temperature=i % 2, max_tokens=TOKENS, ignore_eos=True), {"num_speculative_tokens": k, "seed": i})
                for i, prompt in enumerate(prompts)
            ]
            got[k] = answers(stack.endpoint, asks)
    right = [Text(Simulation(), vocabulary.size, prompt).upto(3 + TOKENS)[3 : 3 + TOKENS] for prompt in prompts]
    assert [list(answer.token_ids) for answer in got[0]] == [list(answer.token_ids) for answer in got[4]] == right
    assert [answer.text for answer in got[0]] == [answer.text for answer in got[4]]
    stats = [answer.finished.speculative for answer in got[4]]
    assert sum(s.num_accepted_draft_tokens for s in stats) > 0.3 * sum(s.num_draft_tokens for s in stats) > 20


def test_two_orchestrators_share_simulated_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every text that they deliver is the target's."""
    monkeypatch.setattr(run, "WARM_S", 0.1)
    monkeypatch.setattr(run, "STAGGER_S", 0.1)
    wanted = run.Scenario(targets=2, drafts=2, sessions=8, orchestrators=2, step_ms=4, draft_ms=0.5, tokens=16, rtt_ms=1)
    told = run.run(wanted, 1.0)
    assert told["simulated"] and told["scenario"] == dataclasses.asdict(wanted)
    assert told["answers"] > 0 and not (told["differing"] or told["failed"] or told["broken"])
    assert told["rounds_with_block"] > 0.3 and told["accepted_per_round"] > 0.2
    assert len(told["orchestrator_cpu"]) == 2 and told["session_rounds_per_cpu_s"] > 0 and told["to_client_ms"]["p50"] > 0
