"""Grammars at the door: what is no grammar, what does not fit one, and what is whole already. F86, F88."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler
from specdec.status import error_from_rpc
from specdec.terms import FinishReason, Grammar, GrammarForm
from specdec.v1 import common_pb2, generation_pb2
from tests.fakes_driver import decided, ended
from tests.unit.orchestrator.front_rig import END, TOKENIZER, Service, failure, ids, serving, text_model_in, tokens

pytestmark = pytest.mark.timeout(30)
STOP = common_pb2.FINISH_REASON_STOP


def asked(output: list[int] | None = None, start_after: str | None = None, **fields: Any) -> dict[str, Any]:
    """Fields of a request with a grammar: its form, and what else shapes the answer."""
    form = {name: fields.pop(name) for name in ("regex", "json_schema", "ebnf", "choice") if name in fields}
    sampling = {"grammar": common_pb2.Grammar(start_after=start_after, **form), **fields}
    return {"sampling": sampling, **({} if output is None else {"output_token_ids": output})}


async def refused(service: Service, **fields: Any) -> InvalidRequest:
    error = await failure(service.call(**fields))
    assert isinstance(error, InvalidRequest) and not service.backend.started
    return error


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("regex", "a(b"),
        ("json_schema", "{"),
        ("json_schema", '{"type": "nonsense"}'),
        ("ebnf", "root ::= missing"),
        ("ebnf", "not a grammar"),
        ("choice", common_pb2.Choice()),
    ],
)
async def test_what_is_no_grammar_is_refused_by_its_form(service: Service, form: str, text: Any) -> None:
    error = await refused(service, **asked(**{form: text}))
    assert error.field == f"sampling.grammar.{form}" and error.remedy


@pytest.mark.parametrize("form", [{"regex": "a+"}, {"choice": common_pb2.Choice(options=["yes", "no"])}, {"ebnf": 'root ::= "a"'}])
async def test_a_grammar_goes_on_to_the_target(service: Service, form: dict[str, Any]) -> None:
    service.backend.steps = [decided(*ids("a")), ended(FinishReason.STOP)]
    last = (await service.collect(**asked(**form, start_after="x")))[-1].finished
    sent = service.backend.started[0].admitted.sampling.grammar
    assert isinstance(sent, Grammar) and sent.start_after == "x" and sent.form is GrammarForm(next(iter(form)))
    assert last.settings.sampling.grammar == common_pb2.Grammar(**form, start_after="x")
    assert (last.finish_reason, last.stop_reason) == (STOP, ""), "its end is nobody's token"


async def test_F86_a_resumed_answer_must_begin_a_text_of_it(service: Service) -> None:
    """By ids, at every cut, inside a character too (F88): what an interrupted stream delivered is taken, anything else is not."""
    whole = TOKENIZER.encode('{"name": "🎉é"}').ids
    schema = '{"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"], "additionalProperties": false}'
    service.backend.steps = [ended(FinishReason.STOP)]
    for cut in range(len(whole)):
        await service.collect(**asked(whole[:cut], json_schema=schema))
        assert service.backend.started[-1].admitted.tokens == (*ids("the"), *whole[:cut])
    count = len(service.backend.started)
    for output in (whole[1:], [*whole[:3], *whole[:3]], ids('{"other"'), [END]):
        error = await failure(service.call(**asked(list(output), json_schema=schema)))
        assert isinstance(error, InvalidRequest) and error.field == "output_token_ids"
    assert len(service.backend.started) == count


async def test_a_restarted_grammar_would_be_refused(service: Service) -> None:
    """F86's symptom, nested JSON: the beginning of a second text inside the first."""
    half = ids('{"a": [1')
    schema = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "additionalProperties": false}'
    assert (await refused(service, **asked([*half, *half], json_schema=schema))).field == "output_token_ids"


@pytest.mark.parametrize("n", [1, 3])
async def test_where_nothing_may_follow_no_target_is_asked(service: Service, n: int) -> None:
    messages = await service.collect(n=n, **asked(regex="()"))
    assert [m.WhichOneof("event") for m in messages] == ["started"] * n + ["finished"] * n and not service.backend.started
    assert {(m.finished.finish_reason, m.finished.stop_reason) for m in messages[n:]} == {(STOP, "")}


async def test_a_whole_sentence_is_told_again(service: Service) -> None:
    """Before min_tokens too; not where more may follow."""
    messages = await service.collect(**asked(ids("lazy"), regex="lazy", min_tokens=50))
    last = messages[-1].finished
    assert (len(messages), last.finish_reason, last.usage.completion_tokens) == (2, STOP, len(ids("lazy")))
    assert tokens(messages) == [] and not service.backend.started
    service.backend.steps = [ended(FinishReason.STOP)]
    await service.collect(**asked(ids("lazy"), regex="lazy( dog)?"))
    assert len(service.backend.started) == 1


