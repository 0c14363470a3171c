"""The driver between scripted pools: releases, admission, slow readers, lost and returning targets. Broken twins beside them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.admission import Admission
from orchestrator.driver import Driver
from orchestrator.generation import Generation
from orchestrator.handle import MAX_UNDELIVERED, Handle, Undelivered, Wake
from orchestrator.observe import Observer
from orchestrator.states import State
from orchestrator.tally import Tally
from specdec import terms
from specdec.errors import AlreadyExists, InternalFault, Mismatch, Overloaded, SpecdecError, Unavailable
from tests.unit.orchestrator.scripted_pools import VOCAB, Pools, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.timeout(30)


async def test_texts_are_the_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=2)
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}", k=i % 5)) for i in range(20)))
    assert got == [answer_of(prompt_of(f"s{i}"), 20) for i in range(20)]
    await settle()
    pools.check_empty()


# --- F74: one release per session -------------------------------------------------------------------------------------


async def many(pools: Pools, normal: int, cancelled: int) -> None:
    draw = random.Random(3)

    async def leaver(name: str) -> None:
        handle = pools.start(name, count=30)
        for _ in range(draw.choice((0, 0, 1, 5, 40))):
            await asyncio.sleep(0)
        handle.cancel()
        handle.cancel()

    async def stayer(name: str) -> None:
        assert await fetch(pools.start(name, count=4)) == answer_of(prompt_of(name), 4)

    tasks = [stayer(f"n{i}") for i in range(normal)] + [leaver(f"c{i}") for i in range(cancelled)]
    draw.shuffle(tasks)
    await asyncio.gather(*tasks)
    await settle()


async def test_F74_exactly_one_release(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=64, max_waiting=2000)
    await many(pools, 1000, 1000)
    pools.check_empty()
    for peer in (pools.targets[0], pools.drafts[0]):
        assert peer.not_found == 0
        assert set(peer.released.values()) == {1}
        assert sum(peer.released.values()) == len(peer.seen) >= 1000


@pytest.mark.parametrize("end", [lambda self: None, lambda self: self._tell(ev.Forget())], ids=["nothing", "no close"])
async def test_F74_twin_an_end_without_release(monkeypatch: pytest.MonkeyPatch, end: Any) -> None:
    monkeypatch.setattr(Generation, "_end", end)
    pools = Pools(monkeypatch, max_running=64, max_waiting=2000)
    await asyncio.wait_for(many(pools, 20, 20), 5)
    with pytest.raises(AssertionError):
        pools.check_empty()


@pytest.mark.parametrize("state", list(State))
async def test_a_cancel_in_every_state_frees_both_pools(monkeypatch: pytest.MonkeyPatch, state: State) -> None:
    pools = Pools(monkeypatch, max_run_ahead=64 if state is State.GOING else 0)
    target, draft = pools.targets[0], pools.drafts[0]
    if state is State.PLACING:
        target.connected = False
    if state is State.CHOOSING:
        draft.silent = True
    count, n = 100_000 if state is State.HELD else 20, 2 if state is State.WAITING else 1
    handle = pools.start("s", count=count, k=0 if state is State.GOING else 3, n=n)
    generation = pools.driver._live["s.1" if state is State.WAITING else "s"].generation
    if state in (State.VERIFYING, State.BACKING_OFF, State.WAITING):
        target.silent = True
        await settle(3)
        if state is State.BACKING_OFF:
            target.say(terms.Answer("s", generation.at.epoch, generation.at.round, terms.NoRoom(10_000)))
    elif state is State.DONE:
        await fetch(handle)
    else:
        await settle(3000 if state is State.HELD else 10)
    assert generation.state is state
    target.silent = draft.silent = False
    handle.cancel()
    await settle()
    target.connected = True
    pools.check_empty()
    assert target.not_found == draft.not_found == 0


async def test_giving_up_and_closing_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=2)
    pools.targets[0].silent = True
    handles = [pools.start(f"s{i}") for i in range(4)]
    await settle(3)
    await pools.driver.close()
    for handle in handles:
        with pytest.raises(Unavailable, match="resume"):
            await fetch(handle)
    await settle()
    pools.check_empty()
    assert set(pools.targets[0].seen) == {"s0", "s1"}  # who waited never began
    with pytest.raises(Unavailable):
        pools.start("late")


# --- admission --------------------------------------------------------------------------------------------------------


async def test_F75_who_left_the_queue_never_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=1, max_waiting=5)
    pools.targets[0].silent = True
    first = pools.start("first")
    queued = [pools.start(f"q{i}") for i in range(5)]
    with pytest.raises(Overloaded):
        pools.start("one too many")
    for i in (0, 1, 3, 4):
        queued[i].cancel()
    assert pools.driver.waiting == 1
    pools.targets[0].silent = False
    await settle(2)
    pools.targets[0].say(*pools.targets[0].kept)
    assert await fetch(first) == answer_of(prompt_of("first"), 20)
    assert await fetch(queued[2]) == answer_of(prompt_of("q2"), 20)
    await settle()
    assert set(pools.targets[0].seen) == set(pools.drafts[0].seen) == {"first", "q2"}
    pools.check_empty()


def test_priority_then_order_and_no_memory_of_who_left() -> None:
    room = Admission(1, 1000)
    assert room.ask(["runs"], 0)
    assert not any(room.ask([name], priority) for name, priority in (("b", 1), ("a", 0), ("c", 1)))
    for i in range(10_000):
        room.ask([f"x{i}"], i % 3)
        assert room.leave(f"x{i}") == []
    assert len(room._queue) < 50
    assert [room.leave(name) for name in ("runs", "a", "b", "c", "never heard of")] == [["a"], ["b"], ["c"], [], []]


async def test_F79_one_live_request_per_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    first = pools.start("twice")
    with pytest.raises(AlreadyExists, match="twice"):
        pools.start("twice")
    await settle(2)
    first.cancel()
    again = pools.start("twice")  # while the pools are still closing the first
    assert await fetch(again) == answer_of(prompt_of("twice"), 20)
    await settle()
    pools.check_empty()


# --- F80: slow readers ------------------------------------------------------------------------------------------------


async def most_waiting(pools: Pools) -> tuple[int, list[Handle]]:
    """Eight readers that take one piece and sleep; one that reads on."""
    slow = [pools.start(f"slow{i}", count=2500) for i in range(8)]
    for handle in slow:
        await anext(aiter(handle))
    assert await fetch(pools.start("quick", count=900)) == answer_of(prompt_of("quick"), 900)
    return max(len(handle._answers[0].waiting) for handle in slow), slow


async def test_F80_slow_readers_hold_themselves_only(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    most, slow = await most_waiting(pools)
    assert MAX_UNDELIVERED < most <= MAX_UNDELIVERED + 2 * 4
    assert {pools.driver._live[h._answers[0].session_id].generation.state for h in slow} == {State.HELD}
    await settle()
    seen = sum(pools.targets[0].seen.values())
    await settle(200)
    assert sum(pools.targets[0].seen.values()) == seen  # nothing is decided for them
    rest = await fetch(slow[0])
    assert rest == answer_of(prompt_of("slow0"), 2500)[-len(rest) :] and len(rest) > 2400
    for handle in slow:
        handle.cancel()
    await settle()
    pools.check_empty()


async def test_F80_twin_nobody_listens_to_a_reader_that_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = Generation._apply
    monkeypatch.setattr(Generation, "_apply", lambda self, event: None if isinstance(event, ev.ReaderBehind) else apply(self, event))
    most, _ = await most_waiting(Pools(monkeypatch))
    assert most > MAX_UNDELIVERED + 2 * 4


async def test_what_was_decided_comes_before_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver, wake = Pools(monkeypatch).driver, Wake()
    one, other = (Undelivered(driver, name, Tally(3), wake) for name in "ab")
    events = aiter(Handle([one, other], wake))
    one.deliver(plain(1))
    assert await told(events) == (0, (1,))
    one.deliver(plain(2))
    other.deliver(plain(3))
    one.end(Unavailable("gone"))
    assert [await told(events), await told(events)] == [(1, (3,)), (0, (2,))]
    other.deliver(plain(4))
    assert await told(events) == (1, (4,))  # of the other answer, too
    with pytest.raises(Unavailable):
        await anext(events)


def plain(*tokens: int) -> ev.Deliver:
    return ev.Deliver(tokens, (), (terms.Origin.PLAIN,) * len(tokens))


async def told(events: AsyncIterator[tuple[int, Any]]) -> tuple[int, tuple[int, ...]]:
    index, event = await anext(events)
    return index, event.tokens


# --- targets come and go ----------------------------------------------------------------------------------------------


async def lose_and_return(pools: Pools) -> list[int]:
    """The answer to a Step is held back until its target was lost, came back and has the session again; twice."""
    target = pools.targets[0]
    handle = pools.start("s")
    for _ in range(2):
        target.silent = True
        await settle(4)
        late = list(target.kept)
        assert any(isinstance(a.outcome, terms.Result) for a in late)
        target.kept.clear()
        target.fall()
        target.rise()
        await settle(1)
        target.say(*late)
        target.silent = False
        await settle(2)
        target.say(*target.kept)
        target.kept.clear()
    return await asyncio.wait_for(fetch(handle), 2)


async def test_F66_a_late_answer_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    assert await lose_and_return(pools) == answer_of(prompt_of("s"), 20)
    await settle()
    pools.check_empty()


async def test_F66_twin_answers_of_any_epoch_count(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = Generation._on_answered

    def careless(self: Generation, answer: terms.Answer) -> None:
        answered(self, replace(answer, epoch=self.epoch, round=self.round))

    monkeypatch.setattr(Generation, "_on_answered", careless)
    with pytest.raises((AssertionError, SpecdecError, TimeoutError)):
        assert await lose_and_return(Pools(monkeypatch)) == answer_of(prompt_of("s"), 20)


async def test_pools_in_turmoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty sessions while targets and drafts fall and rise at random; a pool may be empty for a while."""
    pools = Pools(monkeypatch, targets=2, drafts=2, max_running=16)
    draw, over = random.Random(5), asyncio.Event()

    async def turmoil() -> None:
        while not over.is_set():
            peer = draw.choice((*pools.targets, *pools.drafts))
            peer.fall() if peer.connected else peer.rise()
            await settle(draw.randint(5, 30))

    trouble = asyncio.create_task(turmoil())
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}", count=60)) for i in range(40)))
    over.set()
    await trouble
    assert got == [answer_of(prompt_of(f"s{i}"), 60) for i in range(40)]
    await settle()
    pools.check_empty()


