"""F16: every field of the sampling parameters has its documented effect, compared with a slow greedy loop over transformers in float64.

A field that is added to the proto and not to these tables fails the first test.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specdec.terms import SamplingParams
from specdec.v1 import common_pb2
from specdec.v1 import generation_pb2 as pb
from tests.e2e.fields import LENGTH, LENGTH_REACHED, ORACLE, PROMPT, STOP, Case, ask, good, good_answer, greedy
from tests.e2e.oracle import EOS, Language
from tests.e2e.raw import RawClient

pytestmark = [pytest.mark.parameters, pytest.mark.timeout(90)]


# ---------------------------------------------------------------- SamplingParams


def matches_the_oracle(**fields: Any) -> Case:
    """At temperature 0 the answer is the slow loop's; without the field it is another."""

    def check(client: RawClient) -> None:
        told, want = greedy(**fields)
        reply = ask(client, told)
        finished = good(reply)
        assert reply.token_ids == want != greedy()[1]
        for name in fields:
            assert getattr(finished.settings.sampling, name) == getattr(common_pb2.SamplingParams(**told), name), name

    return check


def is_greedy(**fields: Any) -> Case:
    """A cut so sharp that only the best id is left, at temperature 1."""

    def check(client: RawClient) -> None:
        reply = ask(client, fields)
        good(reply)
        assert reply.token_ids == greedy()[1] != ask(client).token_ids

    return check


def temperature(client: RawClient) -> None:
    is_greedy(temperature=0.0)(client)
    hot = ask(client, {"temperature": 3.0})
    assert hot.token_ids != ask(client).token_ids and good(hot).settings.sampling.temperature == 3.0


def max_tokens(client: RawClient) -> None:
    reply = ask(client, {"max_tokens": 5})
    assert good(reply).finish_reason == LENGTH_REACHED
    assert reply.token_ids == ask(client).token_ids[:5]


def min_tokens(client: RawClient) -> None:
    stop = greedy()[1][2]
    told, want = greedy(min_tokens=10, stop_token_ids=[stop])
    reply = ask(client, told)
    good(reply)
    assert reply.token_ids == want and len(want) >= 10
    assert len(ask(client, {**told, "min_tokens": 0}).token_ids) == 2


def ignore_eos(client: RawClient) -> None:
    wanted = {"logit_bias": {EOS: 100.0}}
    assert ask(client, wanted).token_ids == [EOS] * LENGTH
    ended = ask(client, {**wanted, "ignore_eos": False})
    assert good(ended).finish_reason == STOP and ended.token_ids == [] and good(ended).stop_reason == str(EOS)


def stop_token_ids(client: RawClient) -> None:
    plain = ask(client).token_ids
    reply = ask(client, {"stop_token_ids": [plain[7]]})
    assert good(reply).finish_reason == STOP and good(reply).stop_reason == str(plain[7])
    assert reply.token_ids == plain[: plain.index(plain[7])]


def logprobs(client: RawClient) -> None:
    reply = ask(client, {"logprobs": 3})
    good(reply)
    assert len(reply.logprobs) == len(reply.token_ids) == LENGTH
    check_logprobs(reply.logprobs, reply.token_ids, PROMPT)
    assert not ask(client).logprobs


def prompt_logprobs(client: RawClient) -> None:
    """From the second token on: nothing precedes the first. They are no part of the answer, and told once."""
    reply, plain = ask(client, {"prompt_logprobs": 3}), ask(client)
    assert good(reply).settings.sampling.prompt_logprobs == 3 and not good(plain).settings.sampling.HasField("prompt_logprobs")
    check_logprobs(reply.prompt_logprobs, PROMPT[1:], PROMPT[:1])
    assert not plain.prompt_logprobs and not reply.logprobs
    assert reply.token_ids == plain.token_ids
    alone = ask(client, {"prompt_logprobs": 0}).prompt_logprobs
    assert [entry.logprob for entry in alone] == [entry.logprob for entry in reply.prompt_logprobs]
    assert not any(entry.top_ids for entry in alone)
    assert not good_answer(ask(client, {"prompt_logprobs": 3}, token_ids=pb.TokenIds(ids=[33]))).prompt_logprobs  # nothing precedes it


