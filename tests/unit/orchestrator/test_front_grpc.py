"""GenerationService over a real connection, with a scripted core behind it: F27, F31, F36, F51, F52, F59, F60, F64, F72–F75, F79, F80,
F138, F153."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.fronts import grpc as front
from specdec.errors import InternalFault, InvalidRequest, Overloaded, Unavailable
from specdec.terms import FinishReason, Origin
from specdec.v1 import common_pb2, generation_pb2
from tests.fakes_driver import WAIT_FOR_EVER, decided, ended
from tests.unit.orchestrator.front_rig import TOKENIZER, Service, failure, ids, request, texts, tokens

pytestmark = pytest.mark.timeout(30)
ENDS = {
    "length": ([decided(*ids("lazy")), ended()], FinishReason.LENGTH, ""),
    "end id": ([decided(*ids("lazy")), ended(FinishReason.STOP, 2)], FinishReason.STOP, "2"),
    "end id first": ([ended(FinishReason.STOP, 2)], FinishReason.STOP, "2"),
    "stop string": ([decided(*ids("lazy dog")), WAIT_FOR_EVER], FinishReason.STOP, "og"),
}


@pytest.mark.parametrize("name", ENDS)
async def test_one_first_message_and_one_last(service: Service, name: str) -> None:
    """F153: however it ends; nothing follows the last message but the status."""
    steps, reason, why = ENDS[name]
    service.backend.steps = steps
    call = service.call(stop=["og"])
    messages = [message async for message in call]
    kinds = [message.WhichOneof("event") for message in messages]
    assert kinds == ["started", *["delta"] * (len(kinds) - 2), "finished"]
    assert await call.code() is grpc.StatusCode.OK
    last = messages[-1].finished
    assert (last.finish_reason, last.stop_reason) == ({FinishReason.STOP: 1, FinishReason.LENGTH: 2}[reason], why)
    assert last.usage.completion_tokens == len(tokens(messages))
    assert last.usage.prompt_tokens == messages[0].started.prompt_tokens == len(ids("the"))
    await service.quiet()


async def test_the_first_and_the_last_message_tell_what_is_in_force(service: Service) -> None:
    block = replace(decided(*ids("over"), origin=Origin.ACCEPTED))
    counts = {"rounds": 4, "spec_rounds": 3, "drafted": 9, "accepted": 6, "hits": 2, "wanted": 4, "spec_tokens": 9, "replacements": 1}
    service.backend.steps = [block, ended(**counts)]
    messages = await service.collect(seed=2**63, request_id="mine", num_speculative_tokens=2, sampling={"temperature": 0.0})
    first, last = messages[0].started, messages[-1].finished
    assert (first.request_id, first.seed, first.model) == ("mine", 2**63, "scripted")
    spec = last.speculative
    assert (spec.mean_acceptance_length, spec.draft_acceptance_rate, spec.hit_rate) == (3.0, pytest.approx(2 / 3), 0.5)
    assert (spec.num_draft_tokens, spec.num_accepted_draft_tokens, spec.num_spec_steps, spec.num_rounds) == (9, 6, 3, 4)
    assert (last.usage.accepted_prediction_tokens, last.usage.rejected_prediction_tokens) == (len(block.tokens), 3)
    settings = last.settings
    assert settings.sampling.HasField("temperature") and settings.sampling.temperature == 0.0
    assert settings.sampling.max_tokens == 64 - first.prompt_tokens and settings.sampling.repetition_penalty == 1.0
    assert (settings.rejection_sample_method, settings.draft_sample_method, settings.num_speculative_tokens) == (1, 1, 2)
    assert settings.batch_invariant and settings.numerics_fingerprint == "numerics"


async def test_an_unset_seed_is_drawn_and_told(service: Service) -> None:
    service.backend.steps = [ended()]
    seeds = {(await service.collect())[0].started.seed for _ in range(5)}
    assert len(seeds) == 5
    assert {running.admitted.seed for running in service.backend.started} == seeds


@pytest.mark.parametrize("skip", [True, False])
async def test_special_text_only_when_asked_for(service: Service, skip: bool) -> None:
    """F59."""
    end = TOKENIZER.token_to_id("<|im_end|>")
    service.backend.steps = [decided(*ids("dog"), end), ended()]
    assert texts(await service.collect(skip_special_tokens=skip)) == ("dog" if skip else "dog<|im_end|>")


async def test_merged_blocks_lose_no_logprobs(service: Service) -> None:
    """F36: three blocks in one message."""
    service.backend.steps = [decided(5, 6, 7, logprobs=True), ended()]
    delta = (await service.collect(sampling={"logprobs": 1}))[1].delta
    assert list(delta.token_ids) == [5, 6, 7] and len(delta.origins) == 3
    assert [round(entry.logprob, 3) for entry in delta.logprobs] == [-0.505, -0.506, -0.507]
    assert [list(entry.top_ids) for entry in delta.logprobs] == [[5], [6], [7]]


async def test_a_stop_string_frees_the_core_and_discards_the_rest(service: Service) -> None:
    service.backend.steps = [decided(*ids("lazy")), decided(*ids(" dog dog")), decided(*ids(" fox")), WAIT_FOR_EVER]
    messages = await service.collect(stop=["dog"])
    running = service.backend.started[0]
    assert texts(messages) == "lazy " and running.stopped_here == 1
    usage, kept = messages[-1].finished.usage, len(ids("lazy")) + len(ids(" dog"))
    assert (usage.completion_tokens, len(tokens(messages))) == (kept, kept)
    assert usage.discarded_tokens == len(ids("lazy")) + len(ids(" dog dog")) + len(ids(" fox")) - kept


async def test_held_back_text_comes_before_an_error(service: Service) -> None:
    """F27; and an error is the status alone, never a last message."""
    service.backend.steps = [decided(*ids("lazy")), decided(*ids(" do")), InternalFault("broken")]
    call, seen = service.call(stop=["dog"]), []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in call:
            seen.append(message)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert texts(seen) == "lazy do" and not any(message.HasField("finished") for message in seen)
    await service.quiet()


async def test_a_chat_goes_through_the_template(service: Service) -> None:
    service.backend.steps = [ended()]
    turn = generation_pb2.Message(role="user", content="hi")
    messages = await service.collect(messages=generation_pb2.Messages(messages=[turn]))
    expected = ids("<|im_end|>user:hi>")
    assert messages[0].started.prompt_tokens == len(expected)
    assert service.backend.started[0].admitted.tokens == tuple(expected)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"text": ""}, "prompt"),
        ({"token_ids": generation_pb2.TokenIds()}, "prompt"),
        ({"token_ids": generation_pb2.TokenIds(ids=[10_000])}, "token_ids.ids"),
        ({"token_ids": generation_pb2.TokenIds(ids=[5] * 65)}, "prompt"),
        ({"sampling": {"max_tokens": 0}}, "sampling.max_tokens"),
        ({"sampling": {"logit_bias": {10_000: 1.0}}}, "sampling.logit_bias"),
        ({"sampling": {"temperature": float("nan")}}, "sampling.temperature"),
        ({"messages": generation_pb2.Messages(messages=[{"role": "u"}], template_args={"x": "{"})}, "messages.template_args[x]"),
    ],
)
async def test_bad_input_names_the_field_and_harms_nobody(service: Service, fields: dict[str, Any], name: str) -> None:
    """F31, F51, F52, F60, F64: a stream that runs beside it goes on."""
    service.backend.steps = [decided(*ids("lazy")), 0.1, decided(*ids(" dog")), ended()]
    neighbour = asyncio.create_task(service.collect(seed=1))
    error = await failure(service.call(**fields))
    assert isinstance(error, InvalidRequest) and error.field == name
    assert texts(await neighbour) == "lazy dog" and len(service.backend.started) == 1


async def test_a_prompt_as_long_as_the_window_gets_an_empty_answer(service: Service) -> None:
    messages = await service.collect(token_ids=generation_pb2.TokenIds(ids=[5] * 64))
    assert [message.WhichOneof("event") for message in messages] == ["started", "finished"]
    assert messages[1].finished.finish_reason == common_pb2.FINISH_REASON_LENGTH and not service.backend.started


async def test_a_resumed_answer_that_was_over_is_told_again(service: Service) -> None:
    messages = await service.collect(output_token_ids=ids("dog"), stop=["dog"])
    last = messages[-1].finished
    assert (len(messages), last.stop_reason, last.usage.completion_tokens) == (2, "dog", len(ids("dog")))
    messages = await service.collect(output_token_ids=[5, 6], sampling={"max_tokens": 2})
    assert messages[-1].finished.finish_reason == common_pb2.FINISH_REASON_LENGTH and not service.backend.started


async def test_more_output_than_a_window_holds_is_refused_before_it_is_read(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """F65: of each id that is resumed the text is made, and the grammar's state."""
    monkeypatch.setattr(front, "prepare", lambda text, request: pytest.fail("it was read"))
    error = await failure(service.call(output_token_ids=[5] * 64))
    assert isinstance(error, InvalidRequest) and error.field == "output_token_ids" and "63" in str(error)


