"""The same table on the real pair and the int8 engine: each parameter once, bit-equal with blocks of four and without."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest
from tokenizers import Tokenizer

from specdec.v1 import generation_pb2 as pb
from tests.e2e.parameters import Fields, Row, merged, pairs, table, together
from tests.e2e.raw import RawClient
from tests.e2e.seen import Seen, ask_all, seen, without_settings
from tests.e2e.stack import Stack

pytestmark = [pytest.mark.pair, pytest.mark.alone, pytest.mark.timeout(300)]
QUESTION = pb.Messages(messages=[pb.Message(role="user", content="Tell me a short story about a lighthouse.")])
BASE: Fields = {"messages": QUESTION, "seed": 11, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 3}
OFF: Fields = {"disable_spec_decode": True}
ON: Fields = {"num_speculative_tokens": 4}
IT_TAKES = {"lure": 8.0, "end_lure": 14.0, "heat": 6.0}
NAMES = [name for name in table(lambda token: 0, **IT_TAKES) if name not in {f"max_tokens {n}" for n in (2, 3, 4, 7, 8, 9, 10, 11, 12)}]
NUM_PAIRS = 150


@pytest.fixture(scope="module")
def rows(pair: Stack) -> Mapping[str, Row]:
    everything = table(Tokenizer.from_file(str(pair.target_model / "tokenizer.json")).token_to_id, **IT_TAKES)
    return {name: everything[name] for name in NAMES}


@pytest.fixture(scope="module")
def client(pair: Stack) -> Iterator[RawClient]:
    with RawClient(pair.endpoint) as client:
        yield client


def answered(client: RawClient, asked: Mapping[str, Fields]) -> dict[str, Seen]:
    replies = ask_all([(client, fields) for fields in asked.values()])
    return {name: seen(fields, answers) for (name, fields), answers in zip(asked.items(), replies, strict=True)}


@pytest.fixture(scope="module")
def answers(client: RawClient, rows: Mapping[str, Row]) -> Mapping[str, tuple[Seen, Seen, Seen]]:
    """By name: with blocks, without, and without the parameter."""
    asked = {name: merged(BASE, row.given, row.fields) for name, row in rows.items()}
    given = {name: merged(BASE, row.given) for name, row in rows.items()}
    once = {repr(fields): {**fields, **OFF} for fields in given.values()}
    on, off, plain = (
        answered(client, requests)
        for requests in ({n: {**f, **ON} for n, f in asked.items()}, {n: {**f, **OFF} for n, f in asked.items()}, once)
    )
    return {name: (on[name], off[name], plain[repr(given[name])]) for name in rows}


@pytest.mark.parametrize("name", NAMES)
def test_parameter(answers: Mapping[str, tuple[Seen, Seen, Seen]], rows: Mapping[str, Row], name: str) -> None:
    on, off, plain = answers[name]
    assert all(answer["code"] == "OK" for answer in off), off
    assert on == off
    assert (without_settings(off) == without_settings(plain)) == rows[name].silent, "the row shows nothing"


def test_the_draft_was_right_and_wrong(client: RawClient) -> None:
    """Else the blocks would have tested little."""
    ((reply,),) = ask_all([(client, {**BASE, **ON})])
    assert reply.finished is not None
    stats = reply.finished.speculative
    assert 0 < stats.num_accepted_draft_tokens < stats.num_draft_tokens


@pytest.mark.long
@pytest.mark.timeout(900)
def test_pairs(client: RawClient, rows: Mapping[str, Row]) -> None:
    drawn = random.Random(1).sample(list(pairs(rows)), NUM_PAIRS)
    both = {f"{one} and {other}": together(rows[one], rows[other]) for one, other in drawn}
    asked = {name: merged(BASE, row.given, row.fields) for name, row in both.items()}
    on, off = (answered(client, {name: {**fields, **how} for name, fields in asked.items()}) for how in (ON, OFF))
    assert [name for name in asked if on[name] != off[name]] == []
    assert sum(answers[0]["code"] == "OK" for answers in off.values()) > 0.85 * NUM_PAIRS
