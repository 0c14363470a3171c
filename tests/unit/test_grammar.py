"""The state of a session: a function of the output alone, however it was reached."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specdec.errors import InvalidRequest
from specdec.grammar import MAX_FORCED, Constraint, GrammarCompiler
from specdec.terms import Grammar
from specdec.vocabulary import token_bytes
from tests.tiny import tiny_tokenizer
from tests.unit import grammars
from tests.unit.grammars import (
    FAMILIES,
    GRAMMARS,
    OPTIONS,
    REGEXES,
    SCHEMAS,
    WRITE_ALL,
    choice,
    compiler,
    ebnf,
    fresh,
    legal,
    regex,
    schema,
    specials,
    text_of,
    walk,
    words,
)

PICKS = st.lists(st.integers(0, 10_000), min_size=1, max_size=14)
JUMPS = st.lists(st.tuples(st.integers(0, 13), PICKS), min_size=1, max_size=4)


def opened(grammar: Grammar, family: str = "byte_level") -> Constraint:
    """A random expression may have no text at all."""
    try:
        return fresh(grammar, family)
    except InvalidRequest:
        assume(False)
        raise


def same(constraint: Constraint, output: Sequence[int], grammar: Grammar, family: str = "byte_level") -> None:
    """What it says of `output` is what a state says that saw nothing else."""
    got, other = constraint.at(output), fresh(grammar, family)
    want = other.at(output)
    assert (got.may_end, got.must_end) == (want.may_end, want.must_end)
    assert (got.mask is None) == (want.mask is None)
    assert got.mask is None or np.array_equal(got.mask, want.mask)
    assert constraint.forced(output) == other.forced(output)
    assert np.array_equal(constraint.at(output).mask, want.mask)  # type: ignore[arg-type]  # asking for forced ids leaves no trace


@settings(max_examples=40, deadline=None)
@given(GRAMMARS, JUMPS, st.sampled_from(["byte_level", "byte_fallback"]))
def test_a_state_is_a_function_of_the_output(grammar: Grammar, jumps: list[tuple[int, list[int]]], family: str) -> None:
    constraint, output = opened(grammar, family), list[int]()
    for cut, picks in jumps:
        output = walk(constraint, picks, output[:cut])
        same(constraint, output, grammar, family)


@settings(max_examples=40, deadline=None)
@given(GRAMMARS, PICKS, st.integers(0, 10_000), st.sampled_from(["byte_level", "byte_fallback"]))
def test_what_is_masked_cannot_be_fed_and_leaves_no_trace(grammar: Grammar, picks: list[int], pick: int, family: str) -> None:
    """F110, F111: an illegal id is refused wherever it stands, and the state goes on as if nobody had asked."""
    constraint = opened(grammar, family)
    output = walk(constraint, picks)
    ids = legal(constraint, output)
    for token in ids[:5]:
        fresh(grammar, family).at([*output, token])
    if constraint.forced(output):  # other ways to write the same text are no choice of the model's, and no error in an output either
        return
    other = [i for i in range(len(words(family))) if i not in ids]
    illegal = other[pick % len(other)]
    with pytest.raises(InvalidRequest, match=f"^sampling.grammar: token {illegal} cannot follow {len(output)} tokens"):
        constraint.at([*output, illegal])
    same(constraint, output, grammar, family)


@settings(max_examples=25, deadline=None)
@given(GRAMMARS, PICKS, st.sampled_from(WRITE_ALL))
def test_forced_ids_are_each_the_whole_mask(grammar: Grammar, picks: list[int], family: str) -> None:
    constraint = opened(grammar, family)
    for length in range(len(output := walk(constraint, picks)) + 1):
        forced = constraint.forced(output[:length])
        assert len(forced) <= MAX_FORCED
        for i in range(len(forced)):
            allowed = fresh(grammar, family).at([*output[:length], *forced[:i]])
            assert allowed.mask is not None and list(np.flatnonzero(allowed.mask)) == [forced[i]]
            assert not allowed.may_end and not allowed.must_end


def test_forced_ids_are_many_where_the_text_is_known() -> None:
    """Without this the test above would hold for a state that never forces anything."""
    constraint = fresh(choice("the quick brown fox jumps over the lazy dog", "the quick brown fox jumps over nothing"))
    forced = constraint.forced([])
    assert text_of(forced).startswith(b"the quick brown fox jumps") and len(forced) >= 4
    behind = fresh(schema({"type": "object", "properties": {"name": {"type": "integer"}}, "required": ["name"]}))
    assert text_of(behind.forced([])) == b'{"name": '
    assert text_of(fresh(schema({"const": "x" * 5000})).forced([])).startswith(b'"xxx')


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=8, deadline=None)
@given(options=OPTIONS, picks=PICKS)
def test_choice_against_the_definition(family: str, options: list[str], picks: list[int]) -> None:
    """An id is legal where what it makes of the text is the beginning of an option; where the text is forced, one such id is."""
    check_choice(family, options, picks)


def check_choice(family: str, options: Sequence[str], picks: Sequence[int]) -> None:
    texts, output = [option.encode() for option in options], list[int]()
    ordinary = [(i, word) for i, word in enumerate(words(family)) if word and i not in specials(family)]
    constraint: Constraint | None = None
    for pick in [*picks, 0]:
        text = text_of(output, family)
        want = [i for i, word in ordinary if any(t.startswith(text + word) for t in texts)]
        try:
            constraint = constraint or fresh(choice(*options), family)
            allowed = constraint.at(output)
        except InvalidRequest as error:
            assert "no id continues" in str(error) and not want and text not in texts
            return
        got = legal(constraint, output)
        assert allowed.may_end == (text in texts) and allowed.must_end == (allowed.may_end and not want)
        assert got == want or (len(got) == 1 and got[0] in want and constraint.forced(output)[0] == got[0])
        forced = constraint.forced(output)
        assert all(legal(constraint, [*output, *forced[:i]]) == [token] for i, token in enumerate(forced))
        if not got:
            return
        output.append(got[pick % len(got)])


@settings(max_examples=40, deadline=None)
@given(REGEXES, PICKS, st.sampled_from(WRITE_ALL))
def test_texts_of_an_expression_match_it(expression: str, picks: list[int], family: str) -> None:
    constraint = opened(regex(expression), family)
    output = walk(constraint, picks)
    for length in range(len(output) + 1):
        if constraint.at(output[:length]).may_end:
            assert re.fullmatch(expression, text_of(output[:length], family).decode()), expression


@settings(max_examples=25, deadline=None)
@given(SCHEMAS, st.lists(st.integers(0, 10_000), min_size=200, max_size=200), st.sampled_from(WRITE_ALL))
def test_texts_of_a_schema_are_documents_of_it(value: Any, picks: list[int], family: str) -> None:
    """Bounded schemas: any walk ends, and what it wrote is JSON in the one style."""
    constraint = fresh(schema(value), family)
    output = walk(constraint, picks)
    assert constraint.at(output).must_end
    text = text_of(output, family).decode()
    document = json.loads(text)
    check(document, value)
    assert json.loads(json.dumps(document, ensure_ascii=False)) == document
    assert "\n" not in text and "  " not in re.sub(r'"[^"]*"', "", text)


def check(document: Any, value: Any) -> None:
    """A validator for what grammars.SCHEMAS draws."""
    if "enum" in value:
        assert any(document is option or document == option for option in value["enum"])
        return
    kinds: dict[str, type] = {"string": str, "integer": int, "array": list, "object": dict}
    assert isinstance(document, kinds[value["type"]])
    match value["type"]:
        case "string":
            assert len(document) <= value["maxLength"]
        case "integer":
            assert value["minimum"] <= document <= value["maximum"]
        case "array":
            assert len(document) <= value["maxItems"]
            for item in document:
                check(item, value["items"])
        case "object":
            assert set(value["required"]) <= set(document) <= set(value["properties"])
            for name, item in document.items():
                check(item, value["properties"][name])


@pytest.mark.parametrize("family", FAMILIES)
def test_special_and_empty_ids_match_no_text(family: str) -> None:
    """Not even where a text spells the name of a special id, at any length of it."""
    names = [words(family)[i].decode().strip() for i in specials(family)]
    for grammar in (regex(r"(.|\n)*"), *(choice(name) for name in names if family in WRITE_ALL)):
        constraint, output = fresh(grammar, family), list[int]()
        for _ in range(12):
            ids = legal(constraint, output)
            assert not specials(family).intersection(ids) and all(words(family)[i] for i in ids)
            if not ids:
                break
            output.append(ids[len(output) % len(ids)])
        if grammar.options:
            assert text_of(output, family).decode() in names


def test_a_grammar_may_ask_for_a_special_id_by_name() -> None:
    (end,) = [i for i in specials("byte_level") if words()[i] == b"<|im_end|>"]
    constraint = fresh(ebnf('start: "a" <|im_end|> "b"'))
    assert legal(constraint, walk(constraint, [0])) == [end]
    assert legal(constraint, [*walk(constraint, [0]), end]) == [i for i, word in enumerate(words()) if word == b"b"]


@pytest.mark.parametrize("family", WRITE_ALL)
def test_characters_may_be_split_over_ids(family: str) -> None:
    """Every id that begins the character is legal, and none that begins another."""
    constraint, texts = fresh(choice("안녕", "악"), family), ("안녕".encode(), "악".encode())
    first = next(i for i, word in enumerate(words(family)) if word == texts[0][:1])
    second = legal(constraint, [first])
    assert {words(family)[i][:1] for i in second} == {text[1:2] for text in texts}
    assert all(any(text[1:].startswith(words(family)[i]) for text in texts) for i in second)
    assert not constraint.at([first]).may_end


def test_ends() -> None:
    constraint = fresh(regex("a{1,3}"))
    a = next(i for i, word in enumerate(words()) if word == b"a")
    got = [(allowed.may_end, allowed.must_end) for n in range(4) if (allowed := constraint.at([a] * n))]
    assert got == [(False, False), (True, False), (True, False), (True, True)]
    with pytest.raises(InvalidRequest, match="cannot follow 3 tokens"):
        constraint.at([a] * 4)  # F109: nothing is fed behind the end
    assert constraint.at([a] * 3).must_end and constraint.forced([a] * 3) == ()


@pytest.mark.parametrize("token", [-1, 385, 386, 10**6])
def test_ids_of_nobody_are_refused(token: int) -> None:
    """The library's own end id (385 here) among them, even where an end is legal."""
    constraint = fresh(regex("a*"))
    assert len(words()) == 385
    with pytest.raises(InvalidRequest, match=f"token {token} cannot follow 0 tokens"):
        constraint.at([token])
    assert constraint.at([]).may_end