async def test_nobody_there(service: Service) -> None:
    service.backend.info = None
    assert isinstance(await failure(service.call()), Unavailable)
    assert isinstance(await failure(service.call(text="")), InvalidRequest), "needs no target"


async def test_no_room_and_no_first_message(service: Service) -> None:
    service.backend.refuse = Overloaded("full", 250)
    call = service.call()
    error = await failure(call)
    assert isinstance(error, Overloaded) and error.retry_after_ms == 250


# --- clients that go away -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_is_gone_frees_the_core(service: Service, after: int, how: str) -> None:
    """F72, F73, F138: before the first token and in the middle."""
    service.backend.steps = [*[decided(5)] * after, WAIT_FOR_EVER]
    call = service.stub.Generate(request(), timeout=1.5 if how == "deadline" else None)
    for _ in range(after + 1):
        await call.read()
    assert service.backend.live
    if how == "cancel":
        call.cancel()
    await service.quiet()
    assert service.backend.started[0].cancelled >= 1


async def test_a_client_that_is_gone_before_it_was_let_in(service: Service) -> None:
    """F75: it never reaches the core."""
    reached = asyncio.Event()

    async def slow_info() -> None:
        reached.set()
        await asyncio.sleep(WAIT_FOR_EVER)

    service.backend.model_info = slow_info  # type: ignore[method-assign, assignment]
    call = service.call()
    reading = asyncio.create_task(call.read())
    await reached.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    assert not service.backend.started


