"""Every parameter, and pairs of them, with speculation and without: the answers are equal in everything that a client sees.

Tiny models in float64 over real processes; drafts that are always, hardly ever and never right; blocks of 1, 4 and 8. That covers F11
to F16, F21 to F23, F25, F28, F32, F33, F35, F43, F44, F46 and F109 to F112 in one table, and what two of them do to each other.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import pytest
from tokenizers import Tokenizer

from specdec.seeds import answer_seed
from specdec.v1 import generation_pb2 as pb
from tests.e2e.drafts import DRAFTS, SPECULATING, EveryDraft
from tests.e2e.parameters import NOT_IN_THE_TABLE, SAMPLING, Fields, Row, merged, pairs, table, together
from tests.e2e.raw import RawClient, Reply
from tests.e2e.seen import Seen, ask_all, seen, without_settings
from tests.e2e.stack import wait_ready

pytestmark = [pytest.mark.parameters, pytest.mark.timeout(120)]
BASE: Fields = {
    "token_ids": [10, 11, 12, 13, 11, 10], "seed": 11, "temperature": 1.0, "max_tokens": 20, "ignore_eos": True, "logprobs": 3,
}  # fmt: skip
OFF: Fields = {"disable_spec_decode": True}
BLOCKS = (1, 4, 8)
EVERY_VARIANT = list(product(SPECULATING, BLOCKS))
IT_TAKES = {"lure": 8.0, "end_lure": 8.0, "heat": 1.0}
NAMES = table(lambda token: 0, **IT_TAKES)  # their ids come with the model
NUM_PAIRS, FOR_LONG, MOST_REFUSED = 60, 600, 0.1
CUT_EVERY = 4


def some_pairs(count: int) -> list[tuple[str, str]]:
    everything = list(pairs(NAMES))
    return random.Random(count).sample(everything, min(count, len(everything)))


class Scene:
    """The drafts, the table in the model's own ids, and the answers without speculation, each asked for once."""

    def __init__(self, drafts: EveryDraft, clients: Mapping[str, RawClient]) -> None:
        self.drafts, self._clients = drafts, clients
        self.rows = table(Tokenizer.from_file(str(drafts.stack.target_model / "tokenizer.json")).token_to_id, **IT_TAKES)
        self._known: dict[str, list[Reply]] = {}

    def replies_without(self, *several: Fields) -> list[list[Reply]]:
        """The references: no speculation."""
        asked = {repr(fields): {**fields, **OFF} for fields in several if repr(fields) not in self._known}
        replies = ask_all([(self._clients["none"], fields) for fields in asked.values()])
        self._known |= dict(zip(asked, replies, strict=True))
        return [self._known[repr(fields)] for fields in several]

    def without(self, *several: Fields) -> list[Seen]:
        return [seen(fields, replies) for fields, replies in zip(several, self.replies_without(*several), strict=True)]

    def each(self, asked: Sequence[tuple[tuple[str, int], Fields]]) -> list[Seen]:
        """Answers to requests, each with its (kind of draft, block length)."""
        replies = ask_all([(self._clients[kind], {**fields, "num_speculative_tokens": k}) for (kind, k), fields in asked])
        return [seen(fields, answers) for (_, fields), answers in zip(asked, replies, strict=True)]

    def speculating(self, fields: Fields, variants: Sequence[tuple[str, int]]) -> list[Seen]:
        """The same request with each of them."""
        return self.each([(variant, fields) for variant in variants])


@pytest.fixture(scope="module")
def scene(drafts: EveryDraft) -> Iterator[Scene]:
    with contextlib.ExitStack() as clients:
        yield Scene(drafts, {kind: clients.enter_context(RawClient(drafts.endpoint(kind))) for kind in DRAFTS})


def fields_of(row: Row) -> Fields:
    return merged(BASE, row.given, row.fields)


def given(row: Row) -> Fields:
    return merged(BASE, row.given)


def test_F16_no_parameter_is_forgotten() -> None:
    known = {name for row in NAMES.values() for name in row.fields} | NOT_IN_THE_TABLE
    assert known == {*SAMPLING, *pb.GenerateRequest.DESCRIPTOR.fields_by_name}


@pytest.mark.parametrize("name", NAMES)
def test_parameter(scene: Scene, name: str) -> None:
    row = scene.rows[name]
    want, plain = scene.without(fields_of(row), given(row))
    assert all(answer["code"] == "OK" for answer in want), want
    assert (without_settings(want) == without_settings(plain)) == row.silent, "the row shows nothing"
    for (kind, k), got in zip(EVERY_VARIANT, scene.speculating(fields_of(row), EVERY_VARIANT), strict=True):
        assert got == want, f"{name}, {kind} draft, blocks of {k}"


