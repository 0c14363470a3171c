"""The state of a session: a function of the output alone, however it was reached."""

from __future__ import annotations

import contextlib
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

from specdec.errors import InvalidRequest
from specdec.grammar import MAX_FORCED, Constraint, GrammarCompiler, Roamer
from specdec.terms import Grammar
from tests.tiny import tiny_tokenizer
from tests.unit.grammars import (
    GRAMMARS,
    PICKS,
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
    text_of,
    walk,
    words,
)

JUMPS = st.lists(st.tuples(st.integers(0, 13), PICKS), min_size=1, max_size=4)


def opened(grammar: Grammar, family: str = "byte_level", kind: str = "compile") -> Any:
    """A random expression may have no text at all."""
    try:
        return getattr(compiler(family), kind)(grammar)
    except InvalidRequest:
        assume(False)
        raise


def same(constraint: Constraint | Roamer, output: Sequence[int], grammar: Grammar, family: str = "byte_level") -> None:
    """What it says of `output` is what a state says that saw nothing else."""
    got, other = constraint.at(output), fresh(grammar, family)
    want = other.at(output)
    assert (got.may_end, got.must_end) == (want.may_end, want.must_end)
    assert (got.mask is None) == (want.mask is None)
    assert got.mask is None or np.array_equal(got.mask, want.mask)
    assert constraint.forced(output) == other.forced(output)
    assert np.array_equal(constraint.at(output).mask, want.mask)  # type: ignore[arg-type]  # asking for forced ids leaves no trace


@settings(max_examples=40, deadline=None)
@given(GRAMMARS, JUMPS, st.sampled_from(["byte_level", "byte_fallback"]), st.sampled_from(["compile", "compile_roaming"]))
def test_f110_a_state_is_a_function_of_the_output(grammar: Grammar, jumps: list[tuple[int, list[int]]], family: str, kind: str) -> None:
    constraint, output = opened(grammar, family, kind), list[int]()
    for cut, picks in jumps:
        output = walk(constraint, picks, output[:cut])
        same(constraint, output, grammar, family)


@settings(max_examples=40, deadline=None)
@given(GRAMMARS, PICKS, st.integers(0, 10_000), st.sampled_from(["byte_level", "byte_fallback"]))
def test_f111_what_is_masked_cannot_be_fed_and_leaves_no_trace(grammar: Grammar, picks: list[int], pick: int, family: str) -> None:
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


def test_f109_nothing_is_fed_behind_the_end() -> None:
    constraint = fresh(regex("a{1,3}"))
    a = next(i for i, word in enumerate(words()) if word == b"a")
    got = [(allowed.may_end, allowed.must_end) for n in range(4) if (allowed := constraint.at([a] * n))]
    assert got == [(False, False), (True, False), (True, False), (True, True)]
    with pytest.raises(InvalidRequest, match="cannot follow 3 tokens"):
        constraint.at([a] * 4)  # F109: nothing is fed behind the end
    assert constraint.at([a] * 3).must_end and constraint.forced([a] * 3) == ()


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


def test_a_roamer_that_saw_too_much_of_other_texts_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """F110: what was explored and given up costs an answer nothing, though the library's limits count it."""
    monkeypatch.setattr("specdec.grammar.compiler.LIMITS", llguidance.LLParserLimits(max_lexer_states=64, verbose_errors=False))
    made, grammar = GrammarCompiler(tiny_tokenizer()), regex("(a{1,40}b){1,40}")
    language = Watched(made, grammar)
    roamer = Roamer(language, made._words, None)
    a, b = (next(i for i, word in enumerate(words("tiny")) if word == letter) for letter in (b"a", b"b"))
    for i in range(1, 40):
        output = [a] * i + [b, a] * (i % 6)
        want = made.compile_roaming(grammar).at(output).mask
        assert want is not None and np.array_equal(roamer.at(output).mask, want)  # type: ignore[arg-type]
    assert language.taken > 1  # the limit was met


class Watched:
    """A language whose matchers write down what they are asked, and give up when they are asked for a mask behind `most` tokens."""

    def __init__(self, made: GrammarCompiler, grammar: Grammar, most: int = 10_000) -> None:
        self.accepted: Any = (made.compile(grammar), made._accepted(grammar))[1]
        self.asked: list[tuple[Any, ...]] = []
        self.taken, self.most = 0, most

    def take(self) -> Any:
        self.taken += 1
        return WatchedMatcher(self)

    unforced = take


class WatchedMatcher:
    def __init__(self, language: Watched) -> None:
        self._language, self._inner, self._fed, self._broken = language, language.accepted.take(), 0, False

    def __getattr__(self, name: str) -> Any:
        def ask(*args: Any) -> Any:
            self._language.asked.append((name, *args))
            return getattr(self._inner, name)(*args)

        return ask

    def consume_token(self, token: int) -> bool:
        self._language.asked.append(("consume_token", token))
        self._fed += 1
        return self._inner.consume_token(token)

    def compute_bitmask(self) -> bytes:
        self._language.asked.append(("compute_bitmask",))
        self._broken = self._fed >= self._language.most
        return self._inner.compute_bitmask()

    def is_error(self) -> bool:
        return self._broken or self._inner.is_error()

    def get_error(self) -> str:
        return "too many states" if self._broken else self._inner.get_error()


