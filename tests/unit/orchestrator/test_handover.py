"""Sessions leave a replica that drains before it ends, and a draft that lets them starve; texts are those of a session that stayed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import leaving
from orchestrator.observe import MAX_REPLICA_LABELS, Observer, _endpoints, _sessions
from orchestrator.peers import Heard
from specdec import terms
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

COUNT = 300
BELIEVED = 4  # reports until a target counts as slow, in these tests


def report(peer: ScriptedPeer, **words: Any) -> None:
    """The peer's next beat."""
    target = peer in peer._listener.targets.peers.values()  # type: ignore[attr-defined]
    beat = terms.TargetBeat(0, 0, 0, 10_000, 0, 20, **words) if target else terms.DraftLoad(1.0, 0.0, 0, 0, 10_000, **words)
    peer.beat = beat
    peer._listener.heard(peer, Heard((), beat))  # type: ignore[arg-type]


def spread(pools: Pools, *names: str) -> set[str]:
    return {pools.driver._live[name].target for name in names}


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []
    replaced, moved = Observer.replaced, Observer.handed_over

    def note(self: Observer, *, equal: bool, reason: str) -> None:
        told.append(f"{reason} {equal}")
        replaced(self, equal=equal, reason=reason)

    def note_moved(self: Observer, pool: str, reason: str) -> None:
        told.append(f"{pool} {reason}")
        moved(self, pool, reason)

    monkeypatch.setattr(Observer, "replaced", note)
    monkeypatch.setattr(Observer, "handed_over", note_moved)
    return told


async def drained(pools: Pools) -> list[list[int]]:
    """Six long answers; the first target drains in the middle, and ends when nobody is left there."""
    old = pools.targets[0]
    handles = [asyncio.ensure_future(fetch(pools.start(f"s{i}", count=COUNT))) for i in range(6)]
    await settle(30)
    assert "t0:1" in spread(pools, *(f"s{i}" for i in range(6)))
    for remaining_ms in range(10_000, 0, -250):
        if not old.held:
            break
        report(old, draining=True, drain_remaining_ms=remaining_ms)
        await settle(2)
    assert not old.held, "nobody is left"
    old.fall()
    return await asyncio.gather(*handles)


