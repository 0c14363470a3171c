"""F20: unset, empty and zero are three things, for every field that may be unset; requests are built byte by byte.

The tables hold what an explicit zero means. A field that is added to the proto and not here fails the first test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.conftest import WINDOW
from tests.e2e.raw import RawClient, Reply, double, fixed64, num, sub, token_prompt

pytestmark = [pytest.mark.parameters, pytest.mark.timeout(90)]
PROMPT = [10, 11, 12]
ASK, SEED, ENOUGH = token_prompt(PROMPT), fixed64(6, 11), num(11, 12)  # the last: SamplingParams.max_tokens
CHAT = sub(1, sub(1, b"user") + sub(2, b"hi"))
Meaning = Callable[[RawClient, bytes], None]  # of a field whose bytes are a zero; inside its own message


def sampling(*fields: bytes) -> bytes:
    return sub(5, b"".join(fields))


def in_sampling(zero: bytes) -> bytes:
    return ASK + SEED + sampling(ENOUGH, zero)


def in_request(zero: bytes) -> bytes:
    return ASK + SEED + sampling(ENOUGH) + zero


def answered(reply: Reply) -> tuple[Reply, Any]:
    assert (reply.code, reply.details) == ("OK", "")
    return reply, reply.finished


# ---------------------------------------------------------------- what a zero means


def unset(place: Callable[[bytes], bytes]) -> Meaning:
    """The same as leaving it out: zero is the documented default."""

    def check(client: RawClient, zero: bytes) -> None:
        (got, end), (want, wanted) = answered(client.generate(place(zero))), answered(client.generate(place(b"")))
        assert (got.token_ids, got.text, end.settings) == (want.token_ids, want.text, wanted.settings)

    return check


def refused(place: Callable[[bytes], bytes], field: str, code: str = "INVALID_ARGUMENT") -> Meaning:
    def check(client: RawClient, zero: bytes) -> None:
        reply = client.generate(place(zero))
        assert (reply.code, reply.field) == (code, field), reply.details
        assert reply.started is None

    return check


def temperature(client: RawClient, zero: bytes) -> None:
    """Argmax, whatever the seed."""
    (got, end), (greedy, _) = (answered(client.generate(in_sampling(value))) for value in (zero, double(1, 1e-6)))
    assert got.token_ids == greedy.token_ids != client.generate(in_sampling(b"")).token_ids
    assert end.settings.sampling.HasField("temperature") and end.settings.sampling.temperature == 0.0


def logprobs(client: RawClient, zero: bytes) -> None:
    """No alternatives is not no log-probabilities."""
    got, _ = answered(client.generate(in_sampling(zero)))
    assert len(got.logprobs) == len(got.token_ids) > 0
    assert all(entry.logprob < 0 and not entry.top_ids for entry in got.logprobs)
    assert not client.generate(in_sampling(b"")).logprobs


def prompt_logprobs(client: RawClient, zero: bytes) -> None:
    got, _ = answered(client.generate(in_sampling(zero)))
    assert len(got.prompt_logprobs) == len(PROMPT) - 1
    assert all(entry.logprob < 0 and not entry.top_ids for entry in got.prompt_logprobs)
    assert not client.generate(in_sampling(b"")).prompt_logprobs


def seed(client: RawClient, zero: bytes) -> None:
    """A seed of zero is a seed; without one it is drawn."""
    replies = [client.generate(ASK + sampling(ENOUGH) + field) for field in (zero, zero, b"", b"")]
    seeds = [reply.started.seed for reply in replies if reply.started]
    assert seeds[:2] == [0, 0] and len(set(seeds)) == 3
    assert replies[0].token_ids == replies[1].token_ids


def skip_special_tokens(client: RawClient, zero: bytes) -> None:
    only_special = ASK + sampling(ENOUGH, sub(9, b"\x00"))  # allowed_token_ids [0], <|endoftext|>
    shown, hidden = (client.generate(only_special + flag) for flag in (zero, b""))
    assert shown.text == "<|endoftext|>" * 12 and hidden.text == ""


def num_speculative_tokens(client: RawClient, zero: bytes) -> None:
    (off, off_end), (on, on_end) = (answered(client.generate(in_request(k))) for k in (zero, b""))
    assert off.token_ids == on.token_ids
    assert off_end.speculative.num_spec_steps == 0 == off_end.settings.num_speculative_tokens
    assert on_end.speculative.num_spec_steps > 0


def add_generation_prompt(client: RawClient, zero: bytes) -> None:
    bare, opened = (client.generate(sub(3, CHAT + flag) + sampling(ENOUGH)) for flag in (zero, b""))
    assert bare.started and opened.started and bare.started.prompt_tokens < opened.started.prompt_tokens


SAMPLING: dict[str, tuple[bytes, Meaning]] = {
    "temperature": (double(1, 0.0), temperature),
    "top_k": (num(2, 0), unset(in_sampling)),
    "top_p": (double(3, 0.0), refused(in_sampling, "sampling.top_p")),
    "min_p": (double(4, 0.0), unset(in_sampling)),
    "frequency_penalty": (double(5, 0.0), unset(in_sampling)),
    "presence_penalty": (double(6, 0.0), unset(in_sampling)),
    "repetition_penalty": (double(7, 0.0), refused(in_sampling, "sampling.repetition_penalty")),
    "max_tokens": (num(11, 0), refused(in_sampling, "sampling.max_tokens")),
    "min_tokens": (num(12, 0), unset(in_sampling)),
    "ignore_eos": (num(13, 0), unset(in_sampling)),
    "logprobs": (num(15, 0), logprobs),
    "prompt_logprobs": (num(16, 0), prompt_logprobs),
    "grammar": (sub(17, b""), refused(in_sampling, "sampling.grammar")),
}
REQUEST: dict[str, tuple[bytes, Meaning]] = {
    "sampling": (sampling(), unset(lambda zero: ASK + SEED + zero)),
    "seed": (fixed64(6, 0), seed),
    "n": (num(7, 0), refused(in_request, "n")),
    "priority": (num(8, 0), unset(in_request)),
    "include_stop_str_in_output": (num(10, 0), unset(lambda zero: in_request(sub(9, b"e") + zero))),
    "skip_special_tokens": (num(11, 0), skip_special_tokens),
    "num_speculative_tokens": (num(12, 0), num_speculative_tokens),
    "enable_adaptive_verification": (num(13, 0), unset(in_request)),
    "disable_spec_decode": (num(14, 0), unset(in_request)),
    "model": (sub(17, b""), refused(in_request, "model", "NOT_FOUND")),
    "request_id": (sub(18, b""), refused(in_request, "request_id")),
    "use_heterogeneous_vocab": (num(19, 0), unset(in_request)),
    "text": (sub(1, b""), refused(lambda zero: zero, "prompt")),
    "token_ids": (sub(2, b""), refused(lambda zero: zero, "prompt")),
    "messages": (sub(3, b""), refused(lambda zero: zero, "messages.messages")),
}
GRAMMAR: dict[str, tuple[bytes, Meaning]] = {
    name: (sub(number, b""), refused(lambda zero: in_sampling(sub(17, zero)), f"sampling.grammar.{name}"))
    for name, number in (("json_schema", 1), ("regex", 2), ("choice", 3), ("ebnf", 4))
} | {"start_after": (sub(5, b""), refused(lambda zero: in_sampling(sub(17, sub(2, b"a+") + zero)), "sampling.grammar.start_after"))}
MESSAGES: dict[str, tuple[bytes, Meaning]] = {"add_generation_prompt": (num(3, 0), add_generation_prompt)}
TABLES = {common_pb2.SamplingParams: SAMPLING, pb.GenerateRequest: REQUEST, common_pb2.Grammar: GRAMMAR, pb.Messages: MESSAGES}


@pytest.mark.parametrize("message", TABLES, ids=lambda message: message.DESCRIPTOR.name)
def test_F20_no_field_is_forgotten(message: Any) -> None:
    assert {field.name for field in message.DESCRIPTOR.fields if field.has_presence} == TABLES[message].keys()


@pytest.mark.parametrize(
    ("message", "field"),
    [(message, field) for message, table in TABLES.items() for field in table],
    ids=lambda value: value if isinstance(value, str) else value.DESCRIPTOR.name,
)
def test_F20_zero(client: RawClient, message: Any, field: str) -> None:
    zero, meaning = TABLES[message][field]
    assert zero
    meaning(client, zero)


# ---------------------------------------------------------------- everything unset at once


@pytest.fixture(scope="module")
def explicit(client: RawClient) -> Reply:
    """What a client gets that sets every default itself."""
    parameters = common_pb2.SamplingParams(
        temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0,
        max_tokens=WINDOW - len(PROMPT), min_tokens=0, ignore_eos=False,
    )  # fmt: skip
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=PROMPT), seed=11, sampling=parameters, n=1, priority=0, include_stop_str_in_output=False,
        skip_special_tokens=True, num_speculative_tokens=2, enable_adaptive_verification=False, disable_spec_decode=False,
        use_heterogeneous_vocab=False,
        rejection_sample_method=common_pb2.REJECTION_SAMPLE_METHOD_COUPLED, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_GUMBEL,
    )  # fmt: skip
    reply, _ = answered(client.generate(request))
    assert len(reply.token_ids) > 20
    return reply


@pytest.mark.parametrize("parameters", [b"", sampling()], ids=["no sampling message", "empty message"])
def test_F20_absent_is_the_documented_default(client: RawClient, explicit: Reply, parameters: bytes) -> None:
    """An old client, which knows none of the newer fields, gets what it always got."""
    got, end = answered(client.generate(ASK + SEED + parameters))
    assert (got.token_ids, got.text) == (explicit.token_ids, explicit.text)
    assert explicit.finished is not None and end.settings == explicit.finished.settings
    assert end.settings.sampling.max_tokens == WINDOW - len(PROMPT)
    assert not got.logprobs and not got.prompt_logprobs