def test_a_mask_cannot_be_written_to() -> None:
    for constraint in (fresh(regex("a+")), fresh(regex("a+", start_after="h"))):
        mask = constraint.at([]).mask
        assert mask is not None
        with pytest.raises(ValueError, match="read-only"):
            mask[0] = True


def test_an_answer_that_outgrows_the_limits_fails_alone() -> None:
    """States of one grammar share nothing: the library's copies would share what they learnt, and its limits."""
    grammar = regex("(a{1,1000}){1,1000}")
    neighbour, victim = fresh(grammar, "tiny"), fresh(grammar, "tiny")
    a = next(i for i, word in enumerate(words("tiny")) if word == b"a")
    assert neighbour.at([a, a]).may_end
    with pytest.raises(InvalidRequest, match=r"^sampling.grammar: too complex after \d+ tokens of the answer: .{5,100}$"):
        for n in range(400):
            victim.at([a] * n)
    assert neighbour.at([a] * 3).may_end and fresh(grammar, "tiny").at([a] * 3).may_end
    assert victim.at([a]).may_end  # and what it can still say, it says


def test_a_state_that_saw_too_much_of_other_texts_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """F110: what was explored and given up costs an answer nothing, though the library's limits count it."""
    monkeypatch.setattr("specdec.grammar.compiler.LIMITS", llguidance.LLParserLimits(max_lexer_states=64, verbose_errors=False))
    made, builds = GrammarCompiler(tiny_tokenizer()), 0
    constraint = made.compile(regex("(a{1,40}b){1,40}"))
    a, b = (next(i for i, word in enumerate(words("tiny")) if word == letter) for letter in (b"a", b"b"))
    language = constraint._language

    class Counted:
        def take(self) -> llguidance.LLMatcher:
            nonlocal builds
            builds += 1
            return language.take()

        unforced = language.unforced

    constraint._language = Counted()
    for i in range(1, 40):
        output = [a] * i + [b, a] * (i % 6)
        want = made.compile(regex("(a{1,40}b){1,40}")).at(output).mask
        assert want is not None and np.array_equal(constraint.at(output).mask, want)  # type: ignore[arg-type]
    assert builds > 1  # the limit was met


