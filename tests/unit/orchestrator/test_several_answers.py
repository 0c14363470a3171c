"""A request with several answers, from the driver down: who waits for whom, who may start, and that nothing is left. F74, F77, F79, F80."""

from __future__ import annotations

import asyncio
import random

import pytest

from orchestrator import events as ev
from orchestrator.admission import Admission
from orchestrator.driver import Driver
from orchestrator.handle import MAX_UNDELIVERED
from orchestrator.output import Ended
from orchestrator.states import State
from specdec import terms
from specdec.errors import AlreadyExists, InvalidRequest, Overloaded, Unavailable
from specdec.seeds import answer_seed
from tests.unit.orchestrator.scripted_pools import SEED, Pools, answer_of, fetch, fetch_all, prompt_of, settle

pytestmark = pytest.mark.timeout(30)


def texts(name: str, n: int, count: int = 20) -> list[list[int]]:
    """Answer i is the one of a request of its own with the seed of answer i."""
    return [answer_of(prompt_of(name), count, answer_seed(SEED, i)) for i in range(n)]


def state(pools: Pools, name: str) -> State:
    return pools.driver._live[name].generation.state


@pytest.mark.parametrize("n", [2, 5, 16])
async def test_each_answer_is_that_of_its_seed(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    pools = Pools(monkeypatch, targets=3, drafts=2)
    assert await fetch_all(pools.start("s", n=n)) == texts("s", n)
    assert len({tuple(tokens) for tokens in texts("s", n)}) == n
    await settle()
    pools.check_empty()


async def test_the_others_start_where_the_prompt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=4, drafts=1)
    for target in pools.targets:
        target.silent = True
    handle = pools.start("s", n=4)
    await settle(5)
    (first,) = (target for target in pools.targets if target.seen)
    assert set(first.seen) == {"s"} and set(pools.drafts[0].seen) == {"s"}, "the others wait, and no draft works for them"
    assert [state(pools, f"s.{i}") for i in (1, 2, 3)] == [State.WAITING] * 3
    first.say(*first.kept)
    for target in pools.targets:
        target.silent = False
    await settle(2)
    assert set(first.seen) == {"s", "s.1", "s.2", "s.3"} and not any(t.seen for t in pools.targets if t is not first)
    assert first.forks == {"s.1": True, "s.2": True, "s.3": True}
    assert await fetch_all(handle) == texts("s", 4)
    await settle()
    pools.check_empty()


