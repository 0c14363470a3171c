"""Prompt lookup against the slow reading: search the whole text for the newest tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.ngram import PromptLookup


def slow(tokens: list[int], n: int, k: int, behind: tuple[int, ...] = ()) -> tuple[int, ...]:
    text = [*tokens, *behind]
    if n == 0 or len(text) < n:
        return ()
    for end in range(len(tokens) - 1, n - 1, -1):
        if tokens[end - n : end] == text[-n:]:
            return tuple(tokens[end : end + k])
    return ()


@given(st.lists(st.lists(st.integers(0, 3), max_size=4), max_size=30), st.integers(0, 4), st.integers(1, 5))
def test_equals_a_search(pieces: list[list[int]], n: int, k: int) -> None:
    lookup, tokens = PromptLookup(n), list[int]()
    for piece in pieces:
        lookup.extend(piece)
        tokens += piece
        assert lookup.propose(k) == slow(tokens, n, k)


@given(st.lists(st.integers(0, 2), max_size=30), st.lists(st.integers(0, 2), max_size=4), st.integers(0, 4), st.integers(1, 5))
def test_what_might_be_committed_next_is_looked_up_as_if_it_were(tokens: list[int], behind: list[int], n: int, k: int) -> None:
    assert PromptLookup(n, tokens).propose(k, behind) == slow(tokens, n, k, tuple(behind))


def test_the_latest_occurrence_wins() -> None:
    lookup = PromptLookup(2)
    lookup.extend([1, 2, 7, 1, 2, 8, 1, 2])
    assert lookup.propose(3) == (8, 1, 2)


def test_a_lookup_of_nothing_never_proposes() -> None:
    lookup = PromptLookup(0)
    lookup.extend([1, 1, 1, 1])
    assert lookup.propose(4) == ()
