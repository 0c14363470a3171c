"""A draft process over gRPC, with a tiny model in float64: what it tells is what the engine alone says for that prefix."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from orchestrator.lookahead import Lookahead
from specdec import wire
from specdec.engine import Engine, EngineConfig, load_engine
from specdec.hashing import prefix_hash
from specdec.runtime.channels import open_channel
from specdec.terms import (
    CloseDraft,
    Grammar,
    GrammarForm,
    Pause,
    Proposal,
    Refused,
    Resume,
    Resync,
    SamplingParams,
)
from specdec.v1 import draft_pb2, draft_pb2_grpc
from specdec.vocabulary import vocabulary
from tests import scraped
from tests.service.draft_client import ANSWER_S, PROMPT, Process, Stream, commit_of, naive, open_of, sent_of
from tests.tiny import save_tiny, tiny_tokenizer
from tests.unit.runtime.shell import SERVING, health

pytestmark = [pytest.mark.faults, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), seed=3, window=256)


@pytest.fixture(scope="module")
def reference(model: Path) -> Engine:
    return load_engine(EngineConfig(model_dir=model, dtype="float64", kv_tokens=4096, self_test=False))


@pytest.fixture(scope="module")
def process(model: Path) -> Iterator[Process]:
    with Process(model) as running:
        yield running


@pytest.fixture
async def channel(process: Process) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(process.endpoint) as opened:
        yield opened


@pytest.fixture
async def stream(channel: grpc.aio.Channel) -> AsyncIterator[Stream]:
    made = Stream(channel)
    yield made
    made.cancel()


def fits(proposal: Proposal, prefix: Sequence[int], reference: Engine) -> bool:
    named = (proposal.prefix_length, proposal.prefix_hash) == (len(prefix), prefix_hash(prefix))
    return named and list(proposal.tokens) == naive(reference, prefix, len(proposal.tokens))


async def test_info(process: Process, channel: grpc.aio.Channel, model: Path) -> None:
    stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
    info = wire.model_info_from_wire((await stub.GetModelInfo(draft_pb2.DraftServiceGetModelInfoRequest())).info)
    assert info.vocabulary_fingerprint == vocabulary(model).fingerprint and info.vocab_size == 320
    assert info.max_model_len == 256 and info.dtype == "float64" and info.boot_id and info.numerics_fingerprint


ROUNDS = ("full", "correction", "bonus differs", "empty", "foreign", "no sent", "full", "first differs", "full", "full")


async def test_rounds_of_every_kind(stream: Stream, reference: Engine) -> None:
    """The orchestrator's own lookahead gets a full block for every next round, and it is what the engine alone says."""
    tokens = list(PROMPT)
    lookahead = Lookahead(tokens)
    await stream.send(open_of())
    for kind in ROUNDS:
        while len(lookahead.block(3).tokens) < 3:
            lookahead.add(await stream.event())
        block = lookahead.block(3).tokens
        assert list(block) == naive(reference, tokens, 3), kind
        foreign = (block[0], 99, 98) if kind == "foreign" else ()
        n = 0 if kind == "empty" else 3
        if kind != "no sent":
            await stream.send(sent_of(tokens, n, foreign))
        true = naive(reference, tokens, n + 1)
        decided = {
            "full": true,
            "correction": [true[0], 7],
            "bonus differs": [*true[:-1], 7],
            "first differs": [7],
            "empty": true,
            "foreign": [*foreign, 5],
            "no sent": [7, 8, 9],
        }[kind]
        await stream.send(commit_of(tokens, decided))
        tokens += decided
        lookahead.commit(decided)


async def test_pause_resume_close_and_reopen(stream: Stream, reference: Engine) -> None:
    await stream.send(open_of(), Pause("s"))
    await stream.send(open_of("other"))
    assert (await stream.proposed(3)).session_id == "other"
    await stream.send(Resume("s"))
    assert fits(await stream.proposed(3), PROMPT, reference)
    await stream.send(CloseDraft("s"), CloseDraft("other"))
    await stream.until_load(lambda load: load.sessions == 0 and load.kv_used_tokens == 0)
    await stream.send(open_of(epoch=2, tokens=PROMPT[:2]))
    again = await stream.proposed(3)
    assert again.epoch == 2 and fits(again, PROMPT[:2], reference)


async def test_f99_many_sessions_at_once_say_what_each_alone_says(stream: Stream, reference: Engine) -> None:
    prompts = {f"s{i}": [50 + i] * (1 + 17 * i) for i in range(6)}
    await stream.send(*(open_of(name, tokens) for name, tokens in prompts.items()))
    for _ in prompts:
        told = await stream.proposed(3)
        assert fits(told, prompts[told.session_id], reference)


