"""One session's tokens at the draft, by themselves: what names them, what a commit and a block leave, what a step gives."""

from __future__ import annotations

from draft_service.chain import Chain, Draft
from specdec.hashing import prefix_hash

PROMPT = (1, 2, 3)


def drafts(*tokens: int) -> list[Draft]:
    return [Draft(token, 0.5) for token in tokens]


def made(*tokens: int) -> Chain:
    chain = Chain(PROMPT)
    if tokens:
        assert chain.absorb(0, PROMPT, drafts(*tokens)) == len(tokens)
    return chain


def test_what_names_a_prefix_and_what_is_drafted_where() -> None:
    chain = made(10, 11)
    assert [chain.names(length, prefix_hash(chain.tokens[:length])) for length in range(7)] == [False, *[True] * 5, False]
    assert not chain.names(4, prefix_hash([*PROMPT, 11]))
    at = [chain.draft_at(place) for place in range(6)]
    assert [draft and draft.token for draft in at] == [None, None, None, 10, 11, None]


def test_a_late_commit_is_a_repeat_and_adds_what_it_says_more() -> None:
    chain = made(10, 11, 12, 13)
    assert chain.commit(3, (10, 11)) == 0
    assert chain.commit(3, (10,)) == 0 and (chain.committed, chain.tokens) == (5, [*PROMPT, 10, 11, 12, 13]), "nothing is taken back"
    assert chain.last_draft == Draft(13, 0.5) and chain.draft_at(5) == Draft(12, 0.5)
    assert chain.commit(4, (11, 12)) == 0 and chain.committed == 6
    assert chain.draft_at(6) == Draft(13, 0.5) and chain.names(7, prefix_hash(chain.tokens))
    assert chain.commit(4, (11, 9)) is None and chain.commit(3, (10, 11, 12, 13, 14)) == 0
    assert chain.names(8, prefix_hash([*PROMPT, 10, 11, 12, 13, 14]))


def test_an_early_commit_contradicts_nothing() -> None:
    chain = made(10, 11)
    assert not chain.contradicts(5, (7, 8, 9)) and chain.commit(5, (7, 8, 9)) == 0
    assert chain.tokens == [*PROMPT, 10, 11, 7, 8, 9] and chain.committed == chain.pushed == 8


def test_a_block_that_agrees_takes_back_nothing_that_was_told() -> None:
    chain = made(10, 11, 12)
    piece = chain.take_unpushed()
    assert piece is not None and [draft.token for draft in piece.drafts] == [10, 11, 12]
    assert chain.assume(3, (10,)) == 0 and chain.pushed == 6 and chain.take_unpushed() is None
    assert chain.assume(3, (10, 99)) == 2 and chain.pushed == 5


def test_a_step_behind_a_prefix_that_is_no_more_gives_nothing() -> None:
    """Though the token that it fed is here again."""
    chain = made(10, 11)
    assert (chain.kv, chain.assume(3, (99, 11))) == (4, 2)
    assert chain.kv == 3 and chain.absorb(4, (11,), drafts(12)) == 0
    assert (chain.tokens, chain.kv) == ([*PROMPT, 99, 11], 3)
    assert not chain.ends_with(4, [11])
    assert chain.absorb(3, (99, 11), drafts(12)) == 1 and chain.ends_with(3, [99, 11, 12]) and not chain.ends_with(3, [99, 11])


def test_of_a_step_what_still_agrees_is_used() -> None:
    chain = made()
    chain.assume(3, (10, 11))
    assert chain.absorb(0, PROMPT, drafts(10)) == 0 and chain.kv == 3, "its last token was drawn, not fed"
    chain = made()
    chain.assume(3, (10,))
    assert chain.absorb(0, PROMPT, drafts(10, 11, 12)) == 2 and (chain.tokens, chain.kv) == ([*PROMPT, 10, 11, 12], 5)
    chain = made()
    chain.assume(3, (99, 98))
    assert chain.absorb(0, (*PROMPT, 10), drafts(11)) == 0 and (chain.tokens, chain.kv) == ([*PROMPT, 99, 98], 3)