async def test_the_free_part_of_a_resumed_answer_is_free(service: Service) -> None:
    service.backend.steps = [ended(FinishReason.STOP)]
    for text in ("lazy dog", "lazy dog!", "lazy dog!12"):
        await service.collect(**asked(ids(text), regex="[0-9]+", start_after="!"))
    error = await failure(service.call(**asked(ids("lazy dog!x"), regex="[0-9]+", start_after="!")))
    assert isinstance(error, InvalidRequest) and error.field == "output_token_ids"


async def one(service: Service, **fields: Any) -> str:
    """The field that is refused, empty when the request goes on."""
    service.backend.steps = [ended(FinishReason.STOP)]
    try:
        await service.collect(**asked(**fields))
    except grpc.aio.AioRpcError as error:
        refusal = error_from_rpc(error)
        assert isinstance(refusal, InvalidRequest)
        return refusal.field
    return ""


async def test_a_first_token_must_be_left(service: Service) -> None:
    """What other fields rule out is seen at the first token, as the target's sampler sees it."""
    (a, b) = (TOKENIZER.token_to_id(char) for char in "ab")
    grammar = "sampling.grammar"
    assert await one(service, regex="[ab]") == ""
    assert await one(service, regex="[ab]", banned_token_ids=[a]) == ""
    assert await one(service, regex="[ab]", banned_token_ids=[a, b]) == grammar
    assert await one(service, regex="[ab]", allowed_token_ids=[b, END]) == ""
    assert await one(service, regex="[ab]", allowed_token_ids=[END, TOKENIZER.token_to_id("c")]) == grammar
    # An end may stand where a sentence is complete: the empty one is.
    assert await one(service, regex="[ab]?", banned_token_ids=[a, b]) == ""
    assert await one(service, regex="[ab]?", banned_token_ids=[a, b, END]) == grammar
    assert await one(service, regex="[ab]?", banned_token_ids=[a, b], min_tokens=1) == grammar
    assert await one(service, regex="[ab]?", banned_token_ids=[a, b], ignore_eos=True) == grammar
    assert await one(service, regex="[ab]?", banned_token_ids=[a, b], ignore_eos=True, stop_token_ids=[7]) == ""
    assert await one(service, regex="[ab]", stop_token_ids=[a, b], min_tokens=1) == grammar
    # Before the grammar begins the answer is free.
    assert await one(service, regex="[ab]", banned_token_ids=[a, b], start_after="x") == ""


async def test_bad_ids_beside_a_grammar_name_their_field(service: Service) -> None:
    error = await refused(service, **asked([10_000], regex="a"))
    assert error.field == "output_token_ids"
    error = await refused(service, **asked(regex="a", banned_token_ids=[10_000]))
    assert error.field == "sampling.banned_token_ids"


async def test_a_grammar_and_a_neighbour(service: Service) -> None:
    """A large schema is compiled beside the event loop."""
    properties = ", ".join(f'"p{i}": {{"type": "string", "maxLength": {i}}}' for i in range(1, 300))
    service.backend.steps = [decided(*ids("dog")), ended(FinishReason.STOP)]
    call = service.call(**asked(json_schema=f'{{"type": "object", "properties": {{{properties}}}}}'))
    assert tokens(await service.collect()) == ids("dog")
    assert tokens([message async for message in call]) == ids("dog")


async def test_grammars_that_are_slow_to_compile_hold_up_nobody_else(tmp_path: Path) -> None:
    """More of them than there are threads, each waiting: texts are tokenised, and requests without a grammar run."""
    let_go, text = threading.Event(), text_model_in(tmp_path)
    text.grammars = GrammarCompiler(TOKENIZER, trial=lambda grammar: assert_in_time(let_go))
    async with serving(text) as service:
        slow = [asyncio.create_task(service.collect(**asked(regex="a" * i))) for i in range(1, 9)]
        try:
            async with asyncio.timeout(10.0):
                await asyncio.sleep(0.1)
                assert (await service.stub.Tokenize(generation_pb2.TokenizeRequest(text="the"))).token_ids == ids("the")
                service.backend.steps = [decided(*ids("a")), ended(FinishReason.STOP)]
                assert tokens(await service.collect()) == ids("a")
                assert not any(task.done() for task in slow)
        finally:
            let_go.set()
            await asyncio.gather(*slow)


def assert_in_time(event: threading.Event) -> None:
    assert event.wait(20.0)
