"""The loop around the decider: commands that arrive while the engine works, readers that fall behind, loops that end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest

from draft_service.outbox import MAX_JOINED, MAX_PENDING, Outbox, Told, joined
from draft_service.worker import MAX_STREAMS, Worker
from specdec.errors import Overloaded, Unavailable
from specdec.hashing import prefix_hash
from specdec.terms import Commit, DraftDistribution, DraftEvent, DraftLoad, Open, Proposal, Refused, Sent
from tests.unit.draft.rig import Rig, other
from tests.unit.draft.test_limits import GOOD


class Thread:
    """The engine's thread, and a gate before each forward pass."""

    def __init__(self) -> None:
        self.plans = 0

    async def run(self, function: Callable[..., Any], *args: Any) -> Any:
        self.plans += 1
        return await asyncio.to_thread(function, *args)


class Silent:
    def stepped(self, plan: Any, outcome: Any, seconds: float) -> None:
        pass


class Loop:
    def __init__(self, rig: Rig) -> None:
        self.rig, self.thread = rig, Thread()
        self.worker = Worker(rig.drafter, rig.stepper, self.thread, Silent())
        self.stream, self.outbox = self.worker.attach()
        self.outbox.take(9)

    def apply(self, *commands: Any) -> None:
        for command in commands:
            self.worker.apply(self.stream, command)
        self.worker.wake()

    async def events(self) -> list[DraftEvent]:
        await asyncio.wait_for(self.outbox.wait(), 5)
        return self.outbox.take(99)[0]