def check_logprobs(entries: Sequence[Any], tokens: Sequence[int], before: Sequence[int]) -> None:
    assert len(entries) == len(tokens)
    for i, (token, told) in enumerate(zip(tokens, entries, strict=True)):
        exact = ORACLE.logprobs([*before, *tokens[:i]])
        top = exact.topk(3)
        assert told.top_ids == top.indices.tolist()
        assert told.logprob == pytest.approx(float(exact[token]), rel=1e-4)  # transformers' norms round to float32
        assert told.top_logprobs == pytest.approx(top.values.tolist(), rel=1e-4)


def grammar(client: RawClient) -> None:
    """By an end token the answer ends where a sentence is complete, and not before."""
    form = common_pb2.Grammar(regex="the( hat)*")
    endless = ask(client, {"temperature": 0.0, "grammar": form})
    assert good(endless).finish_reason == LENGTH_REACHED and endless.text.startswith("the hat hat")
    ended = ask(client, {"grammar": form, "ignore_eos": False, "logit_bias": {EOS: 100.0}})
    assert (ended.text, good(ended).finish_reason, good(ended).stop_reason) == ("the", STOP, str(EOS))
    assert good(ended).settings.sampling.grammar == form


FAVOURITES = greedy()[1]
MIDDLE = ORACLE.words[FAVOURITES[1]].decode()  # text that the greedy answer soon holds
SAMPLING: dict[str, Case] = {
    "temperature": temperature,
    "top_k": is_greedy(top_k=1),
    "top_p": is_greedy(top_p=1e-9),
    "min_p": is_greedy(min_p=1.0),
    "frequency_penalty": matches_the_oracle(frequency_penalty=2.0),
    "presence_penalty": matches_the_oracle(presence_penalty=2.0),
    "repetition_penalty": matches_the_oracle(repetition_penalty=3.0),
    "logit_bias": matches_the_oracle(logit_bias={FAVOURITES[0]: -100.0, FAVOURITES[3]: 2.5}),
    "allowed_token_ids": matches_the_oracle(allowed_token_ids=[5, 40, 41, 200, 300]),
    "banned_token_ids": matches_the_oracle(banned_token_ids=FAVOURITES[:2]),
    "max_tokens": max_tokens,
    "min_tokens": min_tokens,
    "ignore_eos": ignore_eos,
    "stop_token_ids": stop_token_ids,
    "logprobs": logprobs,
    "prompt_logprobs": prompt_logprobs,
    "grammar": grammar,
}


# ---------------------------------------------------------------- Grammar and Choice


def speaks(language: Language, **form: Any) -> Case:
    """At temperature 0 the answer is the slow loop's over all sentences, and ends where nothing may follow."""

    def check(client: RawClient) -> None:
        reply = ask(client, {"temperature": 0.0, "grammar": common_pb2.Grammar(**form)})
        assert (good(reply).finish_reason, good(reply).stop_reason) == (STOP, "")
        ORACLE.check_greedy(SamplingParams(temperature=0.0, ignore_eos=True), language, reply.token_ids)

    return check


WORDS = ("at the hat", "the other", "cat", "no")
GRAMMAR: dict[str, Case] = {
    "json_schema": speaks(
        Language([f'{{"name": {value}, "val": {flag}}}' for value in ('"cat"', "12") for flag in ("true", "false")]),
        json_schema='{"type": "object", "properties": {"name": {"enum": ["cat", 12]}, "val": {"type": "boolean"}},'
        ' "required": ["name", "val"], "additionalProperties": false}',
    ),
    "regex": speaks(
        Language([f"{a} {b}{c}" for a in ("the", "no") for b in "0123456789" for c in ("", "rth")]), regex="(the|no) [0-9](rth)?"
    ),
    "choice": speaks(Language(WORDS), choice=common_pb2.Choice(options=WORDS)),
    "ebnf": speaks(
        Language([f"{a} {b}" for a in ("cat", "hat") for b in ("in", "on")]), ebnf='root ::= word " " ("in" | "on")\nword ::= "cat" | "hat"'
    ),
    "start_after": speaks(Language(["12", "34"], start_after=MIDDLE), regex="12|34", start_after=MIDDLE),
}
CHOICE: dict[str, Case] = {"options": speaks(Language(["other", "user"]), choice=common_pb2.Choice(options=["other", "user"]))}


TABLES = {common_pb2.SamplingParams: SAMPLING, common_pb2.Grammar: GRAMMAR, common_pb2.Choice: CHOICE}


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
