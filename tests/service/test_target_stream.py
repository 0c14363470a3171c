"""TargetService.Verify over real gRPC on loopback, with the scripted engine in the same process: streams, beats, faults."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from specdec import wire
from specdec.engine import EngineThread
from specdec.errors import EngineFault, InvalidRequest
from specdec.grammar import Allowed
from specdec.runtime import greeting
from specdec.runtime.channels import open_channel, server_options
from specdec.runtime.interceptor import CallInterceptor
from specdec.runtime.telemetry import Telemetry
from specdec.terms import Answer, Close, Closed, Failed, Grammar, GrammarForm, ModelInfo, Result, SamplingParams
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service import servicer
from target_service.loop import EngineLoop
from target_service.servicer import TargetServicer
from tests.e2e.network import Link
from tests.fakes import ScriptedEngine, hashed_script
from tests.service.target_client import Stream, verify_stream
from tests.unit.target.harness import VOCAB, Bench, first_step, next_step, reference

pytestmark = pytest.mark.faults
SCRIPT = hashed_script(VOCAB)
INFO = ModelInfo("scripted", VOCAB, b"fp", (), 512, "boot", "numerics", True, "float64", 4096, 8, 64)


class Free:
    """A grammar under which everything goes."""

    def at(self, output: Sequence[int]) -> Allowed:
        return Allowed(None, True, False)

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        return ()


class Silent:
    def stepped(self, rows: int, engine_us: int, sample_us: int, answers: Sequence[Answer]) -> None: ...


@dataclass
class Target:
    bench: Bench
    loop: EngineLoop
    running: asyncio.Task[None]
    port: int
    thread: EngineThread

    @property
    def engine(self) -> ScriptedEngine:
        return self.bench.engine

    async def until(self, condition: Callable[[], bool], seconds: float = 2.0) -> None:
        async with asyncio.timeout(seconds):
            while not condition():
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(max_unread: int = 64, **limits: Any) -> AsyncIterator[Target]:
    bench = Bench(**limits)
    thread = EngineThread("test engine")
    loop = EngineLoop(bench.verifier, bench.executor.execute, thread, Silent(), bench.compile_grammar, max_unread)
    running = asyncio.create_task(loop.run())
    server = grpc.aio.server(interceptors=[CallInterceptor(Telemetry("target"))], options=server_options())
    TargetServicer(loop, INFO).add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield Target(bench, loop, running, port, thread)
    finally:
        await server.stop(0)
        if bench.engine.hang is not None:
            bench.engine.hang.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        thread.close()


def stream(target: Target, orchestrator_id: str | None = "orch", *, narrow: bool = False) -> AbstractAsyncContextManager[Stream]:
    return verify_stream(target.port, orchestrator_id, narrow=narrow)


async def generate(talk: Stream, prompt: list[int], count: int, session: str = "s", k: int = 3) -> list[int]:
    """Round after round, each with the block the target would choose, spoiled now and then."""
    expected = reference(SCRIPT, prompt, count + k + 1)
    committed = list(prompt)
    round_ = 1
    while (made := len(committed) - len(prompt)) < count:
        block = expected[made : made + k]
        if block and made % 3 == 1:
            block[-1] = (block[-1] + 1) % VOCAB
        step = first_step(prompt, block, session=session) if round_ == 1 else next_step(committed, block, round_=round_, session=session)
        await talk.send(step)
        answer = await talk.answer()
        assert isinstance(answer.outcome, Result) and answer.session_id == session
        committed += answer.outcome.tokens
        round_ += 1
    await talk.send(Close(session, 1))
    assert (await talk.answer()).outcome == Closed()
    return committed[len(prompt) :][:count]


async def test_model_info() -> None:
    async with serving() as target, open_channel(f"127.0.0.1:{target.port}") as channel:
        response = await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest())
        assert wire.model_info_from_wire(response.info) == INFO


async def test_two_orchestrators_share_the_engine() -> None:
    async with serving() as target, stream(target, "a") as one, stream(target, "b") as two:
        target.engine.on_forward = lambda rows: time.sleep(0.03)
        texts = await asyncio.gather(generate(one, [1, 2], 30), generate(two, [3, 4], 30))
        assert texts == [reference(SCRIPT, [1, 2], 30), reference(SCRIPT, [3, 4], 30)]
        together = sum(len(call) == 2 for call in target.engine.log)
        assert together > len(target.engine.log) / 2, "the two fall into step"
        await target.until(lambda: not target.engine.kv.slots)


async def test_one_message_carries_what_one_engine_step_finished() -> None:
    async with serving() as target, stream(target) as talk:
        await talk.send(*(first_step([i], session=f"s{i}") for i in range(5)))
        while not (response := await talk.listen()).answers:
            pass
        assert len(response.answers) == 5 and response.rows == 5 and response.engine_us > 0


async def test_streams_are_bounded_also_where_their_hellos_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    waiting, read = list[object](), servicer._next

    async def noted(context: Any) -> Any:
        waiting.append(context)
        return await read(context)

    monkeypatch.setattr(servicer, "MAX_STREAMS", 1)
    monkeypatch.setattr(servicer, "_next", noted)
    async with serving() as target, stream(target, None) as one, stream(target, None) as two:
        await target.until(lambda: len(waiting) == 2)
        await one.send(hello="one")
        await target.until(lambda: target.loop.num_streams == 1)
        await two.send(hello="two")
        code, details = await two.status()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "1 streams" in details
        async with stream(target, "three") as three:
            assert (await three.status())[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert target.loop.num_streams == 1


async def test_hello_comes_first_and_once() -> None:
    async with serving() as target:
        async with stream(target, None) as talk:
            await talk.send(first_step([1]))
            code, details = await talk.status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "hello" in details
        async with stream(target) as talk:
            await talk.send(hello="again")
            code, details = await talk.status()
            assert code is grpc.StatusCode.INVALID_ARGUMENT and "hello" in details


async def test_a_caller_that_never_says_hello_is_ended_and_one_that_said_it_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(greeting, "HELLO_S", 0.2)
    async with serving() as target, stream(target) as polite, stream(target, None) as mute:
        code, details = await mute.status()
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert details == "hello: the first message must carry it, and come within 0.2 s of the call's beginning"
        assert target.loop.num_streams == 1
        await polite.send(first_step([1]))
        assert isinstance((await polite.answer()).outcome, Result)


async def test_a_beat_at_least_every_quarter_second() -> None:
    async with serving() as target, stream(target) as talk:
        first = await talk.listen()
        assert first.beat is not None
        heard = [asyncio.get_running_loop().time()]
        for _ in range(4):
            await talk.listen()
            heard.append(asyncio.get_running_loop().time())
        assert heard[-1] - heard[0] > 0.8 and statistics.median(b - a for a, b in itertools.pairwise(heard)) < 0.4
        assert len(talk.beats) == 5 and talk.beats[-1].kv_total_tokens == target.bench.pool.total_tokens


async def test_the_end_of_a_stream_drops_what_waits_and_frees_the_rest_after_the_lease() -> None:
    """F72, F73, F77"""
    async with serving(lease_ms=200.0) as target:
        target.engine.hang = threading.Event()
        async with stream(target) as talk:
            await talk.send(first_step([1], session="runs"))
            await target.until(lambda: len(target.engine.log) == 1)
            await talk.send(first_step([2], session="waits"))
            await target.until(lambda: target.bench.verifier.num_sessions == 2)
        await target.until(lambda: target.loop.num_streams == 0)
        target.engine.hang.set()
        await target.until(lambda: target.bench.verifier.num_sessions == 0 and not target.engine.kv.slots)
        assert len(target.engine.log) == 1 and target.bench.pool.held == {}


async def test_close_frees_within_a_step_although_another_runs() -> None:
    async with serving() as target, stream(target) as talk:
        await talk.send(first_step([1], session="a"), first_step([2], session="b"))
        await talk.answer()
        await talk.answer()
        await talk.send(Close("a", 1))
        assert (await talk.answer()).outcome == Closed()
        await target.until(lambda: len(target.engine.kv.slots) == 1)


async def test_a_session_is_taken_over_after_the_connection_was_lost() -> None:
    async with serving(lease_ms=5000.0) as target:
        expected = reference(SCRIPT, [1, 2], 4)
        async with stream(target) as talk:
            await talk.send(first_step([1, 2], expected[:1]))
            assert (await talk.answer()).outcome.tokens == tuple(expected[:2])
        async with stream(target) as talk:
            await talk.send(first_step([1, 2], expected[:1]))
            assert (await talk.answer()).outcome.tokens == tuple(expected[:2]), "the stored result"
            await talk.send(next_step([1, 2, *expected[:2]], round_=2))
            assert (await talk.answer()).outcome.tokens == (expected[2],)
        assert target.engine.log[-1][0].start == 3
        assert target.engine.kv.opened == 1


async def test_a_fresh_stream_ends_the_older_one_of_its_link_which_is_half_open() -> None:
    """Nobody hangs up and nobody reads there. Another link of the same orchestrator, and another orchestrator, keep what they hold."""
    async with serving(lease_ms=100.0) as target:
        network = Link(f"127.0.0.1:{target.port}")
        async with (
            network.serving() as name,
            verify_stream(int(name.rpartition(":")[2]), "x", link="1") as lost,
            verify_stream(target.port, "x", link="2") as second,
            verify_stream(target.port, "y", link="1") as other,
        ):
            for talk, session in ((lost, "lost"), (second, "second"), (other, "other")):
                await talk.send(first_step([1, 2], session=session))
                await talk.answer()
            network.forget_server()
            assert target.bench.verifier.num_sessions == 3
            async with verify_stream(target.port, "x", link="1") as fresh:
                await target.until(lambda: target.bench.verifier.num_sessions == 2)
                await fresh.send(first_step([1, 2], session="lost", epoch=2))
                for talk, session in ((second, "second"), (other, "other")):
                    await talk.send(Close(session, 1))
                    assert (await talk.answer()).outcome == Closed()
                await fresh.answer()


async def test_bad_items_are_answered_by_name_and_the_stream_goes_on() -> None:
    async with serving() as target, stream(target) as talk:
        bad_step = wire.step_to_wire(first_step([1], session="bad"))
        bad_step.begin.rejection_sample_method = 99
        message = wire.verify_request_to_wire([first_step([1, VOCAB], session="ids")])
        message.items.add().step.CopyFrom(bad_step)
        message.items.add().ahead.CopyFrom(target_pb2.Ahead(session_id="ahead", epoch=1))
        await talk.call.write(message)
        answers = {a.session_id: a.outcome for a in [await talk.answer() for _ in range(3)]}
        assert all(isinstance(outcome, Failed) for outcome in answers.values())
        assert (answers["ids"].code, answers["bad"].code, answers["ahead"].code) == (3, 3, 3)
        assert "step.tokens" in answers["ids"].message and "rejection_sample_method" in answers["bad"].message
        assert "ahead.tokens" in answers["ahead"].message and not answers["ahead"].drop
        assert await generate(talk, [1, 2], 5) == reference(SCRIPT, [1, 2], 5)
        assert target.running.done() is False


async def test_a_reader_that_is_too_slow_loses_its_stream_and_nobody_else_waits() -> None:
    """F80"""
    async with (
        serving(max_unread=16, lease_ms=0.0) as target,
        stream(target, "slow", narrow=True) as slow,
        stream(target, "quick") as quick,
    ):
        await target.until(lambda: target.loop.num_streams == 2)
        await quick.send(first_step([9], session="other"))
        await slow.send(first_step([8], session="held"))
        await target.until(lambda: target.bench.verifier.num_sessions == 2)
        for turn in range(200):
            # Each is answered at once, and takes more than a kilobyte on the way back.
            await slow.send(*(next_step([1, 2], round_=7, session=f"{turn}-{i}-" + "x" * 100) for i in range(12)))
            if target.bench.verifier.num_sessions == 1:
                break
        # Its sessions are let go although it does not even read that.
        await target.until(lambda: target.bench.verifier.num_sessions == 1, 10.0)
        code, details = await slow.status()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "unread" in details, details
        assert isinstance((await quick.answer()).outcome, Result)
        assert await generate(quick, [1, 2], 5) == reference(SCRIPT, [1, 2], 5)


async def test_a_crash_of_the_engine_reaches_every_caller_and_ends_the_loop() -> None:
    """F170"""
    async with serving() as target, stream(target, "a") as one, stream(target, "b") as two:
        target.engine.raises = RuntimeError("device lost")
        await two.send(Close("x", 1))
        await two.answer()
        await one.send(first_step([1]))
        for talk in (one, two):
            code, details = await talk.status()
            assert code is grpc.StatusCode.INTERNAL and "device lost" in details
        with pytest.raises(EngineFault):
            await asyncio.wait_for(asyncio.shield(target.running), 2.0)
        async with stream(target, "late") as late:
            assert (await late.status())[0] is grpc.StatusCode.INTERNAL


async def test_a_hung_engine_shows_in_the_beats_and_in_liveness() -> None:
    async with serving() as target, stream(target) as talk:
        target.engine.hang = threading.Event()
        target.bench.verifier.cost.seen(1, 1.0)
        await talk.send(first_step([1]))
        while not talk.beats or talk.beats[-1].running_step_ms < 300:
            await talk.listen()
        assert not target.thread.alive(0.3) and target.thread.alive(600)
        target.engine.hang.set()
        assert isinstance((await talk.answer()).outcome, Result)
        assert target.thread.alive(0.3)


@pytest.mark.parametrize("outcome", ["fine", "no grammar", "defect"])
async def test_a_grammar_is_compiled_beside_the_engine(outcome: str) -> None:
    """Other sessions do not wait for it, whatever comes of it."""
    ready = asyncio.Event()

    async with serving() as target, stream(target) as talk:

        async def compile_grammar(order: object) -> Free:
            await ready.wait()
            if outcome == "fine":
                return Free()
            raise InvalidRequest("sampling.grammar.regex", "no") if outcome == "no grammar" else RuntimeError("bug")

        target.loop._compile_grammar = compile_grammar
        params = SamplingParams(temperature=0.0, max_tokens=5, grammar=Grammar(GrammarForm.REGEX, "a"))
        await talk.send(first_step([1, 2], session="slow", sampling=params))
        assert await generate(talk, [1, 2], 5) == reference(SCRIPT, [1, 2], 5)
        assert len(target.loop._compiling) == 1
        ready.set()
        answer = (await talk.answer()).outcome
        if outcome == "fine":
            assert isinstance(answer, Result) and answer.tokens == tuple(reference(SCRIPT, [1, 2], 1))
        else:
            assert isinstance(answer, Failed) and answer.drop and answer.code == (3 if outcome == "no grammar" else 13)
            assert target.bench.verifier.num_sessions == 0
        await target.until(lambda: not target.loop._compiling)


async def test_the_loop_ends_although_a_grammar_is_still_compiled() -> None:
    async with serving() as target, stream(target) as talk:
        target.loop._compile_grammar = lambda order: asyncio.Event().wait()
        params = SamplingParams(temperature=0.0, max_tokens=5, grammar=Grammar(GrammarForm.REGEX, "a"))
        await talk.send(first_step([1, 2], sampling=params))
        await target.until(lambda: len(target.loop._compiling) == 1)
        [task] = target.loop._compiling
        target.running.cancel()
        await asyncio.gather(target.running, return_exceptions=True)
        assert task.cancelled()


async def test_a_caller_that_sends_no_more_still_gets_its_answers() -> None:
    async with serving() as target, stream(target) as talk:
        await talk.send(next_step([1, 2, 3], round_=2))
        await talk.call.done_writing()
        await talk.answer()
        assert (await talk.status())[0] is grpc.StatusCode.OK


async def test_draining_waits_for_sessions_then_ends_the_streams() -> None:
    async with serving() as target, stream(target) as talk:
        await talk.send(first_step([1]))
        await talk.answer()
        draining = asyncio.create_task(target.loop.drain())
        await asyncio.sleep(0.15)
        assert not draining.done()
        await talk.send(Close("s", 1))
        assert (await talk.answer()).outcome == Closed()
        await asyncio.wait_for(draining, 1.0)
        assert (await talk.status())[0] is grpc.StatusCode.OK