@pytest.fixture
async def loop() -> AsyncIterator[Loop]:
    made = Loop(Rig())
    task = asyncio.create_task(made.worker.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def opened(rig: Rig) -> Open:
    rig.opened["s"], rig.committed["s"] = GOOD, list(GOOD.tokens)
    return GOOD


async def test_one_hop_gives_a_whole_block(loop: Loop) -> None:
    loop.apply(opened(loop.rig))
    (told,) = await loop.events()
    assert isinstance(told, Proposal) and list(told.tokens) == loop.rig.naive([1, 2, 3], 3)
    assert loop.thread.plans == 1 and loop.rig.forwards() == 3


async def test_a_command_ends_a_run_of_passes_at_the_next_boundary(loop: Loop) -> None:
    rig = loop.rig
    entered, gate = asyncio.Event(), threading.Semaphore(0)
    running = asyncio.get_running_loop()

    def on_forward(rows: Any) -> None:
        running.call_soon_threadsafe(entered.set)
        gate.acquire()

    rig.engine.on_forward = on_forward
    loop.apply(opened(rig))
    await entered.wait()
    entered.clear()
    correction = other(rig.naive([1, 2, 3], 1)[0])
    loop.apply(Commit("s", 3, prefix_hash([1, 2, 3]), (correction,)))
    gate.release()  # the running pass ends …
    await entered.wait()
    assert rig.engine.log[-1][0].tokens == (correction,)  # … and the next one already feeds the correction
    for _ in range(3):
        gate.release()
    (told,) = await loop.events()
    assert isinstance(told, Proposal) and list(told.tokens) == rig.naive([1, 2, 3, correction], 3)


async def test_a_fitting_commit_during_a_pass_is_answered_without_waiting_for_it(loop: Loop) -> None:
    rig = loop.rig
    loop.apply(opened(rig))
    await loop.events()
    passes, gate, entered = threading.Semaphore(2), threading.Event(), asyncio.Event()
    running = asyncio.get_running_loop()

    def on_forward(rows: Any) -> None:
        if not passes.acquire(blocking=False):
            running.call_soon_threadsafe(entered.set)
            gate.wait()

    rig.engine.on_forward = on_forward
    ahead = rig.naive([1, 2, 3], 7)
    loop.apply(Sent("s", 3, prefix_hash([1, 2, 3]), 3))
    await entered.wait()
    loop.apply(Commit("s", 3, prefix_hash([1, 2, 3]), tuple(ahead[:2])))  # fits what was told; the pass still runs
    assert rig.session().chain.committed == 5
    gate.set()
    (told,) = await loop.events()
    assert isinstance(told, Proposal) and told.prefix_length + len(told.tokens) >= 8


async def test_a_stream_that_ends_during_a_pass_frees_its_sessions(loop: Loop) -> None:
    rig = loop.rig
    entered, gate = asyncio.Event(), threading.Event()
    running = asyncio.get_running_loop()

    def on_forward(rows: Any) -> None:
        running.call_soon_threadsafe(entered.set)
        gate.wait()

    rig.engine.on_forward = on_forward
    loop.apply(opened(rig))
    await entered.wait()
    loop.worker.detach(loop.stream)
    assert rig.drafter.num_sessions == 0 and rig.room.used_tokens == 0
    gate.set()
    for _ in range(100):
        if not rig.engine.kv.slots:
            break
        await asyncio.sleep(0.01)
    assert rig.engine.kv.slots == {}


async def test_an_engine_that_hangs_ends_every_stream_and_lets_none_begin_until_its_step_is_over() -> None:
    rig, hung = Rig(), [False]
    worker = Worker(rig.drafter, rig.stepper, Thread(), Silent(), hangs=lambda: hung[0])
    _, outbox = worker.attach()
    worker.beat()
    assert await outbox.wait() and not outbox.ended
    hung[0] = True
    worker.beat()
    with pytest.raises(Unavailable, match="hangs in a step"):
        await outbox.wait()
    with pytest.raises(Unavailable, match="hangs in a step"):
        worker.attach()
    hung[0] = False
    worker.attach()


async def test_streams_are_bounded() -> None:
    worker = Worker(Rig().drafter, Rig().stepper, Thread(), Silent())
    for _ in range(MAX_STREAMS):
        worker.attach()
    with pytest.raises(Overloaded):
        worker.attach()


# --- the outbox -------------------------------------------------------------------------------------------------------


def piece(start: int, tokens: tuple[int, ...], session_id: str = "s", epoch: int = 1) -> Proposal:
    return Proposal(session_id, epoch, start, start * 10, tokens, (0.5,) * len(tokens))


def test_pieces_that_continue_each_other_are_joined_and_others_replaced() -> None:
    assert joined(piece(3, (1, 2)), piece(5, (3,))) == piece(3, (1, 2, 3))
    assert joined(piece(3, (1, 2)), piece(6, (3,))) == piece(6, (3,))
    assert joined(piece(3, (1, 2)), piece(5, (3,), epoch=2)) == piece(5, (3,), epoch=2)
    long = piece(3, (1,) * MAX_JOINED)
    assert joined(long, piece(3 + MAX_JOINED, (9,))) == piece(3 + MAX_JOINED, (9,))
    told = Proposal("s", 1, 5, 50, (3,), (0.5,), (DraftDistribution((3,), b"\0\0\x80?"),))
    assert joined(piece(3, (1, 2)), told).distributions == (None, None, *told.distributions)


def test_lines_of_one_chain_wait_together_in_order_and_go_with_it() -> None:
    def put(start: int, tokens: tuple[int, ...], line: int, chain: int, epoch: int = 1) -> None:
        outbox.put(Told(piece(start, tokens, epoch=epoch), line, chain))

    outbox = Outbox()
    put(3, (1, 2), 0, 0)
    put(4, (9, 8), 1, 0)
    put(4, (7, 6), 2, 0)
    put(5, (3,), 0, 0)  # joins in place: before the guesses
    put(6, (5,), 2, 0)
    assert outbox.take(9)[0] == [piece(3, (1, 2, 3)), piece(4, (9, 8)), piece(4, (7, 6, 5))]
    put(3, (1, 2), 0, 0)
    put(4, (9, 8), 1, 0)
    put(4, (7, 6), 2, 0)
    put(6, (5,), 1, 1)  # branch 1 has become the chain
    assert outbox.take(9)[0] == [piece(4, (9, 8, 5))]
    put(3, (1, 2), 0, 0)
    put(9, (9, 8), 3, 3)  # the chain was cut
    put(11, (1,), 3, 3, epoch=2)
    assert outbox.take(9)[0] == [piece(11, (1,), epoch=2)]
    put(3, (1, 2), 0, 0)
    put(4, (9, 8), 1, 0)
    put(4, (7, 6), 2, 0)
    assert (len(outbox.take(2)[0]), outbox.take(9)[0]) == (2, [piece(4, (7, 6))])


def test_a_slow_reader_gets_the_newest_state_of_each_session() -> None:
    outbox = Outbox()
    outbox.put(piece(3, (1, 2)))
    outbox.put(piece(3, (7,), "t"))
    outbox.put(piece(9, (4,)))
    outbox.put(piece(10, (5,)))
    outbox.put(Refused("t", 1, "why", 0))
    outbox.put_load(DraftLoad(0, 0, 1, 2, 3))
    outbox.put_load(DraftLoad(0, 0, 2, 2, 3))
    events, load = outbox.take(1)
    assert events == [piece(9, (4, 5))] and load is not None and load.sessions == 2
    assert outbox.take(9) == ([Refused("t", 1, "why", 0)], None)
    assert outbox.take(9) == ([], None)


async def test_an_outbox_wakes_its_writer_until_it_is_empty() -> None:
    outbox = Outbox()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.wait(), 0.01)
    for i in range(3):
        outbox.put(piece(3, (1,), str(i)))
    await asyncio.wait_for(outbox.wait(), 1)
    outbox.take(2)
    await asyncio.wait_for(outbox.wait(), 1)
    outbox.take(2)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(outbox.wait(), 0.01)