async def test_no_session_is_left_behind(service: Service) -> None:
    """F74: normal ends and hang-ups, mixed."""
    service.backend.steps = [decided(5), 0.001, decided(6), 0.001, ended()]

    async def one(number: int) -> None:
        call = service.call()
        await call.read()
        if number % 2:
            await asyncio.sleep(number % 5 / 1000)
            call.cancel()
        else:
            while await call.read() is not grpc.aio.EOF:
                pass

    for _ in range(5):
        await asyncio.gather(*(one(number) for number in range(40)))
    await service.quiet()
    assert len(service.backend.started) == 200


async def test_a_live_request_id_is_used_once(service: Service) -> None:
    """F79; after a hang-up the name is free at once."""
    service.backend.steps = [decided(5), WAIT_FOR_EVER]
    first = service.call(request_id="same")
    await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.collect(request_id="same")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    first.cancel()
    await service.quiet()
    service.backend.steps = [ended()]
    assert await service.collect(request_id="same")


async def test_a_slow_reader_holds_the_core_back(service: Service) -> None:
    """F80: what waits for it is bounded, by gRPC's window and the core's; a neighbour does not notice."""
    block = decided(*[5] * 500, logprobs=True)
    service.backend.steps = [block] * 5000
    call = service.call(sampling={"logprobs": 1})
    await call.read()
    before, given = -1, 0
    while given != before:  # until nothing more fits between the two
        await asyncio.sleep(0.3)
        before, given = given, service.backend.started[0].given
    assert 0 < given < 1000 * 500
    service.backend.steps = [decided(*ids("dog")), ended()]
    assert texts(await service.collect()) == "dog"
    call.cancel()
    await service.quiet()


# --- the other calls ----------------------------------------------------------------------------------------------------


async def test_tokenise_and_detokenise(service: Service) -> None:
    turn = generation_pb2.Message(role="user", content="hi")
    tokenise, detokenise = service.stub.Tokenize, service.stub.Detokenize
    assert list((await tokenise(generation_pb2.TokenizeRequest(text="the dog"))).token_ids) == ids("the dog")
    chat = generation_pb2.Messages(messages=[turn], add_generation_prompt=False)
    got = list((await tokenise(generation_pb2.TokenizeRequest(messages=chat))).token_ids)
    assert got == ids("<|im_end|>user:hi")
    for skip, text in ((None, "<|im_end|>user:hi"), (True, "user:hi")):
        asked = generation_pb2.DetokenizeRequest(token_ids=got, skip_special_tokens=skip)
        assert (await detokenise(asked)).text == text
    for bad in (tokenise(generation_pb2.TokenizeRequest()), detokenise(generation_pb2.DetokenizeRequest(token_ids=[9999]))):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bad
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_model_info(service: Service) -> None:
    answer = await service.stub.GetModelInfo(generation_pb2.GetModelInfoRequest())
    assert (answer.info.model, answer.info.max_model_len, answer.draft_available, answer.num_speculative_tokens) == (
        "scripted",
        64,
        True,
        3,
    )


# --- no room ------------------------------------------------------------------------------------------------------------


async def test_who_has_no_place_costs_no_text_work(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused before its prompt is looked at, with a time to come back; what is left of its deadline is known."""
    worked: list[object] = []
    monkeypatch.setattr(front, "prepare", lambda *what: worked.append(what))
    service.backend.full = Overloaded("no place", 250)
    error = await failure(service.stub.Generate(request(n=3, priority=-2, text="the lazy dog"), timeout=20.0))
    assert isinstance(error, Overloaded) and error.retry_after_ms == 250
    ((answers, size, priority, left_s),) = service.backend.arrivals
    assert (answers, priority) == (3, -2) and size > len("the lazy dog") and 0 < (left_s or 0) < 22.0, "gRPC rounds it up"
    assert not worked and not service.backend.started
    await failure(service.call())
    assert service.backend.arrivals[1][3] is None, "no deadline"
