"""What is asked for: a prompt, sampling parameters and options → GenerateRequest. Knows no connection.

Refused here is what the wire cannot carry, or what could only be meant otherwise. Ranges, ids and grammars are the service's to judge.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypedDict, Unpack

from specdec import wire
from specdec.errors import InvalidRequest
from specdec.terms import MAX_SEED, DraftMethod, Grammar, GrammarForm, RejectionMethod, SamplingParams
from specdec.v1 import generation_pb2

Prompt = str | Sequence[int] | Sequence[Mapping[str, str]]
MAX_ID = (1 << 32) - 1


class Options(TypedDict, total=False):
    """What a request may carry beside prompt and sampling parameters; None or absent = unset = the service's default.

    The names are those of GenerateRequest in proto/specdec/v1/generation.proto, where each is described, but for three kinds:
    `rejection_method` and `draft_method` stand for `…_sample_method`; `template_args` (names to Python values, sent as JSON) and
    `add_generation_prompt` go with a chat; and one of `json_schema` (a dict, or text), `regex`, `choice` (a list of strings) or `ebnf`,
    with or without `start_after`, is short for `SamplingParams.grammar`.
    """

    output_token_ids: Sequence[int] | None
    seed: int | None
    n: int | None
    priority: int | None
    stop: str | Sequence[str] | None
    include_stop_str_in_output: bool | None
    skip_special_tokens: bool | None
    num_speculative_tokens: int | None
    enable_adaptive_verification: bool | None
    disable_spec_decode: bool | None
    rejection_method: RejectionMethod | None
    draft_method: DraftMethod | None
    model: str | None
    request_id: str | None
    use_heterogeneous_vocab: bool | None
    template_args: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    json_schema: Mapping[str, Any] | str | None
    regex: str | None
    choice: Sequence[str] | None
    ebnf: str | None
    start_after: str | None


class CallOptions(Options, total=False):
    """Options, and two of the call itself: its time limit in seconds, and the caller's W3C trace context."""

    timeout_s: float
    traceparent: str


_UINT32 = f"a whole number from 0 to {MAX_ID}"
_PLAIN = {  # fields that are set as they are, and what the wire takes
    "output_token_ids": f"a list of token ids, each {_UINT32}",
    "seed": f"a whole number from 0 to {MAX_SEED}",
    "n": "a whole number from 1 to 16",
    "priority": f"a whole number from {-(1 << 31)} to {(1 << 31) - 1}",
    "stop": "a list of strings",
    "include_stop_str_in_output": "true or false",
    "skip_special_tokens": "true or false",
    "num_speculative_tokens": _UINT32,
    "enable_adaptive_verification": "true or false",
    "disable_spec_decode": "true or false",
    "model": "text",
    "request_id": "text",
    "use_heterogeneous_vocab": "true or false",
}


def generate_request(prompt: Prompt, sampling: SamplingParams | None = None, **options: Unpack[Options]) -> generation_pb2.GenerateRequest:
    """Raises InvalidRequest naming the field and what would be accepted."""
    if unknown := options.keys() - Options.__annotations__.keys():
        raise InvalidRequest(min(unknown), "no such option; there are: " + ", ".join(Options.__annotations__))
    request = generation_pb2.GenerateRequest()
    for name, accepted in _PLAIN.items():
        value: Any = options.get(name)
        if name == "stop" and isinstance(value, str):
            value = [value]  # a string is a sequence of strings too
        if value is None:
            continue
        try:
            request.MergeFrom(generation_pb2.GenerateRequest(**{name: value}))
        except (ValueError, TypeError) as error:
            raise InvalidRequest(name, f"must be {accepted}, got {value!r}") from error
    _set_prompt(request, prompt, options.get("template_args"), options.get("add_generation_prompt"))
    _set_sampling(request, sampling, _grammar(options))
    if (rejection := options.get("rejection_method")) is not None:
        request.rejection_sample_method = wire.rejection_method_to_wire(rejection)
    if (draft := options.get("draft_method")) is not None:
        request.draft_sample_method = wire.draft_method_to_wire(draft)
    return request


def tokenize_request(
    prompt: str | Sequence[Mapping[str, str]],
    add_special_tokens: bool,
    template_args: Mapping[str, Any] | None = None,
    add_generation_prompt: bool | None = None,
) -> generation_pb2.TokenizeRequest:
    request = generation_pb2.TokenizeRequest(add_special_tokens=add_special_tokens)
    if isinstance(prompt, str):
        _only_for_a_chat(template_args, add_generation_prompt)
        _set_text(request, prompt)
    else:
        request.messages.CopyFrom(_messages(prompt, template_args, add_generation_prompt))
    return request


