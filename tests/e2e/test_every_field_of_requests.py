"""F16: every field of a request either has its documented effect or is refused by name. There is no third outcome.

A field that is added to the proto and not to these tables fails the first test.
"""

from __future__ import annotations

from typing import Any

import pytest

from specdec.seeds import answer_seed
from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.fields import LENGTH, PROMPT, SEED, STOP, Case, ask, good, refused
from tests.e2e.raw import RawClient, Reply

pytestmark = [pytest.mark.parameters, pytest.mark.timeout(90)]


# ---------------------------------------------------------------- GenerateRequest


def text(client: RawClient) -> None:
    ids = client.unary("Tokenize", pb.TokenizeRequest(text="the hat"), pb.TokenizeResponse).token_ids
    assert ask(client, text="the hat").token_ids == ask(client, token_ids=pb.TokenIds(ids=ids)).token_ids


def token_ids(client: RawClient) -> None:
    reply = ask(client, token_ids=pb.TokenIds(ids=[33]))
    assert reply.started is not None and reply.started.prompt_tokens == 1
    assert reply.token_ids != ask(client).token_ids


def messages(client: RawClient) -> None:
    chat = pb.Messages(messages=[pb.Message(role="user", content="the hat")])
    ids = client.unary("Tokenize", pb.TokenizeRequest(messages=chat), pb.TokenizeResponse).token_ids
    assert ask(client, messages=chat).token_ids == ask(client, token_ids=pb.TokenIds(ids=ids)).token_ids


def output_token_ids(client: RawClient) -> None:
    whole = ask(client)
    reply = ask(client, output_token_ids=whole.token_ids[:9])
    assert good(reply).usage.completion_tokens == LENGTH
    assert reply.token_ids == whole.token_ids[9:]


def sampling(client: RawClient) -> None:
    assert ask(client, {"top_k": 1}).token_ids != ask(client).token_ids


def seed(client: RawClient) -> None:
    reply = ask(client, seed=SEED + 1)
    assert reply.started is not None and reply.started.seed == SEED + 1
    assert reply.token_ids != ask(client).token_ids == ask(client).token_ids


def n(client: RawClient) -> None:
    """Each answer has a first and a last message of its own, and is what its seed gives alone."""
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT), seed=SEED, n=3, sampling=common_pb2.SamplingParams(max_tokens=LENGTH))
    replies = client.answers(request)
    assert [reply.started and reply.started.seed for reply in replies] == [answer_seed(SEED, i) for i in range(3)]
    assert len({reply.started and reply.started.request_id for reply in replies}) == 1
    assert len({reply.text for reply in replies}) == 3
    for reply in replies:
        assert reply.started is not None
        alone = client.generate(pb.GenerateRequest(token_ids=request.token_ids, seed=reply.started.seed, sampling=request.sampling))
        assert (reply.token_ids, reply.text) == (alone.token_ids, alone.text)
        assert good(reply).usage.completion_tokens == len(reply.token_ids)
        assert good(reply).settings == good(alone).settings


def priority(client: RawClient) -> None:
    """Order among requests only: never the text."""
    reply = ask(client, priority=-5)
    good(reply)
    assert reply.token_ids == ask(client).token_ids


def ending(client: RawClient) -> tuple[Reply, str]:
    """An answer, and some text of its middle that is whole characters."""
    reply = ask(client)
    middle = next(reply.text[i : i + 2] for i in range(3, len(reply.text)) if reply.text[i : i + 2].isascii())
    assert len(middle) == 2
    return reply, middle


def stop(client: RawClient) -> None:
    plain, middle = ending(client)
    reply = ask(client, stop=[middle])
    assert good(reply).finish_reason == STOP and good(reply).stop_reason == middle
    assert reply.text == plain.text[: plain.text.index(middle)]
    assert reply.token_ids == plain.token_ids[: len(reply.token_ids)]


def include_stop_str_in_output(client: RawClient) -> None:
    plain, middle = ending(client)
    reply = ask(client, stop=[middle], include_stop_str_in_output=True)
    good(reply)
    assert reply.text == plain.text[: plain.text.index(middle) + len(middle)]


def skip_special_tokens(client: RawClient) -> None:
    only = {"allowed_token_ids": [0], "max_tokens": 3}
    assert ask(client, only, skip_special_tokens=False).text == "<|endoftext|>" * 3
    assert ask(client, only).text == ""


def num_speculative_tokens(client: RawClient) -> None:
    reply, default = ask(client, num_speculative_tokens=1), ask(client)
    assert len(good(reply).speculative.acceptance_histogram) <= 2 < len(good(default).speculative.acceptance_histogram)
    assert good(reply).settings.num_speculative_tokens == 1
    assert reply.token_ids == default.token_ids


def enable_adaptive_verification(client: RawClient) -> None:
    """A bound instead of a length; the text is the same."""
    reply, default = ask(client, enable_adaptive_verification=True, num_speculative_tokens=3), ask(client)
    settings = good(reply).settings
    assert settings.enable_adaptive_verification and settings.num_speculative_tokens == 3
    assert len(good(reply).speculative.acceptance_histogram) <= 4
    assert not good(default).settings.enable_adaptive_verification
    assert not good(ask(client, enable_adaptive_verification=True, disable_spec_decode=True)).settings.enable_adaptive_verification
    assert reply.token_ids == default.token_ids


