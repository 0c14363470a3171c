"""The lookahead tree: what fits is used, what does not is dropped."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.lookahead import HISTORY, MAX_NODES, Lookahead
from specdec.hashing import prefix_hash
from specdec.terms import Proposal


def proposal(prefix: list[int], tokens: tuple[int, ...]) -> Proposal:
    return Proposal("s", 1, len(prefix), prefix_hash(prefix), tokens)


def test_pieces_of_a_chain_join() -> None:
    tree = Lookahead([1, 2])
    assert tree.add(proposal([1, 2], (3, 4))) == 2
    assert tree.add(proposal([1, 2, 3, 4], (5,))) == 1
    assert tree.block(9).tokens == (3, 4, 5)
    assert tree.block(2).tokens == (3, 4)


def test_the_rest_of_a_longer_chain_stays() -> None:
    tree = Lookahead([1])
    tree.add(proposal([1], (2, 3, 4, 5)))
    tree.commit((2, 3))
    assert tree.block(9).tokens == (4, 5)
    tree.commit((9,))
    assert not tree.block(9).tokens and tree.nodes == 0


def test_first_to_arrive_stays_first() -> None:
    tree = Lookahead([1])
    tree.add(proposal([1], (2, 3)))
    tree.add(proposal([1], (7, 8)))
    assert tree.block(9).tokens == (2, 3)
    tree.commit((7,))
    assert tree.block(9).tokens == (8,)


@pytest.mark.parametrize("prefix", [[9], [1, 2, 3], [2], []])
def test_a_foreign_prefix_is_stale(prefix: list[int]) -> None:
    assert Lookahead([1, 2]).add(proposal(prefix, (5, 6))) == 0


def test_a_place_far_ahead_costs_nothing() -> None:
    tree = Lookahead([5])
    tree.add(proposal([5], (1, 2)))
    assert tree.add(Proposal("s", 1, (1 << 32) - 1, 7, (9,))) == 0  # a search as deep as that would take minutes


def test_a_proposal_may_lag_behind_the_commit() -> None:
    tree = Lookahead([1])
    tree.commit((2, 3))
    assert tree.add(proposal([1], (2, 3, 4))) == 1
    assert tree.add(proposal([1], (2, 9, 4))) == 0
    assert tree.block(9).tokens == (4,)


def test_a_proposal_may_begin_anywhere_in_what_was_committed_lately() -> None:
    """Inside one commit too, and with the hashes that the whole text has."""
    text = list(range(100, 100 + 3 * HISTORY))
    tree = Lookahead(text[:5])
    for end in range(12, 2 * HISTORY, 7):
        tree.commit(tuple(text[end - 7 : end]))
        assert (tree.length, tree.hash) == (end, prefix_hash(text[:end]))
        for behind in range(min(end, HISTORY) + 1):
            assert tree.hash_at(end - behind) == prefix_hash(text[: end - behind])
        assert tree.hash_at(end - HISTORY - 1) is None
        behind = end % 7
        assert tree.add(proposal(text[: end - behind], (*text[end - behind : end], 7))) == 1 and tree.block(9).tokens == (7,)


def test_history_and_size_are_bounded() -> None:
    tree = Lookahead(list(range(1000)))
    assert tree.add(proposal(list(range(1000 - HISTORY - 1)), tuple(range(1000 - HISTORY - 1, 1001)))) == 0
    assert tree.add(proposal(list(range(1000 - HISTORY)), tuple(range(1000 - HISTORY, 1001)))) == 1
    assert tree.add(proposal(list(range(1000)), tuple(range(2000, 2000 + 2 * MAX_NODES)))) == MAX_NODES - 1


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), max_size=6), st.lists(st.integers(0, 2), max_size=6))
def test_equals_a_set_of_strings(chains: list[list[int]], commits: list[int]) -> None:
    """Oracle: a plain set of continuations, cut at every commit."""
    tree, known = Lookahead([5]), set()
    for chain in chains:
        tree.add(proposal([5], tuple(chain)))
        known |= {tuple(chain[:n]) for n in range(1, len(chain) + 1)}
    committed = [5]
    for token in commits:
        tree.commit((token,))
        committed.append(token)
        known = {c[1:] for c in known if c[0] == token and len(c) > 1}
        block = tree.block(9).tokens
        assert (block in known) if known else not block
        assert tree.nodes == len(known)
        assert (tree.length, tree.hash) == (len(committed), prefix_hash(committed))


def test_a_branch_that_is_dropped_is_gone_at_once() -> None:
    """Without the garbage collector, whose searches are a pause for everybody."""
    lookahead = Lookahead((1, 2, 3))
    lookahead.add(Proposal("s", 1, 3, lookahead.hash, (4, 5, 6)))
    lookahead.add(Proposal("s", 1, 3, lookahead.hash, (7, 8)))
    dropped = ref(lookahead._root.children[4].children[5])
    gc.disable()
    try:
        lookahead.commit((7,))
        assert dropped() is None and lookahead.block(4).tokens == (8,)
    finally:
        gc.enable()
