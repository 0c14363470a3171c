"""The outcome tree without engine and sessions: what a branch tells, which seeds sprout, what a commit and a block from elsewhere leave."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draft_service.chain import Chain, Draft
from draft_service.tree import Branch, Seed, Tree
from specdec.hashing import prefix_hash

PROMPT = (1, 2, 3)


class Ranks:
    def __init__(self, *ids: int) -> None:
        self.ids = ids

    def ranked(self) -> tuple[int, ...]:
        return self.ids


def drafted() -> Tree:
    """A chain of 10, 11, 12, each with two guesses, of which the last token is not fed yet."""
    tree = Tree(Chain(PROMPT))
    drafts = [Draft(token, 0.5, guesses=Ranks(token + 10, token + 20)) for token in (10, 11, 12)]
    assert tree.chain.absorb(0, PROMPT, drafts) == 3 and tree.chain.kv == 5
    return tree


def seed(base: int, rank: int = 0, bonus: bool = False) -> Seed:
    return Seed(0.5, base, rank, bonus)


def never(token: int, index: int) -> bool:
    return False


def branched(*seeds: Seed, most: int = 9) -> Tree:
    """Handles count from 101."""
    tree, handles = drafted(), iter(range(101, 200))
    tree.sow(seeds)
    tree.sprout(most, lambda base: next(handles), never)
    return tree


def firsts(tree: Tree) -> list[tuple[int, int]]:
    return [(branch.base, branch.tokens[0]) for branch in tree.branches.values()]


def grown(tree: Tree, handle: int, tokens: Sequence[int]) -> Branch:
    branch = tree.branches[handle]
    branch.absorb([Draft(token, 0.5) for token in tokens], lambda confidence: confidence)
    return branch


def test_a_branch_is_told_in_pieces_each_behind_what_was_told() -> None:
    branch = branched(seed(4)).branches[101]
    assert not branch.untold, "a guess alone is nothing to tell"
    branch.absorb([Draft(30, 0.5)], lambda confidence: confidence / 2)
    assert (branch.chance, branch.kv, len(branch), branch.untold) == (0.125, 1, 6, True), "the newest token is fed with the next one"
    piece = branch.take_untold()
    assert (piece.prefix_length, piece.prefix_hash) == (4, prefix_hash([*PROMPT, 10]))
    assert [draft.token for draft in piece.drafts] == [21, 30] and not branch.untold
    branch.absorb([Draft(31, 0.5), Draft(32, 0.1)], lambda confidence: confidence)
    piece = branch.take_untold()
    assert (piece.prefix_length, piece.prefix_hash) == (6, prefix_hash([*PROMPT, 10, 21, 30]))
    assert [draft.token for draft in piece.drafts] == [31, 32] and not branch.untold
    assert (branch.chance, branch.kv) == (pytest.approx(0.125 * 0.05), 3)


def test_a_seed_sprouts_where_the_engine_has_come_and_a_guess_is_left() -> None:
    tree = drafted()
    tree.sow([seed(3), seed(5, rank=1), seed(6), seed(4, rank=2), seed(3), seed(4)])
    assert tree.reach == 7
    asked: list[tuple[int, int]] = []

    def is_end(token: int, index: int) -> bool:
        asked.append((token, index))
        return index == 4

    handles = iter((101, 102))
    tree.sprout(9, lambda base: next(handles), is_end)
    assert firsts(tree) == [(3, 20), (5, 32)], "no rank that is not there, no token twice, none behind the end"
    assert asked == [(20, 3), (32, 5), (20, 3), (21, 4)]
    assert tree.seeds == [seed(6)] and tree.reach == 7, "its place is not drafted"
    tree.chain.absorb(5, (12,), [Draft(13, 0.5)])
    tree.sprout(9, lambda base: None, never)
    assert tree.seeds == [] and tree.reach == 0 and len(tree.branches) == 2, "its place has no other guess"


def test_a_token_that_the_engine_has_not_seen_before_has_no_branch_behind_it() -> None:
    tree = drafted()
    tree.chain.kv = 4
    tree.sow([seed(4), seed(5)])
    tree.sprout(9, lambda base: 101, never)
    assert firsts(tree) == [(4, 21)] and tree.seeds == [seed(5)]


def test_there_are_so_many_branches_and_no_more() -> None:
    assert firsts(branched(seed(3), seed(4), seed(5), most=2)) == [(3, 20), (4, 21)]
    tree, asked = drafted(), list[int]()
    tree.sow([seed(3), seed(4)])
    tree.sprout(9, asked.append, never)
    assert firsts(tree) == [] and tree.seeds == [] and asked == [3], "where there is no room for the likeliest there is none for others"


def test_a_commit_that_fits_leaves_the_branches_behind_it_and_no_seed() -> None:
    tree = branched(seed(3), seed(4), seed(5))
    tree.sow([seed(6)])
    kept = tree.commit(3, (10,))
    assert kept is not None and (kept.dropped, kept.cut, kept.grown) == (0, None, None)
    assert firsts(tree) == [(4, 21), (5, 22)] and [branch.base for branch in tree.dead] == [3]
    assert (tree.seeds, tree.line) == ([], 0)
    tree.sow([seed(6)])
    assert tree.commit(3, (10,)) is not None and tree.seeds == [seed(6)], "a repeat changes nothing"
    assert tree.commit(3, (11,)) is None and len(tree.branches) == 2, "what contradicts the committed tokens changes nothing"


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize("told", [False, True])
def test_a_right_guess_becomes_the_chain_with_what_follows_it(planned: bool, told: bool) -> None:
    """`decided` says more than the guess, and what it says next is not what the branch had."""
    tree = branched(seed(3), seed(4), seed(4, rank=1), seed(5))
    tree.sow([seed(6)])
    tree.chain.pushed = 6
    branch = grown(tree, 102, (30, 31))
    branch.planned = planned
    if told:
        branch.take_untold()
    kept = tree.commit(3, (10, 21))
    assert kept is not None and (kept.dropped, kept.cut, kept.grown) == (2, 4, branch)
    chain = tree.chain
    assert chain.tokens == [*PROMPT, 10, 21, 30, 31] and (chain.committed, chain.kv) == (5, 6)
    assert chain.pushed == (7 if told else 5), "what is decided is known"
    assert (tree.graft, tree.grafted) == ((102, 102) if planned else (None, 0))
    assert tree.line == branch.line and tree.branches == {} and tree.seeds == []
    assert sorted(dead.handle for dead in tree.dead) == [101, 103, 104], "it is not dead itself"
    line = tree.line
    kept = tree.commit(5, (30, 9))
    assert kept is not None and (kept.dropped, kept.cut, kept.grown) == (1, 6, None)
    assert chain.tokens == [*PROMPT, 10, 21, 30, 9] and tree.line not in (line, 0)


def test_a_guess_in_the_middle_of_a_commit_is_found_and_what_follows_it_is_cut() -> None:
    tree = branched(seed(4))
    branch = grown(tree, 101, (30,))
    kept = tree.commit(3, (10, 21, 9))
    assert kept is not None and (kept.dropped, kept.cut, kept.grown) == (3, 4, branch)
    assert tree.chain.tokens == [*PROMPT, 10, 21, 9]


def test_a_guess_that_was_not_told_makes_nothing_known_that_was_not() -> None:
    tree = branched(seed(4))
    assert tree.chain.pushed == 3
    tree._grow(tree.branches[101])
    assert tree.chain.pushed == 3 and tree.chain.tokens == [*PROMPT, 10, 21]


def test_a_block_from_elsewhere_leaves_what_its_first_difference_does_not_touch() -> None:
    seeds = [seed(3), seed(4), seed(4, rank=1), seed(5)]
    tree = branched(*seeds)
    assert tree.assume(3, (10, 21, 5)) == 2
    assert firsts(tree) == [(3, 20), (4, 31)], "not what hangs behind it, nor the guess that it is"
    assert sorted((branch.base, branch.tokens[0]) for branch in tree.dead) == [(4, 21), (5, 22)]
    assert tree.line != 0
    tree = branched(*seeds)
    assert tree.assume(3, (10, 11)) == 0 and len(tree.branches) == 4 and tree.line == 0


def test_one_branch_goes_or_all_do() -> None:
    tree = branched(seed(4), seed(4, rank=1))
    tree.sow([seed(6)])
    tree.kill(tree.branches[101])
    assert list(tree.branches) == [102] and [branch.handle for branch in tree.dead] == [101] and tree.seeds
    tree.clear()
    assert not tree.branches and not tree.seeds and [branch.handle for branch in tree.dead] == [101, 102]
