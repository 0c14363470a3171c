"""What a grammar may say, what is refused, and in which words."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.errors import InvalidRequest, Unsupported
from specdec.grammar import GrammarCompiler
from specdec.terms import MAX_CHOICES, Grammar, GrammarForm
from tests.unit.grammars import choice, compiler, ebnf, fresh, legal, regex, schema, text_of, walk, words
from tests.unit.orchestrator.tokenizers_here import byte_level, strip_each

CONST = {"const": {"a": [1, "x"], "b": {}}}
LIST = {"$defs": {"list": {"type": "object", "properties": {"next": {"$ref": "#/$defs/list"}}, "additionalProperties": False}}}


def sentence(grammar: Grammar, pick: int = 0) -> str:
    """A whole text of the language."""
    constraint, output = fresh(grammar), list[int]()
    for step in range(400):
        if constraint.at(output).must_end:
            return text_of(output).decode()
        ids = legal(constraint, output)
        output.append(ids[(pick * (step + 1)) % len(ids)])
    raise AssertionError(f"no end of {text_of(output)!r}")


def begins(grammar: Grammar, text: str) -> bool:
    """Whether a text of the language begins like this, byte by byte."""
    constraint, output = fresh(grammar), list[int]()
    for byte in text.encode():
        output.append(words().index(bytes((byte,))))
        try:
            constraint.at(output)
        except InvalidRequest:
            return False
    return True


def whole(grammar: Grammar, text: str) -> bool:
    constraint = fresh(grammar)
    output = [words().index(bytes((byte,))) for byte in text.encode()]
    try:
        return constraint.at(output).may_end
    except InvalidRequest:
        return False


# --- JSON schemas -----------------------------------------------------------------------------------------------------


def test_documents_have_one_style() -> None:
    assert sentence(schema(CONST)) == '{"a": [1, "x"], "b": {}}'


def test_a_schema_may_choose_another_style() -> None:
    own = {"x-guidance": {"item_separator": ",", "key_separator": ":"}}
    assert sentence(schema({**CONST, **own})) == '{"a":[1,"x"],"b":{}}'


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        ({"type": "string", "pattern": "^[ab]{2}$"}, '"ab"', '"abc'),
        ({"type": "string", "pattern": "b"}, '"abc"', "'b"),
        ({"type": "string", "format": "date"}, '"2026-02-28"', '"2026-13'),
        ({"type": "string", "format": "uuid"}, '"123e4567-e89b-12d3-a456-426614174000"', '"123e4567-e89bz'),
        ({**LIST, "$ref": "#/$defs/list"}, '{"next": {"next": {}}}', '{"next": 1'),
        ({"type": "object", "properties": {"me": {"$ref": "#"}}, "additionalProperties": False}, '{"me": {"me": {}}}', '{"you'),
        ({"$defs": {"n": {"$anchor": "here", "type": "null"}}, "$ref": "#here"}, "null", "0"),
        ({"definitions": {"n": {"type": "null"}}, "$ref": "#/definitions/n"}, "null", "0"),
        ({"oneOf": [{"type": "string"}, {"type": "null"}]}, "null", "1"),
        ({"anyOf": [{"const": "a"}, {"const": 2}]}, "2", "3"),
        ({"allOf": [{"minimum": 3}, {"type": "integer", "maximum": 5}]}, "4", "2"),
        ({"type": ["integer", "null"]}, "-1", '"'),
        ({"type": "array", "prefixItems": [{"const": 1}], "items": {"const": 2}, "minItems": 2, "maxItems": 2}, "[1, 2]", "[2"),
        ({"enum": ["é", {"x": None}]}, '{"x": null}', '"e'),
        ({"type": "integer", "multipleOf": 7}, "21", "x"),
        ({"title": "t", "description": "d", "default": 3, "examples": [1], "x-mine": {"not": 1}, "const": 1}, "1", "2"),
        ({"type": "object", "properties": {"not": {"const": 1}, "foo": {"const": 2}}, "required": ["foo"]}, '{"foo": 2}', '{"not": 2'),
    ],
)
def test_keywords(value: Any, good: str, bad: str) -> None:
    assert whole(schema(value), good) and not begins(schema(value), bad)
    json.loads(good)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"type": "string", "minlength": 3}, "'minlength' is no keyword of JSON Schema"),
        ({"properties": {"a": {"nullable": True}}}, "'nullable' is no keyword"),
        ({"$defs": {"a": {"items": [{"anyof": []}]}}}, "'anyof' is no keyword"),
        ({"not": {"type": "string"}}, 'Unimplemented keys: ["not"]'),
        ({"type": "array", "uniqueItems": True}, 'Unimplemented keys: ["uniqueItems"]'),
        ({"if": {}, "then": {}}, 'Unimplemented keys: ["if", "then"]'),
        ({"x-guidance": {"lenient": True}, "not": {}}, 'Unimplemented keys: ["not"]'),  # leniency would pass over it
        ({"x-guidance": {"lenient": True}, "properties": {"a": {"contains": {}}}}, 'Unimplemented keys: ["contains"]'),
        ({"x-guidance": {"nonsense": 1}}, "unknown field `nonsense`"),
        ({"oneOf": [{"const": 1}, {"type": "integer"}]}, "oneOf constraints are not supported"),
        ({"type": "string", "format": "nonsense"}, "Unknown format: nonsense"),
        ({"type": "nonsense"}, "Invalid type: nonsense"),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
        ({"$ref": "https://example.com/schema.json"}, "is not present in a registry"),
        ({"$ref": "file:///etc/passwd"}, "is not present in a registry"),
        ({"$ref": "#"}, "no id continues the text after 0 tokens"),  # an empty language
        ({"enum": []}, "Unsatisfiable schema"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum (5) is greater than maximum (3)"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"type": "string", "minLength": -1}, "minLength"),
    ],
)
def test_schemas_that_are_refused(value: Any, told: str) -> None:
    refused("json_schema", schema(value), told)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[]", "must be a JSON object"),
        ("true", "must be a JSON object; {} allows every document"),
        ("{", "must be JSON: "),
        ("{} x", "must be JSON: "),
        ('{"items":' * 3000 + "{}" + "}" * 3000, ""),
        ("[" * 60000, "must be JSON: "),
        ("{" + " " * 65536, "at most 65536 bytes"),
    ],
    ids=lambda value: value[:12],
)
def test_schemas_that_are_none(text: str, told: str) -> None:
    refused("json_schema", Grammar(GrammarForm.JSON_SCHEMA, text), told)


# --- expressions, choices, grammars -----------------------------------------------------------------------------------


@pytest.mark.parametrize("expression", ["^a|b$", "a/b", "a\nb", r"\x61|\u{62}", "(?i)AB", "(?P<name>a)b?", "(?s).", r"\p{L}"])
def test_expressions(expression: str) -> None:
    text = sentence(regex(expression)) if expression != r"\p{L}" else "é"
    assert re.fullmatch(expression.replace(r"\u{62}", "b").replace(r"\p{L}", "é"), text)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("a(", "unclosed group"),
        ("(?=a)b", "look-around"),
        (r"(a)\1", "backreferences are not supported"),
        (r"\ba", "lookarounds not supported"),
        (r"[^\s\S]", "no id continues the text after 0 tokens"),
        ("(?-u:\\xff)", "invalid UTF-8"),
        ("(" * 20000 + "a" + ")" * 20000, ""),
        ("|".join(rf"\p{{L}}{{{i}}}\w{{{i}}}" for i in range(1, 300)), "too complex"),
    ],
    ids=lambda value: value[:12],
)
def test_expressions_that_are_refused(expression: str, told: str) -> None:
    refused("regex", regex(expression), told)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(min_size=1, max_size=9), min_size=1, max_size=4))
def test_any_text_may_be_an_option(options: list[str]) -> None:
    """Control characters, quotes, characters beyond 16 bits; one may begin another."""
    grammar = choice(*options)
    assert all(whole(grammar, option) for option in options)
    assert sentence(grammar, 1) in options


def test_options_are_bounded() -> None:
    assert sentence(choice(*(f"w{i}" for i in range(MAX_CHOICES)))) in {f"w{i}" for i in range(MAX_CHOICES)}
    refused("choice", choice(), "must hold 1 to 1024 options")
    refused("choice", choice("a", ""), "none of them empty")


@pytest.mark.parametrize(
    ("text", "good", "bad"),
    [
        ('root ::= "a" [b-d]{2,3} rest?\nrest ::= "x" | "y" # no more\n', "abcx", "abx"),
        ('root ::= a-b "!"\na-b ::= "s"', "s!", "t"),
        ('root ::= "\\u00e9\\x41\\"\\\\" [\\u0430-\\u044f] "\\U0001F600\\u0022"', 'éA"\\б😀"', "e"),
        ('root ::= "\\\\u0041"', "\\u0041", "A"),
        ('root ::= ("a" | "b" root) ', "bba", "c"),
        ("# start: of a grammar\n\nroot ::= [^a]", "b", "a"),
        ('start: "a" rest+\nrest: /[0-9]/ | "x"', "a1x", "1"),
        ("start: WORD\nWORD: /[a-z]+/ & /.{3}/ & ~/abc/", "abd", "ab1"),
        ('%ignore / +/\nstart: "a" "b"', "a  b", "b"),
        ('start: item ("," item)*\nitem: %json {"type": "integer"}', "1,2", "a"),
        ("%import common.INT\nstart: INT", "12", "a"),
        ('start: x "!"\nx[suffix="?"]: /.*/', "any?!", "any!?\n"),
    ],
)
def test_grammars(text: str, good: str, bad: str) -> None:
    assert whole(ebnf(text), good) and not whole(ebnf(text), bad)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('root := "a"', "1(7): Expected value"),
        ('root ::= start "!"\nstart ::= "s"', "Rule 'start' already exists"),
        ("root ::= nobody", "Rule 'nobody' not found"),
        ("start: nobody", 'unknown name: "nobody"'),
        ('other ::= "a"', "No 'root' rule found"),
        ('root ::= "\\ud83d"', "\\ud83d is no character"),
        ("root ::= " + "(" * 20000 + '"a"' + ")" * 20000, "nested too deeply"),
        ("start: " + "(" * 20000 + '"a"' + ")" * 20000, "too deeply nested"),
        ("start: start", "no id continues the text after 0 tokens"),
        ('start: x "b"\nx[lazy]: /.*/', "the compiler gave up on it"),
        ("start: <|nobody|>", 'unknown special token: "<|nobody|>"'),
        ("start: <[99999]>", "Token range end too large"),
        ("start: <[385]>", "no id continues"),  # the library's own end
        ("start: x\nx[temperature=0.5]: /a+/", "temperature: belongs to sampling"),
        ('start: %json {"x-guidance": {"lenient": true}, "not": {}}', 'Unimplemented keys: ["not"]'),
        ("start: " + '"a"? ' * 1000, "too complex after 0 tokens"),
        ("start: " + "x? " * 1000 + '\nx: "a" | "b" | x "c"', "too complex after 0 tokens"),
        ("\n" * 65000, "no start rule found"),
        (" " * 65000 + ":", "expecting rule"),
        ("x" * 65000, "Expected"),
    ],
    ids=lambda value: value[:12],
)
def test_grammars_that_are_refused(text: str, told: str) -> None:
    refused("ebnf", ebnf(text), told)


def refused(form: str, grammar: Grammar, told: str) -> None:
    """By name, in one line, without what concerns the library alone; and the same when it is asked again."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as caught:
            fresh(grammar)
        error = caught.value
        assert error.field == f"sampling.grammar.{form}" and told in error.remedy
        assert 8 < len(error.remedy) < 400 and error.remedy.isprintable()
        assert not re.search(r"/home|\.rs|panic|backtrace|<state>|limits\.|non-verbose|\^", error.remedy), error.remedy


