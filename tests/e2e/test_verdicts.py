"""`specdec bench` on systems that are built to pay, to make no difference and to cost: real orchestrators between simulated pools."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from specdec.bench import figures, page, timings
from specdec.bench.experiment import FIXED, NONE, Experiment, Outcome
from specdec.bench.experiment import run as ask
from specdec.bench.record import Run, run_of
from specdec.bench.report import Asked, report
from specdec.bench.sim import folder
from specdec.bench.sim.path import Paths
from specdec.bench.sim.pools import Counts
from specdec.bench.sim.run import Scenario, _orchestrators, _pools
from specdec.bench.store import Store
from specdec.bench.verdict import COSTS, NEUTRAL, PAYS
from specdec.bench.whatif import Setting, waiting
from specdec.client import Client
from specdec.simulation import Simulation
from specdec.terms import SamplingParams

pytestmark = pytest.mark.faults
K, TOKENS, REPEATS, MARGIN = 3, 16, 4, 0.15
# A draft that is nearly always right, and rows that cost nothing; one that is hardly ever right, with rows that cost nothing, and with rows
# that cost as much as a step.
BUILT = {
    PAYS: Scenario(acceptance=0.9, step_ms=8, row_ms=0.0, draft_ms=0.2, hits=1.0, block=K),
    NEUTRAL: Scenario(acceptance=0.1, step_ms=8, row_ms=0.0, draft_ms=0.2, hits=1.0, block=K),
    COSTS: Scenario(acceptance=0.1, step_ms=4, row_ms=4.0, draft_ms=0.2, hits=1.0, block=K),
}


async def _asked(built: Scenario, model: Path, store: Store, outcome: Outcome, one_at_a_time: asyncio.Lock) -> None:
    vocabulary = folder.write(model)
    paths = Paths(Simulation(acceptance=built.acceptance, step_ms=built.step_ms, row_ms=built.row_ms), vocabulary.size)
    async with contextlib.AsyncExitStack() as stack:
        targets, drafts = await stack.enter_async_context(_pools(built, paths, vocabulary, Counts()))
        running = await stack.enter_async_context(_orchestrators(built, model, targets, drafts, False, {}))
        client = await stack.enter_async_context(Client(running[0].endpoint))
        await client.wait_ready(20.0)
        async with one_at_a_time:
            await ask(client, outcome, lambda turn, seconds: None, lambda done: store.add(run_of(done)))


def _of(model: Path) -> tuple[Store, Outcome]:
    model.mkdir()
    experiment = Experiment(
        prompts=[("code", [20, 30, 40]), ("chat", [21, 31, 41]), ("json", [22, 32, 42]), ("creative", [23, 33, 43])],
        ways=(NONE, FIXED),
        concurrencies=(1,),
        temperatures=(0.0,),
        repeats=REPEATS,
        batch=1,
        sampling=SamplingParams(max_tokens=TOKENS, ignore_eos=True),
        num_speculative_tokens=K,
    )
    return Store(model / "out", {"sweep": {}}), Outcome(experiment)


def test_verdicts_of_what_was_built_to_pay_to_make_no_difference_and_to_cost(tmp_path: Path) -> None:
    found = {word: _of(tmp_path / word) for word in BUILT}

    async def all_of_them() -> None:
        alone = asyncio.Lock()  # they start together, and are measured one after the other
        await asyncio.gather(*(_asked(BUILT[word], tmp_path / word, *found[word], alone) for word in BUILT))

    asyncio.run(all_of_them())
    told = {word: report(outcome, {"command": "c"}, store, Asked(margin=MARGIN)) for word, (store, outcome) in found.items()}
    assert {word: one["cells"][0]["verdict"]["word"] for word, one in told.items()} == {word: word for word in BUILT}
    assert {word: one["summary"]["word"] for word, one in told.items()} == {word: word for word in BUILT}
    for word, one in told.items():
        assert one["complete"] and one["simulated"] and not one["differing"] and not one["errors"]
        given = one["cells"][0]["verdict"]
        assert (given["advised"]["num_speculative_tokens"] > 0) is (word == PAYS) and given["reasons"]
        assert "Simulated" in page.page(one)[0]
    # The formula of whatif.py says about the same as what was measured, with acceptance as it was built and costs as they were set.
    built, measured = BUILT[PAYS], told[PAYS]["cells"][0]["verdict"]["ratio"]
    expected = waiting(
        Setting(built.step_ms + built.row_ms, built.draft_ms, (built.acceptance,), built.row_ms, foresight=built.hits), K
    ).ratio
    assert 0.6 * expected < measured < 1.15 * expected
    # The figures are those of the raw times on the disk.
    store, outcome = found[PAYS]
    runs = store.of(outcome.experiment.cells[0])
    assert len(runs) == 2 * REPEATS and all(isinstance(run, Run) and run.settings["num_speculative_tokens"] in (0, K) for run in runs)
    fixed = [run for run in runs if run.turn.way == FIXED]
    per_token = [one.decode_s / one.behind_first for run in fixed for one in run.answers]
    assert told[PAYS]["cells"][0]["ways"][FIXED]["time_per_token_ms_p50"] == pytest.approx(
        1e3 * figures.percentile(per_token, 0.5), abs=0.01
    )
    assert timings.acceptance(fixed)["mean_acceptance_length"] > 2.5