# ---------------------------------------------------------------- two at once


def check_pair(scene: Scene, one: str, other: str) -> None:
    """Each kind of draft with a block length drawn for it. What cannot be answered fails alike."""
    both = together(scene.rows[one], scene.rows[other])
    want, plain = scene.without(fields_of(both), BASE)
    assert without_settings(want) != without_settings(plain)
    draw = random.Random(one + other)
    variants = [(kind, draw.choice(BLOCKS)) for kind in SPECULATING]
    for (kind, k), got in zip(variants, scene.speculating(fields_of(both), variants), strict=True):
        assert got == want, f"{one} and {other}, {kind} draft, blocks of {k}"


@pytest.mark.parametrize(("one", "other"), some_pairs(NUM_PAIRS))
def test_pair(scene: Scene, one: str, other: str) -> None:
    check_pair(scene, one, other)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_many_pairs(scene: Scene) -> None:
    for one, other in some_pairs(FOR_LONG):
        check_pair(scene, one, other)


def test_most_pairs_are_answered(scene: Scene) -> None:
    """Equal refusals prove little."""
    asked = [fields_of(together(scene.rows[one], scene.rows[other])) for one, other in some_pairs(NUM_PAIRS)]
    refused = [answers[0]["details"] for answers in scene.without(*asked) if answers[0]["code"] != "OK"]
    assert len(refused) <= MOST_REFUSED * NUM_PAIRS, refused


# ---------------------------------------------------------------- resumed


@pytest.mark.parametrize("name", [name for name in NAMES if name != "n"])
def test_resumed(scene: Scene, name: str) -> None:
    """Cut after every few tokens: what was delivered and what comes then are the whole, text and log-probabilities too."""
    fields = fields_of(scene.rows[name])
    ((reply,),) = scene.replies_without(fields)
    (want,) = seen(fields, [reply])
    texts = {ids: text for ids, text in reversed(reply.pieces)}  # characters delivered with so many ids
    draw = random.Random(name)
    cuts = sorted({*range(1, len(reply.token_ids), CUT_EVERY), len(reply.token_ids)} & texts.keys())
    asked = [(draw.choice(EVERY_VARIANT), {**fields, "output_token_ids": reply.token_ids[:cut]}) for cut in cuts]
    for cut, (variant, _), got in zip(cuts, asked, scene.each(asked), strict=True):
        rest = {**want, "ids": want["ids"][cut:], "text": want["text"][texts[cut] :], "logprobs": want["logprobs"][cut:]}
        if cut == len(reply.token_ids):  # may need no target any more; the prompt's came with the first delta
            rest["prompt_logprobs"] = []
        assert got == [rest], f"{name}, cut after {cut}, {variant}"


# ---------------------------------------------------------------- several answers


def test_answers_are_those_of_their_seeds(scene: Scene) -> None:
    """Answer i of a request is what the i-th derived seed gives alone."""
    (several,) = scene.without({**BASE, "n": 3})
    alone = scene.without(*({**BASE, "seed": answer_seed(BASE["seed"], i)} for i in range(3)))
    assert several == [answers[0] for answers in alone]
    assert len({answer["text"] for answer in several}) == 3


# ---------------------------------------------------------------- the table can see


FORGOTTEN = {"min_p", "min_tokens and the end", "min_tokens and a stop id", *(name for name in NAMES if "penalty" in name)}
KEPT = {"temperature 0", "top_k", "top_p", "logit_bias", "banned_token_ids", "min_tokens and a stop string", "stop", "regex", "start_after"}


def test_a_broken_target_is_noticed(scene: Scene) -> None:
    """Its faults show in the rows of the parameters that it forgets, and in no other. Where blocks begin is up to time, so a fault may miss
    an answer: what was not noticed is asked again, with other seeds."""
    stack = scene.drafts.stack
    target = wait_ready(stack.begin_target("tests.e2e.broken_target"))
    orchestrator = stack.add_orchestrator(TARGETS=target.endpoint, DRAFTS=stack.drafts[0].endpoint)
    noticed: set[str] = set()
    with RawClient(orchestrator.endpoint) as client:
        for k, seed in ((4, 11), (8, 11), *((8, seed) for seed in range(12, 18))):
            names = sorted(FORGOTTEN - noticed | (KEPT if seed == 11 else set()))
            asked = [{**fields_of(scene.rows[name]), "max_tokens": 60, "seed": seed} for name in names]
            replies = ask_all([(client, {**fields, "num_speculative_tokens": k}) for fields in asked])
            got = [seen(fields, answers) for fields, answers in zip(asked, replies, strict=True)]
            noticed |= {name for name, answers, want in zip(names, got, scene.without(*asked), strict=True) if answers != want}
    assert noticed == FORGOTTEN
