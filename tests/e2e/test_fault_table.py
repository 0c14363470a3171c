"""Every fault at every phase of a round, many streams meanwhile: each text is that of the run without speculation and without faults."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.targeting import TargetSide
from specdec.terms import Step
from tests.e2e.fault_driver import Report, Turmoil, asks, references, watched
from tests.e2e.fault_phases import CLIENT, DRAFT, TARGET, Row, rows
from tests.e2e.inprocess import Cluster, Hosted, cluster, hurried
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(150)]
LEAST = 200
SECONDS = 90.0
LEFT_S = 5.0
EJECTED_MS = 100  # else the links would rest for most of the time


async def left(made: Cluster) -> dict[str, float]:
    """Gauges that are not 0."""
    names = {"orchestrator": ("specdec_requests_running", "specdec_requests_waiting"), "target": ("specdec_sessions",)}

    def read(hosted: Hosted) -> dict[str, float]:
        return {f"{hosted.role} {name}": value for name in names.get(hosted.role, ("specdec_sessions",)) if (value := hosted.metric(name))}

    found: dict[str, float] = {}
    for service in (*made.orchestrators, *made.targets, *made.drafts):
        found |= await asyncio.to_thread(read, service)
    return found


async def nothing_left(made: Cluster) -> None:
    deadline = asyncio.get_running_loop().time() + LEFT_S
    while found := await left(made):
        assert asyncio.get_running_loop().time() < deadline, found
        await asyncio.sleep(0.05)


async def turmoil(made: Cluster, choose: Callable[[str], list[Row]] = rows, least: int = LEAST) -> Report:
    """Two targets, two drafts, one orchestrator, a link on every hop. `choose`: the rows of a kind of link."""
    async with contextlib.AsyncExitStack() as links:
        pools = {TARGET: made.targets, DRAFT: made.drafts}
        hops = [(kind, *watched(service.endpoint, kind)) for kind, pool in pools.items() for service in pool]
        names = [await links.enter_async_context(link.serving()) for _, link, _ in hops]
        orchestrator = await made.begin_orchestrator(names[:2], names[2:], step_deadline_ms=3000, max_ejection_ms=EJECTED_MS)
        client, trigger = watched(orchestrator.endpoint, CLIENT)
        name = await links.enter_async_context(client.serving())
        asked = asks()
        wanted = await references(orchestrator.endpoint, asked)
        tables = {kind: choose(kind) for kind in (TARGET, DRAFT, CLIENT)}
        work = [(link, trigger, tables[kind]) for kind, link, trigger in (*hops, (CLIENT, client, trigger))]
        return await Turmoil(asked, wanted, [name]).run(work, least, SECONDS)


def forgetful(step: Callable[..., Step]) -> Callable[..., Step]:
    """A session that moves takes another seed along."""

    def wrong(side: TargetSide, *more: Any) -> Step:
        made = step(side, *more)
        return made if side.epoch == 1 or made.begin is None else replace(made, begin=replace(made.begin, seed=made.begin.seed + 1))

    return wrong


def now_and_then(kind: str) -> list[Row]:
    """A target is lost, and has peace for a while; two rows of the same for each of its links."""
    pause = Row(kind, rows(kind)[0].phase, "stall")
    return [*[Row(TARGET, "result", "cut")] * 2, *[pause] * 8] if kind == TARGET else [pause] * 2


def test_every_fault_at_every_phase(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the same with a defect that only fail-over shows, which the comparison must see."""

    async def run() -> Report:
        async with cluster(save_tiny(tmp_path / "tiny", seed=0), targets=2, drafts=2) as made:
            report = await turmoil(made)
            print(report)
            await nothing_left(made)
            monkeypatch.setattr(TargetSide, "step", forgetful(TargetSide.step))
            with pytest.raises(AssertionError, match="^answer .* after"):
                await turmoil(made, now_and_then)
            return report

    with hurried():
        report = asyncio.run(run())
    missing = {row for kind in (TARGET, DRAFT, CLIENT) for row in rows(kind)} - set(report.injected)
    assert not missing, sorted(map(str, missing))
    assert report.injected.total() >= LEAST
    assert report.moved and report.answers >= 8
    defects = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert not defects, defects[0].getMessage()