def test_a_tokenizer_whose_pieces_are_trimmed() -> None:
    """Its texts are not what its ids stand for: no mask could be right."""
    with pytest.raises(Unsupported, match="^sampling.grammar: not served with this tokenizer"):
        GrammarCompiler(strip_each()).compile(regex("a"))


def test_a_grammar_is_tried_before_it_is_compiled() -> None:
    """Once for each grammar, whatever it begins after; a refusal is kept too, a trial that could not be made is not."""
    tried: list[Grammar] = []

    def trial(grammar: Grammar) -> None:
        tried.append(grammar)
        if grammar.text == "b":
            raise InvalidRequest("sampling.grammar.regex", "too complex")
        if grammar.text == "c":
            raise RuntimeError

    made = GrammarCompiler(byte_level(), trial)
    for marker in (None, "x", None):
        made.compile(regex("a", start_after=marker))
        with pytest.raises(InvalidRequest, match="^sampling.grammar.regex: too complex"):
            made.compile(regex("b", start_after=marker))
        with pytest.raises(RuntimeError):
            made.compile(regex("c", start_after=marker))
    assert [grammar.text for grammar in tried] == ["a", "b", "c", "c", "c"]


def test_what_is_compiled_ahead_is_used() -> None:
    """Compiled beside the engine, the first state costs the engine nothing; the next one is made when it is asked for."""
    made = compiler()
    grammar = regex("ahead")
    made.compile(grammar)
    accepted = made._accepted(grammar)
    assert not isinstance(accepted, str)
    spare = accepted.prepare()
    first, second = made.compile(grammar), made.compile(grammar)
    assert walk(first, [0])
    assert first._reading._made is spare
    assert walk(second, [0])
    assert second._reading._made is not spare