async def test_a_target_that_drains_is_empty_before_it_ends(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    pools = Pools(monkeypatch, targets=2)
    assert await drained(pools) == [answer_of(prompt_of(f"s{i}"), COUNT) for i in range(6)]
    assert "target draining" in told and set(told) == {"target draining", "draining True"}, "none was lost"
    assert pools.driver.pools.targets.ejection.closed("t0:1"), "it ended as it had said"
    await settle()
    pools.check_empty()


async def test_twin_without_the_announcement_they_are_lost(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr("orchestrator.handover.leave", lambda *a, **k: [])
    with pytest.raises(AssertionError, match="nobody is left"):
        await drained(Pools(monkeypatch, targets=2))


async def test_nothing_is_placed_where_it_drains(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=2)
    report(pools.targets[0], draining=True, drain_remaining_ms=9000)
    report(pools.drafts[0], draining=True)
    handles = [pools.start(f"s{i}") for i in range(20)]
    assert spread(pools, *(f"s{i}" for i in range(20))) == {"t1:1"}
    await asyncio.gather(*map(fetch, handles))
    assert not pools.targets[0].seen and not pools.drafts[0].seen


async def test_who_leaves_does_not_count_as_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=3, drafts=1)

    def states() -> dict[str, float]:
        return {labels["state"]: count for count, labels in _endpoints(pools.driver) if labels["pool"] == "target" and count}

    assert states() == {"up": 3}
    report(pools.targets[0], draining=True, drain_remaining_ms=9000)
    handles = [asyncio.ensure_future(fetch(pools.start(f"s{i}", count=COUNT))) for i in range(2)]
    await settle(10)
    assert spread(pools, "s0", "s1") == {"t1:1", "t2:1"} and states() == {"leaving": 1, "up": 2}
    pools.driver.pools.targets.remove("t1:1")
    assert states() == {"leaving": 2, "up": 1}, "it serves until its session has ended"
    await asyncio.gather(*handles)
    pools.targets[0].fall()
    assert states() == {"up": 1, "down": 1}


async def test_the_only_target_keeps_its_sessions_to_the_end(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    pools = Pools(monkeypatch, targets=1)
    handle = asyncio.ensure_future(fetch(pools.start("s", count=COUNT)))
    await settle(10)
    for remaining_ms in (5000, 1000, 0):
        report(pools.targets[0], draining=True, drain_remaining_ms=remaining_ms)
    assert spread(pools, "s") == {"t0:1"} and not told
    waits = asyncio.ensure_future(fetch(pools.start("waits")))
    await settle(5)
    pools.targets[0].fall()
    pools.targets[0].rise()
    assert await handle == answer_of(prompt_of("s"), COUNT)
    assert await waits == answer_of(prompt_of("waits"), 20), "the process that follows it takes sessions"


async def beside_a_slow_one(pools: Pools, step_ms: int, count: int = COUNT) -> list[int]:
    """Sessions at the first target with every beat of both; six long answers run, and come out right."""
    handles = [asyncio.ensure_future(fetch(pools.start(f"s{i}", count=count))) for i in range(6)]
    await settle(10)
    seen = []
    for _ in range(BELIEVED + 5):
        for peer, step in zip(pools.targets, (step_ms, 20), strict=True):
            peer.beat = terms.TargetBeat(len(peer.held), 0, 0, 10_000, 0, step)
            peer._listener.heard(peer, Heard((), peer.beat))  # type: ignore[arg-type]
        await settle(3)
        seen.append(len(pools.targets[0].held))
    assert count < COUNT or not any(handle.done() for handle in handles)
    assert await asyncio.gather(*handles) == [answer_of(prompt_of(f"s{i}"), count) for i in range(6)]
    return seen


async def test_sessions_leave_a_target_that_became_slow_one_by_one(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr("orchestrator.places.SLOW_REPORTS", BELIEVED)
    pools = Pools(monkeypatch, targets=2)
    seen = await beside_a_slow_one(pools, 200)
    assert seen == [3] * (BELIEVED - 1) + [2] + [1] * 5, "one with a beat, once it is believed, until the other has half as much to do"
    assert told == ["target slow", "slow True"] * 2, "and nobody comes back"
    await settle()
    pools.check_empty()


async def test_sessions_stay_where_it_is_no_better_elsewhere(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr("orchestrator.places.SLOW_REPORTS", BELIEVED)
    assert set(await beside_a_slow_one(Pools(monkeypatch, targets=2), 75)) == {3}, "slower, but not by far"
    other = Pools(monkeypatch, targets=2)
    assert other.targets[1].info is not None
    other.targets[1].info = replace(other.targets[1].info, numerics_fingerprint="other")
    assert len(set(await beside_a_slow_one(other, 200))) == 1, "the text would not be sure to be the same"
    assert max(await beside_a_slow_one(Pools(monkeypatch, targets=2), 200, count=60)) == 3 and not told, "they end soon"


async def test_sessions_leave_a_draft_that_drains_at_once(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    pools = Pools(monkeypatch, drafts=2)
    handles = [pools.start(f"s{i}", count=COUNT) for i in range(6)]
    await settle(10)
    old, other = pools.drafts
    assert old.held and other.held
    report(old, draining=True)
    await settle(3)
    assert not old.held and len(other.held) == 6
    assert set(told) == {"draft draining"}
    old.fall()
    assert await asyncio.gather(*map(fetch, handles)) == [answer_of(prompt_of(f"s{i}"), COUNT) for i in range(6)]
    await settle()
    pools.check_empty()


async def test_a_hungry_session_moves_to_a_draft_with_less_to_do(monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
    monkeypatch.setattr("orchestrator.driver.Trouble.LATE.weight", 0.0)  # nobody is ejected meanwhile
    pools = Pools(monkeypatch, drafts=2, max_grace_ms=0)
    busy, idle = pools.drafts
    idle.fall()
    handles = [pools.start(f"s{i}", count=COUNT) for i in range(5)]
    await settle(10)
    idle.rise()
    busy.silent = True
    assert [len(tokens) for tokens in await asyncio.gather(*map(fetch, handles))] == [COUNT] * 5
    assert "draft hungry" in told and len(told) < 10
    await settle()
    pools.check_empty()


def test_who_is_left_at_the_margin_leaves() -> None:
    assert leaving.leave({"a": 1, "b": 10}, 1.0, leaving.MARGIN_MS, equal=False) == ["a", "b"]


async def test_replicas_that_a_metric_names_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=0, drafts=0)
    for i in range(MAX_REPLICA_LABELS + 9):
        for _ in range(i + 1):
            pools.driver.pools.targets.places.moved("", f"t{i}:1")
    readings = _sessions(pools.driver)
    assert len(readings) == MAX_REPLICA_LABELS + 1
    assert readings[-1] == (sum(range(1, 10)), {"pool": "target", "replica": "other"})
