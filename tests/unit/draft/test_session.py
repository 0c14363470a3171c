"""One session at the draft, without engine and decider: how far to draft, how urgent it is, what a commit ended, when to tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from draft_service.chain import Draft
from draft_service.session import Bounds, Session
from draft_service.tree import Seed
from specdec.odds import Ending, Wish
from specdec.terms import DraftDistribution, DraftMethod
from tests.unit.draft.test_tree_parts import PROMPT, Ranks, grown

BOUNDS = Bounds(k=3, budget=16, limit=100, ends=frozenset({9}), ends_from=5, prompt_length=3, greedy=True, method=DraftMethod.GUMBEL)


def made(*tokens: int, block: int | None = None, **bounds: Any) -> Session:
    """The drafted tokens have two guesses each, token + 10 and token + 20. `block`: so many of them are in flight."""
    session = Session(1, "s", 1, 7, PROMPT, replace(BOUNDS, **bounds), None)  # type: ignore[arg-type]
    draft(session, *tokens)
    if block is not None:
        assert session.sent(3, block, ()) == 0
    return session


def draft(session: Session, *tokens: int) -> None:
    chain = session.chain
    drafts = [Draft(token, 0.5, guesses=Ranks(token + 10, token + 20)) for token in tokens]
    joined = chain.absorb(chain.kv, chain.tokens[chain.kv :], drafts)
    session.drafted += joined


TEN = (10, 11, 12, 13, 14, 15, 16, 17, 18, 19)


# ------------------------------------------------------------ how far


def test_the_goal_is_the_next_block_and_behind_one_in_flight_the_one_after_it() -> None:
    session = made()
    assert (session.goal, session.wanted, session.end) == (6, 3, 19)
    session.k = 2
    assert session.goal == 5, "as long as blocks are by now"
    draft(session, *TEN[:2])
    session.sent(3, 2, ())
    assert (session.goal, session.wanted) == (5 + 1 + 2, 3)
    session.ahead = False
    assert (session.goal, session.wanted) == (5, 0)
    session.tree.sow([Seed(0.5, 6, 0, False)])
    assert (session.goal, session.wanted) == (7, 2), "up to where every seed has sprouted"
    session.tree.sow([Seed(0.5, 60, 0, False)])
    assert session.goal == session.end == 19


@pytest.mark.parametrize(("bounds", "end"), [({"budget": 2}, 5), ({"limit": 4}, 4), ({"limit": 6, "budget": 9}, 6)])
def test_there_is_an_end_by_the_budget_and_by_the_request(bounds: dict[str, int], end: int) -> None:
    session = made(**bounds)
    assert session.end == end == session.goal and session.wanted == end - 3
    session.commit(3, (10,))
    assert session.end == end + ("budget" in bounds and "limit" not in bounds)


@pytest.mark.parametrize("flag", ["paused", "stalled", "over"])
def test_who_rests_wants_nothing(flag: str) -> None:
    session = made(10)
    setattr(session, flag, True)
    assert (session.wanted, session.lacks) == (0, 0)
    session.commit(3, (10,))
    assert (session.wanted > 0) is (flag != "paused"), "until the next commit"


def test_nothing_is_wanted_behind_a_token_that_ends_the_text() -> None:
    assert made(10, 11, 9).wanted == made(10, 9, k=3).wanted - 1 == made(10, 11, k=3).wanted - 1 == 0, "from its place on, and not before"
    assert made(10, 11, 9, k=4).wanted == 0 and made(10, 9, k=4).wanted == 2
    session = made(10, 11, 12)
    assert [session.is_end(token, index) for token, index in ((9, 4), (9, 5), (9, 6), (8, 5))] == [False, True, True, False]


def test_what_is_wanted_behind_a_guess_hangs_on_its_chance() -> None:
    session = made(*TEN[:3], block=3)
    session.tree.sow([Seed(0.5, 4, 0, False)])
    session.tree.sprout(9, lambda base: 101, lambda token, index: False)
    branch = session.tree.branches[101]
    assert session.wanted_of(branch, 0.5) == 3 and session.wanted_of(branch, 0.51) == 0
    branch.chance = 1.0
    grown(session.tree, 101, ())
    branch.absorb([Draft(30, 1.0)], lambda confidence: confidence)
    assert session.wanted_of(branch, 0.5) == 2 and session.wanted_of(branch, 0.51) == 0, "deeper is worth half"
    for flag, of in (("paused", session), ("over", branch)):
        setattr(of, flag, True)
        assert session.wanted_of(branch, 0.0) == 0
        setattr(of, flag, False)
    session.k = 2
    assert session.wanted_of(branch, 0.0) == 1
    branch.absorb([Draft(9, 1.0)], lambda confidence: confidence)
    session.k = 3
    assert session.wanted_of(branch, 0.0) == 0, "it ends the text there"
    session.bounds = replace(session.bounds, ends_from=7)
    assert session.wanted_of(branch, 0.0) == 1, "not before its place"
    session.bounds = replace(session.bounds, limit=7)
    assert session.wanted_of(branch, 0.0) == 0
    session.bounds = replace(session.bounds, limit=6)
    assert session.wanted_of(branch, 0.0) == 0


# ------------------------------------------------------------ how urgent


@pytest.mark.parametrize(
    ("drafted", "block", "usable", "lacks", "hungry"),
    [
        (0, None, 0, 1, True),
        (1, None, 1, 0, True),
        (0, 0, 0, 2, True),
        (1, 0, 1, 1, True),
        (2, 0, 2, 0, False),
        (3, 3, 0, 2, False),
        (4, 3, 1, 1, False),
        (5, 3, 2, 0, False),
        (6, 3, 3, 0, False),
    ],
)
def test_what_a_session_lacks_and_whether_its_target_waits(drafted: int, block: int | None, usable: int, lacks: int, hungry: bool) -> None:
    """Behind a block in flight one token is its bonus: only what follows that is of use."""
    session = made(*TEN[:drafted], block=block)
    session.served = 5
    assert (session.usable, session.lacks, session.hungry) == (usable, lacks, hungry)
    assert session.urgency == (block is not None, usable, 5)


def test_no_more_is_lacking_than_is_wanted() -> None:
    session = made(*TEN[:3], block=3)
    session.ahead = False
    assert (session.wanted, session.lacks) == (0, 0)
    session = made(*TEN[:3], block=3, budget=4)
    assert (session.wanted, session.lacks) == (1, 1)


# ------------------------------------------------------------ a block in flight


def test_a_block_of_the_drafts_own() -> None:
    session = made(*TEN[:4])
    assert session.sent(3, 3, ()) == 0
    assert (session.block_start, session.block_end, session.own_block, session.product) == (3, 6, 3, 0.125)
    session = made(*TEN[:2], block=3)
    assert (session.block_end, session.own_block, session.product) == (6, 2, 0.25), "as far as it is here"


@pytest.mark.parametrize(
    ("drafted", "block", "dropped", "over"),
    [
        (TEN[:3], (), 0, True),
        (TEN[:3], (10, 11), 0, True),
        (TEN[:1], (10, 11), 0, False),
        (TEN[:3], (10, 98, 99), 2, False),
    ],
    ids=["its own", "it agrees", "it goes on", "it differs"],
)
def test_where_nothing_may_follow_is_asked_again_once_the_tokens_are_others(
    drafted: Sequence[int], block: tuple[int, ...], dropped: int, over: bool
) -> None:
    session = made(*drafted)
    session.over = True
    assert session.sent(3, 2 if len(block) < 3 else 3, block) == dropped
    assert session.over is over and session.own_block == (0 if block else 2)
    session.over = False
    session.sent(3, 2, ())
    assert not session.over


class Wishes:
    """Odds that want what they are told to."""

    def __init__(self, *wishes: Wish) -> None:
        self.wanted, self.asked = list(wishes), list[Any]()

    def wishes(self, confidences: Sequence[float | None], most: int, floor: float) -> list[Wish]:
        self.asked.append((list(confidences), most, floor))
        return self.wanted


def test_branches_worth_having_become_seeds_and_the_path_past_the_block_is_one_of_them() -> None:
    session = made(*TEN[:1])
    session.sent(3, 2, (10, 50))
    wishes: Any = Wishes(Wish(0.4, 2, 0), Wish(0.3, 0, 0), Wish(0.2, 2, 2), Wish(0.1, 1, 1))
    session.branch_out(wishes, 4, 0.01)
    assert wishes.asked == [([0.5, None], 4, 0.01)], "what came from elsewhere is certain"
    assert session.ahead
    assert session.tree.seeds == [Seed(0.3, 3, 0, False), Seed(0.2, 5, 1, True), Seed(0.1, 4, 1, False)]
    wishes.wanted = [Wish(0.3, 0, 0)]
    session.branch_out(wishes, 4, 0.01)
    assert not session.ahead and len(session.tree.seeds) == 1
    session.chain._drafts[0] = Draft(10, 0.5)
    session.branch_out(wishes, 4, 0.01)
    assert wishes.asked[-1][0] == [None, None], "nor is what has no guesses to be branched at"
    session = made(*TEN[:1], block=2)
    session.branch_out(wishes, 4, 0.01)
    assert session.ahead and session.tree.seeds == [], "a part of the block is not here"


# ------------------------------------------------------------ a commit


def ended(session: Session, *tokens: int) -> Any:
    round_ = session.commit(session.chain.committed, tokens)
    assert round_ is not None
    return round_


def test_a_block_that_was_accepted_whole() -> None:
    session = made(*TEN[:7], block=3)
    round_ = ended(session, 10, 11, 12, 13)
    assert (round_.wasted, round_.drafted, round_.needed, round_.behind, round_.late) == (0, 7, 3, False, False)
    assert (round_.product, round_.whole, round_.grown, round_.wanted) == (0.125, True, None, True)
    assert round_.ending == Ending((0.5, 0.5, 0.5), False, 0)
    assert (session.block_end, session.drafted, session.own_block, session.flush, session.void) == (None, 0, 0, True, False)
    assert session.sent(7, 3, ()) == 0
    assert ended(session, 14, 15, 16, 30).drafted == 0


@pytest.mark.parametrize(("bonus", "rank"), [(23, 1), (33, 2), (99, None)])
def test_a_refused_bonus_token_leaves_the_block_whole(bonus: int, rank: int | None) -> None:
    session = made(*TEN[:7], block=3)
    round_ = ended(session, 10, 11, 12, bonus)
    assert (round_.wasted, round_.whole, round_.ending) == (4, True, Ending((0.5, 0.5, 0.5), False, rank))
    assert not session.flush, "nothing is left to be told"


@pytest.mark.parametrize(("token", "rank"), [(21, 0), (31, 1), (99, None)])
def test_a_refused_proposal(token: int, rank: int | None) -> None:
    """Wasted is what no target saw: what was drafted past the block."""
    session = made(*TEN[:7], block=3)
    round_ = ended(session, 10, token)
    assert (round_.wasted, round_.whole, round_.behind, round_.ending) == (4, False, False, Ending((0.5, 0.5), True, rank))
    session = made(*TEN[:3], block=3)
    round_ = ended(session, 10, token)
    assert (round_.wasted, round_.behind, round_.late) == (0, False, True), "more was wanted, but not behind this"
    session = made(*TEN[:2], block=3)
    assert ended(session, 10, token).wasted == 0


def test_a_draft_that_is_behind_and_one_that_is_late() -> None:
    for drafted, behind, late in ((3, True, True), (4, True, True), (5, True, False), (7, False, False)):
        round_ = ended(made(*TEN[:drafted], block=3), 10, 11, 12, 13)
        assert (round_.behind, round_.late) == (behind, late)
    session = made(*TEN[:3], block=3)
    session.paused = True
    round_ = ended(session, 10, 11, 12, 13)
    assert (round_.behind, round_.late, round_.wanted) == (False, False, False)


def test_of_what_a_round_says_nothing_nothing_is_learned() -> None:
    part = made(*TEN[:7], block=3)
    for tokens in ((10,), (11, 12)):
        round_ = ended(part, *tokens)
        assert (round_.whole, round_.ending) == (None, None), "only a part of the block was verified, or of it there is no block"
    whole = made(*TEN[:7], block=3)
    assert ended(whole, 10, 11, 12).whole is None
    assert ended(made(*TEN[:4], block=0), 10).whole is None, "no block"
    assert ended(made(*TEN[:4]), 10).whole is None
    assert ended(made(*TEN[:1], block=3), 10, 50, 51, 52).whole is False, "the block was not here: who knows what it was"
    assert ended(made(*TEN[:3], block=3), 10, 11, 12, 13).ending is None, "nothing was guessed there"
    foreign = made(*TEN[:7])
    foreign.sent(3, 3, (10, 50, 51))
    draft(foreign, 52)
    assert ended(foreign, 10, 50, 51, 52).ending is None, "a part of the block is not ours"
    behind = made(*TEN[:7])
    behind.sent(5, 2, ())
    assert ended(behind, 10, 99).ending is None, "not the block in flight"
    silent = made(*TEN[:7], block=3)
    silent.chain._drafts[1] = Draft(11, 0.5)
    assert ended(silent, 10, 21).ending is None


def test_a_commit_wakes_who_rested_and_a_repeat_changes_nothing() -> None:
    session = made(*TEN[:7], block=3)
    session.stalled = session.over = True
    assert session.commit(3, ()) is not None and session.block_end == 6 and session.stalled and session.over and session.drafted == 7
    ended(session, 10, 11, 12, 13)
    assert not session.stalled and not session.over and session.block_end is None
    session.sent(7, 3, ())
    session.flush = False
    assert session.commit(3, (10,)) is not None and session.block_end == 10 and session.own_block == 3 and not session.flush
    assert session.commit(3, (11,)) is None and session.block_end == 10


@pytest.mark.parametrize("stepping", [False, True])
def test_a_branch_that_becomes_the_chain_is_told_and_the_running_step_is_of_no_use(stepping: bool) -> None:
    session = made(*TEN[:3], block=3)
    session.tree.sow([Seed(0.5, 4, 0, False)])
    session.tree.sprout(9, lambda base: 101, lambda token, index: False)
    branch = grown(session.tree, 101, (30,))
    session.stepping = stepping
    round_ = ended(session, 10, 21)
    assert round_.grown is branch and (round_.late, round_.behind, round_.whole) == (False, False, False)
    assert session.flush and session.void is stepping
    (told,) = session.told()
    assert (told.proposal.prefix_length, told.proposal.tokens, told.line, told.chain) == (5, (30,), branch.line, branch.line)
    ended(session, 99)
    assert session.void is stepping, "it still runs"


# ------------------------------------------------------------ when to tell


def pieces(session: Session) -> list[tuple[int, tuple[int, ...]]]:
    return [(told.proposal.prefix_length, told.proposal.tokens) for told in session.told()]


def test_a_block_is_told_when_it_is_whole() -> None:
    session = made(*TEN[:2])
    assert pieces(session) == []
    draft(session, 12)
    session.paused = True
    assert pieces(session) == []
    session.paused = False
    assert pieces(session) == [(3, TEN[:3])] and pieces(session) == []


def test_past_a_block_the_bonus_alone_is_not_told() -> None:
    session = made(*TEN[:4], block=3, budget=4)
    assert session.wanted == 0 and pieces(session) == []
    session = made(*TEN[:5], block=3, budget=5)
    assert pieces(session) == [(3, TEN[:5])]


def test_behind_a_plain_token_what_is_there_is_told_with_every_step() -> None:
    session = made(*TEN[:2], block=0)
    session.stepping = True
    assert session.wanted == 2 and pieces(session) == []
    session.stepping = False
    assert pieces(session) == [(3, TEN[:2])]
    draft(session, 12)
    assert pieces(session) == [(5, (12,))]
    session = made(*TEN[:5], block=3)
    assert session.wanted == 2 and pieces(session) == [], "behind a block it is told when it is whole"


def test_what_fits_a_commit_is_told_at_once_and_what_the_running_step_adds_to_it() -> None:
    session = made(*TEN[:5], block=3)
    session.stepping = True
    ended(session, 10, 11, 12, 13)
    assert pieces(session) == [(7, (14,))] and session.flush, "the step may bring more"
    draft(session, 15)
    session.stepping = False
    assert pieces(session) == [(8, (15,))] and not session.flush
    draft(session, 16)
    assert session.wanted == 0 and pieces(session) == [(9, (16,))]
    session = made(*TEN[:5], block=3)
    ended(session, 10, 99)
    draft(session, 50)
    assert session.wanted == 2 and pieces(session) == [], "behind a correction a whole block is drafted first"


def test_a_branch_is_told_behind_the_chains_own_token_at_its_place() -> None:
    session = made(*TEN[:4], block=3)
    session.tree.sow([Seed(0.5, 5, 0, False), Seed(0.5, 4, 0, False)])
    handles = iter((101, 102))
    session.tree.sprout(9, lambda base: next(handles), lambda token, index: False)
    session.chain.pushed = 5
    grown(session.tree, 102, (30,))
    session.paused = True
    assert pieces(session) == []
    session.paused = False
    assert pieces(session) == [(4, (21, 30))], "the chain's token at its place is known: only the branch has something to tell"
    grown(session.tree, 101, (40,))
    assert pieces(session) == [(5, (12, 13)), (5, (22, 40))], "the chain's comes first"
    grown(session.tree, 102, (31,))
    draft(session, 14)
    assert pieces(session) == [(6, (31,))]
    session.chain.pushed, session.chain._drafts[2:] = 5, [None, None, None]
    grown(session.tree, 101, (41,))
    assert pieces(session) == [], "and is no token of the draft's to be told"


def test_distributions_travel_when_any_token_has_one() -> None:
    q = DraftDistribution((30,), b"\0\0\x80?")
    session = made(*TEN[:4], block=3)
    session.tree.sow([Seed(0.5, 3, 0, False)])
    session.tree.sprout(9, lambda base: 101, lambda token, index: False)
    session.chain.pushed = 6
    session.tree.branches[101].absorb([Draft(30, 0.5, q)], lambda confidence: confidence)
    (told,) = session.told()
    assert told.proposal.distributions == (None, q) and told.proposal.confidences == (0.0, 0.5)
