"""Grammars over small vocabularies, and what their masks must be, said slowly."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

from specdec.grammar import Constraint, GrammarCompiler, Roamer
from specdec.terms import Grammar, GrammarForm
from specdec.vocabulary import special_ids, token_bytes
from tests.tiny import tiny_tokenizer
from tests.unit.orchestrator import tokenizers_here

FAMILIES = {
    name: build for name, build in {**tokenizers_here.FAMILIES, "tiny": tiny_tokenizer}.items() if name != "strip_each"
}  # strip_each: no grammar can be followed
WRITE_ALL = ("byte_level", "llama3", "byte_fallback", "byte_fallback_no_strip", "unigram_bytes", "strip_start", "tiny")  # any text


@cache
def compiler(family: str = "byte_level") -> GrammarCompiler:
    return GrammarCompiler(FAMILIES[family]())


@cache
def words(family: str = "byte_level") -> tuple[bytes, ...]:
    return tuple(word or b"" for word in token_bytes(FAMILIES[family]()))


@cache
def specials(family: str) -> frozenset[int]:
    return special_ids(FAMILIES[family]())


def regex(text: str, **more: Any) -> Grammar:
    return Grammar(GrammarForm.REGEX, text, **more)


def choice(*options: str, **more: Any) -> Grammar:
    return Grammar(GrammarForm.CHOICE, options=options, **more)


def schema(value: Any, **more: Any) -> Grammar:
    return Grammar(GrammarForm.JSON_SCHEMA, json.dumps(value), **more)


def ebnf(text: str, **more: Any) -> Grammar:
    return Grammar(GrammarForm.EBNF, text, **more)


def fresh(grammar: Grammar, family: str = "byte_level") -> Constraint:
    return compiler(family).compile(grammar)


def legal(constraint: Constraint | Roamer, output: Sequence[int]) -> list[int]:
    mask = constraint.at(output).mask
    assert mask is not None
    return [int(i) for i in np.flatnonzero(mask)]


def text_of(output: Sequence[int], family: str = "byte_level") -> bytes:
    return b"".join(words(family)[i] for i in output)


def walk(constraint: Constraint | Roamer, picks: Sequence[int], output: Sequence[int] = ()) -> list[int]:
    """One legal id after the other, chosen by `picks`, until the picks or the ids are used up."""
    made = list(output)
    for pick in picks:
        ids = legal(constraint, made)
        if not ids:
            break
        made.append(ids[pick % len(ids)])
    return made


PICKS = st.lists(st.integers(0, 10_000), min_size=1, max_size=14)  # ways through a language
LETTERS = st.sampled_from(["a", "b", "the", " ", '"', "é", "안", "{", "1", "x y", r"\n"])
CLASSES = st.sampled_from(["[a-c]", "[^a]", "[0-9]", ".", "[^ -~]", "[é-ü ]"])
REPEATS = st.sampled_from(["*", "+", "?", "{2}", "{0,3}", "{1,}"])


def _larger(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "(" + "|".join(parts) + ")"),
        st.tuples(inner, REPEATS).map(lambda pair: f"({pair[0]}){pair[1]}"),
    )


REGEXES = st.recursive(st.one_of(LETTERS.map(lambda s: s.replace("{", r"\{")), CLASSES), _larger, max_leaves=6)
OPTIONS = st.lists(st.text(st.sampled_from('ab"é안 \\{t<h\n'), min_size=1, max_size=8), min_size=1, max_size=5, unique=True)
_STRINGS = st.fixed_dictionaries({"type": st.just("string"), "maxLength": st.integers(0, 6)})
_INTEGERS = st.fixed_dictionaries({"type": st.just("integer"), "minimum": st.integers(-99, 0), "maximum": st.integers(0, 99)})
_ENUMS = st.fixed_dictionaries({"enum": st.lists(st.sampled_from(["a", "the", "é", 1, None, True]), min_size=1, max_size=4, unique=True)})


def _nested(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    arrays = st.fixed_dictionaries({"type": st.just("array"), "items": inner, "maxItems": st.integers(0, 2)})
    objects = st.dictionaries(st.sampled_from(["a", "name", "é"]), inner, max_size=2).flatmap(
        lambda properties: st.lists(st.sampled_from([*properties, ""]), unique=True).map(
            lambda required: {
                "type": "object",
                "properties": properties,
                "required": [name for name in required if name],
                "additionalProperties": False,
            }
        )
    )
    return st.one_of(arrays, objects)


SCHEMAS = st.recursive(st.one_of(_STRINGS, _INTEGERS, _ENUMS), _nested, max_leaves=4)
GRAMMARS = st.one_of(REGEXES.map(regex), OPTIONS.map(lambda options: choice(*options)), SCHEMAS.map(schema))