async def test_all_who_waited_are_placed_evenly_when_targets_come_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=0)
    for target in pools.targets:
        target.fall()
    handles = [pools.start(f"s{i}") for i in range(100)]
    for target in pools.targets:
        target.connected = True
    pools.driver.pools.up(pools.targets[0])  # type: ignore[arg-type]
    placed = pools.driver.pools.targets.places.sessions
    assert abs(placed["t0:1"] - placed["t1:1"]) <= 30
    assert [len(tokens) for tokens in await asyncio.gather(*map(fetch, handles))] == [20] * 100


async def test_equal_numerics_are_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=4, drafts=0)
    for i, target in enumerate(pools.targets):
        assert target.info is not None
        target.info, target.silent = replace(target.info, numerics_fingerprint="even" if i % 2 == 0 else "odd"), True
    told: list[bool] = []
    monkeypatch.setattr(Observer, "replaced", lambda self, *, equal, reason: told.append(equal))
    for i in range(32):  # so many that one of them is at the target that falls
        pools.start(f"s{i}", k=0)
    before = {name: live.target for name, live in pools.driver._live.items()}
    pools.targets[0].fall()
    moved = {name: live.target for name, live in pools.driver._live.items() if before[name] == "t0:1"}
    assert set(moved.values()) == {"t2:1"} and told == [True] * len(moved)
    pools.targets[2].fall()
    for _ in range(100):  # sessions that lost two targets before a result pause first
        if False in told:
            break
        await asyncio.sleep(0.01)
    assert False in told  # better a target of other numerics than none


