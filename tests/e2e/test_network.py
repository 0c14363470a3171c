"""Bad networks between real processes: long, narrow, half-open, parted. Every text is the reference's, and every pause a bounded one.

One target sits behind a cable that can be pulled (namespace.py); where this machine has no network namespaces, a proxy's black hole stands
in, and the test says what was missing.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

import grpc
import pytest
import pytest_asyncio

from specdec.client import Client, Completion, Delta
from specdec.errors import DeadlineExceeded
from specdec.terms import SamplingParams
from specdec.v1 import generation_pb2, generation_pb2_grpc
from tests.e2e.ask import Ask, gather_answers, same
from tests.e2e.fault_driver import Told, asks, references, watched
from tests.e2e.fault_phases import DRAFT, TARGET, Row, Trigger
from tests.e2e.levels import Levels
from tests.e2e.namespace import Namespace
from tests.e2e.network import Link
from tests.e2e.stack import Process, Stack, wait_ready
from tests.tiny import save_tiny

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
RESTS = {"MAX_EJECTION_MS": "500"}  # what is lost here again and again is shut out for longer and longer otherwise
LONG = SamplingParams(temperature=1.0, max_tokens=400, ignore_eos=True)
PROMPT = list(range(10, 40))
PAUSE_S = 6.0  # 1.25 s of silence and a prefill elsewhere, on a busy machine


@dataclass
class Scene:
    """`one` knows the near target, `both` the far one as well; the draft and the near target are behind links."""

    stack: Stack
    far: Namespace | Link
    links: dict[str, Link]
    triggers: dict[str, Trigger]
    one: Process
    both: Process
    asked: list[Ask]
    wanted: list[Completion]

    def pull(self) -> None:
        self.far.pull() if isinstance(self.far, Namespace) else self.far.partition()

    def plug(self) -> None:
        self.far.plug() if isinstance(self.far, Namespace) else self.far.heal()

    async def check(self) -> None:
        """Eight answers at once."""
        for got, want in zip(await gather_answers(self.one.endpoint, self.asked), self.wanted, strict=True):
            same(got, want)

    async def connected(self, count: int, seconds: float) -> None:
        """So many targets, whether or not they are trusted again already."""
        down = 'specdec_pool_endpoints{pool="target",state="down"}'
        await until(lambda: self.both.metrics()[down] == 2 - count, seconds)

    def dialled(self) -> list[int]:
        return [link.counts["connections"] for link in self.links.values()]


async def until(happened: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not await asyncio.to_thread(happened):
        assert time.monotonic() < deadline, f"not within {seconds} s"
        await asyncio.sleep(0.02)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    model = save_tiny(tmp_path_factory.mktemp("model") / "tiny", seed=0)
    async with contextlib.AsyncExitStack() as exit:
        cable = None if Namespace.missing() else exit.enter_context(Namespace())
        stack = Stack(tmp_path_factory.mktemp("logs"), model, model, FLOAT64 | {"LEASE_MS": "1000"}, FLOAT64)
        exit.callback(stack.stop)
        stack.begin_target()
        stack.begin_target(inside=cable.enter if cable else (), HOST=cable.address if cable else "127.0.0.1")
        stack.begin_draft()
        for process in (*stack.targets, *stack.drafts):
            await asyncio.to_thread(wait_ready, process)
        made = {"near": watched(stack.targets[0].endpoint, TARGET), "draft": watched(stack.drafts[0].endpoint, DRAFT)}
        names = [await exit.enter_async_context(link.serving()) for link, _ in made.values()]
        far: Namespace | Link = cable or Link(stack.targets[1].endpoint)
        far_name = stack.targets[1].endpoint if cable else await exit.enter_async_context(far.serving())  # type: ignore[union-attr]
        both, one = await asyncio.gather(
            asyncio.to_thread(lambda: stack.add_orchestrator(TARGETS=f"{names[0]},{far_name}", DRAFTS=names[1], **RESTS)),
            asyncio.to_thread(lambda: stack.add_orchestrator(TARGETS=names[0], DRAFTS=names[1], **RESTS)),
        )
        asked = asks()
        links, triggers = {n: link for n, (link, _) in made.items()}, {n: trigger for n, (_, trigger) in made.items()}
        yield Scene(stack, far, links, triggers, one, both, asked, await references(one.endpoint, asked))
        assert stack.defects() == []


@pytest.fixture(autouse=True)
def healed(scene: Scene) -> Iterator[None]:
    yield
    for link in scene.links.values():
        link.heal()
        for way in (link.there, link.back):
            way.delay_s, way.bytes_per_s, way.drop_after = 0.0, None, None


# ---------------------------------------------------------------- long and narrow: slower, and nobody is given up


@pytest.mark.parametrize("delay_s", [0.05, 0.2])
async def test_a_long_wire(scene: Scene, delay_s: float) -> None:
    """One way, to both pools. The first tokens of three answers."""
    before = scene.dialled()
    for link in scene.links.values():
        link.there.delay_s = link.back.delay_s = delay_s
    begun = [replace(ask, sampling=replace(ask.sampling, max_tokens=12)) for ask in scene.asked[:3]]
    for got, want in zip(await gather_answers(scene.one.endpoint, begun), scene.wanted, strict=False):
        assert got.token_ids == want.token_ids[:12]
    assert scene.dialled() == before


async def test_a_narrow_wire(scene: Scene) -> None:
    before = scene.links["near"].counts["connections"]
    for link in scene.links.values():
        link.there.bytes_per_s = link.back.bytes_per_s = 24_000
    await scene.check()
    assert scene.links["near"].counts["connections"] == before


# ---------------------------------------------------------------- connections that end, or only look alive


@pytest.mark.parametrize("hop", ["near", "draft"])
@pytest.mark.parametrize("how", ["cut", "close", "forget_client", "forget_server", "freeze"])
async def test_a_connection_ends_on_one_side_or_both(scene: Scene, hop: str, how: str) -> None:
    """Half-open ones are found out by their silence."""
    link = scene.links[hop]
    before = link.counts["connections"]
    answers = asyncio.create_task(scene.check())
    await asyncio.sleep(0.1)
    getattr(link, how)()
    await answers
    await until(lambda: link.counts["connections"] > before, PAUSE_S)


async def test_messages_end_in_the_middle(scene: Scene) -> None:
    """After so many bytes, the first of a frame's head among them."""
    link = scene.links["near"]
    before = link.counts["cut"]
    answers = asyncio.create_task(scene.check())
    for way in (link.there, link.back):
        for size in (1, 700):
            way.drop_after = size
            await asyncio.sleep(0.1)
            if answers.done():
                await answers
                answers = asyncio.create_task(scene.check())
    await answers
    assert link.counts["cut"] > before


