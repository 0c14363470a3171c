"""A real target process with a tiny float64 model, over gRPC on loopback: what it decides is what the model alone would have said."""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import wire
from specdec.runtime.channels import open_channel
from specdec.terms import (
    Close,
    Closed,
    Failed,
    FinishReason,
    Grammar,
    GrammarForm,
)
from specdec.v1 import target_pb2, target_pb2_grpc
from specdec.vocabulary import load_tokenizer, vocabulary
from tests import scraped
from tests.service.target_process import GREEDY, PROMPTS, Talk, TargetProcess, contextual, generated, sessions_held, spoiled
from tests.unit.target.harness import first_step, next_step

pytestmark = [pytest.mark.faults, pytest.mark.timeout(120)]


async def test_model_info(target: TargetProcess, model: Path) -> None:
    async with open_channel(f"127.0.0.1:{target.port}") as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        one, two = [
            wire.model_info_from_wire((await stub.GetModelInfo(target_pb2.TargetServiceGetModelInfoRequest())).info) for _ in range(2)
        ]
    words = vocabulary(model)
    assert one == two and len(one.boot_id) == 32
    assert (one.vocab_size, one.vocabulary_fingerprint, one.eos_token_ids) == (words.size, words.fingerprint, words.eos_ids)
    assert one.batch_invariant and one.dtype == "float64" and one.max_model_len == 1024 and one.numerics_fingerprint


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_without_blocks_it_is_transformers_generate(target: TargetProcess, hf: Any, prompt: list[int]) -> None:
    async with target.stream() as stream:
        assert await Talk(stream, prompt, "s").run(40) == generated(hf, prompt, 40)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
@pytest.mark.parametrize("period", [1, 3, 1000], ids=["bad", "mixed", "good"])
async def test_blocks_change_when_tokens_come_not_which(target: TargetProcess, hf: Any, k: int, period: int) -> None:
    expected = generated(hf, PROMPTS[2], 60)
    async with target.stream() as stream:
        talk = Talk(stream, PROMPTS[2], "s")
        assert await talk.run(50, spoiled(expected, k, period)) == expected[:50]
    accepted = sum(result.num_accepted for result in talk.results)
    assert period != 1000 or accepted >= 50 * k // (k + 1) - k
    for result in talk.results:
        assert result.kv_length_after == result.prefix_length + len(result.tokens) - 1


@pytest.mark.parametrize("k", [1, 4, 8])
async def test_sampled_text_and_logprobs_depend_on_the_seed_alone(target: TargetProcess, k: int) -> None:
    sampling = replace(GREEDY, temperature=1.0, top_p=0.95, frequency_penalty=0.3, logprobs=2)
    async with target.stream() as stream:
        plain = Talk(stream, PROMPTS[1], "plain", sampling)
        expected = await plain.run(60)
        other = Talk(stream, PROMPTS[1], "blocks", sampling)
        assert await other.run(50, spoiled(expected, k, 4)) == expected[:50]
        logprobs = [[p for r in talk.results for p in r.logprobs][:50] for talk in (plain, other)]
        assert logprobs[0] == logprobs[1] and len(logprobs[0]) == 50
        assert await Talk(stream, PROMPTS[1], "seed", sampling, seed=12).run(50) != expected[:50]


async def test_the_prompts_logprobs_are_transformers_own(target: TargetProcess, hf: Any) -> None:
    """In pieces, beside another session; what the text is does not change."""
    prompt = [(13 * j) % 300 + 3 for j in range(200)]
    with torch.no_grad():
        rows = hf(torch.tensor([prompt])).logits[0].log_softmax(-1)
    async with target.stream("a") as one, target.stream("b") as two:
        asking = Talk(one, prompt, "s", replace(GREEDY, prompt_logprobs=3))
        texts = await asyncio.gather(asking.run(5), Talk(two, PROMPTS[0], "t").run(40))
    assert texts == [generated(hf, prompt, 5), generated(hf, PROMPTS[0], 40)]
    entries = asking.results[0].prompt_logprobs
    assert len(entries) == 199 and not any(result.prompt_logprobs for result in asking.results[1:])
    for at, entry in enumerate(entries, 1):
        best, ids = rows[at - 1].topk(3)
        assert entry.logprob == pytest.approx(float(rows[at - 1, prompt[at]]), abs=1e-5)
        assert entry.top_ids == tuple(ids.tolist()) and entry.top_logprobs == pytest.approx(best.tolist(), abs=1e-5)


async def test_answers_that_fork_are_those_of_their_seeds(target: TargetProcess) -> None:
    """Eight at once from one prefill; the first goes on and is closed while they run."""
    sampling = replace(GREEDY, temperature=1.0, logprobs=1)
    prompt = [(13 * j) % 300 + 3 for j in range(150)]
    async with contextual(target, 9) as streams:
        lone = [Talk(stream, prompt, "s", sampling, seed=i) for i, stream in enumerate(streams[:8])]
        expected = await asyncio.gather(*(talk.run(30) for talk in lone))
        stream = streams[8]
        first = Talk(stream, prompt, "s0", sampling, seed=0)
        await first.ask()
        await first.feed(await stream.answer())
        talks = {f"s{i}": Talk(stream, prompt, f"s{i}", sampling, seed=i, fork="s0") for i in range(1, 8)}
        talks["s0"] = first
        for talk in talks.values():
            await talk.ask(expected[talk.seed][len(talk.output) :][:3])
        while any(len(talk.output) < 30 for talk in talks.values()):
            answer = await stream.answer()
            if answer.outcome == Closed():
                continue
            talk = talks[answer.session_id]
            await talk.feed(answer)
            if len(talk.output) < 30:
                await talk.ask(expected[talk.seed][len(talk.output) :][:3])
            else:
                await stream.send(Close(talk.session, 1))
    assert [talks[f"s{i}"].output[:30] for i in range(8)] == list(expected)
    for i, talk in enumerate(lone):
        entries = [[entry for result in each.results for entry in result.logprobs][:30] for each in (talk, talks[f"s{i}"])]
        assert entries[0] == entries[1]