def disable_spec_decode(client: RawClient) -> None:
    reply = ask(client, disable_spec_decode=True)
    assert good(reply).speculative.num_spec_steps == 0 and good(reply).settings.num_speculative_tokens == 0
    assert set(reply.origins) == {pb.TOKEN_ORIGIN_PLAIN}


def rejection_sample_method(client: RawClient) -> None:
    reply = ask(client, rejection_sample_method=common_pb2.REJECTION_SAMPLE_METHOD_STANDARD)
    settings = good(reply).settings
    assert settings.rejection_sample_method == common_pb2.REJECTION_SAMPLE_METHOD_STANDARD
    assert settings.draft_sample_method == common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC
    assert good(ask(client)).settings.rejection_sample_method == common_pb2.REJECTION_SAMPLE_METHOD_COUPLED


def draft_sample_method(client: RawClient) -> None:
    """A greedy draft proposes another token than the sampler decides; a gumbel one with the target's own weights never does."""
    reply, default = ask(client, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_GREEDY), ask(client)
    assert good(reply).settings.draft_sample_method == common_pb2.DRAFT_SAMPLE_METHOD_GREEDY
    assert good(reply).speculative.draft_acceptance_rate < 1.0 == good(default).speculative.draft_acceptance_rate
    assert reply.token_ids == default.token_ids
    illegal = ask(client, draft_sample_method=common_pb2.DRAFT_SAMPLE_METHOD_PROBABILISTIC)
    refused(illegal, "draft_sample_method", "INVALID_ARGUMENT")


def model(client: RawClient) -> None:
    refused(ask(client, model="another"), "model", "NOT_FOUND")
    assert getattr(ask(client, model="tiny").started, "model", None) == "tiny"


def request_id(client: RawClient) -> None:
    assert getattr(ask(client, request_id="mine").started, "request_id", None) == "mine"


def refused_field(**fields: Any) -> Case:
    (name,) = fields
    return lambda client: refused(ask(client, **fields), name)


REQUEST: dict[str, Case] = {
    "text": text,
    "token_ids": token_ids,
    "messages": messages,
    "output_token_ids": output_token_ids,
    "sampling": sampling,
    "seed": seed,
    "n": n,
    "priority": priority,
    "stop": stop,
    "include_stop_str_in_output": include_stop_str_in_output,
    "skip_special_tokens": skip_special_tokens,
    "num_speculative_tokens": num_speculative_tokens,
    "enable_adaptive_verification": enable_adaptive_verification,
    "disable_spec_decode": disable_spec_decode,
    "rejection_sample_method": rejection_sample_method,
    "draft_sample_method": draft_sample_method,
    "model": model,
    "request_id": request_id,
    "use_heterogeneous_vocab": refused_field(use_heterogeneous_vocab=True),
}


# ---------------------------------------------------------------- Messages


def turns(client: RawClient) -> None:
    two = [pb.Message(role="system", content="a"), pb.Message(role="user", content="b")]
    long, short = (ask(client, messages=pb.Messages(messages=chat)) for chat in (two, two[1:]))
    assert long.started is not None and short.started is not None
    assert long.started.prompt_tokens > short.started.prompt_tokens


def chat_of(**more: Any) -> pb.Messages:
    return pb.Messages(messages=[pb.Message(role="user", content="the hat")], **more)


def template_args(client: RawClient) -> None:
    """A variable that the template does not use changes nothing; what is no JSON, or set elsewhere, is refused."""
    assert ask(client, messages=chat_of(template_args={"other": "[1]"})).token_ids == ask(client, messages=chat_of()).token_ids
    broken = ask(client, messages=chat_of(template_args={"other": "{"}))
    refused(broken, "messages.template_args[other]", "INVALID_ARGUMENT")
    reserved = ask(client, messages=chat_of(template_args={"messages": "[]"}))
    refused(reserved, "messages.template_args[messages]", "INVALID_ARGUMENT")


def add_generation_prompt(client: RawClient) -> None:
    bare, opened = ask(client, messages=chat_of(add_generation_prompt=False)), ask(client, messages=chat_of())
    assert bare.started is not None and opened.started is not None
    assert bare.started.prompt_tokens < opened.started.prompt_tokens


MESSAGES: dict[str, Case] = {"messages": turns, "template_args": template_args, "add_generation_prompt": add_generation_prompt}
TABLES = {pb.GenerateRequest: REQUEST, pb.Messages: MESSAGES}


@pytest.mark.parametrize("message", TABLES, ids=lambda message: message.DESCRIPTOR.name)
def test_F16_no_field_is_forgotten(message: Any) -> None:
    assert {field.name for field in message.DESCRIPTOR.fields} == TABLES[message].keys()


@pytest.mark.parametrize(
    ("message", "field"),
    [(message, field) for message, table in TABLES.items() for field in table],
    ids=lambda value: value if isinstance(value, str) else value.DESCRIPTOR.name,
)
def test_F16(client: RawClient, message: Any, field: str) -> None:
    TABLES[message][field](client)
