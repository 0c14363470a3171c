"""Requests from the wire: every field is read or refused by name (F16), unset is not zero (F20), nothing broken gets in (F31, F51, F52,
F60, F64)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.events import Admitted
from orchestrator.fronts import requests as door
from orchestrator.fronts.requests import Defaults, parse
from orchestrator.request import MAX_BLOCK, Chat, Ids, Request, Text, admit, is_complete, others
from specdec.errors import InvalidRequest, NotFound, Unsupported
from specdec.seeds import answer_seed
from specdec.terms import MAX_GRAMMAR_BYTES, DraftMethod, Grammar, GrammarForm, RejectionMethod, SamplingParams
from specdec.v1 import common_pb2, generation_pb2
from tests.fakes_driver import model_info

VOCAB, EOS = 1000, (2,)
DEFAULTS = Defaults(3, False, RejectionMethod.COUPLED, None)


def read(message: generation_pb2.GenerateRequest, defaults: Defaults = DEFAULTS) -> Request:
    return parse(message, defaults, VOCAB, EOS)


def ask(**fields: Any) -> generation_pb2.GenerateRequest:
    if not {"text", "token_ids", "messages"} & fields.keys():
        fields["text"] = "hello"
    return generation_pb2.GenerateRequest(**fields)


def sampled(**fields: Any) -> generation_pb2.GenerateRequest:
    return ask(sampling=common_pb2.SamplingParams(**fields))


PROMPT_IDS = generation_pb2.TokenIds(ids=[5, 6])
TURN = generation_pb2.Message(role="user", content="hi")
Expected = tuple[Callable[[Request], Any], Any] | type[Exception]

# One value that is not the default for every field, and where it must turn up, or the refusal.
REQUEST_FIELDS: dict[str, tuple[Any, Expected]] = {
    "text": ("hi", (lambda r: r.prompt, Text("hi"))),
    "token_ids": (PROMPT_IDS, (lambda r: r.prompt, Ids((5, 6)))),
    "messages": (
        generation_pb2.Messages(messages=[TURN], template_args={"x": "1"}, add_generation_prompt=False),
        (lambda r: r.prompt, Chat(({"role": "user", "content": "hi"},), {"x": "1"}, False)),
    ),
    "output_token_ids": ([7, 8], (lambda r: r.output_ids, (7, 8))),
    "sampling": (common_pb2.SamplingParams(top_k=9), (lambda r: r.sampling.top_k, 9)),
    "seed": (2**64 - 1, (lambda r: r.seed, 2**64 - 1)),
    "n": (2, (lambda r: r.n, 2)),
    "priority": (-3, (lambda r: r.priority, -3)),
    "stop": (["a", "b"], (lambda r: r.stop, ("a", "b"))),
    "include_stop_str_in_output": (True, (lambda r: r.include_stop, True)),
    "skip_special_tokens": (False, (lambda r: r.skip_special, False)),
    "num_speculative_tokens": (5, (lambda r: r.num_speculative_tokens, 5)),
    "enable_adaptive_verification": (True, (lambda r: r.adaptive, True)),
    "disable_spec_decode": (True, (lambda r: r.num_speculative_tokens, 0)),
    "rejection_sample_method": (2, (lambda r: r.rejection_method, RejectionMethod.STANDARD)),
    "draft_sample_method": (2, (lambda r: r.draft_method, DraftMethod.GREEDY)),
    "model": ("m", (lambda r: r.model, "m")),
    "request_id": ("r", (lambda r: r.request_id, "r")),
    "use_heterogeneous_vocab": (True, Unsupported),
}
SAMPLING_FIELDS: dict[str, tuple[Any, Any]] = {
    "temperature": (0.5, 0.5),
    "top_k": (7, 7),
    "top_p": (0.25, 0.25),
    "min_p": (0.125, 0.125),
    "frequency_penalty": (-2.0, -2.0),
    "presence_penalty": (1.5, 1.5),
    "repetition_penalty": (1.25, 1.25),
    "logit_bias": ({4: -100.0}, {4: -100.0}),
    "allowed_token_ids": ([4, 5], (4, 5)),
    "banned_token_ids": ([6], (6,)),
    "max_tokens": (11, 11),
    "min_tokens": (3, 3),
    "ignore_eos": (True, True),
    "stop_token_ids": ([8], (8,)),
    "logprobs": (0, 0),
    "prompt_logprobs": (1, 1),
    "grammar": (common_pb2.Grammar(regex="a+", start_after="b"), Grammar(GrammarForm.REGEX, "a+", start_after="b")),
}


def test_the_tables_below_know_every_field() -> None:
    """A field added to the proto and forgotten here would be ignored in silence."""
    assert set(generation_pb2.GenerateRequest.DESCRIPTOR.fields_by_name) == set(REQUEST_FIELDS)
    assert set(common_pb2.SamplingParams.DESCRIPTOR.fields_by_name) == set(SAMPLING_FIELDS)
    assert set(generation_pb2.Messages.DESCRIPTOR.fields_by_name) == {"messages", "template_args", "add_generation_prompt"}
    assert set(generation_pb2.Message.DESCRIPTOR.fields_by_name) == {"role", "content"}


@pytest.mark.parametrize("name", REQUEST_FIELDS)
def test_every_request_field_is_read_or_refused_by_name(name: str) -> None:
    value, expected = REQUEST_FIELDS[name]
    message = ask(**{name: value})
    if isinstance(expected, type):
        with pytest.raises(expected) as caught:
            read(message)
        assert caught.value.field == name
        return
    where, wanted = expected
    assert where(read(message)) == wanted
    assert where(read(ask() if name != "text" else ask(text="other"))) != wanted, "the value must not be the default"


@pytest.mark.parametrize("name", SAMPLING_FIELDS)
def test_every_sampling_field_is_read(name: str) -> None:
    value, expected = SAMPLING_FIELDS[name]
    sampling = read(sampled(**{name: value})).sampling
    assert getattr(sampling, name) == expected != getattr(SamplingParams(), name)


def test_what_off_means_is_accepted() -> None:
    read(ask(n=1, enable_adaptive_verification=False, use_heterogeneous_vocab=False, disable_spec_decode=False))


# --- F20: presence, by bytes written by hand ----------------------------------------------------------------------------


def field(number: int, kind: int, payload: bytes) -> bytes:
    return bytes([number << 3 | kind]) + payload


def inside(number: int, message: bytes) -> bytes:
    return field(number, 2, bytes([len(message)]) + message)


PROMPT = inside(1, b"hello")


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (b"", SamplingParams()),
        (inside(5, b""), SamplingParams()),
        (inside(5, field(1, 1, struct.pack("<d", 0.0))), SamplingParams(temperature=0.0)),
        (inside(5, field(2, 0, b"\0")), SamplingParams(top_k=0)),
        (inside(5, field(12, 0, b"\0")), SamplingParams(min_tokens=0)),
        (inside(5, field(15, 0, b"\0")), SamplingParams(logprobs=0)),
    ],
)
def test_unset_is_the_default_and_zero_is_zero(sampling: bytes, expected: SamplingParams) -> None:
    request = read(generation_pb2.GenerateRequest.FromString(PROMPT + sampling))
    assert request.sampling == expected
    assert (request.seed, request.num_speculative_tokens, request.skip_special) == (None, None, True)


def test_explicit_zeros_of_the_request_stay() -> None:
    message = PROMPT + field(6, 1, bytes(8)) + field(11, 0, b"\0") + field(12, 0, b"\0")
    request = read(generation_pb2.GenerateRequest.FromString(message))
    assert (request.seed, request.skip_special, request.num_speculative_tokens) == (0, False, 0)


@pytest.mark.parametrize(
    ("sampling", "name"),
    [
        (field(11, 0, b"\0"), "max_tokens"),  # explicitly 0
        (field(11, 0, b"\xff" * 9 + b"\x01"), "max_tokens"),  # -1, as a client with signed numbers writes it
        (field(11, 0, b"\x80\x80\x80\x80\x08"), "max_tokens"),  # 2^31
        (field(3, 1, struct.pack("<d", 0.0)), "top_p"),  # explicitly 0
        (field(8, 2, b"\x14" + field(1, 0, b"\xff" * 9 + b"\x01") + field(2, 1, struct.pack("<d", 1.0))), "logit_bias"),  # {-1: 1}
    ],
)
def test_illegal_numbers_are_refused_by_name(sampling: bytes, name: str) -> None:
    """F31, F52: no default takes their place."""
    with pytest.raises(InvalidRequest) as caught:
        read(generation_pb2.GenerateRequest.FromString(PROMPT + inside(5, sampling)))
    assert caught.value.field == f"sampling.{name}"


# --- refusals -----------------------------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (generation_pb2.GenerateRequest(), "prompt"),
        (ask(n=0), "n"),
        (ask(n=door.MAX_N + 1), "n"),
        (ask(n=2, output_token_ids=[5]), "n"),
        (sampled(prompt_logprobs=21), "sampling.prompt_logprobs"),
        (sampled(grammar=common_pb2.Grammar()), "sampling.grammar"),
        (sampled(grammar=common_pb2.Grammar(regex="")), "sampling.grammar.regex"),
        (sampled(grammar=common_pb2.Grammar(choice=common_pb2.Choice(options=["a", ""]))), "sampling.grammar.choice"),
        (sampled(grammar=common_pb2.Grammar(ebnf="x" * (MAX_GRAMMAR_BYTES + 1))), "sampling.grammar.ebnf"),
        (sampled(grammar=common_pb2.Grammar(regex="a", start_after="")), "sampling.grammar.start_after"),
        (ask(token_ids=generation_pb2.TokenIds(ids=[1, VOCAB])), "token_ids.ids"),
        (ask(token_ids=generation_pb2.TokenIds(ids=[2**32 - 1])), "token_ids.ids"),
        (ask(output_token_ids=[VOCAB]), "output_token_ids"),
        (ask(messages=generation_pb2.Messages()), "messages.messages"),
        (ask(messages=generation_pb2.Messages(messages=[TURN] * (door.MAX_MESSAGES + 1))), "messages.messages"),
        (ask(messages=generation_pb2.Messages(messages=[TURN], template_args={str(i): "1" for i in range(65)})), "messages.template_args"),
        (ask(text="x" * (door.MAX_PROMPT_BYTES + 1)), "text"),
        (ask(messages=generation_pb2.Messages(messages=[generation_pb2.Message(content="x" * door.MAX_PROMPT_BYTES)])), "messages"),
        (ask(token_ids=generation_pb2.TokenIds(ids=[1] * (door.MAX_PROMPT_TOKENS + 1))), "token_ids.ids"),
        (ask(stop=["a", ""]), "stop[1]"),
        (ask(stop=["é" * 257]), "stop[0]"),
        (ask(stop=["a"] * 17), "stop"),
        (ask(request_id=""), "request_id"),
        (ask(request_id="x" * 129), "request_id"),
        (ask(rejection_sample_method=9), "rejection_sample_method"),
        (ask(draft_sample_method=9), "draft_sample_method"),
        (ask(rejection_sample_method=1, draft_sample_method=3), "draft_sample_method"),
        (ask(rejection_sample_method=2, draft_sample_method=1), "draft_sample_method"),
        (sampled(temperature=-0.1), "sampling.temperature"),
        (sampled(temperature=NAN), "sampling.temperature"),
        (sampled(temperature=INF), "sampling.temperature"),
        (sampled(top_p=1.01), "sampling.top_p"),
        (sampled(min_p=-0.1), "sampling.min_p"),
        (sampled(repetition_penalty=0.0), "sampling.repetition_penalty"),
        (sampled(frequency_penalty=2.1), "sampling.frequency_penalty"),
        (sampled(presence_penalty=NAN), "sampling.presence_penalty"),
        (sampled(logprobs=21), "sampling.logprobs"),
        (sampled(min_tokens=5, max_tokens=4), "sampling.min_tokens"),
        (sampled(logit_bias={VOCAB: 1.0}), "sampling.logit_bias"),
        (sampled(logit_bias={1: NAN}), "sampling.logit_bias"),
        (sampled(logit_bias={i: 1.0 for i in range(1025)}), "sampling.logit_bias"),
        (sampled(stop_token_ids=[VOCAB]), "sampling.stop_token_ids"),
        (sampled(allowed_token_ids=[VOCAB]), "sampling.allowed_token_ids"),
        (sampled(banned_token_ids=[VOCAB]), "sampling.banned_token_ids"),
        (sampled(allowed_token_ids=[4], banned_token_ids=[4]), "sampling.allowed_token_ids"),
        (sampled(allowed_token_ids=[2], min_tokens=1), "sampling.allowed_token_ids"),
        (sampled(banned_token_ids=range(VOCAB)), "sampling.banned_token_ids"),
    ],
)
def test_what_cannot_be_is_refused_by_name(message: generation_pb2.GenerateRequest, name: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        read(message)
    assert caught.value.field == name
    assert caught.value.remedy


def test_the_services_methods_hold_where_the_request_is_silent() -> None:
    standard = Defaults(3, False, RejectionMethod.STANDARD, DraftMethod.GREEDY)
    silent, other = read(ask(), standard), read(ask(rejection_sample_method=1), standard)
    assert (silent.rejection_method, silent.draft_method) == (RejectionMethod.STANDARD, DraftMethod.GREEDY)
    assert (other.rejection_method, other.draft_method) == (RejectionMethod.COUPLED, DraftMethod.GREEDY)
    assert read(ask()).draft_method is DraftMethod.GUMBEL


# --- admission ----------------------------------------------------------------------------------------------------------


def admitted(message: generation_pb2.GenerateRequest, prompt_tokens: int = 3, **info: Any) -> Admitted:
    info_ = model_info(VOCAB, **info)
    return admit(read(message), [1] * prompt_tokens, info_, session_id="s", seed=77, num_speculative_tokens=3, traceparent="trace")


@pytest.mark.parametrize("max_tokens", [None, 2**31 - 1])
@pytest.mark.parametrize(("prompt_tokens", "room"), [(62, 2), (63, 1), (64, 0)])
def test_near_the_window(max_tokens: int | None, prompt_tokens: int, room: int) -> None:
    """F64: prompt and output together never pass the window; a prompt as long as the window leaves an empty answer."""
    done = admitted(ask() if max_tokens is None else sampled(max_tokens=max_tokens), prompt_tokens)
    assert done.sampling.max_tokens == room and done.window == 64
    assert is_complete(done) == (room == 0)


@pytest.mark.parametrize(
    ("message", "prompt_tokens", "name"),
    [
        (ask(), 65, "prompt"),
        (ask(), 0, "prompt"),
        (ask(output_token_ids=[1] * 5), 60, "output_token_ids"),
        (sampled(min_tokens=5), 60, "sampling.min_tokens"),
        (ask(num_speculative_tokens=9), 3, "num_speculative_tokens"),
    ],
)
def test_what_does_not_fit_the_target_is_refused_by_name(message: generation_pb2.GenerateRequest, prompt_tokens: int, name: str) -> None:
    """F60, F64."""
    with pytest.raises(InvalidRequest) as caught:
        admitted(message, prompt_tokens)
    assert caught.value.field == name
    assert name != "prompt" or "window of 64" in str(caught.value) or "at least one token" in str(caught.value)


def test_admission_leaves_nothing_open() -> None:
    done = admitted(ask())
    assert (done.seed, done.num_speculative_tokens, done.prompt_length, done.traceparent) == (77, 3, 3, "trace")
    assert admitted(ask(seed=0)).seed == 0
    assert admitted(ask(num_speculative_tokens=0)).num_speculative_tokens == 0
    assert admitted(ask(), max_num_speculative_tokens=2).num_speculative_tokens == 2
    assert (done.max_block, admitted(ask(), max_num_speculative_tokens=2).max_block) == (8, 2)


def test_F51_a_target_that_takes_any_block_is_not_taken_at_its_word() -> None:
    """A session keeps a list as long as its blocks may be."""
    assert admitted(ask(), max_num_speculative_tokens=2**32 - 1).max_block == MAX_BLOCK
    with pytest.raises(InvalidRequest, match="at most 1024"):
        admitted(ask(num_speculative_tokens=1025), max_num_speculative_tokens=2**32 - 1)


def test_the_other_answers_differ_by_seed_alone() -> None:
    """Answer i is the one of a request of its own with its seed; only answer 0 tells of the prompt."""
    first = admitted(ask(seed=5, n=3, sampling=common_pb2.SamplingParams(prompt_logprobs=1, top_k=4)))
    made = others(first, ["a", "b"])
    assert first.seed == 5 and first.fork_session_id == "" and first.sampling.prompt_logprobs == 1
    for index, (answer, name) in enumerate(zip(made, "ab", strict=True), 1):
        sampling = replace(first.sampling, prompt_logprobs=None)
        assert answer == replace(first, session_id=name, seed=answer_seed(5, index), fork_session_id="s", sampling=sampling)
    assert read(ask()).n == read(ask(n=1, output_token_ids=[5])).n == 1 and read(ask(n=16)).n == 16


@pytest.mark.parametrize(("alternatives", "prompt_tokens"), [(0, 200_001), (20, 9524), (9, 20_001)])
def test_prompt_entries_are_bounded(alternatives: int, prompt_tokens: int) -> None:
    message = sampled(prompt_logprobs=alternatives)
    assert admitted(message, prompt_tokens - 1, max_model_len=1 << 20).sampling.prompt_logprobs == alternatives
    with pytest.raises(InvalidRequest, match="MAX_PROMPT_LOGPROBS") as caught:
        admitted(message, prompt_tokens, max_model_len=1 << 20)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_a_prompt_that_fills_the_window_has_no_entries() -> None:
    """No target is asked for anything, so there would be none, in silence."""
    assert admitted(sampled(prompt_logprobs=0), 63)
    with pytest.raises(InvalidRequest, match="window 64") as caught:
        admitted(sampled(prompt_logprobs=0), 64)
    assert caught.value.field == "sampling.prompt_logprobs"


def test_resumed_ids_count_against_the_limit() -> None:
    """F87."""
    limited = {"sampling": common_pb2.SamplingParams(max_tokens=3)}
    done = admitted(ask(output_token_ids=[4, 5], **limited))
    assert (done.tokens, done.prompt_length, done.sampling.max_tokens) == ((1, 1, 1, 4, 5), 3, 3)
    assert not is_complete(done)
    assert is_complete(admitted(ask(output_token_ids=[4, 5, 6], **limited)))


def test_the_model_must_be_the_one_served() -> None:
    assert admitted(ask(model="scripted"))
    with pytest.raises(NotFound, match="scripted"):
        admitted(ask(model="other"))
