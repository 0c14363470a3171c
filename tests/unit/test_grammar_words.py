"""Masks over vocabularies of every kind: what an id stands for decides, and nothing else about it."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from specdec.errors import InvalidRequest
from specdec.grammar import MAX_FORCED, Constraint, GrammarCompiler
from specdec.vocabulary import token_bytes
from tests.tiny import tiny_tokenizer
from tests.unit.grammars import FAMILIES, OPTIONS, PICKS, WRITE_ALL, choice, ebnf, fresh, legal, regex, specials, text_of, walk, words


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


@pytest.mark.parametrize("token", [-1, 385, 386, 10**6])
def test_ids_of_nobody_are_refused(token: int) -> None:
    """The library's own end id (385 here) among them, even where an end is legal."""
    constraint = fresh(regex("a*"))
    assert len(words()) == 385
    with pytest.raises(InvalidRequest, match=f"token {token} cannot follow 0 tokens"):
        constraint.at([token])
    assert constraint.at([]).may_end


def test_forced_ids_one_by_one_where_the_library_names_others() -> None:
    """What the library names ahead is cut otherwise once it is asked in that very row."""
    text = "<|im_end|> the123ing aing's<|im_end|>123 a"
    constraint = fresh(choice(text, text[:20] + "Q"), "byte_fallback")
    named = tuple(constraint._reading._matcher.compute_ff_tokens()[:MAX_FORCED])
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