async def test_a_schema_shapes_the_answer_and_a_bad_one_fails_alone(target: TargetProcess, model: Path) -> None:
    age = {"type": "integer", "minimum": 0, "maximum": 99}
    schema = {"type": "object", "properties": {"age": age}, "required": ["age"], "additionalProperties": False}
    grammar = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(schema))
    tokenizer = load_tokenizer(model)
    async with target.stream() as stream, target.stream("vandal") as vandal:
        await vandal.send(first_step([5], sampling=replace(GREEDY, grammar=replace(grammar, text="{"))))
        failed = (await vandal.answer()).outcome
        assert isinstance(failed, Failed) and failed.code == 3 and failed.message.startswith("sampling.grammar.json_schema")
        texts = []
        for blocks in (lambda output: (), lambda output: [7] * 3):
            talk = Talk(stream, PROMPTS[1], f"s{len(texts)}", replace(GREEDY, grammar=grammar, ignore_eos=False))
            texts.append(await talk.run(100, blocks))
            assert talk.finish is FinishReason.STOP
        assert texts[0] == texts[1] and 0 <= json.loads(tokenizer.decode(texts[0]))["age"] <= 99


async def test_a_long_prompt_comes_in_pieces_beside_running_streams(target: TargetProcess, hf: Any) -> None:
    long_prompt = [(13 * j) % 300 + 3 for j in range(500)]
    async with target.stream("a") as one, target.stream("b") as two:
        texts = await asyncio.gather(Talk(one, PROMPTS[0], "short").run(60), Talk(two, long_prompt, "long").run(10))
    assert texts == [generated(hf, PROMPTS[0], 60), generated(hf, long_prompt, 10)]


async def test_eight_streams_at_once_equal_solo_runs(target: TargetProcess, hf: Any) -> None:
    async with contextual(target, 8) as streams:
        expected = [generated(hf, PROMPTS[i % 4], 40) for i in range(8)]
        talks = [Talk(stream, PROMPTS[i % 4], "same name").run(30, spoiled(expected[i], i % 5, 3)) for i, stream in enumerate(streams)]
        assert await asyncio.gather(*talks) == [text[:30] for text in expected]


async def test_a_cancelled_stream_frees_its_sessions_after_the_lease(target: TargetProcess) -> None:
    """F73"""
    async with target.stream("watcher") as watcher:
        async with target.stream("leaver") as leaver:
            await leaver.send(*(first_step(PROMPTS[i], session=f"s{i}", sampling=GREEDY) for i in range(4)))
            await leaver.answer()
            assert await sessions_held(watcher) == 4
        begun = time.monotonic()
        while await sessions_held(watcher):
            assert time.monotonic() - begun < 10.0  # the lease is 0.3 s


async def test_taken_over_after_a_reconnect(target: TargetProcess, hf: Any) -> None:
    expected = generated(hf, PROMPTS[0], 6)
    async with target.stream("adopter") as stream:
        await stream.send(first_step(PROMPTS[0], expected[:3], sampling=GREEDY))
        first = await stream.answer()
    async with target.stream("adopter") as stream:
        await stream.send(first_step(PROMPTS[0], expected[:3], sampling=GREEDY))
        assert await stream.answer() == first
        await stream.send(next_step([*PROMPTS[0], *expected[:4]], expected[4:5], round_=2))
        assert (await stream.answer()).outcome.tokens == tuple(expected[4:6])
        await stream.send(Close("s", 1))
        await stream.answer()


async def test_bad_input_names_the_field_and_neighbours_do_not_notice(target: TargetProcess, hf: Any) -> None:
    """F51, F52, F60"""
    bad = {
        "step.tokens": first_step([5, 320], sampling=GREEDY, session="ids"),
        "step.num_proposed": first_step([5], [6] * 17, sampling=GREEDY, session="many"),
        "begin.prompt_length": first_step([5], prompt_length=0, sampling=GREEDY, session="prompt"),
        "sampling.top_p": first_step([5], sampling=replace(GREEDY, top_p=0.0), session="top_p"),
    }
    async with target.stream("vandal") as vandal, target.stream() as stream:
        text = asyncio.create_task(Talk(stream, PROMPTS[3], "s").run(40))
        for _ in range(5):
            await vandal.send(*bad.values())
            outcomes = {a.session_id: a.outcome for a in [await vandal.answer() for _ in bad]}
            for field, step in bad.items():
                outcome = outcomes[step.session_id]
                assert isinstance(outcome, Failed) and field in outcome.message and outcome.code == 3
        assert await text == generated(hf, PROMPTS[3], 40)


async def test_health_reflection_and_metrics(target: TargetProcess) -> None:
    async with open_channel(f"127.0.0.1:{target.port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for name in ("", "liveness", "specdec.v1.TargetService"):
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == health_pb2.HealthCheckResponse.SERVING
    page = await asyncio.to_thread(scraped.page, target.metrics_port)
    for name in (
        "specdec_batch_size",
        "specdec_queue_duration",
        "specdec_kv_cache_utilization",
        "specdec_memory_bytes",
        "specdec_round_duration",
        "specdec_sessions",
    ):
        assert re.search(rf"^{name}", page, re.MULTILINE), name
