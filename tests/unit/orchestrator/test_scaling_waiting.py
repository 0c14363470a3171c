"""F174: which calls wait since no replica of a pool can take them."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.admission import Admission
from specdec import terms
from specdec.errors import Unavailable
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.unit


def waiting(pools: Pools) -> tuple[int, int]:
    """For a target, for a draft."""
    targets, drafts = (pools.driver.waiting_for(pool) for pool in pools.driver.pools)
    return targets, drafts


async def test_sessions_without_a_target_wait_and_without_a_draft_they_run_and_want_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    target, draft = pools.targets[0], pools.drafts[0]
    assert waiting(pools) == (0, 0)
    target.fall()
    draft.fall()
    handles = [asyncio.ensure_future(fetch(pools.start(name))) for name in "abc"]
    plain = asyncio.ensure_future(fetch(pools.start("plain", k=0)))
    await settle()
    assert waiting(pools)[0] == 4
    target.silent = True
    target.rise()
    await settle()
    assert waiting(pools) == (0, 3), "who asked for no speculation wants no draft"
    draft.rise()
    await settle()
    assert waiting(pools) == (0, 0)
    target.silent = False
    target.say(*target.kept)
    assert await asyncio.gather(*handles, plain) == [answer_of(prompt_of(name), 20) for name in ("a", "b", "c", "plain")]
    assert waiting(pools) == (0, 0)


async def test_calls_that_wait_for_the_first_target_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=1, placement_wait_ms=100)
    pools.driver.pools._model_known.clear()
    pools.targets[0].fall()
    asking = [asyncio.ensure_future(pools.driver.model_info()) for _ in range(2)]
    await settle()
    assert waiting(pools)[0] == 2
    asking[0].cancel()
    await settle()
    assert waiting(pools)[0] == 1, "whoever leaves waits no more"
    with pytest.raises(Unavailable):
        await asking[1]
    assert waiting(pools)[0] == 0


async def test_sessions_that_find_no_room_wait_though_a_target_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    full = True
    verify = ScriptedPeer._verify

    def refuses(self: ScriptedPeer, step: terms.Step) -> terms.Answer:
        if full and step.begin is not None:
            return terms.Answer(step.session_id, step.epoch, step.round, terms.NoRoom(10))
        return verify(self, step)

    monkeypatch.setattr(ScriptedPeer, "_verify", refuses)
    pools = Pools(monkeypatch)
    handles = [asyncio.ensure_future(fetch(pools.start(name))) for name in "ab"]
    await settle()
    assert waiting(pools)[0] == 2
    full = False
    assert await asyncio.gather(*handles) == [answer_of(prompt_of(name), 20) for name in "ab"]
    assert waiting(pools)[0] == 0


def test_who_waits_for_a_place_here_does_not_wait_for_room_there() -> None:
    """More targets would not help them."""
    room = Admission(max_running=2, max_waiting=10)
    for name in "abcd":
        room.ask([name], 0)
    assert (room.running, room.waiting, room.for_room) == (2, 2, 0)
    room.no_room("a")
    assert room.for_room == 1, "the one that was refused; the queue is that of this orchestrator"
    room.has_room("a")
    assert room.for_room == 0


def test_who_waits_behind_those_that_find_no_room_counts() -> None:
    room = Admission(max_running=100, max_waiting=100)
    asked = 0
    while not room.waiting:
        name = f"s{asked}"
        room.ask([name], 0)
        if not room.waits(name):
            room.no_room(name)
        asked += 1
    assert room.running < 100 and room.for_room == asked
