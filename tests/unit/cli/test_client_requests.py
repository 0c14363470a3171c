"""Arguments of the client → the message, and the message → events: nothing of the protocol is out of reach from Python."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf import json_format

from specdec import terms, wire
from specdec.client import Completion, Delta, EffectiveSettings, Finished, Options, SpeculativeStats, Started, Usage, generate_request
from specdec.client import event_from_wire as event
from specdec.errors import InvalidRequest
from specdec.terms import DraftMethod, Grammar, GrammarForm, RejectionMethod, SamplingParams
from specdec.v1 import common_pb2, generation_pb2

pytestmark = pytest.mark.unit
TURNS = [{"role": "user", "content": "x"}]

# One value that is not the default for every field: what a user writes, and what the message holds then.
REQUEST: dict[str, tuple[dict[str, Any], Any]] = {
    "text": ({"prompt": "hi"}, "hi"),
    "token_ids": ({"prompt": [1, 2]}, generation_pb2.TokenIds(ids=[1, 2])),
    "messages": ({"prompt": TURNS}, generation_pb2.Messages(messages=[generation_pb2.Message(role="user", content="x")])),
    "output_token_ids": ({"output_token_ids": [7, 8]}, [7, 8]),
    "sampling": ({"sampling": SamplingParams()}, wire.sampling_to_wire(SamplingParams())),
    "seed": ({"seed": 2**64 - 1}, 2**64 - 1),
    "n": ({"n": 3}, 3),
    "priority": ({"priority": -3}, -3),
    "stop": ({"stop": ["a", "b"]}, ["a", "b"]),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True}, True),
    "skip_special_tokens": ({"skip_special_tokens": False}, False),
    "num_speculative_tokens": ({"num_speculative_tokens": 0}, 0),
    "enable_adaptive_verification": ({"enable_adaptive_verification": True}, True),
    "disable_spec_decode": ({"disable_spec_decode": True}, True),
    "rejection_sample_method": ({"rejection_method": RejectionMethod.STANDARD}, common_pb2.REJECTION_SAMPLE_METHOD_STANDARD),
    "draft_sample_method": ({"draft_method": DraftMethod.GREEDY}, common_pb2.DRAFT_SAMPLE_METHOD_GREEDY),
    "model": ({"model": "m"}, "m"),
    "request_id": ({"request_id": "r"}, "r"),
    "use_heterogeneous_vocab": ({"use_heterogeneous_vocab": True}, True),
}
SAMPLING: dict[str, Any] = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.25, "min_p": 0.125, "frequency_penalty": -2.0, "presence_penalty": 1.5,
    "repetition_penalty": 1.25, "logit_bias": {4: -100.0}, "allowed_token_ids": (4, 5), "banned_token_ids": (6,), "max_tokens": 11,
    "min_tokens": 3, "ignore_eos": True, "stop_token_ids": (8,), "logprobs": 0, "prompt_logprobs": 0,
    "grammar": Grammar(GrammarForm.REGEX, "a+"),
}  # fmt: skip
MESSAGES: dict[str, tuple[dict[str, Any], Any]] = {
    "messages": ({}, [generation_pb2.Message(role="user", content="x")]),
    "template_args": ({"template_args": {"a": False, "b": "1", "c": [1]}}, {"a": "false", "b": '"1"', "c": "[1]"}),
    "add_generation_prompt": ({"add_generation_prompt": False}, False),
}
GRAMMAR: dict[str, tuple[dict[str, Any], Any]] = {
    "json_schema": ({"json_schema": {"type": "object", "title": "é"}}, '{"type": "object", "title": "é"}'),
    "regex": ({"regex": "a+"}, "a+"),
    "choice": ({"choice": ["yes", "no"]}, common_pb2.Choice(options=["yes", "no"])),
    "ebnf": ({"ebnf": 'root ::= "a"'}, 'root ::= "a"'),
    "start_after": ({"regex": "a+", "start_after": "</think>"}, "</think>"),
}
TABLES = {
    generation_pb2.GenerateRequest: REQUEST,
    common_pb2.SamplingParams: SAMPLING,
    generation_pb2.Messages: MESSAGES,
    common_pb2.Grammar: GRAMMAR,
}


def made(prompt: Any = "hi", **options: Any) -> generation_pb2.GenerateRequest:
    return generate_request(prompt, **options)


@pytest.mark.parametrize("message", TABLES, ids=lambda message: message.DESCRIPTOR.name)
def test_the_tables_know_every_field(message: Any) -> None:
    """A field that is added to the proto and not here would be out of reach in silence."""
    assert {field.name for field in message.DESCRIPTOR.fields} == TABLES[message].keys()


@pytest.mark.parametrize("name", REQUEST)
def test_every_field_of_a_request(name: str) -> None:
    written, wanted = REQUEST[name]
    request = made(**written)
    assert getattr(request, name) == wanted
    assert name == "text" or request.ListFields() != made().ListFields()
    assert {field.name for field, _ in request.ListFields()} - {name} <= {"text"}, "nothing else was set"


@pytest.mark.parametrize("name", SAMPLING)
def test_every_sampling_parameter(name: str) -> None:
    params = SamplingParams(**{name: SAMPLING[name]})
    assert params != SamplingParams(), "the value must not be the default"
    assert wire.sampling_from_wire(made(sampling=params).sampling) == params


@pytest.mark.parametrize("name", MESSAGES)
def test_every_field_of_a_chat(name: str) -> None:
    written, wanted = MESSAGES[name]
    assert getattr(made(TURNS, **written).messages, name) == wanted


@pytest.mark.parametrize("name", GRAMMAR)
def test_every_field_of_a_grammar(name: str) -> None:
    """In short, and as a term: both make the same message."""
    written, wanted = GRAMMAR[name]
    short = made(sampling=SamplingParams(top_k=7), **written)
    assert getattr(short.sampling.grammar, name) == wanted and short.sampling.top_k == 7
    params = wire.sampling_from_wire(short.sampling)
    assert made(sampling=params).sampling == short.sampling
    assert made(**written).sampling.grammar == short.sampling.grammar


def test_every_option_is_tried_here() -> None:
    tried = {name for table in (REQUEST, MESSAGES, GRAMMAR) for written, _ in table.values() for name in written}
    assert Options.__annotations__.keys() == tried - {"prompt", "sampling"}


def test_what_is_left_open_stays_unset() -> None:
    empty = made(**dict.fromkeys(Options.__annotations__))
    assert empty == generation_pb2.GenerateRequest(text="hi")
    zero = made(seed=0, num_speculative_tokens=0, priority=0)
    assert all(zero.HasField(name) for name in ("seed", "num_speculative_tokens", "priority"))


def test_what_is_easily_meant() -> None:
    assert list(made(stop="END").stop) == ["END"], "one string is not its letters"
    assert made(json_schema='{"b": 1, "a": 2}').sampling.grammar.json_schema == '{"b": 1, "a": 2}', "a text is sent as it is"
    with pytest.raises(InvalidRequest, match="json_schema: must be a JSON schema: an object, or its text"):
        made(json_schema=True)
    assert list(made([]).token_ids.ids) == []


def bad(field: str, *words: str, prompt: Any = "x", **options: Any) -> Any:
    return pytest.param(field, words, prompt, options, id=f"{field} {options or prompt!r}"[:60])


@pytest.mark.parametrize(
    ("field", "words", "prompt", "options"),
    [
        bad("seed", "from 0 to 18446744073709551615, got -1", seed=-1),
        bad("n", "from 1 to 16", n=-1),
        bad("priority", "from -2147483648 to 2147483647", priority=2**31),
        bad("num_speculative_tokens", "whole number", num_speculative_tokens="3"),
        bad("output_token_ids", "token ids", output_token_ids=[2**32]),
        bad("request_id", "text", request_id=7),
        bad("stop", "list of strings", stop=[1]),
        bad("nonsense", "no such option", "seed", nonsense=1),
        bad("token_ids.ids", "token ids", prompt=[-1]),
        bad("token_ids.ids", "token ids", prompt=b"text"),
        bad("text", "UTF-8", prompt="\ud800"),
        bad("messages.messages", "role", prompt=[{"role": "user"}]),
        bad("messages.template_args", "JSON", prompt=TURNS, template_args={"a": {1, 2}}),
        bad("messages.template_args", "goes with a chat", template_args={"a": 1}),
        bad("messages.add_generation_prompt", "goes with a chat", prompt=[1], add_generation_prompt=False),
        bad("sampling.max_tokens", "in [1, 2147483647], got -1", sampling=SamplingParams(max_tokens=-1)),
        bad("sampling.top_k", "in [0, 2147483647], got -5", sampling=SamplingParams(top_k=-5)),
        bad("sampling.logit_bias", "-1", sampling=SamplingParams(logit_bias={-1: 1.0})),
        bad("sampling.stop_token_ids", str(2**32), sampling=SamplingParams(stop_token_ids=(2**32,))),
        bad("sampling.grammar.regex", "one form at most", json_schema={}, regex="a"),
        bad("sampling.grammar.regex", "not both", sampling=SamplingParams(grammar=Grammar(GrammarForm.EBNF, "x")), regex="a"),
        bad("sampling.grammar.regex", "must be text", regex=7),
        bad("sampling.grammar.regex", "must not be empty", regex=""),
        bad("sampling.grammar", "UTF-8", regex="\ud800"),
        bad("sampling.grammar.choice", "list of strings", choice="yes"),
        bad("sampling.grammar.choice", "1 to 1024", choice=[]),
        bad("sampling.grammar.json_schema", "JSON schema", json_schema={"a": object()}),
        bad("sampling.grammar.start_after", "json_schema, regex, choice, ebnf", start_after="x"),
    ],
)
def test_what_the_wire_cannot_carry_is_named_with_what_it_takes(field: str, words: tuple[str, ...], prompt: Any, options: Any) -> None:
    with pytest.raises(InvalidRequest) as caught:
        made(prompt, **options)
    assert caught.value.field == field
    assert all(word in caught.value.remedy for word in words), caught.value.remedy


# ---------------------------------------------------------------- what comes back

RESPONSES = {
    "Started": (Started, {}),
    "Delta": (Delta, {}),
    "Finished": (Finished, {}),
    "Usage": (Usage, {}),
    "SpeculativeStats": (SpeculativeStats, {}),
    "EffectiveSettings": (EffectiveSettings, {"rejection_sample_method": "rejection_method", "draft_sample_method": "draft_method"}),
}


@pytest.mark.parametrize("name", RESPONSES)
def test_every_field_of_a_response_has_an_attribute(name: str) -> None:
    cls, renamed = RESPONSES[name]
    sent = {renamed.get(field.name, field.name) for field in generation_pb2.DESCRIPTOR.message_types_by_name[name].fields}
    assert sent == {field.name for field in dataclasses.fields(cls)} - {"index"}
    assert {field.name for field in dataclasses.fields(Delta)} - {"index"} <= {field.name for field in dataclasses.fields(Completion)}


def test_every_field_of_a_response_is_read() -> None:
    """A message with a value in every field, and an event without a default in any."""
    delta = generation_pb2.Delta(
        token_ids=[5], text="x", origins=[generation_pb2.TOKEN_ORIGIN_BONUS], logprobs=[ENTRY], prompt_logprobs=[ENTRY, ENTRY]
    )
    told = event(generation_pb2.GenerateResponse(index=2, delta=delta))
    entry = terms.TokenLogprobs(-0.5, (1,), (-0.25,))
    assert told == Delta((5,), "x", (entry,), (terms.Origin.BONUS,), 2, (entry, entry))
    numbers = {
        "prompt_tokens": 1,
        "completion_tokens": 2,
        "accepted_prediction_tokens": 3,
        "rejected_prediction_tokens": 4,
        "discarded_tokens": 5,
    }
    speculative = {field.name: 7 for field in generation_pb2.SpeculativeStats.DESCRIPTOR.fields} | {"acceptance_histogram": [7]}
    last = json_format.ParseDict(
        {
            "finish_reason": "FINISH_REASON_STOP", "stop_reason": "END", "usage": numbers, "speculative": speculative,
            "settings": {
                "sampling": {"grammar": {"regex": "a"}}, "rejection_sample_method": 2, "draft_sample_method": 2,
                "num_speculative_tokens": 4, "enable_adaptive_verification": True, "batch_invariant": True, "numerics_fingerprint": "f",
            },
        },
        generation_pb2.Finished(),
    )  # fmt: skip
    end = event(generation_pb2.GenerateResponse(index=2, finished=last))
    assert isinstance(end, Finished) and (end.finish_reason, end.stop_reason, end.index) == (terms.FinishReason.STOP, "END", 2)
    assert dataclasses.asdict(end.usage) == numbers
    assert dataclasses.asdict(end.speculative) == {**speculative, "acceptance_histogram": (7,)}
    sampling = SamplingParams(grammar=Grammar(GrammarForm.REGEX, "a"))
    assert end.settings == EffectiveSettings(sampling, RejectionMethod.STANDARD, DraftMethod.GREEDY, 4, True, True, "f")


ENTRY = common_pb2.TokenLogprobs(logprob=-0.5, top_ids=[1], top_logprobs=[-0.25])