async def test_f51_bad_commands_cost_their_session_alone(stream: Stream, reference: Engine) -> None:
    await stream.send(open_of("good"), open_of("bad", tokens=(1, 320)))
    seen = {type(e): e for e in (await stream.event(), await stream.event())}
    assert seen[Refused].session_id == "bad" and "open.tokens" in seen[Refused].reason
    assert fits(seen[Proposal], PROMPT, reference)
    unreadable = draft_pb2.DraftRequest(
        commands=[draft_pb2.DraftCommand(sent=draft_pb2.Sent(session_id="good", num_proposed=2, tokens=[1]))]
    )
    await stream.send_raw(unreadable)
    refused = await stream.event()
    assert isinstance(refused, Refused) and (refused.session_id, refused.epoch) == ("good", 1) and "sent.tokens" in refused.reason
    await stream.send(commit_of((1, 2), (3,), "nobody"))
    assert await stream.event() == Resync("nobody", 0, 0)
    await stream.send(open_of("good", epoch=2))
    assert fits(await stream.proposed(3), PROMPT, reference)


async def test_under_a_grammar_proposals_are_legal(stream: Stream, reference: Engine) -> None:
    """What is no grammar costs its session alone, and nobody waits."""
    sampling = SamplingParams(temperature=0.0, ignore_eos=True)
    regex = {name: replace(sampling, grammar=Grammar(GrammarForm.REGEX, text)) for name, text in (("bad", "a("), ("good", "[a-f]+"))}
    await stream.send(open_of("bad", sampling=regex["bad"]), open_of("good", sampling=regex["good"]), open_of("free"))
    told = dict[str, Proposal]()
    letter, written = tuple(tiny_tokenizer().encode("a").ids), list(PROMPT)
    while len(told) < 2:
        telling = asyncio.create_task(stream.event())
        while not telling.done():
            await asyncio.sleep(0.2)
            if "free" in told and not telling.done():  # the language was not compiled yet when its first row was there
                await stream.send(commit_of(written, letter, "good"))
                written += letter
        event = await telling
        assert isinstance(event, Proposal) and event.session_id != "bad"
        told.setdefault(event.session_id, event)
    assert fits(told["free"], PROMPT, reference)
    assert re.fullmatch("[a-f]+", tiny_tokenizer().decode(list(told["good"].tokens)))
    committed = list(PROMPT)
    telling = asyncio.create_task(stream.event())
    while not telling.done():  # each time it would be asked again
        await stream.send(commit_of(committed, (68,), "bad"))
        committed.append(68)
        await asyncio.sleep(0.05)
    while isinstance(refused := await telling, Proposal):
        telling = asyncio.create_task(stream.event())
    assert isinstance(refused, Refused) and refused.session_id == "bad" and refused.retry_after_ms == 0


@pytest.mark.parametrize("name", [None, "", "x" * 129])
async def test_a_stream_must_say_whose_it_is(channel: grpc.aio.Channel, name: str | None) -> None:
    stream = Stream(channel)
    await stream.send_raw(draft_pb2.DraftRequest(orchestrator_id=name))
    assert await stream.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_too_many_commands_or_a_command_of_nobody_end_the_stream(channel: grpc.aio.Channel) -> None:
    many = Stream(channel)
    await many.send_raw(draft_pb2.DraftRequest(orchestrator_id="x", commands=[draft_pb2.DraftCommand()] * 1025))
    assert await many.code() is grpc.StatusCode.INVALID_ARGUMENT
    nobody = Stream(channel)
    await nobody.send_raw(draft_pb2.DraftRequest(orchestrator_id="x", commands=[draft_pb2.DraftCommand()]))
    assert await nobody.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_f62_the_window_ends_proposals(stream: Stream) -> None:
    await stream.send(open_of(tokens=[9] * 254), open_of("short"), open_of("long", tokens=[9] * 300))
    told = [await stream.event() for _ in range(3)]
    by_name = {event.session_id: event for event in told}
    assert isinstance(by_name["long"], Refused) and by_name["long"].retry_after_ms == 0
    assert len(by_name["s"].tokens) == 2 and len(by_name["short"].tokens) == 3
    await stream.send(commit_of([9] * 254, [1, 1]))
    assert isinstance(await stream.event(), Refused)


