"""One session as the target knows it: what is asked for, what is known, what agrees."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.hashing import prefix_hash
from specdec.terms import Begin, FinishReason, Result, TokenLogprobs
from target_service.plan import PromptScore
from target_service.sessions import Held, Pending, Session, agreement
from tests.unit.target.harness import GREEDY, first_step
from tests.unit.target.test_prompt_logprobs import asking


def made(tokens: int = 8, prompt: int = 4, **more: Any) -> Session:
    session = Session(("o", "s"), 1, Begin(prompt, more.pop("sampling", GREEDY), 7), 1, 1, list(range(tokens)))
    for name, value in more.items():
        setattr(session, name, value)
    return session


def pending(own: bool = False, round_: int = 3) -> Pending:
    return Pending(round_, (), (), 5.0, 1e9, 1, own=own)


@pytest.mark.parametrize(
    ("one", "other", "same"), [((), (), 0), ((1, 2, 3), (1, 2), 2), ((1, 2), (1, 2, 3), 2), ((1, 5, 3), (1, 2, 3), 1), ((4,), (1,), 0)]
)
def test_agreement_is_of_what_both_have(one: tuple[int, ...], other: tuple[int, ...], same: int) -> None:
    assert agreement(one, other) == same


def test_what_is_asked_for_is_the_step_that_waits_and_no_round_of_the_targets_own() -> None:
    held = Held(first_step([1]), 0.0, 1e9)
    assert made().asked is None and made(pending=pending()).asked == 3 and made(pending=pending(own=True)).asked is None
    assert made(pending=pending(own=True), held=held).asked == made(held=held).asked == 1


def test_who_is_awaited_has_heard_all_and_may_go_on() -> None:
    assert made().awaited
    ended = Result(8, 7, 0, 0, (), finish=FinishReason.LENGTH)
    for changes in ({"stream": None}, {"pending": pending(own=True)}, {"ended": ended}, {"closing": True}):
        assert not made(**changes).awaited


def test_what_a_step_names_is_known_or_an_edit() -> None:
    session = made(floor=6)
    assert [session.knows(2, tuple(range(2, end))) for end in range(4, 10)] == [False, False, True, True, True, False]
    assert not session.knows(2, (2, 3, 4, 9)) and not session.knows(2, (3, 4, 5, 6))


def test_never_all_that_is_asked_for_is_shared() -> None:
    session = made(kv_length=6)
    assert [session.shareable(list(range(count))) for count in (1, 3, 6, 7, 9)] == [0, 2, 5, 6, 6]
    assert session.shareable([0, 1, 9, 3, 4]) == 2


def test_an_edit_keeps_what_agrees_beyond_its_base() -> None:
    entries = [TokenLogprobs(-float(place)) for place in range(1, 6)]
    session = made(prompt=7, sampling=asking(0), kv_length=5, floor=8)
    session.prompt_logprobs = list(entries)
    assert (session.hash_at(2), session.unscored) == (prefix_hash([0, 1]), 1)
    session.rebase(2, (2, 3, 9, 5, 6, 7, 8))
    assert (session.tokens, session.floor) == ([0, 1, 2, 3, 9, 5, 6, 7, 8], 9)
    assert (session.prompt_logprobs, session.kv_length) == (entries[:3], 3), "the KV ends where an entry is owed"
    assert session.hash_at(5) == prefix_hash(session.tokens[:5])


def test_entries_of_a_piece_end_where_the_tokens_behind_it_are_others() -> None:
    session = made(prompt=8, sampling=asking(0))
    entries = [TokenLogprobs(-float(place)) for place in range(4)]
    session.prefilled(4, PromptScore(0, (1, 2, 9, 4), 0), entries)
    assert (session.prompt_logprobs, session.kv_length) == (entries[:2], 2)
    session.prefilled(6, PromptScore(2, (3, 4, 5, 6), 0), entries)
    assert (session.prompt_logprobs, session.kv_length) == ([*entries[:2], *entries], 6)
    session.prefilled(8, PromptScore(6, (7,), 0), entries[:1])
    assert session.kv_length == 7, "never all tokens"