# ---------------------------------------------------------------- prompt


def _set_prompt(
    request: generation_pb2.GenerateRequest, prompt: Prompt, template_args: Mapping[str, Any] | None, add_generation_prompt: bool | None
) -> None:
    if not isinstance(prompt, str | bytes) and len(prompt) and isinstance(prompt[0], Mapping):
        request.messages.CopyFrom(_messages(prompt, template_args, add_generation_prompt))  # type: ignore[arg-type]
        return
    _only_for_a_chat(template_args, add_generation_prompt)
    if isinstance(prompt, str):
        _set_text(request, prompt)
        return
    try:
        if isinstance(prompt, bytes):  # a sequence of whole numbers as well, but nobody means that
            raise TypeError("bytes")
        request.token_ids.CopyFrom(generation_pb2.TokenIds(ids=prompt))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        raise InvalidRequest("token_ids.ids", f"must be a list of token ids, each {_UINT32}") from error


def _set_text(request: generation_pb2.GenerateRequest | generation_pb2.TokenizeRequest, text: str) -> None:
    try:
        request.text = text
    except ValueError as error:  # half a character of UTF-16
        raise InvalidRequest("text", "must be text that UTF-8 can hold") from error


def _only_for_a_chat(template_args: Mapping[str, Any] | None, add_generation_prompt: bool | None) -> None:
    for name, value in (("template_args", template_args), ("add_generation_prompt", add_generation_prompt)):
        if value is not None:
            raise InvalidRequest(f"messages.{name}", "goes with a chat, and the prompt is none; leave it unset")


def _messages(
    turns: Sequence[Mapping[str, str]], template_args: Mapping[str, Any] | None, add_generation_prompt: bool | None
) -> generation_pb2.Messages:
    try:
        chat = [generation_pb2.Message(role=turn["role"], content=turn["content"]) for turn in turns]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidRequest("messages.messages", 'each turn must be {"role": text, "content": text}') from error
    try:
        extra = {name: json.dumps(value, allow_nan=False) for name, value in (template_args or {}).items()}
        return generation_pb2.Messages(messages=chat, template_args=extra, add_generation_prompt=add_generation_prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequest("messages.template_args", f"must map names to values that JSON has: {error}") from error


# ---------------------------------------------------------------- sampling parameters and grammar


def _set_sampling(request: generation_pb2.GenerateRequest, sampling: SamplingParams | None, grammar: Grammar | None) -> None:
    if grammar is not None:
        if sampling is not None and sampling.grammar is not None:
            raise InvalidRequest(f"sampling.grammar.{grammar.form.value}", "set the option or SamplingParams.grammar, not both")
        sampling = replace(sampling or SamplingParams(), grammar=grammar)
    if sampling is None:
        return
    try:
        if sampling.grammar is not None:
            sampling.grammar.check()
        request.sampling.CopyFrom(wire.sampling_to_wire(sampling))
    except UnicodeEncodeError as error:
        raise InvalidRequest("sampling.grammar", "must be text that UTF-8 can hold") from error
    except InvalidRequest:
        sampling.check(vocab_size=MAX_ID + 1)  # says what would be accepted, where the wire only says no
        raise


def _grammar(options: Options) -> Grammar | None:
    values = {form: options.get(form.value) for form in GrammarForm}
    given = [form for form, value in values.items() if value is not None]
    start_after = options.get("start_after")
    if not given:
        if start_after is not None:
            raise InvalidRequest("sampling.grammar.start_after", "goes with one of: " + ", ".join(form.value for form in GrammarForm))
        return None
    if len(given) > 1:
        raise InvalidRequest(f"sampling.grammar.{given[1].value}", f"one form at most, and {given[0].value} is set")
    (form,) = given
    value: Any = values[form]
    if form is GrammarForm.CHOICE:
        if isinstance(value, str) or not all(isinstance(option, str) for option in value):
            raise InvalidRequest("sampling.grammar.choice", "must be a list of strings")
        return Grammar(form, options=tuple(value), start_after=start_after)
    if form is GrammarForm.JSON_SCHEMA and not isinstance(value, str):
        if not isinstance(value, Mapping):  # true and false are schemas too, that allow everything and nothing
            raise InvalidRequest("sampling.grammar.json_schema", "must be a JSON schema: an object, or its text")
        try:
            value = json.dumps(value, ensure_ascii=False, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise InvalidRequest("sampling.grammar.json_schema", f"must be a JSON schema: {error}") from error
    if not isinstance(value, str):
        raise InvalidRequest(f"sampling.grammar.{form.value}", "must be text")
    return Grammar(form, value, start_after=start_after)
