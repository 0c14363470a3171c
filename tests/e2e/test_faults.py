"""Real kills under real streams: a draft, a target, a client, an orchestrator goes away; the text is the reference's."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specdec.client import Client, Completion, Delta, FailoverClient, Finished
from specdec.errors import Unavailable
from specdec.terms import FinishReason, SamplingParams
from tests.e2e.ask import Ask, answers, same
from tests.e2e.stack import Process, Stack, running, wait_ready
from tests.tiny import save_tiny
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(180)]
FLOAT64 = {"DTYPE": "float64", "SELF_TEST": "false"}
LONG = SamplingParams(temperature=1.0, max_tokens=700, ignore_eos=True)
PROMPT = list(range(10, 40))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model") / "target", seed=0)


@pytest.fixture(scope="module")
def unharmed(model: Path) -> Iterator[Stack]:
    """For the tests that come first and kill nothing."""
    with running(model, model, target={**FLOAT64, "LEASE_MS": "1000"}, draft=FLOAT64) as stack:
        yield stack


@pytest.fixture(scope="module")
def reference(unharmed: Stack) -> Completion:
    return answers(unharmed.endpoint, [Ask(PROMPT, LONG, {"seed": 5, "disable_spec_decode": True})])[0]


@pytest.fixture
def pools(unharmed: Stack) -> Stack:
    """A target and a draft; whom the test before has stopped or killed serves again where it was. No orchestrator."""
    stack = unharmed
    for orchestrator in stack.orchestrators:
        orchestrator.kill()
    stack.orchestrators.clear()
    for pool, begin in ((stack.targets, stack.begin_target), (stack.drafts, stack.begin_draft)):
        port = pool[0].port
        for process in pool:
            process.kill(signal.SIGCONT)
        pool[:] = [process for process in pool if process.popen.poll() is None] or [begin(PORT=str(port))]
    for process in (*stack.targets, *stack.drafts):
        wait_ready(process)
    return stack


@pytest.fixture
def stack(pools: Stack) -> Stack:
    """With an orchestrator that has seen no trouble."""
    pools.add_orchestrator()
    return pools


def sessions(process: Process) -> float:
    return process.metric("specdec_sessions")


def stream_with(endpoints: str | list[str], after: int, act: Callable[[], None], **options: object) -> tuple[tuple[int, ...], Finished]:
    """Streams the long answer and acts once `after` tokens are here. `endpoints`: one, or several to go on at."""

    async def run() -> tuple[tuple[int, ...], Finished]:
        ids: list[int] = []
        acted = False
        chosen = Client(endpoints) if isinstance(endpoints, str) else FailoverClient(endpoints)
        async with chosen as client, contextlib.aclosing(client.generate(PROMPT, LONG, seed=5, **options)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    ids += event.token_ids
                if not acted and len(ids) >= after:
                    acted = True
                    await asyncio.to_thread(act)
                if isinstance(event, Finished):
                    return tuple(ids), event
        raise AssertionError("no end")

    return asyncio.run(run())


# ---------------------------------------------------------------- nobody is killed


def test_resumed_elsewhere(unharmed: Stack, reference: Completion) -> None:
    """What a client got is continued exactly, by ids, on another orchestrator."""
    other = unharmed.add_orchestrator()
    for cut in (1, 50, 699):
        ask = Ask(PROMPT, LONG, {"seed": 5, "output_token_ids": reference.token_ids[:cut]})
        rest = answers(other.endpoint, [ask])[0]
        assert rest.token_ids == reference.token_ids[cut:]
        assert rest.finished.usage.completion_tokens == len(reference.token_ids)


def test_F83_a_draft_that_never_comes(unharmed: Stack, reference: Completion) -> None:
    other = unharmed.add_orchestrator(DRAFTS="127.0.0.1:1")
    for _ in range(3):
        assert answers(other.endpoint, [Ask(PROMPT, LONG, {"seed": 5})])[0].token_ids == reference.token_ids
    assert other.metric("specdec_spec_enabled") == 0 and unharmed.orchestrators[0].metric("specdec_spec_enabled") == 1
    assert other.log.read_text().count("speculation is off") == 1


def leave_after(endpoint: str, tokens: int, prompt: list[int]) -> None:
    """A client that cancels once it has `tokens` tokens; 0 = 50 ms after asking."""

    async def run() -> None:
        async with Client(endpoint) as client:
            events = client.generate(prompt, LONG, seed=5)
            if tokens == 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(anext(events), 0.05)
            count = 0
            while count < tokens:
                event = await anext(events)
                count += len(event.token_ids) if isinstance(event, Delta) else 0
            await events.aclose()

    asyncio.run(run())


@pytest.mark.parametrize("tokens", [0, 1, 30])
def test_F73_client_cancels(unharmed: Stack, tokens: int) -> None:
    """Both pools are free long before the answer would have been whole: by its tokens, since a busy machine stretches both alike."""
    decided = "specdec_decided_tokens_total"
    before = unharmed.orchestrators[0].metric(decided)
    leave_after(unharmed.endpoint, tokens, PROMPT * (20 if tokens == 0 else 1))
    wait_until(lambda: sessions(unharmed.targets[0]) == 0 and sessions(unharmed.drafts[0]) == 0)
    assert unharmed.orchestrators[0].metric(decided) - before < LONG.max_tokens / 2


def test_neighbours_do_not_notice(unharmed: Stack, reference: Completion) -> None:
    """Eight streams; half the clients leave."""

    async def run() -> list[Completion]:
        async with Client(unharmed.endpoint) as client:

            async def leaver(i: int) -> None:
                events = client.generate(PROMPT, LONG, seed=i)
                for _ in range(3 + 5 * i):
                    await anext(events)
                await events.aclose()

            stayers = [client.complete(PROMPT, LONG, seed=5) for _ in range(4)]
            done = await asyncio.gather(*stayers, *(leaver(i) for i in range(4)))
            return [answer for answer in done if answer is not None]

    for answer in asyncio.run(run()):
        same(answer, reference)


# ---------------------------------------------------------------- somebody is


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["kill", "stop"])
def test_F82_draft_lost(stack: Stack, reference: Completion, number: signal.Signals) -> None:
    ids, finished = stream_with(stack.endpoint, 60, lambda: stack.drafts[0].kill(number))
    assert ids == reference.token_ids
    assert finished.speculative.num_accepted_draft_tokens > 0
    assert finished.speculative.num_rounds > finished.speculative.num_spec_steps  # it went on without


def test_F82_a_draft_of_another_model_comes_in_its_place(stack: Stack, reference: Completion, tmp_path: Path) -> None:
    """Its speculation pauses and goes on; nothing else of the answer depends on it."""
    draft, other = stack.drafts[0], save_tiny(tmp_path / "other", seed=1)

    def restart() -> None:
        draft.kill()
        wait_ready(stack.begin_draft(PORT=str(draft.port), MODEL=str(other)))

    ids, _ = stream_with(stack.endpoint, 60, restart)
    assert ids == reference.token_ids
    wait_until(lambda: stack.orchestrators[0].metrics()['specdec_pool_endpoints{pool="draft",state="up"}'] == 1, 10)
    again = answers(stack.endpoint, [Ask(PROMPT, LONG, {"seed": 5})])[0]
    assert again.token_ids == reference.token_ids
    assert again.finished.speculative.num_spec_steps > 50  # speculation resumed
    stack.drafts[-1].kill()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_target_restarted(stack: Stack, reference: Completion, number: signal.Signals) -> None:
    target = stack.targets[0]

    def restart() -> None:
        if number is signal.SIGTERM:
            target.popen.send_signal(number)
            target.popen.send_signal(number)
            target.popen.wait(60)
        else:
            target.kill()
        wait_ready(stack.begin_target(PORT=str(target.port)))

    ids, finished = stream_with(stack.endpoint, 60, restart)
    assert ids == reference.token_ids
    assert finished.usage.completion_tokens == len(ids)
    assert number is signal.SIGTERM or finished.speculative.num_replacements >= 1


def test_no_target_left_says_how_to_resume(pools: Stack, reference: Completion) -> None:
    orchestrator = pools.add_orchestrator(DRAFTS="", PLACEMENT_WAIT_MS="500")
    ids: list[int] = []

    async def run() -> None:
        async with Client(orchestrator.endpoint) as client:
            async for event in client.generate(PROMPT, LONG, seed=5):
                ids.extend(event.token_ids if isinstance(event, Delta) else ())
                if len(ids) >= 20 and pools.targets[0].popen.poll() is None:
                    await asyncio.to_thread(pools.targets[0].kill)

    with pytest.raises(Unavailable, match="resume with output_token_ids") as told:
        asyncio.run(run())
    assert told.value.output_tokens == len(ids) and told.value.retry_after_ms
    assert tuple(ids) == reference.token_ids[: len(ids)]


def test_F77_orchestrator_killed(stack: Stack, reference: Completion) -> None:
    """The client goes on at another one, exactly; what the dead one held leaves both pools."""
    endpoints = [stack.endpoint, stack.add_orchestrator().endpoint]
    ids, finished = stream_with(endpoints, 30, stack.orchestrators[0].kill)
    assert ids == reference.token_ids
    assert finished.usage.completion_tokens == len(ids) and finished.finish_reason is FinishReason.LENGTH
    wait_until(lambda: sessions(stack.drafts[0]) == 0, 10)
    wait_until(lambda: sessions(stack.targets[0]) == 0, 10)  # the lease is one second


def test_F87_F152_target_lost_another_takes_over(pools: Stack, reference: Completion) -> None:
    """First the one in use is stopped, then, when that is back in rotation, the other one killed."""
    wait_ready(pools.begin_target())
    orchestrator = pools.add_orchestrator()

    def lose_the_one_in_use(number: signal.Signals) -> None:
        (busy,) = (target for target in pools.targets if sessions(target))
        lost.append(busy)
        busy.kill(number)

    lost: list[Process] = []
    for number in (signal.SIGSTOP, signal.SIGKILL):
        ids, finished = stream_with(orchestrator.endpoint, 60, lambda number=number: lose_the_one_in_use(number))
        assert ids == reference.token_ids
        assert finished.speculative.num_replacements >= 1
        assert len(ids) == LONG.max_tokens  # not a fresh budget
        if number is signal.SIGSTOP:
            lost[0].kill(signal.SIGCONT)
            wait_until(lambda: orchestrator.metrics()['specdec_pool_endpoints{pool="target",state="up"}'] == 2, 15)
            wait_until(lambda: not any(sessions(target) for target in pools.targets), 15)