def test_an_unread_stream_overflows() -> None:
    outbox = Outbox()
    for i in range(MAX_PENDING + 1):
        outbox.put(Refused(str(i), 1, "why", 0))
    assert outbox.overflowing


async def test_an_outbox_that_ended_says_how() -> None:
    outbox = Outbox()
    outbox.put(piece(3, (1,)))
    assert await outbox.wait()
    outbox.end()
    assert not await outbox.wait()
    outbox.end(Overloaded("slow", 5))
    with pytest.raises(Overloaded):
        await outbox.wait()


class Due:
    """A commit is due for a minute."""

    def committed(self, now_ms: float) -> None: ...

    def rest_ms(self, now_ms: float) -> float:
        return 60_000.0


async def test_a_draft_that_rests_for_a_commit_hears_it_at_once(loop: Loop) -> None:
    rig = loop.rig
    loop.worker._rhythm = Due()  # type: ignore[assignment]
    loop.apply(opened(rig))
    await loop.events()
    block = rig.naive([1, 2, 3], 4)
    loop.apply(Sent("s", 3, prefix_hash([1, 2, 3]), 1))
    while not loop.worker.drafter.may_rest:  # until it has something for the round behind the block
        await asyncio.sleep(0.001)
    plans = loop.thread.plans
    await asyncio.sleep(0.05)
    assert loop.thread.plans == plans, "it rests"
    loop.apply(Commit("s", 3, prefix_hash([1, 2, 3]), (block[0],)))
    async with asyncio.timeout(2):
        while loop.thread.plans == plans:
            await asyncio.sleep(0.001)


async def test_only_a_session_that_is_alone_lets_its_draft_rest(loop: Loop) -> None:
    rig = loop.rig
    loop.apply(opened(rig))
    await loop.events()
    loop.apply(Sent("s", 3, prefix_hash([1, 2, 3]), 1))
    while not loop.worker.drafter.may_rest:
        await asyncio.sleep(0.001)
    loop.apply(replace(GOOD, session_id="other"))
    assert not loop.worker.drafter.may_rest, "the other one can use the pass"


async def test_commits_of_several_sessions_are_no_rhythm(loop: Loop) -> None:
    """Two that come in one message are microseconds apart: a rhythm of that would never let a draft rest again."""
    rig, heard = loop.rig, list[str]()

    class Heard(Due):
        def committed(self, now_ms: float) -> None:
            heard.append("alone")

        def mixed(self) -> None:
            heard.append("mixed")

    loop.worker._rhythm = Heard()  # type: ignore[assignment]
    first = opened(rig)
    token = rig.naive([1, 2, 3], 1)[0]
    loop.apply(first, Commit("s", 3, prefix_hash([1, 2, 3]), (token,)))
    loop.apply(replace(GOOD, session_id="other"), Commit("other", 3, prefix_hash([1, 2, 3]), (token,)))
    assert heard == ["alone", "mixed"]
