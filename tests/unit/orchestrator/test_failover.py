"""What a lost, full or refusing target costs: a pause, never a token; and what a client hears when nobody is left. F67, F82, F86, F87."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import moving
from orchestrator.states import State
from specdec import terms
from specdec.errors import Unavailable
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.timeout(30)


def fill(peer: ScriptedPeer, retry_after_ms: int = 5) -> None:
    """It has no room from here on."""
    peer._verify = lambda step: terms.Answer(step.session_id, step.epoch, step.round, terms.NoRoom(retry_after_ms))  # type: ignore[method-assign]


def empty(peer: ScriptedPeer) -> None:
    del peer._verify  # type: ignore[attr-defined]


def beat(used: int) -> terms.TargetBeat:
    return terms.TargetBeat(0, 0, used, 4096, 0, 0)


# --- no room ----------------------------------------------------------------------------------------------------------


async def test_F67_a_session_without_room_goes_where_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2)
    fill(pools.targets[0], retry_after_ms=10_000)
    got = await asyncio.wait_for(asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(12))), 2)
    assert got == [answer_of(prompt_of(f"s{i}"), 20) for i in range(12)]
    assert len(pools.targets[1].seen) == 12 and pools.targets[0].seen
    await settle()
    pools.check_empty()


async def test_F67_twin_a_session_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moving, "SeekRoom", lambda full: moving.StartTimer(moving.Timer.DRAFT, 1e6))
    pools = Pools(monkeypatch, targets=2)
    fill(pools.targets[0], retry_after_ms=10_000)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(12))), 0.2)


async def test_F67_a_parked_session_goes_too_and_only_where_its_text_is_sure_to_be_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2)
    handle = pools.start("s", count=200)
    await settle(30)
    here = next(peer for peer in pools.targets if peer.held)
    there = next(peer for peer in pools.targets if not peer.held)
    assert there.info is not None
    same, there.info = there.info, replace(there.info, numerics_fingerprint="other")
    fill(here)
    await settle(30)
    assert pools.driver._live["s"].generation.state is State.BACKING_OFF and not there.seen
    there.info = same
    assert await asyncio.wait_for(fetch(handle), 2) == answer_of(prompt_of("s"), 200)
    assert there.seen
    await settle()
    pools.check_empty()


async def test_F67_nobody_has_room_then_somebody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wait for room ends no session, and asks no more often than the targets want to be asked."""
    pools = Pools(monkeypatch, targets=3)
    for peer in pools.targets:
        fill(peer, retry_after_ms=20)
    pools.targets[2].beat = beat(used=4096)  # not even asked for room
    handle = pools.start("s")
    await asyncio.sleep(0.3)
    asked = sum(peer.seen["s"] for peer in pools.targets[:2])
    assert 2 < asked <= 4 * 0.3 / 0.02 + 4
    empty(pools.targets[1])
    assert await asyncio.wait_for(fetch(handle), 2) == answer_of(prompt_of("s"), 20)
    await settle()
    pools.check_empty()


# --- nobody is left ---------------------------------------------------------------------------------------------------


async def broken_off(handle: Any) -> tuple[list[int], Unavailable]:
    tokens: list[int] = []
    with pytest.raises(Unavailable) as told:
        async for _, event in handle:
            tokens += event.tokens
    return tokens, told.value


async def test_the_error_tells_what_there_is_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, placement_wait_ms=100)
    handle = pools.start("s", count=400)
    await settle(40)
    pools.targets[0].fall()
    tokens, error = await asyncio.wait_for(broken_off(handle), 2)
    assert tokens == answer_of(prompt_of("s"), 400)[: len(tokens)] and tokens
    assert error.output_tokens == len(tokens) and error.retry_after_ms == moving.COME_BACK_MS
    assert f"{len(tokens)} tokens were decided: resume with output_token_ids" in str(error)


async def test_an_orchestrator_that_goes_tells_every_answer_its_own_count(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    handles = [pools.start(f"s{i}", count=400 + i) for i in range(3)]
    await settle(40)
    pools.driver.give_up()
    for handle in handles:
        tokens, error = await broken_off(handle)
        assert error.output_tokens == len(tokens) > 0
    with pytest.raises(Unavailable) as told:
        pools.start("late")
    assert told.value.output_tokens is None and told.value.retry_after_ms


# --- replicas of other sizes ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smaller", [{"max_model_len": 30}, {"max_num_speculative_tokens": 4}])
async def test_a_session_never_goes_to_a_target_that_is_too_small_for_it(monkeypatch: pytest.MonkeyPatch, smaller: dict[str, int]) -> None:
    """One that came after the session was admitted would end the answer early, or refuse its blocks as the client's fault."""
    pools = Pools(monkeypatch, targets=2, placement_wait_ms=60_000)
    large, small = pools.targets
    assert small.info is not None
    small.info = replace(small.info, **smaller)  # type: ignore[arg-type]
    handles = [pools.start(f"s{i}", count=40) for i in range(4)]
    await settle(6)
    assert small.seen.total() == 0 and large.held
    large.fall()
    short = asyncio.create_task(fetch(pools.start("t", count=10)))  # behind those that wait
    await settle(50)
    assert small.seen.total() == 0 or set(small.seen) == {"t"}
    large.rise()
    assert [await fetch(handle) for handle in handles] == [answer_of(prompt_of(f"s{i}"), 40) for i in range(4)]
    assert await short == answer_of(prompt_of("t"), 10)
    assert "max_model_len" not in smaller or small.seen["t"]
    await settle()
    pools.check_empty()
