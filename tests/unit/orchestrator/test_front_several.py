"""Several answers in one call, and the prompt's log-probabilities, as a client sees them: F27, F74, F75, F79, F80, F153."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest

from orchestrator.events import Admitted
from orchestrator.output import TokensDecided
from specdec.errors import InternalFault, InvalidRequest, Overloaded
from specdec.seeds import answer_seed
from specdec.terms import TokenLogprobs
from specdec.v1 import common_pb2, generation_pb2
from tests.fakes_driver import WAIT_FOR_EVER, ScriptedRunning, decided, ended
from tests.unit.orchestrator.front_rig import Service, failure, ids, texts, tokens

pytestmark = pytest.mark.timeout(30)
Messages = list[generation_pb2.GenerateResponse]


def of(messages: Messages, index: int) -> Messages:
    return [message for message in messages if message.index == index]


def kinds(messages: Messages) -> list[str | None]:
    return [message.WhichOneof("event") for message in messages]


def word(text: str) -> TokensDecided:
    return decided(*ids(text))


async def test_every_answer_has_one_first_message_and_one_last(service: Service) -> None:
    """F153: told apart by the index, interleaved, each ended in its own way and billed for its own tokens."""
    service.backend.steps = [word("lazy"), word(" dog"), word(" fox"), ended()]
    service.backend.other = {1: [word("over"), word(" dog"), WAIT_FOR_EVER], 2: [ended()]}
    messages = await service.collect(n=4, seed=11, request_id="mine", stop=["dog"])
    for index in range(4):
        mine = of(messages, index)
        assert kinds(mine) == ["started", *["delta"] * (len(mine) - 2), "finished"]
        started, finished = mine[0].started, mine[-1].finished
        assert (started.request_id, started.seed, started.prompt_tokens) == ("mine", answer_seed(11, index), len(ids("the")))
        assert finished.usage.completion_tokens == len(tokens(mine)) and finished.usage.prompt_tokens == len(ids("the"))
    assert [texts(of(messages, index)) for index in range(4)] == ["lazy ", "over ", "", "lazy "]
    assert [of(messages, index)[-1].finished.stop_reason for index in range(4)] == ["dog", "dog", "", "dog"]
    deltas = [message.index for message in messages if message.HasField("delta")]
    assert deltas != sorted(deltas), "no answer waits for another to end"
    assert service.backend.started[0].stopped_here == 3
    await service.quiet()


async def test_what_is_admitted(service: Service) -> None:
    service.backend.steps = [ended()]
    await service.collect(n=3, sampling={"prompt_logprobs": 2, "top_k": 5})
    first, *rest = service.backend.started[0].answers
    assert len({answer.session_id for answer in (first, *rest)}) == 3
    assert first.sampling.prompt_logprobs == 2 and not first.fork_session_id
    assert all(a.fork_session_id == first.session_id and a.sampling.prompt_logprobs is None and a.sampling.top_k == 5 for a in rest)


@pytest.mark.parametrize(("fields", "name"), [({"n": 0}, "n"), ({"n": 17}, "n"), ({"n": 2, "output_token_ids": [5]}, "n")])
async def test_how_many_there_may_be(service: Service, fields: dict[str, Any], name: str) -> None:
    error = await failure(service.call(**fields))
    assert isinstance(error, InvalidRequest) and error.field == name and not service.backend.started


async def test_one_that_fails_ends_the_call(service: Service) -> None:
    """F27: what was held back of the others comes first; an error is the status alone, and no answer goes on."""
    service.backend.steps = [word("lazy"), word(" do"), WAIT_FOR_EVER]
    service.backend.other = {1: [word("over"), 0.05, InternalFault("broken")]}
    call, seen = service.call(n=3, stop=["dog"]), []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for message in call:
            seen.append(message)
    assert caught.value.code() is grpc.StatusCode.INTERNAL and caught.value.details() == "broken"
    assert [texts(of(seen, index)) for index in range(3)] == ["lazy do", "over", "lazy do"]
    assert kinds(seen).count("started") == 3 and "finished" not in kinds(seen)
    assert service.backend.started[0].cancelled >= 1
    await service.quiet()


async def test_one_that_is_over_before_another_fails_keeps_its_last_message(service: Service) -> None:
    service.backend.steps = [word("lazy"), ended()]
    service.backend.other = {1: [word("over"), 0.05, InternalFault("broken")]}
    call, seen = service.call(n=2), []
    with pytest.raises(grpc.aio.AioRpcError):
        async for message in call:
            seen.append(message)
    assert kinds(of(seen, 0)) == ["started", "delta", "finished"] and "finished" not in kinds(of(seen, 1))


async def test_answers_that_need_no_target(service: Service) -> None:
    messages = await service.collect(n=3, token_ids=generation_pb2.TokenIds(ids=[5] * 64))
    assert kinds(messages) == ["started"] * 3 + ["finished"] * 3 and not service.backend.started
    assert {message.finished.finish_reason for message in messages[3:]} == {common_pb2.FINISH_REASON_LENGTH}


async def test_no_room_for_all_is_no_room(service: Service) -> None:
    service.backend.refuse = Overloaded("n: 9 answers never run at once here, at most 4 do", 250)
    error = await failure(service.call(n=9))
    assert isinstance(error, Overloaded) and "n: 9" in str(error) and error.retry_after_ms == 250


@pytest.mark.parametrize("after", [0, 6])
async def test_a_client_that_is_gone_frees_all(service: Service, after: int) -> None:
    service.backend.steps = [decided(5), 0.01, decided(5), WAIT_FOR_EVER]
    call = service.call(n=4)
    for _ in range(4 + after):
        await call.read()
    call.cancel()
    await service.quiet()
    assert service.backend.started[0].cancelled >= 1


async def test_a_request_id_is_that_of_all_answers(service: Service) -> None:
    """F79."""
    service.backend.steps, service.backend.other = [decided(5), ended()], {2: [decided(5), WAIT_FOR_EVER]}
    first = service.call(n=3, request_id="same")
    for _ in range(8):  # all but the last answer are over
        await first.read()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await service.collect(request_id="same")
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    first.cancel()
    await service.quiet()


async def test_messages_are_written_one_at_a_time(service: Service) -> None:
    """Answers that all have something at once: nothing is lost, doubled or reordered."""
    count = 200
    service.backend.steps = [decided(5 + i % 50) for i in range(count)] + [ended()]
    messages = await service.collect(n=16)
    for index in range(16):
        assert tokens(of(messages, index)) == [5 + i % 50 for i in range(count)]


# --- the prompt's log-probabilities -------------------------------------------------------------------------------------

ENTRIES = (TokenLogprobs(-1.5, (7, 8), (-0.5, -1.5)), TokenLogprobs(-2.5, (9,), (-0.25,)))


def prompt_entries(messages: Messages) -> list[tuple[int, int]]:
    """(index of the answer, entries) of every delta that has some."""
    return [(m.index, len(m.delta.prompt_logprobs)) for m in messages if m.HasField("delta") and m.delta.prompt_logprobs]


async def test_they_come_with_the_first_delta_of_answer_0(service: Service) -> None:
    service.backend.steps = [replace(word("lazy"), prompt_logprobs=ENTRIES), word(" dog"), ended()]
    service.backend.other = {1: [word("over"), ended()]}
    messages = await service.collect(n=2, sampling={"prompt_logprobs": 2})
    assert prompt_entries(messages) == [(0, 2)]
    first = next(message.delta for message in messages if message.HasField("delta") and message.index == 0)
    assert [(e.logprob, list(e.top_ids), list(e.top_logprobs)) for e in first.prompt_logprobs] == [
        (entry.logprob, list(entry.top_ids), list(entry.top_logprobs)) for entry in ENTRIES
    ]
    assert [message.finished.settings.sampling.HasField("prompt_logprobs") for message in messages if message.HasField("finished")] in (
        [True, False],
        [False, True],
    )


async def test_they_come_without_tokens_too(service: Service) -> None:
    service.backend.steps = [TokensDecided((), (), (), ENTRIES), ended()]
    messages = await service.collect(sampling={"prompt_logprobs": 2})
    assert kinds(messages) == ["started", "delta", "finished"] and prompt_entries(messages) == [(0, 2)]


async def test_too_many_are_refused(service: Service) -> None:
    service.backend.info = replace(service.backend.info, max_model_len=100_000)  # type: ignore[type-var]
    fields = {"token_ids": generation_pb2.TokenIds(ids=[5] * 10_000), "sampling": {"prompt_logprobs": 20}}
    error = await failure(service.call(**fields))
    assert isinstance(error, InvalidRequest) and error.field == "sampling.prompt_logprobs"


# --- broken twins -------------------------------------------------------------------------------------------------------


async def test_twin_an_error_that_forgets_the_others(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.answer.AnswerStream.flush", lambda self: "")
    with pytest.raises(AssertionError):
        await test_one_that_fails_ends_the_call(service)


async def test_twin_answers_mixed_up(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    start = service.backend.start

    def swapped(answers: Sequence[Admitted], request_id: str, deadline_ms: float) -> ScriptedRunning:
        running = start(answers, request_id, deadline_ms)
        running.steps = running.steps[::-1]
        return running

    monkeypatch.setattr(service.backend, "start", swapped)
    with pytest.raises((AssertionError, asyncio.TimeoutError)):
        await test_every_answer_has_one_first_message_and_one_last(service)