async def test_room_ends_for_one_session(stream: Stream) -> None:
    await stream.send(*(open_of(f"s{i}", tokens=[i + 1] * 240) for i in range(20)))
    told = [await stream.event() for _ in range(20)]
    refused = [event for event in told if isinstance(event, Refused)]
    assert refused and all(event.retry_after_ms > 0 for event in refused)
    assert len(refused) < 20
    load = await stream.until_load(lambda load: load.sessions == 20 - len(refused))
    assert 0 < load.kv_used_tokens <= load.kv_total_tokens


async def test_a_cut_stream_takes_its_sessions_with_it(channel: grpc.aio.Channel) -> None:
    watcher, lost = Stream(channel), Stream(channel)
    await watcher.send(open_of("kept"))
    await watcher.proposed(3)
    await lost.send(open_of("gone"), open_of("gone too", tokens=[7] * 200))
    await watcher.until_load(lambda load: load.sessions == 3)
    lost.cancel()
    await watcher.until_load(lambda load: load.sessions == 1)
    done = Stream(channel)
    await done.send(open_of("half-closed"))
    await watcher.until_load(lambda load: load.sessions == 2)
    await done._call.done_writing()
    assert await done.code() is grpc.StatusCode.OK
    await watcher.until_load(lambda load: load.sessions == 1)
    watcher.cancel()


async def test_the_same_session_id_on_two_streams_is_two_sessions(channel: grpc.aio.Channel, reference: Engine) -> None:
    one, two = Stream(channel), Stream(channel)
    await one.send(open_of())
    await two.send(open_of(tokens=PROMPT[:2]))
    assert fits(await one.proposed(3), PROMPT, reference)
    assert fits(await two.proposed(3), PROMPT[:2], reference)
    one.cancel()
    two.cancel()


async def test_f82_a_killed_process_ends_its_streams_and_nothing_else(process: Process, model: Path, reference: Engine) -> None:
    with Process(model) as victim:
        async with open_channel(victim.endpoint) as doomed, open_channel(process.endpoint) as healthy:
            dying, living = Stream(doomed), Stream(healthy)
            await dying.send(open_of())
            await living.send(open_of())
            assert fits(await dying.proposed(3), PROMPT, reference)
            victim.process.send_signal(signal.SIGKILL)
            assert await dying.code() is grpc.StatusCode.UNAVAILABLE
            assert fits(await living.proposed(3), PROMPT, reference)
            living.cancel()


async def test_sigterm_announces_ends_streams_and_the_process_cleanly(model: Path) -> None:
    with Process(model) as running:
        async with open_channel(running.endpoint) as channel:
            stream = Stream(channel)
            await stream.send(open_of())
            await stream.proposed(3)
            running.process.send_signal(signal.SIGTERM)
            assert (await stream.until_load(lambda load: load.draining)).sessions == 1, "told before anything ends"
            assert await stream.code() is grpc.StatusCode.UNAVAILABLE
            assert await asyncio.to_thread(running.process.wait, 8) == 0


HANGING = """
import sys, time
from draft_service import __main__ as draft

def broken(config, load=draft.load_engine):
    engine = load(config)
    forward = engine.forward
    def hanging(segments):
        if any(299 in segment.tokens for segment in segments):
            time.sleep(3600)
        return forward(segments)
    engine.forward = hanging
    return engine

draft.load_engine = broken
sys.exit(draft.main())
"""


async def test_f170_a_hung_engine_shows_in_liveness_and_cannot_keep_the_process(model: Path) -> None:
    with Process(model, HANGING, HUNG_STEP_MS=700, HEALTH_PORT=0) as running:
        probes = open_channel(f"127.0.0.1:{running.ready['health_port']}")
        async with open_channel(running.endpoint) as channel, probes:
            assert await health(probes, "liveness") == SERVING
            stream = Stream(channel)
            await stream.send(open_of(tokens=(5, 299)))
            async with asyncio.timeout(20):
                while await health(probes, "liveness") == SERVING:
                    await asyncio.sleep(0.02)
            running.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(running.process.wait, 10) == 1


async def test_metrics_are_served(process: Process, stream: Stream) -> None:
    await stream.send(open_of())
    await stream.proposed(3)
    names = {
        "specdec_draft_proposed_tokens",
        "specdec_draft_wasted_tokens",
        "specdec_batch_size",
        "specdec_sessions",
        "specdec_kv_cache_utilization",
        "specdec_memory_bytes",
    }
    async with asyncio.timeout(ANSWER_S):
        while names:
            text = await asyncio.to_thread(scraped.page, int(process.ready["metrics_port"]), process.ready["host"])
            names = {name for name in names if name not in text}
