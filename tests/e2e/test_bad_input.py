"""Bad and odd requests over the wire. Each is answered by a defined result or by a status that names the field; the neighbours' streams
on the same target do not notice any of it.

Names begin with the field case. Most requests are built byte by byte: an old client, a foreign one, a hostile one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.conftest import WINDOW
from tests.e2e.raw import Neighbours, RawClient, Reply, double, fixed64, num, packed, sub, token_prompt
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.faults, pytest.mark.timeout(90)]
VOCAB = 320
MINUS_ONE = 2**32 - 1
PROMPT = [10, 11, 12]
ENOUGH = num(11, 12)  # SamplingParams.max_tokens
SEED = fixed64(6, 11)


@pytest.fixture(scope="module")
def neighbours(questioned: Stack, client: RawClient) -> Iterator[Neighbours]:
    """Three long streams: greedy, sampled, without speculation."""
    requests = [
        pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=[20 + i, 30, 40]),
            seed=i,
            num_speculative_tokens=3 * (i < 2),
            sampling=common_pb2.SamplingParams(temperature=float(i > 0), max_tokens=200, ignore_eos=True),
        )
        for i in range(3)
    ]
    wanted = [client.generate(request) for request in requests]
    assert [len(reply.token_ids) for reply in wanted] == [200] * 3
    with Neighbours(questioned.endpoint, requests, wanted) as neighbours:
        yield neighbours


@pytest.fixture(autouse=True)
def undisturbed(neighbours: Neighbours) -> Iterator[None]:
    with neighbours.undisturbed():
        yield


def test_the_neighbours_would_notice(questioned: Stack, client: RawClient) -> None:
    """Otherwise their silence means nothing."""
    request = token_prompt(PROMPT) + SEED + sampling(ENOUGH)
    wanted = client.generate(request)
    wanted.token_ids[5] += 1
    watched = Neighbours(questioned.endpoint, [pb.GenerateRequest.FromString(request)], [wanted])
    with watched, pytest.raises(AssertionError, match="instead of"), watched.undisturbed():
        client.generate(request)


def sampling(*fields: bytes) -> bytes:
    return sub(5, b"".join(fields))


def answered(reply: Reply) -> Reply:
    assert (reply.code, reply.details) == ("OK", "")
    assert reply.started is not None and reply.finished is not None
    assert reply.finished.usage.completion_tokens == len(reply.token_ids)
    return reply


def refused(reply: Reply, field: str, code: str = "INVALID_ARGUMENT") -> None:
    assert (reply.code, reply.field) == (code, field), reply.details
    assert reply.details.startswith(field) and len(reply.details) > len(field) + 5, "the remedy is missing"
    assert reply.started is None and not reply.token_ids


# ---------------------------------------------------------------- F31: odd limits


@pytest.mark.parametrize("limit", [-1, MINUS_ONE, 2**31])
def test_F31_impossible_limits(client: RawClient, limit: int) -> None:
    refused(client.generate(token_prompt(PROMPT) + sampling(num(11, limit), num(15, 2))), "sampling.max_tokens")


def test_F31_a_huge_limit_is_the_window(client: RawClient) -> None:
    plain = answered(client.generate(token_prompt(PROMPT) + SEED))
    got = answered(client.generate(token_prompt(PROMPT) + SEED + sampling(num(11, 2**31 - 1), num(15, 2))))
    assert got.token_ids == plain.token_ids
    assert len(got.logprobs) == len(got.token_ids)


# ---------------------------------------------------------------- F52: ids that nobody knows


def bias(token: int, value: float) -> bytes:
    return sampling(sub(8, num(1, token) + double(2, value)))


UNKNOWN = {
    "bias of the id past the last": (bias(VOCAB, 1.0), "sampling.logit_bias"),
    "bias of -1": (bias(MINUS_ONE, 1.0), "sampling.logit_bias"),
    "bias of 191222": (bias(191222, -100.0), "sampling.logit_bias"),
    "bias NaN": (bias(5, math.nan), "sampling.logit_bias"),
    "bias of infinity": (bias(5, math.inf), "sampling.logit_bias"),
    "bias of 101": (bias(5, 101.0), "sampling.logit_bias"),
    "allowed": (sampling(packed(9, [5, VOCAB])), "sampling.allowed_token_ids"),
    "banned": (sampling(packed(10, [MINUS_ONE])), "sampling.banned_token_ids"),
    "stop": (sampling(packed(14, [VOCAB])), "sampling.stop_token_ids"),
    "resumed": (packed(4, [5, VOCAB]), "output_token_ids"),
    "nothing left": (sampling(packed(9, [5, 6]), packed(10, [5, 6])), "sampling.allowed_token_ids"),
    "all banned": (sampling(packed(10, range(VOCAB))), "sampling.banned_token_ids"),
    "too many alternatives": (sampling(num(15, 21)), "sampling.logprobs"),
    "NaN temperature": (sampling(double(1, math.nan)), "sampling.temperature"),
    "negative temperature": (sampling(double(1, -0.5)), "sampling.temperature"),
    "unknown method": (num(15, 77), "rejection_sample_method"),
    "unknown draft method": (num(16, 77), "draft_sample_method"),
    "methods that do not fit": (num(15, 1) + num(16, 3), "draft_sample_method"),
    "block too long": (num(12, 17), "num_speculative_tokens"),
    "seventeen stops": (b"".join(sub(9, b"x") for _ in range(17)), "stop"),
    "empty stop": (sub(9, b""), "stop[0]"),
    "seventeen answers": (num(7, 17), "n"),
    "two answers to resume": (num(7, 2) + packed(4, [5, 6]), "n"),
    "too many alternatives of the prompt": (sampling(num(16, 21)), "sampling.prompt_logprobs"),
    "a name of 129 bytes": (sub(18, b"x" * 129), "request_id"),
    "an empty name": (sub(18, b""), "request_id"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_F52_unknown_ids_and_values(client: RawClient, name: str) -> None:
    fields, field = UNKNOWN[name]
    refused(client.generate(token_prompt(PROMPT) + fields), field)


@pytest.mark.parametrize("token", [VOCAB, MINUS_ONE, 2**31])
def test_F52_prompt_ids(client: RawClient, token: int) -> None:
    refused(client.generate(token_prompt([5, token, 6])), "token_ids.ids")


# ---------------------------------------------------------------- languages that are none


def constrained(*fields: bytes) -> bytes:
    return sampling(ENOUGH, sub(17, b"".join(fields)))


MANY = b"".join(sub(1, b"option %d" % i) for i in range(1025))
DEEP = b'{"type": "array", "items": ' * 3000 + b"{}" + b"}" * 3000
LANGUAGES = {
    "half a schema": (sub(1, b'{"type": "object"'), "json_schema"),
    "a schema of no type": (sub(1, b'{"type": "strnig"}'), "json_schema"),
    "a schema that is a list": (sub(1, b"[1, 2]"), "json_schema"),
    "a schema nobody can satisfy": (sub(1, b'{"type": "string", "minLength": 3, "maxLength": 2}'), "json_schema"),
    "a reference to nothing": (sub(1, b'{"$ref": "#/$defs/missing"}'), "json_schema"),
    "a very deep schema": (sub(1, DEEP), "json_schema"),
    "an open bracket": (sub(2, b"(a|b"), "regex"),
    "a repetition of nothing": (sub(2, b"*a"), "regex"),
    "a look-behind": (sub(2, b"(?<=a)b"), "regex"),
    "too many repetitions": (sub(2, b"((a{1000}){1000}){1000}"), "regex"),
    "seventy kilobytes of regex": (sub(2, b"a" * 70_000), "regex"),
    "seventy kilobytes of schema": (sub(1, b'{"title": "' + b"a" * 70_000 + b'"}'), "json_schema"),
    "no options": (sub(3, b""), "choice"),
    "an empty option": (sub(3, sub(1, b"a") + sub(1, b"")), "choice"),
    "1025 options": (sub(3, MANY), "choice"),
    "half a rule": (sub(4, b"root ::= ("), "ebnf"),
    "a rule that is missing": (sub(4, b"root ::= nothing"), "ebnf"),
    "no rule": (sub(4, b"words"), "ebnf"),
    "a form of the future": (sub(99, b"a+"), ""),
    "no form": (b"", ""),
    "a beginning of 257 bytes": (sub(2, b"a+") + sub(5, b"x" * 257), "start_after"),
    "an empty beginning": (sub(2, b"a+") + sub(5, b""), "start_after"),
    "a beginning of nothing": (sub(5, b"x"), ""),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_no_language(client: RawClient, name: str) -> None:
    form, field = LANGUAGES[name]
    refused(client.generate(token_prompt(PROMPT) + constrained(form)), "sampling.grammar" + ("." + field if field else ""))


LETTERS = packed(9, [67, 68, 71, 74, 86, 261])  # a, b, e, h, t, " the"
CHOICES = sub(3, b"".join(sub(1, option) for option in (b"the other hat", b"the hat", b"an otter", b"at the other")))


@pytest.mark.parametrize("k", [1, 4, 8])
def test_a_language_without_its_ids(client: RawClient, k: int) -> None:
    """Other fields may ban what a grammar needs. The error names it and comes behind what was decided until then, however long a block is;
    an answer that a stop string ends before that is a good one."""
    nothing = client.generate(token_prompt(PROMPT) + num(12, k) + sampling(ENOUGH, sub(17, sub(2, b"[0-9]{4}")), LETTERS))
    assert (nothing.code, nothing.field, nothing.token_ids) == ("INVALID_ARGUMENT", "sampling.grammar", [])
    some = token_prompt([10, 11, 12, 13, 11, 10]) + SEED + sampling(ENOUGH, sub(17, CHOICES), LETTERS)
    want, got = client.generate(some + num(12, 0)), client.generate(some + num(12, k))
    assert (want.code, want.field, want.text) == ("INVALID_ARGUMENT", "sampling.grammar", "at the")
    assert (got.code, got.details, got.token_ids, got.text) == (want.code, want.details, want.token_ids, want.text)
    stopped = answered(client.generate(some + sub(9, b"the") + num(12, k)))
    assert (stopped.text, stopped.token_ids) == ("at ", want.token_ids)


# ---------------------------------------------------------------- F60: hardly any prompt


EMPTY = {
    "none": (b"", "prompt"),
    "empty text": (sub(1, b""), "prompt"),
    "no ids": (sub(2, b""), "prompt"),
    "no messages": (sub(3, b""), "messages.messages"),
}


@pytest.mark.parametrize("name", EMPTY)
def test_F60_empty_prompts(client: RawClient, name: str) -> None:
    content, field = EMPTY[name]
    refused(client.generate(content + sampling(ENOUGH)), field)


@pytest.mark.parametrize("content", [token_prompt([0]), token_prompt([2]), sub(1, b"<|im_end|>"), sub(1, b"\x00")])
def test_F60_one_token_is_a_prompt(client: RawClient, content: bytes) -> None:
    got = answered(client.generate(content + sampling(ENOUGH, num(13, 1))))
    assert got.started is not None and got.started.prompt_tokens == 1
    assert len(got.token_ids) == 12


@pytest.mark.parametrize("content", [sub(1, b"\xff\xfe"), b"\xff" * 64, sub(5, b"\x09")], ids=["not UTF-8", "garbage", "cut short"])
def test_F60_no_message_at_all(client: RawClient, content: bytes) -> None:
    refused(client.generate(content), "request")


# ---------------------------------------------------------------- F64: at the end of the window


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("limit", [b"", num(11, 2**31 - 1), num(11, 1)], ids=["absent", "huge", "one"])
@pytest.mark.parametrize("length", [WINDOW - 2, WINDOW - 1, WINDOW, WINDOW + 1])
def test_F64_prompts_as_long_as_the_window(client: RawClient, length: int, limit: bytes, k: int) -> None:
    prompt = [3 + i * 7 % 300 for i in range(length)]
    reply = client.generate(token_prompt(prompt) + num(12, k) + SEED + sampling(limit, num(13, 1), num(15, 1)))
    if length > WINDOW:
        refused(reply, "prompt")
        return
    answered(reply)
    room = WINDOW - length
    assert len(reply.token_ids) == len(reply.logprobs) == min(room, 1 if limit == num(11, 1) else room)
    assert reply.finished is not None and reply.finished.finish_reason == common_pb2.FINISH_REASON_LENGTH


@pytest.mark.parametrize("short_by", range(1, 6))
def test_F64_F65_resumed_next_to_the_end(client: RawClient, short_by: int) -> None:
    """A block never reaches past the window, wherever the session begins."""
    ignore = sampling(num(13, 1))
    whole = answered(client.generate(token_prompt(PROMPT) + SEED + ignore))
    assert len(whole.token_ids) == WINDOW - len(PROMPT)
    got = client.generate(token_prompt(PROMPT) + SEED + ignore + num(12, 8) + packed(4, whole.token_ids[:-short_by]))
    assert got.code == "OK", got.details
    assert got.token_ids == whole.token_ids[-short_by:]


# ---------------------------------------------------------------- F79: one name, two requests


def test_F79_a_live_name_is_taken(client: RawClient) -> None:
    long = token_prompt([20, 30, 40]) + SEED + sampling(num(11, 200), num(13, 1)) + sub(18, b"mine")
    wanted = answered(client.generate(long))
    call = client.stream(long)
    first = Reply()
    first.take(next(call))
    second = client.generate(token_prompt(PROMPT) + sub(18, b"mine"))
    assert second.code == "ALREADY_EXISTS" and "request_id" in second.details and "mine" in second.details
    for message in call:
        first.take(message)
    assert first.token_ids == wanted.token_ids
    assert answered(client.generate(long)).token_ids == wanted.token_ids  # free again


# ---------------------------------------------------------------- F131: large messages


def test_F131_messages_past_four_megabytes(client: RawClient) -> None:
    """The default limit of gRPC would answer RESOURCE_EXHAUSTED without a reason; ours names the field."""
    refused(client.generate(token_prompt([300] * 1_200_000 + [301] * 1_000_000)), "token_ids.ids")
    refused(client.generate(sub(1, b"a" * (5 << 20))), "text")
    chat = sub(1, sub(1, b"user") + sub(2, b"a" * (5 << 20)))
    refused(client.generate(sub(3, chat)), "messages")


def test_F131_a_long_prompt_that_may_be_sent(client: RawClient) -> None:
    refused(client.generate(token_prompt([300] * 1_000_000)), "prompt")


def test_F131_past_our_own_limit(client: RawClient) -> None:
    reply = client.generate(sub(1, b"a" * (65 << 20)))
    assert reply.code == "RESOURCE_EXHAUSTED" and "larger than max" in reply.details
    assert answered(client.generate(token_prompt(PROMPT) + sampling(ENOUGH))).token_ids