# ---------------------------------------------------------------- deadlines


async def test_calls_and_steps_end_at_their_deadline(scene: Scene) -> None:
    """The target cannot be reached: whoever calls is told in time, and nothing goes on for it."""
    scene.links["near"].partition()
    begun = time.monotonic()
    async with Client(scene.one.endpoint) as client:
        with pytest.raises(DeadlineExceeded):
            await client.complete(PROMPT, LONG, seed=1, timeout_s=0.8)
    assert 0.7 < time.monotonic() - begun < PAUSE_S
    await until(lambda: scene.one.metric("specdec_requests_running") == 0, PAUSE_S)


async def test_steps_have_no_more_time_than_the_client(scene: Scene) -> None:
    told = scene.triggers["near"].remaining_ms
    async with Client(scene.one.endpoint) as client:
        for given_s in (9, 5):
            told.clear()
            got = await client.complete(PROMPT, replace(LONG, max_tokens=24), seed=1, timeout_s=given_s)
            assert len(got.token_ids) == 24
            assert told and 0 < min(told) <= max(told) <= 1000 * given_s


async def test_a_unary_call_through_a_black_hole(scene: Scene) -> None:
    link = Link(scene.one.endpoint)
    async with link.serving() as name, grpc.aio.insecure_channel(name) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        assert (await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=10)).info.vocab_size
        link.freeze()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.GetModelInfo(generation_pb2.GetModelInfoRequest(), timeout=0.3)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


# ---------------------------------------------------------------- clients that leave


async def leave(client: Client, draw: random.Random) -> None:
    """Before the first message, behind it, or in the middle."""
    events = client.generate(PROMPT, LONG, seed=draw.randrange(8))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(draw.choice((0.0005, 0.005, 0.02, 0.1))):
            async for _ in events:
                pass
    await events.aclose()


