"""Deadlines and readers that never read, between scripted pools: who is told what, and that the pools are free."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator import door
from orchestrator import events as ev
from orchestrator.handle import MAX_UNDELIVERED, Handle, Undelivered
from orchestrator.states import State
from specdec import terms
from specdec.errors import DeadlineExceeded, Overloaded
from tests.unit.orchestrator.scripted_pools import SEED, Pools, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.unit


def start(pools: Pools, name: str, left_s: float, count: int = 20) -> Handle:
    prompt = prompt_of(name)
    answer = ev.Admitted(name, prompt, len(prompt), terms.SamplingParams(max_tokens=count), SEED, 10_000, 3, 8)
    with pools.driver.arriving(1, 100, 0, left_s) as deadline_ms:
        pass
    return pools.driver.start((answer,), f"request of {name}", deadline_ms)


async def five_late(pools: Pools) -> None:
    """One generation runs on a target that is busy; five wait until their time is past."""
    target = pools.targets[0]
    target.silent = True
    runs = pools.start("runs")
    late = [start(pools, f"late{i}", 0.05) for i in range(5)]
    assert (pools.driver.running, pools.driver.waiting) == (1, 5)
    for handle in late:
        with pytest.raises(DeadlineExceeded, match="deadline passed in the waiting room"):
            async with asyncio.timeout(5):
                await fetch(handle)
    target.silent = False
    target.say(*target.kept)
    assert await fetch(runs) == answer_of(prompt_of("runs"), 20)
    await settle()
    assert set(target.seen) == set(pools.drafts[0].seen) == {"runs"}, "none of the five reached an engine"
    pools.check_empty()


async def test_F138_who_waits_past_its_deadline_reaches_no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    await five_late(Pools(monkeypatch, max_running=1))


async def test_F138_twin_nobody_keeps_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door.Door, "_watch", lambda self, session, until_ms: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await five_late(Pools(monkeypatch, max_running=1))


async def test_what_is_left_of_a_deadline_bounds_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    steps: list[terms.Step] = []
    send = pools.targets[0].send

    def seen(item: Any) -> None:
        steps.extend([item] if isinstance(item, terms.Step) else [])
        send(item)

    monkeypatch.setattr(pools.targets[0], "send", seen)
    assert await fetch(start(pools, "s", 2.0)) == answer_of(prompt_of("s"), 20)
    assert all(0 < step.remaining_ms <= 2000 - door.MARGIN_MS for step in steps) and len(steps) > 3
    steps.clear()
    await fetch(pools.start("free"))
    assert {step.remaining_ms for step in steps} == {30_000}


async def test_a_deadline_ends_what_runs_and_frees_both_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    pools.targets[0].silent = True
    with pytest.raises(DeadlineExceeded, match="while the answer was decided"):
        async with asyncio.timeout(5):
            await fetch(start(pools, "s", 0.05))
    await settle()
    pools.check_empty()


async def test_the_longest_wait_ends_with_a_time_to_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=1, max_wait_ms=30.0)
    pools.targets[0].silent = True
    runs = pools.start("runs")
    waits = pools.start("waits")
    with pytest.raises(Overloaded, match="SPECDEC_MAX_WAIT_MS") as caught:
        async with asyncio.timeout(5):
            await fetch(waits)
    assert caught.value.retry_after_ms > 0
    runs.cancel()
    await settle()
    pools.check_empty()


async def test_a_request_keeps_its_place_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=1, max_waiting=0)
    with pools.driver.arriving(1, 10, 0, None), pytest.raises(Overloaded), pools.driver.arriving(1, 10, 0, None):
        pass
    with pools.driver.arriving(1, 10, 0, None):
        pass


async def unread(pools: Pools) -> tuple[Handle, list[int]]:
    """A reader that takes one piece and then nothing until its generation is held, beside one that reads on."""
    handle = pools.start("never reads", count=2500)
    async for _, event in handle:
        first = list(event.tokens)  # type: ignore[union-attr]
        break
    assert await fetch(pools.start("quick", count=900)) == answer_of(prompt_of("quick"), 900)
    return handle, first


async def given_up(pools: Pools) -> None:
    handle, first = await unread(pools)
    async with asyncio.timeout(5):
        while pools.driver._live:
            await asyncio.sleep(0.005)
    await settle()
    pools.check_empty()
    with pytest.raises(DeadlineExceeded, match="SPECDEC_MAX_UNREAD_MS.*output_token_ids"):
        async for _, event in handle:
            first += event.tokens  # type: ignore[union-attr]
    assert len(first) > MAX_UNDELIVERED and first == answer_of(prompt_of("never reads"), len(first)), "resumable, nothing lost"


async def test_F80_a_reader_that_never_reads_loses_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    await given_up(Pools(monkeypatch, max_unread_ms=100.0))


async def test_F80_twin_patience_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Undelivered, "_give_up", lambda self: None)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.6):
            await given_up(Pools(monkeypatch, max_unread_ms=100.0))


async def test_F80_a_reader_that_comes_back_in_time_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_unread_ms=60_000.0)
    handle, first = await unread(pools)
    assert pools.driver._live["never reads"].generation.state is State.HELD
    assert first + await fetch(handle) == answer_of(prompt_of("never reads"), 2500)
    await settle()
    pools.check_empty()


async def test_a_session_that_finds_no_room_any_more_asks_again_until_a_target_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are held back by it, also when it had room elsewhere before."""
    pools = Pools(monkeypatch, drafts=0)
    target, asks = pools.targets[0], pools.driver._door.admission.asks
    target.silent = True
    handle = pools.start("s", count=40)
    await settle()
    assert asks("s")
    for _ in range(2):
        (kept,) = target.kept
        target.kept.clear()
        target.say(kept)
        assert not asks("s"), "a result is room"
        await settle()
    (kept,) = target.kept
    target.kept.clear()
    target.say(terms.Answer("s", kept.epoch, kept.round, terms.NoRoom(1)))
    assert asks("s")
    target.silent = False
    assert await asyncio.wait_for(fetch(handle), 20) == answer_of(prompt_of("s"), 40)
    assert not asks("s")
