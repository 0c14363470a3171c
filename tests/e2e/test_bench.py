"""The measurements against real processes: ways in turn, phases of a round, and a longer network."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.bench import report, rounds
from specdec.bench.experiment import FIXED, NONE, Experiment, Outcome, run
from specdec.bench.rtt import delayed
from specdec.cli.main import main
from specdec.client import Client
from specdec.terms import SamplingParams
from tests.e2e.stack import Stack

pytestmark = pytest.mark.parameters
PROMPTS = [("ids", [1, 2, 3, 4]), ("ids", [5, 6, 7])]
RTT_MS = 40.0


def test_ways_in_turn(questioned: Stack, capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text("".join(json.dumps({"token_ids": ids}) + "\n" for _, ids in PROMPTS))
    words = ["--prompts", str(prompts), "--concurrency", "1,3", "--temperature", "0,1", "--repeats", "2", "--batch", "2"]
    assert main(["bench", "--endpoint", questioned.endpoint, *words, "--max-tokens", "12", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    fixed = [cell["ways"]["fixed"] for cell in found["cells"]]
    assert len(fixed) == 4 and all(figure["differing"] == 0 and figure["mean_acceptance_length"] > 1.5 for figure in fixed)
    assert all(cell["ways"]["none"]["tokens_per_round"] <= 1 for cell in found["cells"])
    assert found["differing"] == 0 and "first token" in capsys.readouterr().out


def _as_services(stack: Stack) -> Any:
    everyone = [
        SimpleNamespace(role=p.role, endpoint=p.endpoint, metrics=f"{p.host}:{p.metrics_port}")
        for p in (*stack.targets, *stack.drafts, *stack.orchestrators[:1])
    ]
    return SimpleNamespace(running=everyone, of=lambda role: next(p for p in everyone if p.role == role), orchestrator=everyone[-1])


@pytest.mark.alone
def test_a_round_by_phase(questioned: Stack) -> None:
    """Every phase is told by a service, and together they are the round that the client sees."""
    experiment = Experiment(PROMPTS, ways=(NONE, FIXED), temperatures=(0.0,), sampling=SamplingParams(max_tokens=48))
    found, notes = asyncio.run(rounds.measure(_as_services(questioned), experiment))
    assert notes == []
    for figure in found.values():
        ms = figure["ms_per_round"]
        assert ms["forward"] > 0 and ms["wire"] > 0 and ms["sample"] > 0 and ms["text"] > 0
        assert -0.2 * ms["whole round"] < ms["rest"] < 0.6 * ms["whole round"]
    assert found[NONE]["ms_per_round"]["draft"] == 0 < found[FIXED]["ms_per_round"]["draft"]
    assert found[NONE]["tokens_per_round"] == pytest.approx(1.0) and found[FIXED]["tokens_per_round"] > 1.5


def test_a_longer_network_costs_time_and_no_text(questioned: Stack) -> None:
    experiment = Experiment(
        PROMPTS, (NONE, FIXED), (1,), (0.0,), repeats=1, batch=2, sampling=SamplingParams(max_tokens=6, ignore_eos=True)
    )
    with delayed(questioned.targets[0].endpoint, RTT_MS) as target, delayed(questioned.drafts[0].endpoint, RTT_MS) as draft:
        orchestrator = questioned.add_orchestrator(TARGETS=target, DRAFTS=draft)
        questioned.orchestrators.remove(orchestrator)
        try:
            outcome = Outcome(experiment)
            asyncio.run(_ask(orchestrator.endpoint, outcome))
        finally:
            orchestrator.kill()
    (cell,) = report.report(outcome, {})["cells"]
    assert all(figure["first_token_ms_p50"] >= RTT_MS for figure in cell["ways"].values())
    assert cell["ways"]["fixed"]["differing"] == 0


async def _ask(endpoint: str, outcome: Outcome) -> None:
    async with Client(endpoint) as client:
        await client.wait_ready(10.0)
        await run(client, outcome, lambda turn, seconds: None)