async def many_leave(scene: Scene, count: int) -> None:
    draw = random.Random(3)
    for _ in range(count // 50):
        async with Client(scene.one.endpoint) as client:
            await asyncio.gather(*(leave(client, draw) for _ in range(50)))


async def nobody_left(scene: Scene) -> None:
    for process in (*scene.stack.targets, *scene.stack.drafts):
        await until(lambda process=process: process.metric("specdec_sessions") == 0, PAUSE_S)  # type: ignore[misc]
    for process in scene.stack.orchestrators:
        for name in ("specdec_requests_running", "specdec_requests_waiting"):
            await until(lambda process=process, name=name: process.metric(name) == 0, PAUSE_S)  # type: ignore[misc]


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
async def test_F74_F81_cancelled_requests_leave_nothing(scene: Scene, count: int) -> None:
    """Neither a session nor a socket, and no memory to speak of."""
    await many_leave(scene, count // 4)
    await nobody_left(scene)
    levels = Levels({process.role: process.popen.pid for process in (scene.one, scene.stack.targets[0], scene.stack.drafts[0])})
    levels.read()
    await many_leave(scene, count)
    await nobody_left(scene)
    levels.read()
    assert levels.grown(descriptors=8, memory_mb=16 if count > 1000 else 24) == []  # seen after 10,000: 2.4 MB and less
    await scene.check()


# ---------------------------------------------------------------- parted


async def streams(scene: Scene, act: Callable[[], Awaitable[None]], count: int = 4) -> tuple[list[Told], float]:
    """Long answers of `both`, one after the other in each lane until `act` is through; it acts once each lane has begun. Also the longest
    pause of any from then on."""
    told: list[Told] = []
    begun = [asyncio.Event() for _ in range(count)]
    acted, pause, through = float("inf"), 0.0, False

    async def lane(client: Client, begun: asyncio.Event) -> None:
        nonlocal pause
        while not through:
            mine, last = Told(), time.monotonic()
            told.append(mine)
            async for event in client.generate(PROMPT, LONG, seed=5, timeout_s=60):
                mine.take(event)
                if isinstance(event, Delta):
                    pause, last = max(pause, time.monotonic() - max(last, acted)), time.monotonic()
                if len(mine.ids) > 5:
                    begun.set()

    async with Client(scene.both.endpoint) as client:
        tasks = [asyncio.create_task(lane(client, event)) for event in begun]
        for event in begun:
            await event.wait()
        acted = time.monotonic()
        await act()
        through = True
        await asyncio.gather(*tasks)
    return told, pause


def sessions(process: Process) -> float:
    return process.metric("specdec_sessions")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def long_answer(scene: Scene) -> Completion:
    (answer,) = await gather_answers(scene.one.endpoint, [Ask(PROMPT, LONG, {"seed": 5, "num_speculative_tokens": 0})])
    return answer


async def test_F152_a_target_behind_a_cut_cable(scene: Scene, long_answer: Completion, capsys: pytest.CaptureFixture[str]) -> None:
    """Packets are dropped, nobody is told: its streams go on elsewhere within the silence limit, and it is used again once it can be."""
    if not isinstance(scene.far, Namespace):
        with capsys.disabled():
            print(f"\nno network namespace on this machine, a black hole stands in; missing: {Namespace.missing()}")
    await scene.connected(2, PAUSE_S)

    async def pull() -> None:
        await until(lambda: sessions(scene.stack.targets[1]) > 0, PAUSE_S)
        scene.pull()
        await scene.connected(1, PAUSE_S)  # it is asked until its silence is noticed

    told, pause = await streams(scene, pull)
    scene.plug()
    want = Told.of(long_answer)
    assert [one.all() for one in told] == [want.all()] * len(told)
    assert sum(one.finished.speculative.num_replacements for one in told if one.finished) >= 1
    assert pause < PAUSE_S
    await scene.connected(2, 2 * PAUSE_S)


async def test_F89_turns_of_one_conversation_alternate_between_two_orchestrators(scene: Scene) -> None:
    """Neither knows what the other one placed where; each turn is what one orchestrator without faults and speculation says."""
    tokens, said = list(PROMPT), list[int]()
    for turn in range(4):
        ask = Ask(tokens, replace(LONG, max_tokens=20), {"seed": turn})
        plain = Ask(tokens, ask.sampling, {"seed": turn, "disable_spec_decode": True})
        (want,) = await gather_answers(scene.one.endpoint, [plain])
        (got,) = await gather_answers((scene.both, scene.one)[turn % 2].endpoint, [ask])
        same(got, want)
        said += got.token_ids
        tokens += [*got.token_ids, 40 + turn]
    assert len(said) == 80


async def test_a_target_is_killed_while_sessions_move_to_it(scene: Scene, long_answer: Completion) -> None:
    """The far one is cut off; when the first Step of another placement arrives at the near one, that is killed. The cable is plugged in."""
    await scene.connected(2, PAUSE_S)
    await until(lambda: not any(map(sessions, scene.stack.targets)), 2 * PAUSE_S)  # those of a test before count for who gets ours
    trigger = scene.triggers["near"]

    async def act() -> None:
        await until(lambda: sessions(scene.stack.targets[1]) > 0, PAUSE_S)
        trigger.arm(Row(TARGET, "moved", "cut"))
        scene.pull()
        await asyncio.wait_for(trigger.fired.wait(), 4 * PAUSE_S)  # the cut has to be noticed first
        await asyncio.to_thread(scene.stack.targets[0].kill)
        scene.plug()

    told, _ = await streams(scene, act)
    want = Told.of(long_answer)
    assert [one.all() for one in told] == [want.all()] * len(told)
    assert max(one.finished.speculative.num_replacements for one in told if one.finished) >= 2
