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
from specdec.client import Client
from specdec.simulation import Simulation
from specdec.terms import SamplingParams

pytestmark = [pytest.mark.faults, pytest.mark.alone]
K, TOKENS, REPEATS, MARGIN = 3, 9, 3, 0.15
# A draft that is nearly always right, and rows that cost nothing; one that is hardly ever right, with rows that cost nothing, and with rows
# that cost far more than a step.
BUILT = {
    PAYS: Scenario(acceptance=0.9, step_ms=40, row_ms=0.0, draft_ms=0.2, hits=1.0, block=K),
    NEUTRAL: Scenario(acceptance=0.1, step_ms=40, row_ms=0.0, draft_ms=0.2, hits=1.0, block=K),
    COSTS: Scenario(acceptance=0.1, step_ms=10, row_ms=25.0, draft_ms=0.2, hits=1.0, block=K),
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
    given = {word: one["cells"][0]["verdict"] for word, one in told.items()}
    # On a machine that is busy with something else intervals may be too wide to decide; none may be on the wrong side.
    sides = {PAYS: given[PAYS]["ratio"] > 1.2, NEUTRAL: True, COSTS: given[COSTS]["ratio"] < 0.8}
    for word, one in given.items():
        assert one["word"] == word or (not one["decided"] and sides[word]), given
        assert told[word]["summary"]["word"] == one["word"] and one["reasons"]
        assert (one["advised"]["num_speculative_tokens"] > 0) is (one["word"] == PAYS)
    for one in told.values():
        assert one["complete"] and one["simulated"] and not one["differing"] and not one["errors"]
        assert "Simulated" in page.page(one)[0]
    # The figures are those of the raw times on the disk.
    store, outcome = found[PAYS]
    runs = store.of(outcome.experiment.cells[0])
    assert len(runs) == 2 * REPEATS and all(isinstance(run, Run) and run.settings["num_speculative_tokens"] in (0, K) for run in runs)
    fixed = [run for run in runs if run.turn.way == FIXED]
    per_token = [one.decode_s / one.behind_first for run in fixed for one in run.answers]
    assert told[PAYS]["cells"][0]["ways"][FIXED]["time_per_token_ms_p50"] == pytest.approx(
        1e3 * figures.percentile(per_token, 0.5), abs=0.01
    )
    assert timings.acceptance(fixed)["mean_acceptance_length"] > 2.0