@pytest.mark.parametrize("count", [1, 3])
async def test_an_answer_that_is_over_at_once_is_forked_from_all_the_same(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Its keys and values are there until the first Steps of the others are out."""
    pools = Pools(monkeypatch, targets=2, drafts=0)
    assert await fetch_all(pools.start("s", n=3, count=count)) == texts("s", 3, count)
    assert {name: shared for target in pools.targets for name, shared in target.forks.items()} == {"s.1": True, "s.2": True}
    await settle()
    pools.check_empty()


def end_of(pools: Pools, how: str) -> None:
    """Answer 0 goes, before it decided anything."""
    target = next(target for target in pools.targets if target.seen)
    if how == "failed":
        target.say(terms.Answer("s", 1, 1, terms.Failed(3, "sampling.top_k: broken")))
    elif how == "finished":
        target.say(terms.Answer("s", 1, 1, terms.Result(1, 0, 0, 0, (), finish=terms.FinishReason.STOP, stop_token_id=2)))
    elif how == "cancelled":
        pools.driver.feed("s", ev.Cancelled())
    else:
        pools.driver.feed("s", ev.TargetPlaced("t0:1"))  # an event that cannot be: a defect


@pytest.mark.parametrize("how", ["failed", "finished", "cancelled", "defect"])
async def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    pools = Pools(monkeypatch)
    pools.targets[0].silent = True
    handle = pools.start("s", n=3)
    await settle(3)
    pools.targets[0].kept.clear()
    end_of(pools, how)
    pools.targets[0].silent = False
    assert state(pools, "s.1") is state(pools, "s.2") is State.VERIFYING
    while pools.driver._live:
        await asyncio.sleep(0.01)
    assert [answer.waiting for answer in handle._answers[1:]] == texts("s", 3)[1:]
    await settle()
    pools.check_empty()


@pytest.mark.parametrize("how", ["failed", "cancelled"])
async def test_twin_nobody_tells_those_who_wait(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(Driver, "_prefix_ready", lambda self, live, target: False)
    pools = Pools(monkeypatch)
    pools.targets[0].silent = True
    pools.start("s", n=2)
    await settle(3)
    end_of(pools, how)
    await settle()
    assert state(pools, "s.1") is State.WAITING


async def test_without_a_target_all_fail_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, placement_wait_ms=100)
    pools.targets[0].fall()
    handle = pools.start("s", n=3)
    with pytest.raises(Unavailable):
        await fetch_all(handle)
    handle.cancel()
    await settle()
    pools.check_empty()


# --- admission --------------------------------------------------------------------------------------------------------


def test_all_are_let_in_or_none() -> None:
    room = Admission(max_running=4, max_waiting=6)
    with pytest.raises(Overloaded, match="n: 5 answers never run at once here, at most 4 do"):
        room.ask([f"x{i}" for i in range(5)], 0)
    assert room.ask(["a0", "a1", "a2"], 0)
    assert not room.ask(["b0", "b1"], 0), "one place is free"
    assert not room.ask(["c"], 1), "behind b, though a place is free"
    with pytest.raises(Overloaded):
        room.ask(["d0", "d1", "d2", "d3"], 0)
    assert (room.running, room.waiting) == (3, 3), "who was turned away left no trace"
    assert room.leave("a0") == ["b0", "b1"] and room.running == 4
    assert room.leave("b1") == ["c"]
    assert not room.ask(["e0", "e1"], 0)
    assert room.leave("e0") == [] and room.leave("c") == ["e1"], "the place of one that left is not waited for"
    assert [room.leave(name) for name in ("a1", "a2", "b0", "e1")] == [[]] * 4
    assert (room.running, room.waiting, len(room._queue)) == (0, 0, 0)


def test_two_that_do_not_fit_together_take_turns() -> None:
    """Were each given the places that are free, both would hold half of what they need for ever."""
    room = Admission(max_running=4, max_waiting=100)
    requests = [[f"r{i}.{j}" for j in range(random.Random(i).randint(1, 4))] for i in range(30)]
    running = [session for request in requests if room.ask(request, 0) for session in request]
    done = 0
    while running:
        assert room.running == len(running) <= 4
        running += room.leave(running.pop(0))
        done += 1
    assert done == sum(map(len, requests)) and room.waiting == 0


async def test_a_request_too_many_is_refused_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=4, max_waiting=2)
    pools.targets[0].silent = True
    first = pools.start("first", n=3)
    with pytest.raises(Overloaded, match="n: 5"):
        pools.start("never", n=5)
    with pytest.raises(Overloaded):
        pools.start("too many", n=3)
    waits = pools.start("waits", n=2)
    assert (pools.driver.running, pools.driver.waiting) == (3, 2)
    assert set(pools.driver._requests) == {"request of first", "request of waits"}
    await settle(3)
    pools.targets[0].silent = False
    pools.targets[0].say(*pools.targets[0].kept)
    assert await fetch_all(first) == texts("first", 3)
    assert await fetch_all(waits) == texts("waits", 2)
    await settle()
    pools.check_empty()


async def test_an_elder_that_left_the_queue_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=3)
    pools.targets[0].silent = True
    first = pools.start("first", n=3)
    waits = pools.start("waits", n=3)
    waits._answers[0].cancel()
    await settle(3)
    assert pools.driver.waiting == 2 and "waits.1" not in pools.targets[0].seen, "those that wait for admission go on waiting for it"
    pools.targets[0].silent = False
    pools.targets[0].say(*pools.targets[0].kept)
    assert await fetch_all(first) == texts("first", 3)
    while pools.driver._live:
        await asyncio.sleep(0.01)
    assert [answer.waiting for answer in waits._answers] == [[], *texts("waits", 3)[1:]]
    await settle()
    pools.check_empty()


async def test_F79_a_request_is_live_until_its_last_answer_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    handle = pools.start("s", n=3)
    await settle(3)
    for name in ("s", "s.2"):
        pools.driver.feed(name, ev.Cancelled())
        with pytest.raises(AlreadyExists):
            pools.start("s", n=2)
    pools.driver.feed("s.1", ev.Cancelled())
    assert await fetch(pools.start("s")) == texts("s", 1)[0]
    handle.cancel()
    await settle()
    pools.check_empty()


# --- ends and leaks ---------------------------------------------------------------------------------------------------


async def leave(pools: Pools, numbers: range) -> None:
    """Clients that hang up at any moment, among some that stay."""
    draw = random.Random(9)

    async def leaver(name: str) -> None:
        handle = pools.start(name, n=draw.randint(1, 6), count=30)
        for _ in range(draw.choice((0, 1, 2, 3, 5, 8, 40))):
            await asyncio.sleep(0)
        handle.cancel()
        handle.cancel()

    async def stayer(name: str) -> None:
        assert await fetch_all(pools.start(name, n=3, count=5)) == texts(name, 3, 5)

    tasks = [(leaver if number % 3 else stayer)(f"s{number}") for number in numbers]
    draw.shuffle(tasks)
    await asyncio.gather(*tasks)
    await settle()


async def test_F74_exactly_one_release_for_each_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=24, max_waiting=5000)
    await leave(pools, range(300))
    pools.check_empty()
    for peer in (pools.targets[0], pools.drafts[0]):
        assert peer.not_found == 0
        assert set(peer.released.values()) == {1} and sum(peer.released.values()) == len(peer.seen) >= 300


async def test_a_client_that_goes_starts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that wait are told first: answer 0's end must not send them to work."""
    pools = Pools(monkeypatch)
    pools.targets[0].silent = True
    handle = pools.start("s", n=8)
    await settle(3)
    handle.cancel()
    await settle()
    assert set(pools.targets[0].seen) == {"s"}
    pools.check_empty()


async def test_twin_answer_0_is_cancelled_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    pools.targets[0].silent = True
    handle = pools.start("s", n=8)
    await settle(3)
    for answer in handle._answers:
        answer.cancel()
    await settle()
    assert len(pools.targets[0].seen) > 1


async def test_F77_pools_in_turmoil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests with several answers while targets and drafts fall and rise, between asking and answering too: usage is zero at the end."""
    pools = Pools(monkeypatch, targets=3, drafts=2, max_running=24)
    draw, over = random.Random(6), asyncio.Event()

    async def turmoil() -> None:
        while not over.is_set():
            peer = draw.choice((*pools.targets, *pools.drafts))
            peer.fall() if peer.connected else peer.rise()
            await settle(draw.randint(3, 30))

    trouble = asyncio.create_task(turmoil())
    requests = [(f"s{i}", 1 + i % 5) for i in range(24)]
    got = await asyncio.gather(*(fetch_all(pools.start(name, n=n, count=40)) for name, n in requests))
    over.set()
    await trouble
    assert got == [texts(name, n, 40) for name, n in requests]
    await settle()
    pools.check_empty()


async def test_an_answer_that_fails_is_told_and_the_rest_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    handle = pools.start("s", n=3, count=1000)
    await settle(4)
    answer = pools.driver._live["s.1"].generation
    pools.targets[0].say(terms.Answer("s.1", answer.at.epoch, answer.at.round, terms.Failed(3, "sampling.top_k: broken")))
    got: list[list[int]] = [[], [], []]
    with pytest.raises(InvalidRequest, match="sampling.top_k"):
        async for index, event in handle:
            got[index] += event.tokens  # type: ignore[union-attr]
    assert all(tokens == text[: len(tokens)] and tokens for tokens, text in zip(got, texts("s", 3, 1000), strict=True))
    handle.cancel()
    await settle()
    pools.check_empty()


async def test_giving_up_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, max_running=3)
    pools.targets[0].silent = True
    handles = [pools.start("s", n=3), pools.start("t", n=2)]
    await settle(3)
    await pools.driver.close()
    for handle in handles:
        with pytest.raises(Unavailable, match="resume"):
            await fetch_all(handle)
    await settle()
    pools.check_empty()
    assert set(pools.targets[0].seen) == {"s"}


# --- F80: each answer is held by itself ---------------------------------------------------------------------------------


async def test_F80_answers_of_a_slow_reader_are_held_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    handle = pools.start("s", n=3, count=900)
    events = aiter(handle)
    await anext(events)
    while not all(state(pools, name) is State.HELD for name in ("s", "s.1", "s.2")):
        await settle(50)
    waiting = [len(answer.waiting) for answer in handle._answers]
    assert all(MAX_UNDELIVERED < tokens <= MAX_UNDELIVERED + 8 for tokens in waiting)
    got: list[list[int]] = [[], [], []]
    async for index, event in events:
        if not isinstance(event, Ended):
            got[index] += event.tokens
    assert all(tokens == text[-len(tokens) :] and len(tokens) > 800 for tokens, text in zip(got, texts("s", 3, 900), strict=True))
    await settle()
    pools.check_empty()


async def test_a_stop_in_one_answer_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch)
    handle = pools.start("s", n=3, count=200)
    got: list[list[int]] = [[], [], []]
    async for index, event in handle:
        assert index != 1 or not got[1], "nothing of an answer comes after it was stopped"
        got[index] += event.tokens if not isinstance(event, Ended) else []
        if index == 1:
            assert handle.stop_here(1).decided >= len(got[1])
    assert [got[0], got[2]] == [texts("s", 3, 200)[i] for i in (0, 2)]
    await settle()
    pools.check_empty()
