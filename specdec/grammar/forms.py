"""The four forms of a grammar in llguidance's notation, and its words about them in ours."""

from __future__ import annotations

import json
import re
from typing import Any

import llguidance
from llguidance.gbnf_to_lark import gbnf_to_lark

from specdec.grammar.schema import check_keywords
from specdec.terms import Grammar, GrammarForm

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LONGEST_MESSAGE = 300

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_IGNORED = re.compile(r"^[ \t]*\w+[ \t]*\[[^\]\n]*\b(temperature)\s*=", re.MULTILINE)
_EXCERPT = re.compile(r"^\s*(?:\d+ \|.*|\^+\s*)$")  # lines that quote the library's own notation
_PLACE = re.compile(r"^(?:at )?\d+\(\d+\): ")
_FILE = re.compile(r"\S*/\S+\.rs(?::\d+)*")
_PRIVATE = ("<state>", "<backtrace>", "<non-verbose/>")  # what follows is for the library's developers


def source(grammar: Grammar) -> str:
    """The grammar in llguidance's notation. Raises ValueError."""
    matcher: Any = llguidance.LLMatcher
    match grammar.form:
        case GrammarForm.JSON_SCHEMA:
            check_keywords(grammar.text)
            return str(matcher.grammar_from_json_schema(grammar.text, defaults=JSON_STYLE))
        case GrammarForm.REGEX:
            return str(matcher.grammar_from_regex(grammar.text))
        case GrammarForm.CHOICE:
            return _lark("start: " + " | ".join(json.dumps(option) for option in grammar.options))
        case GrammarForm.EBNF:
            return _lark(_lark_of(grammar.text))


def _lark_of(text: str) -> str:
    if not _GBNF_RULE.search(text):
        if ignored := _IGNORED.search(text):
            raise ValueError(f"{ignored[1]}: belongs to sampling, not to a grammar")
        return text
    try:
        return gbnf_to_lark(_ESCAPE.sub(_character, text))
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except Exception as error:  # the converter raises nothing more precise
        raise ValueError(str(error)) from error


def _character(escape: re.Match[str]) -> str:
    """GBNF's escapes by number: Lark has them shorter, and the library's converter gets them wrong."""
    number = escape[1] or escape[2]
    if not number:
        return escape[0]
    code = int(number, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{escape[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _lark(text: str) -> str:
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def unforced(written: str) -> str:
    """The same language, whose masks name every way to write a text that it leaves no choice of."""
    (inner,) = json.loads(written)["grammars"]
    outer = {"lark_grammar": '%llguidance {"no_forcing": true}\nstart: @inner'}
    return json.dumps({"grammars": [outer, {**inner, "name": "inner"}]})


def said(text: str, with_place: bool = False) -> str:
    """The library's words in one line, fit for a status message; `with_place` keeps line and column."""
    text = text[: 10 * LONGEST_MESSAGE]  # it may quote the whole grammar
    for mark in _PRIVATE:
        text = text.split(mark)[0]
    line = " ".join(" ".join(line for line in text.splitlines() if not _EXCERPT.match(line)).split())
    line = _FILE.sub("", line if with_place else _PLACE.sub("", line))
    if line.startswith("panic: "):
        line = "the compiler gave up on it"
    if "limits." in line:  # names settings of the library that nobody here can change
        line = "too complex"
    return line if len(line) <= LONGEST_MESSAGE else line[:LONGEST_MESSAGE] + " …"
