"""Answers under a grammar, over real processes: the real pair's JSON is JSON of its schema, and no proposal changes a letter of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest

from specdec.client import Completion
from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler
from specdec.terms import FinishReason, Grammar, GrammarForm, SamplingParams
from specdec.vocabulary import load_tokenizer
from tests.e2e.ask import Ask, answers, same
from tests.e2e.drafts import EveryDraft
from tests.e2e.stack import Stack
from tests.tiny import tiny_tokenizer

pytestmark = [pytest.mark.pair, pytest.mark.timeout(300)]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "job": {"enum": ["keeper", "sailor", None]},
        "nick": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
    },
    "required": ["name", "age", "job"],
    "additionalProperties": False,
}
GRID = {
    "type": "array",
    "items": {"type": "array", "items": {"type": "integer", "minimum": -9, "maximum": 9}, "minItems": 1, "maxItems": 3},
    "minItems": 1,
    "maxItems": 2,
}
MIXED = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "why": {"anyOf": [{"type": "null"}, {"enum": ["wind", "fog", 'the "sea"']}]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["ok", "at"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 99},
                "tags": {"type": "array", "items": {"enum": ["a", "é", 1]}, "maxItems": 2},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}
SCHEMAS: dict[str, dict[str, Any]] = {"person": PERSON, "grid": GRID, "mixed": MIXED}
QUESTION = [{"role": "user", "content": "Describe the keeper of the lighthouse and the weather as JSON."}]


def longest(schema: dict[str, Any], root: dict[str, Any]) -> int:
    """Bytes, and so tokens, of the longest document of a bounded schema."""
    if "$ref" in schema:
        return longest(root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        return max(longest(part, root) for part in schema["anyOf"])
    if "enum" in schema:
        return max(len(json.dumps(value).encode()) for value in schema["enum"])
    match schema["type"]:
        case "string":
            return 2 + 12 * int(schema["maxLength"])  # two escapes for a character beyond 16 bits
        case "integer":
            return max(len(str(schema["minimum"])), len(str(schema["maximum"])))
        case "array":
            return 2 + int(schema["maxItems"]) * (2 + longest(schema["items"], root))
        case "object":
            return 2 + sum(len(json.dumps(name)) + 4 + longest(part, root) for name, part in schema["properties"].items())
        case _:
            return 5


def check(document: Any, schema: dict[str, Any], root: dict[str, Any]) -> None:
    """JSON Schema, as far as the schemas above go."""
    if "$ref" in schema:
        return check(document, root["$defs"][schema["$ref"].rsplit("/", 1)[1]], root)
    if "anyOf" in schema:
        assert any(_valid(document, part, root) for part in schema["anyOf"])
        return None
    if "enum" in schema:
        assert any(type(document) is type(value) and document == value for value in schema["enum"])
        return None
    kinds = {"string": str, "integer": int, "array": list, "object": dict, "boolean": bool, "null": type(None)}
    assert type(document) is kinds[schema["type"]]
    match schema["type"]:
        case "string":
            assert len(document) <= schema["maxLength"] and re.search(schema.get("pattern", ""), document)
        case "integer":
            assert schema["minimum"] <= document <= schema["maximum"]
        case "array":
            assert schema.get("minItems", 0) <= len(document) <= schema["maxItems"]
            for item in document:
                check(item, schema["items"], root)
        case "object":
            assert set(schema["required"]) <= set(document) <= set(schema["properties"])
            for name, value in document.items():
                check(value, schema["properties"][name], root)
    return None


def _valid(document: Any, schema: dict[str, Any], root: dict[str, Any]) -> bool:
    try:
        check(document, schema, root)
    except AssertionError:
        return False
    return True


def json_asks(seeds: Sequence[int]) -> list[tuple[str, Ask]]:
    """Each schema greedy and sampled; the seed changes the question too, so that greedy answers differ."""
    asks = []
    for seed in seeds:
        for name, schema in SCHEMAS.items():
            for temperature in (0.0, 1.0):
                grammar = Grammar(GrammarForm.JSON_SCHEMA, json.dumps(schema))
                sampling = SamplingParams(temperature=temperature, max_tokens=longest(schema, schema), logprobs=1, grammar=grammar)
                question = [{"role": "user", "content": f"{QUESTION[0]['content']} It is day {seed}."}]
                asks.append((name, Ask(question, sampling, {"seed": seed})))
    return asks


def with_blocks(asks: Sequence[Ask], k: int) -> list[Ask]:
    return [Ask(ask.prompt, ask.sampling, {**ask.options, "num_speculative_tokens": k}) for ask in asks]


def test_the_checker_refuses() -> None:
    """A checker that takes everything would take every answer."""
    good: dict[str, Any] = {"name": "Bob", "age": 3, "job": None}
    check(good, PERSON, PERSON)
    for wrong in ({"age": True}, {"age": 121}, {"job": "cook"}, {"name": "Bobbobb"}, {"nick": "A"}, {"more": 1}):
        assert not _valid({**good, **wrong}, PERSON, PERSON)
    assert not _valid([[10]], GRID, GRID) and not _valid([[]], GRID, GRID) and not _valid([[1]] * 3, GRID, GRID)
    assert not _valid({"ok": 1, "at": {"x": 1}}, MIXED, MIXED) and not _valid({"ok": True, "at": {"x": 1}, "why": "rain"}, MIXED, MIXED)


@pytest.mark.alone
@pytest.mark.parametrize("count", [20, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1200)])])
def test_json_of_the_real_pair(pair: Stack, count: int) -> None:
    """Every answer ends by itself, parses, is of its schema, and is the one without speculation."""
    named = json_asks(range(100, 100 + -(-count // 6)))[:count]
    asks = [ask for _, ask in named]
    on = answers(pair.endpoint, with_blocks(asks, 4))
    off = answers(pair.endpoint, with_blocks(asks, 0))
    for (name, _), got, want in zip(named, on, off, strict=True):
        same(got, want)
        assert got.finished.finish_reason is FinishReason.STOP
        check(json.loads(got.text), SCHEMAS[name], SCHEMAS[name])
    assert len({answer.text for answer in on}) > count / 2
    compiler = GrammarCompiler(load_tokenizer(pair.target_model))
    assert all(compiler.compile(Grammar(GrammarForm.JSON_SCHEMA, json.dumps(schema))).forced([]) for schema in (PERSON, MIXED))
    stats = [answer.finished.speculative for answer in on]
    assert sum(s.num_accepted_draft_tokens for s in stats) > 0.25 * sum(s.num_draft_tokens for s in stats) > 0
    assert sum(s.num_rounds for s in stats) < 0.7 * sum(len(answer.token_ids) for answer in on)
    assert pair.defects() == []


GRAMMARS = {
    "schema": Grammar(GrammarForm.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Grammar(GrammarForm.REGEX, "(the|hat|[0-9]{3}| ){1,20}"),
    "choice": Grammar(GrammarForm.CHOICE, options=("the other hat", "the hat", "an otter", "at the other", "안녕 <|im_end|> 😀")),
    "gbnf": Grammar(GrammarForm.EBNF, 'root ::= word (" " word){0,5} "."\nword ::= "the" | "hat" | [a-e]{1,4} | "\\u00e9"'),
    "lark": Grammar(GrammarForm.EBNF, 'start: item ("," item)*\nitem: "the" | NUMBER | "(" start ")"\nNUMBER: /[0-9]{1,3}/'),
    "start_after": Grammar(GrammarForm.REGEX, "[0-9]{2,6}!", start_after="the"),
}
TEXTS = {
    "regex": re.compile("(the|hat|[0-9]{3}| ){1,20}"),
    "gbnf": re.compile("(the|hat|[a-e]{1,4}|é)( (the|hat|[a-e]{1,4}|é)){0,5}\\."),
    "start_after": re.compile(".*?the[0-9]{2,6}!", re.DOTALL),
}


def tiny_asks(name: str, k: int) -> list[Ask]:
    """Prompts of ids; a bias makes the marker likely and long lists short."""
    the, close = tiny_tokenizer().token_to_id("the"), tiny_tokenizer().token_to_id(")")
    bias = {the: 12.0} if name == "start_after" else {close: 2.0} if name == "lark" else {}
    return [
        Ask(
            [40 + seed, 90, 61],
            SamplingParams(temperature=temperature, max_tokens=90, logprobs=2, logit_bias=bias, grammar=GRAMMARS[name]),
            {"seed": seed, "num_speculative_tokens": k},
        )
        for seed in range(4)
        for temperature in (0.0, 1.0)
    ]


@pytest.fixture(scope="module")
def plain(drafts: EveryDraft) -> dict[str, list[Completion]]:
    """One at a time, no block, no draft."""
    return {name: answers(drafts.endpoint("none"), tiny_asks(name, 0), at_once=1) for name in GRAMMARS}


@pytest.mark.parametrize("kind", ["self", "random", "never"])
@pytest.mark.parametrize("name", GRAMMARS)
def test_f110_every_form_is_what_it_is_without_speculation(
    drafts: EveryDraft, plain: dict[str, list[Completion]], name: str, kind: str
) -> None:
    """F110: proposals that are legal and refused at every slot, and (the draft's "never") hardly ever kept."""
    for k in (0, 4) if kind == "self" else (4,):
        for got, want in zip(answers(drafts.endpoint(kind), tiny_asks(name, k)), plain[name], strict=True):
            same(got, want)
            assert got.finished.stop_reason == want.finished.stop_reason and got.finished.usage.prompt_tokens == 3


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_form_is_obeyed(plain: dict[str, list[Completion]], name: str) -> None:
    ended = [answer for answer in plain[name] if answer.finished.finish_reason is FinishReason.STOP]
    assert len(ended) > (0 if name in ("lark", "start_after") else 4)
    for answer in ended:
        if name == "choice":
            assert answer.text in GRAMMARS[name].options
        elif name == "schema":
            check(json.loads(answer.text), PERSON, PERSON)
        elif name in TEXTS and (name != "start_after" or "the" in answer.text):
            assert TEXTS[name].fullmatch(answer.text), answer.text
    assert len({answer.text for answer in plain[name]}) > 1


def test_forced_ids_save_rounds(drafts: EveryDraft, plain: dict[str, list[Completion]]) -> None:
    """Also with a draft that is never right: what a grammar forces is proposed by the orchestrator, and kept."""
    orchestrator = drafts.orchestrators["never"]
    before = orchestrator.metrics()
    got = answers(orchestrator.endpoint, tiny_asks("schema", 4))
    after = orchestrator.metrics()
    forced = [name for name in after if name.startswith("specdec_lookahead_rounds") and 'outcome="forced"' in name]
    assert sum(after[name] - before.get(name, 0.0) for name in forced) > 0
    rounds = sum(answer.finished.speculative.num_rounds for answer in got)
    assert rounds < 0.8 * sum(len(answer.token_ids) for answer in got)


HOSTILE = {
    "json_schema": Grammar(
        GrammarForm.JSON_SCHEMA, json.dumps({"allOf": [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(1, 40)]})
    ),
    "ebnf": Grammar(GrammarForm.EBNF, "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(4000)) + '\nr4000: "a"'),
    "regex": Grammar(GrammarForm.REGEX, "(?=a)b"),
}


@pytest.mark.parametrize("form", HOSTILE)
def test_grammars_that_would_hang_or_crash_are_refused_at_the_door(questioned: Stack, form: str) -> None:
    """By name and soon, and everybody else is answered."""
    began = time.monotonic()
    for _ in range(2):  # the second time without trying again
        with pytest.raises(InvalidRequest, match=f"^sampling.grammar.{form}: "):
            answers(questioned.endpoint, [Ask("the hat", SamplingParams(max_tokens=8, grammar=HOSTILE[form]))])
    (after,) = answers(questioned.endpoint, [Ask("the hat", SamplingParams(max_tokens=8, grammar=GRAMMARS["choice"]))])
    assert after.token_ids and time.monotonic() - began < 60
    assert questioned.defects() == []
    assert all(process.popen.poll() is None for process in (*questioned.targets, *questioned.drafts, *questioned.orchestrators))