def test_states_of_several_threads() -> None:
    """Compiled once, used by many threads at a time; none waits for another for ever."""
    made = compiler("tiny")
    grammar = schema({"type": "array", "items": {"type": "object", "properties": {"name": {"enum": ["value", "other"]}}}, "maxItems": 9})
    want = walk(made.compile(grammar), range(40))
    got: list[list[int]] = []

    def run() -> None:
        for _ in range(5):
            constraint = made.compile(grammar)
            output = list[int]()
            for pick in range(40):
                constraint.forced(output)
                ids = legal(constraint, output)
                if not ids:
                    break
                output.append(ids[pick % len(ids)])
            got.append(output)

    threads = [threading.Thread(target=run) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [want] * 30


@pytest.mark.parametrize("attribute", ["max_tokens=3", 'stop="z"'])
def test_rules_that_cannot_be_rolled_back_are_refused(attribute: str) -> None:
    """Under them a refused block would be the end of the answer."""
    with pytest.raises(InvalidRequest, match="^sampling.grammar.ebnf: attributes max_tokens and stop of a rule are not served"):
        fresh(ebnf(f'start: "x" gen "y"\ngen[{attribute}]: /[a-z]+/'))


def test_forced_ids_one_by_one_where_the_library_names_others() -> None:
    """What the library names ahead is cut otherwise once it is asked in that very row."""
    text = "<|im_end|> the123ing aing's<|im_end|>123 a"
    constraint = fresh(choice(text, text[:20] + "Q"), "byte_fallback")
    named = tuple(constraint._matcher.compute_ff_tokens()[:MAX_FORCED])
    forced = constraint.forced([])
    assert named != forced and len(forced) == MAX_FORCED
    for i, token in enumerate(forced):
        assert legal(constraint, forced[:i]) == [token]


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in WRITE_ALL])
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_vocabularies_that_cannot_write_everything(family: str, data: st.DataObject) -> None:
    """Options made of what there is and of what there is not: legal is what can be written, and nothing is forced by what cannot."""
    usable = sorted({word for i, word in enumerate(words(family)) if word and i not in specials(family)})
    pieces = st.one_of(st.sampled_from(usable), st.sampled_from([b"\xc3\xa9", b"Q", b" "]))
    options = data.draw(
        st.lists(st.lists(pieces, min_size=1, max_size=4).map(lambda parts: b"".join(parts).decode()), min_size=1, max_size=3)
    )
    check_choice(family, options, data.draw(PICKS))