def test_limits_met_ahead_are_not_met_yet() -> None:
    """Forced ids are looked for behind the answer, which may never get there."""
    made, grammar = compiler("tiny"), choice("the weather in the north")
    want = made.compile(grammar).forced([])
    language = Watched(made, grammar, most=3)
    constraint = Constraint(language, made._words, None)
    for _ in range(20):
        assert constraint.forced([]) == want[:3] and legal(constraint, []) == [want[0]]
    assert legal(constraint, want[:2]) == [want[2]] and constraint.forced(want[:2]) == want[2:3]
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="too complex after 3 tokens"):
            constraint.at(want[:3])
        assert legal(constraint, want[:2]) == [want[2]], "a round that breaks off there asks again"
    assert language.taken == 1


Asked = tuple[list[tuple[Any, ...]], int]


def asked_along(kind: type[Constraint] | type[Roamer], grammar: Grammar, text: Sequence[int], blocks: Sequence[int], begun: int) -> Asked:
    """What the library is asked while an answer grows by `blocks`, as a target grows it, from its first `begun` tokens on."""
    language = Watched(compiler("tiny"), grammar)
    state = kind(language, compiler("tiny")._words, None)
    length = begun
    for block in [*blocks, *[1] * len(text)]:
        for _ in range(block):
            state.at(text[:length])  # a row is chosen of
            length = min(length + 1, len(text))
            state.at(text[:length])  # and the row behind it may not exist
        state.forced(text[:length])
    return language.asked, language.taken


@settings(max_examples=25, deadline=None)
@given(GRAMMARS, PICKS, st.lists(st.integers(1, 5), max_size=6), st.data())
def test_a_text_is_read_in_one_way(grammar: Grammar, picks: list[int], blocks: list[int], data: st.DataObject) -> None:
    """Whatever the library counts, and whatever it remembers: it is asked the same, with blocks and resumed in the middle."""
    text = walk(opened(grammar, "tiny"), picks)
    want = asked_along(Constraint, grammar, text, [], 0)
    assert asked_along(Constraint, grammar, text, blocks, data.draw(st.integers(0, len(text)))) == want


def test_a_state_that_rolls_back_reads_in_other_ways() -> None:
    """The broken twin of the test above."""
    text = walk(fresh(choice("the weather", "the north"), "tiny"), range(5))
    asked = [asked_along(Roamer, choice("the weather", "the north"), text, blocks, begun) for blocks, begun in (([], 0), ([3], 0), ([], 2))]
    assert asked[0] != asked[1] != asked[2] != asked[0]


@pytest.mark.parametrize("text", ['root ::= "a" root', 'start: x{10000}\nx: "ab "'])
def test_a_known_text_beyond_the_limits_is_refused_at_the_door(text: str) -> None:
    """A state that sees one row alone can bear it; the step to the next row it cannot."""
    with pytest.raises(InvalidRequest, match="^sampling.grammar.ebnf: too complex"):
        fresh(ebnf(text), "tiny")


def broken_off(kind: str, grammar: Grammar, block: int, anew_at: int = -1) -> tuple[list[int], str]:
    """An answer that grows by half of what is looked at, until it outgrows the limits."""
    constraint, output = getattr(compiler("tiny"), kind)(grammar), list[int]()
    try:
        while len(output) < 200:
            if len(output) == anew_at:
                constraint = getattr(compiler("tiny"), kind)(grammar)
            ahead = [*output, legal(constraint, output)[0]]
            with contextlib.suppress(InvalidRequest):
                for _ in range(block):
                    ahead.append(legal(constraint, ahead)[0])
            output = ahead[: len(output) + 1 + block // 2]
            constraint.forced(output)
    except InvalidRequest as error:
        return output, str(error)
    return output, ""


OUTGROW = [ebnf('root ::= [a-z]{5} tail\ntail ::= "a" tail'), regex("(a{1,1000}){1,1000}"), regex("(a{1,1000}b?){1,1000}")]


@pytest.mark.parametrize("grammar", OUTGROW, ids=["tail", "nested", "two letters"])
def test_where_an_answer_outgrows_the_limits_hangs_on_no_block(grammar: Grammar) -> None:
    """Token by token, with blocks, and resumed in the middle: the same answer, broken off at the same place."""
    output, told = want = broken_off("compile", grammar, 0)
    assert 0 < len(output) < 200 and "too complex" in told
    resumed = [broken_off("compile", grammar, block, len(output) // 2) for block in (0, len(output) // 2 - 1)]
    assert [broken_off("compile", grammar, block) for block in (1, 4, 16)] + resumed == [want] * 5


def test_a_state_that_rolls_back_breaks_off_elsewhere() -> None:
    """The broken twin."""
    assert len({str(broken_off("compile_roaming", OUTGROW[1], block)) for block in (0, 4, 16)}) > 1


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