async def test_a_target_of_another_model_is_refused_while_answers_depend_on_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=0)
    one, other = pools.targets
    assert one.info is not None and other.info is not None
    other.connected, other.info = False, replace(other.info, model="another")
    with pytest.raises(Mismatch, match="another"):
        pools.driver.pools.accept(other, other.info)  # type: ignore[arg-type]
    one.fall()
    pools.driver.pools.accept(other, other.info)  # type: ignore[arg-type]
    with pytest.raises(Mismatch, match="vocabulary"):
        pools.driver.pools.accept(other, replace(other.info, vocabulary_fingerprint=b"foreign"))  # type: ignore[arg-type]


async def test_what_is_admitted_fits_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=0)
    one = pools.targets[1]
    assert one.info is not None
    one.fall()
    one.info = replace(one.info, max_model_len=100)
    one.rise()
    assert (await pools.driver.model_info()).max_model_len == 100


# --- defects and nonsense ---------------------------------------------------------------------------------------------


async def one_defect(pools: Pools, monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[Any]:
    deliver = Undelivered.deliver

    def broken(self: Undelivered, decided: ev.Deliver) -> None:
        deliver(self, decided)
        if next(calls) == 10:
            raise KeyError("a defect")

    calls = iter(range(100_000))
    monkeypatch.setattr(Undelivered, "deliver", broken)
    return await asyncio.wait_for(asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(6)), return_exceptions=True), seconds)


async def test_a_defect_costs_one_session(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    got = await one_defect(pools, monkeypatch, 5)
    assert sum(isinstance(answer, InternalFault) for answer in got) == 1
    assert sum(isinstance(answer, list) and len(answer) == 20 for answer in got) == 5
    await settle()
    pools.check_empty()


async def test_twin_a_defect_that_is_not_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(self: Driver, session_id: str, live: Any, event: ev.Event | None) -> None:
        commands = live.generation.begin() if event is None else live.generation.handle(event)
        self._count_placement(live)
        self._carry_out(session_id, live, commands)

    monkeypatch.setattr(Driver, "_apply", careless)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
    with pytest.raises(TimeoutError):
        await one_defect(Pools(monkeypatch), monkeypatch, 0.5)


async def test_answers_and_proposals_of_strangers_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=2)
    handle = pools.start("s")
    live = pools.driver._live["s"]
    for peer in pools.targets:
        if peer.name != live.target:
            lie = terms.Result(1, 1, 0, 0, (1, 2, 3))
            peer.say(terms.Answer("s", 1, 1, lie), terms.Answer("nobody", 1, 1, lie))
    for peer in pools.drafts:
        peer.say(terms.Proposal("s", 1, 1, 5, (VOCAB,)), terms.Resync("nobody", 1, 1), terms.Refused("s", 9, "no", 0))
    assert await fetch(handle) == answer_of(prompt_of("s"), 20)