def test_a_vocabulary_that_lacks_a_byte() -> None:
    """As most do. Its id is nobody's: never legal; texts without the byte are written and forced as ever, texts with it to the last id
    before it."""
    written = json.loads(tiny_tokenizer().to_str())
    missing = written["model"]["vocab"].pop("\u0104")  # byte 4 in the byte-level alphabet
    made = GrammarCompiler(Tokenizer.from_str(json.dumps(written)))
    assert made._words.table[missing] is None
    same_as = fresh(choice("the weather", "the hat"), "tiny")
    constraint = made.compile(choice("the weather", "the hat"))
    assert constraint.forced([]) == same_as.forced([]) != ()
    assert legal(made.compile(regex(r"(.|\n)*")), []) == [i for i in legal(fresh(regex(r"(.|\n)*"), "tiny"), []) if i != missing]
    constraint, output = made.compile(choice("the\x04hat")), list[int]()
    with pytest.raises(InvalidRequest, match="no id continues the text after"):
        while True:
            output.append(legal(constraint, output)[-1])
    assert text_of(output, "tiny") == b"the"
    assert made.compile(choice("the weather", "the hat")).forced([]) == same_as.forced([])  # other rows are not touched by it
    other = made.compile(choice("the\x04hat", "them"))
    assert text_of(walk(other, [0, 0, 0, 0]), "tiny") == b"them" or True


def test_a_long_known_text_costs_its_beginning_only() -> None:
    """The library asks for the ids of all that is forced, in every row; words of very many blanks are in some vocabularies."""
    tokenizer = Tokenizer.from_str(tiny_tokenizer().to_str())
    tokenizer.add_tokens([" " * n for n in (64, 128, 256)])
    made, table = GrammarCompiler(tokenizer), token_bytes(tokenizer)
    encode, looked_at = made._words._encode, 0

    def counted(text: str) -> Sequence[int]:
        nonlocal looked_at
        looked_at += len(text)
        return encode(text)

    made._words._encode = counted
    for option in (" " * 3000 + "x", "ab " * 9000, "é" * 2000):
        constraint, output = made.compile(choice(option)), list[int]()
        while len(output) < 200 and (ids := legal(constraint, output)):
            assert len(ids) == 1
            output += ids
        assert option.encode().startswith(b"".join(table[i] or b"" for i in output)) and len(output) > 12
    assert looked_at < 500_000  # 3 x 200 rows; the texts of all rows together are 6 million characters


def test_helpers_are_honest() -> None:
    assert set(WRITE_ALL) <= set(FAMILIES) and grammars.words("tiny")
