"""Grammars that begin after a text: wherever it ends, everything behind it is of the language, and nothing before it is bound."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specdec.errors import InvalidRequest
from specdec.grammar import Constraint, GrammarCompiler
from specdec.terms import Grammar, GrammarForm
from specdec.vocabulary import special_ids, token_bytes
from tests.tiny import tiny_tokenizer

MORE = ["aa", "ab", "ba", "aab", "aaab", "aba", "abab", "baab", "aabaab", "`a", "```", "``", "`\n", "b```", "```b", "a<|im_end|>"]


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer.from_str(tiny_tokenizer().to_str())
    made.add_tokens(MORE)
    return made


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer())


@cache
def words() -> tuple[bytes, ...]:
    return tuple(word or b"" for word in token_bytes(tokenizer()))


def ids(*texts: str) -> list[int]:
    return [words().index(text.encode()) for text in texts]


def after(marker: str, expression: str = "[0-9]+x") -> Constraint:
    return compiler().compile(Grammar(GrammarForm.REGEX, expression, start_after=marker))


def mask_of(constraint: Constraint, output: list[int]) -> np.ndarray:  # type: ignore[type-arg]
    mask = constraint.at(output).mask
    return np.ones(len(words()), dtype=bool) if mask is None else mask


BITS = st.sampled_from([i for i, word in enumerate(words()) if word and set(word) <= set(b"ab`\n")])


@settings(max_examples=100, deadline=None)
@given(
    st.one_of(st.sampled_from(["aab", "aba", "abab", "``a", "aaab"]), st.text(st.sampled_from("ab`"), min_size=1, max_size=6)),
    st.lists(BITS, max_size=12),
    st.lists(st.tuples(st.integers(0, 12), st.lists(BITS, max_size=4)), max_size=3),
)
def test_the_free_part_against_the_definition(marker: str, first: list[int], jumps: list[tuple[int, list[int]]]) -> None:
    """A token is illegal where the text would hold the marker before its end; behind the token that ends with it the grammar rules."""
    constraint, known, wanted = after(marker), marker.encode(), after(marker).at([]).may_end
    inside = compiler().compile(Grammar(GrammarForm.REGEX, "[0-9]+x")).at([])
    assert wanted
    output: list[int] = []
    for cut, more in [(0, first), *jumps]:
        output, text, started = output[:cut], b"", False
        for token in output:
            text += words()[token]
        started = known in text
        for token in [*more, -1]:
            allowed = constraint.at(output)
            if started:
                assert allowed.mask is not None and inside.mask is not None and np.array_equal(allowed.mask, inside.mask)
                assert not allowed.may_end
                break
            past = [known in (text + word)[:-1] and len(word) > 0 for word in words()]
            assert np.array_equal(mask_of(constraint, output), ~np.array(past)) and allowed.may_end and not allowed.must_end
            assert constraint.forced(output) == ()
            if token < 0:
                break
            if past[token]:
                with pytest.raises(InvalidRequest, match=f"token {token} cannot follow {len(output)} tokens"):
                    constraint.at([*output, token])
                continue
            output, text = [*output, token], text + words()[token]
            started = known in text


@pytest.mark.parametrize(
    ("marker", "output"),
    [
        ("```", ("a", "```")),
        ("```", ("a", "b```")),  # inside a token
        ("```", ("`", "``")),  # over two
        ("```", ("a", "`", "`", "`")),
        ("aab", ("aaab",)),  # overlaps itself
        ("aab", ("a", "aa", "b")),
        ("aab", ("aa", "ab")),
        ("abab", ("ab", "aab", "ab")),  # the first two are not its first half
        ("<|im_end|>", ("a", "<|im_end|>")),  # a special id
        ("<|im_end|>", ("<", "|", "i", "m", "_", "e", "n", "d", "|", ">")),  # and its name in letters
        ("<|im_end|>", ("a<|im_end|>",)),
        ("é", ("Ã", "©")),  # inside a character, see below
    ],
)
def test_f112_the_row_after_the_marker_is_masked(marker: str, output: tuple[str, ...]) -> None:
    """Also when it is reached in the middle of a block, and again after a part of the block was refused."""
    parts = [b"\xc3", b"\xa9"] if marker == "é" else [part.encode() for part in output]
    tokens = [words().index(part) for part in parts]
    constraint = after(marker)
    want = compiler().compile(Grammar(GrammarForm.REGEX, "[0-9]+x"))
    digit, x = ids("1", "x")
    for behind in ([], [digit], [digit, x], []):
        got, expected = constraint.at([*tokens, *behind]), want.at(behind)
        assert np.array_equal(got.mask, expected.mask)  # type: ignore[arg-type]
        assert (got.may_end, got.must_end) == (expected.may_end, expected.must_end)
        for length in range(len(tokens)):  # rolling back across the beginning
            assert constraint.at(tokens[:length]).may_end and mask_of(constraint, tokens[:length])[tokens[length]]
    with pytest.raises(InvalidRequest, match=f"cannot follow {len(tokens)} tokens"):
        constraint.at([*tokens, *ids("```")])


def test_only_the_first_one_counts() -> None:
    constraint = after("ab", "(ab)+")
    output = ids("a", "ab", "ab", "abab")
    assert constraint.at(output[:2]).mask is not None and not constraint.at(output[:2]).may_end
    assert constraint.at(output).may_end


def test_ends_in_the_free_part_are_the_models_own() -> None:
    """The ids that end a text are not fed; every other special id is text like any other."""
    constraint = after("```")
    (end,) = [i for i in special_ids(tokenizer()) if words()[i] == b"<|im_end|>"]
    assert constraint.at(ids("a")).may_end and mask_of(constraint, ids("a"))[end]
    assert constraint.at([*ids("a"), end]).may_end


def test_forced_ids_begin_behind_the_marker() -> None:
    constraint = compiler().compile(Grammar(GrammarForm.CHOICE, options=("the weather in the north",), start_after="```"))
    assert constraint.forced(ids("``")) == ()
    forced = constraint.forced(ids("```"))
    assert b"the weather in".startswith(b"".join(words()[i] for i in forced)[:14]) and len(forced) > 3
    assert constraint.forced(ids("``")) == () and constraint.at(ids("``")).may_end


@pytest.mark.parametrize("marker", ["", "x" * 257, "é" * 129])
def test_markers_have_a_length(marker: str) -> None:
    with pytest.raises(InvalidRequest, match="^sampling.grammar.start_after: must be 1 to 256 bytes"):
        after(marker)


def test_the_longest_marker() -> None:
    constraint, a = after("a" * 256), ids("a")[0]
    assert constraint.at([a] * 255).may_end and not constraint.at([a] * 256).may_end
    assert constraint.at([a] * 255).may_end and not mask_of(constraint, [a] * 255)[ids("aa")[0]]
    assert mask_of(constraint, [a] * 254)[ids("aa")[0]]
