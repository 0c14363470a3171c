"""The outcome tree as scripts: what is drafted for which outcome, when it is told, what a commit keeps and what it frees."""

from __future__ import annotations

import pytest

from draft_service.planner import BRANCH_ROWS, CHEAP_ROWS
from draft_service.tree import Branch
from specdec.terms import DraftMethod, Refused, RejectionMethod, SamplingParams
from tests.fakes import hashed_script
from tests.unit.draft.rig import VOCAB, Rig, other, proposals


def in_flight(k: int = 3, fanout: int = 6, settled: bool = True, **more: object) -> Rig:
    """A session whose first block is with the target, and whose draft has done what it can meanwhile."""
    rig = Rig(fanout=fanout, **more)
    rig.open(k=k)
    rig.settle()
    rig.events.clear()
    rig.sent(k)
    if settled:
        rig.settle()
    return rig


def branches(rig: Rig, session_id: str = "s") -> list[Branch]:
    return list(rig.session(session_id).tree.branches.values())


def outcome(rig: Rig, branch: Branch) -> list[int]:
    """What the target decides when this branch is right."""
    chain = rig.session().chain
    return [*chain.tokens[chain.committed : branch.base], branch.tokens[0]]


@pytest.mark.parametrize("fanout", [0, 1])
def test_a_fanout_of_none_or_one_is_the_chain_alone(fanout: int) -> None:
    rig = in_flight(fanout=fanout)
    assert branches(rig) == [] and len(rig.undecided()) == 3 + 1 + 3
    assert all(len(passes) == 1 for passes in rig.engine.log)


def test_every_branch_is_told_with_the_prefix_that_it_continues() -> None:
    rig = in_flight(k=3, fanout=6)
    assert len(branches(rig)) == 5
    told = {(p.prefix_length, p.tokens[0]): p for p in proposals(rig.events)}
    for branch in branches(rig):
        prefix = rig.session().chain.tokens[: branch.base]
        assert list(branch.tokens[1:]) == rig.naive([*prefix, branch.tokens[0]], len(branch.drafts)) and branch.drafts
        first = told[branch.base, branch.tokens[0]]
        assert branch.tokens[: len(first.tokens)] == list(first.tokens) and len(first.tokens) > 1
        assert branch.told == len(branch.tokens)


def test_guesses_are_the_likeliest_and_corrections_of_every_place_are_among_them() -> None:
    rig = in_flight(k=2, fanout=12)
    chain = rig.session().chain
    for place in {branch.base for branch in branches(rig)}:
        row = rig.engine.script(chain.tokens[:place])
        order = row.argsort(descending=True).tolist()
        guesses = [branch.tokens[0] for branch in branches(rig) if branch.base == place]
        assert sorted(guesses) == sorted(order[1 : 1 + len(guesses)])
    assert {branch.base - chain.committed for branch in branches(rig)} == {0, 1, 2}


def test_a_right_guess_is_a_hit_and_its_tokens_are_usable_at_once() -> None:
    rig = in_flight()
    for branch in branches(rig):
        again = in_flight()
        branch = next(b for b in branches(again) if (b.base, b.tokens[0]) == (branch.base, branch.tokens[0]))
        ahead, forwards = list(branch.tokens[1:]), again.forwards()
        assert again.commit(outcome(again, branch)) == []  # all of it is told already
        assert again.undecided() == ahead and ahead
        again.sent(len(ahead))
        again.settle()
        assert all(len(row.tokens) == 1 for row in again.engine.log[forwards])  # nothing is fed twice
        assert again.undecided()[: len(ahead)] == ahead
        assert again.drafter.tally.grafts == 1


def test_what_a_branch_has_not_told_is_told_with_the_commit() -> None:
    rig = in_flight(settled=False)
    plan = rig.drafter.plan()
    assert plan is not None
    outcome_ = rig.run(plan, interrupted=True)
    (branch, *_) = branches(rig)
    decided = outcome(rig, branch)
    assert rig.commit(decided) == []  # the pass still runs
    told = proposals(rig.finish(plan, outcome_))
    assert [list(p.tokens) for p in told] == [rig.naive(rig.committed["s"], 1)]
    assert rig.undecided() == list(told[0].tokens)


def test_a_wrong_chain_of_a_running_pass_is_dropped_by_a_graft() -> None:
    """The chain's row of the pass belongs to keys and values that the branch's replace."""
    rig = in_flight(settled=False)
    rig.step(interrupted=True)
    plan = rig.drafter.plan()
    assert plan is not None and any(row.branch == 0 for row in plan.rows)
    done = rig.run(plan)
    branch = max(branches(rig), key=lambda b: b.base)
    rig.commit(outcome(rig, branch))
    rig.finish(plan, done)
    rig.settle()
    chain = rig.session().chain
    assert rig.kv_tokens()[: chain.kv] == chain.tokens[: chain.kv]
    assert rig.undecided()[:3] == rig.naive(rig.committed["s"], 3)


def test_a_commit_frees_what_it_leaves_behind() -> None:
    rig = in_flight(fanout=8)
    assert len(rig.engine.kv.slots) == 1 + len(branches(rig)) and len(rig.room.booked) == 1 + len(branches(rig))
    drawn = sum(len(branch.drafts) for branch in branches(rig))
    rig.commit(rig.undecided()[:4])  # all as the chain said
    assert branches(rig) == [] and len(rig.room.booked) == 1
    assert sum(rig.drafter.tally.branches.values()) == drawn == rig.drafter.tally.wasted_tokens
    rig.settle()
    assert len(rig.engine.kv.slots) == 1


def test_branches_behind_a_part_of_the_block_stay() -> None:
    """A commit that says only how the first tokens ended: what hangs behind them still fits."""
    rig = in_flight(k=3, fanout=12)
    later = {(b.base, b.tokens[0]) for b in branches(rig) if b.base > 4}
    rig.commit(rig.undecided()[:2])
    assert {(b.base, b.tokens[0]) for b in branches(rig)} == later and later


def test_a_block_from_elsewhere_ends_the_branches_behind_its_first_difference() -> None:
    rig = in_flight(k=3, fanout=12)
    block = [rig.undecided()[0], other(rig.undecided()[1]), 5]
    rig.sent(3, block=block)
    assert {branch.base - 3 for branch in branches(rig)} <= {0, 1}
    assert all(branch.tokens[0] != block[1] for branch in branches(rig) if branch.base == 4)


def test_hopeless_guesses_have_no_branch() -> None:
    rig = in_flight(branch_floor=1.0)
    assert branches(rig) == [] and len(rig.undecided()) == 3


def test_no_branch_begins_with_a_token_that_ends_the_text() -> None:
    ends = tuple(range(0, VOCAB, 2))
    rig = in_flight(fanout=12, eos_ids=ends)
    assert all(branch.tokens[0] % 2 for branch in branches(rig))
    assert all(token % 2 for branch in branches(rig) for token in branch.tokens[:-1])  # nor goes on behind one


def test_a_session_whose_target_waits_comes_first_and_few_branches_ride_along() -> None:
    rig = in_flight(fanout=8, settled=False)
    rig.open("t", tokens=(4, 5, 6))
    rig.open("u", tokens=(7, 8))
    plan = rig.drafter.plan()
    assert plan is not None
    assert [row.handle for row in plan.rows[:2]] == [rig.session("t").handle, rig.session("u").handle]
    assert sum(len(row.tokens) for row in plan.rows if row.branch) == 0  # the prompts fill the cheap rows
    rig.finish(plan, rig.run(plan))
    plan = rig.drafter.plan()
    assert plan is not None and sum(len(row.tokens) for row in plan.rows) <= CHEAP_ROWS and any(row.branch for row in plan.rows)


def test_rows_of_branches_are_bounded() -> None:
    rig = Rig(fanout=16)
    for name in "abcd":
        rig.open(name, tokens=(ord(name) % VOCAB, 2, 3))
        rig.settle()
    for name in "abcd":
        rig.sent(3, name)
    plan = rig.drafter.plan()
    assert plan is not None and sum(len(row.tokens) for row in plan.rows if row.branch) == BRANCH_ROWS
    assert {row.handle for row in plan.rows if row.branch} == {rig.session(name).handle for name in "abcd"}


def test_without_room_there_are_fewer_branches_and_a_new_session_takes_theirs() -> None:
    rig = in_flight(fanout=12, total=100)
    held = len(branches(rig))
    assert 0 < held < 11 and rig.room.used_tokens <= 100
    told = rig.open("t", tokens=(4, 5, 6))
    assert not any(isinstance(event, Refused) for event in told) and branches(rig) == []
    rig.settle()
    assert proposals(rig.events, "t")


def test_a_broken_row_ends_its_branch_alone() -> None:
    rig = in_flight(settled=False)
    chain = rig.session().chain
    plan = rig.drafter.plan()
    assert plan is not None
    victim = branches(rig)[0]
    rig.engine.nan_when = lambda prefix: list(prefix) == [*chain.tokens[: victim.base], victim.tokens[0]]
    rig.finish(plan, rig.run(plan))
    assert victim.handle not in rig.session().tree.branches and len(branches(rig)) == len([r for r in plan.rows if r.branch]) - 1
    assert rig.drafter.tally.broken == 0 and victim.handle not in rig.room.booked
    rig.settle()
    assert rig.undecided()[:3] == rig.naive([1, 2, 3], 3)


def test_a_failed_pass_leaves_nothing_behind() -> None:
    rig = in_flight()
    rig.commit(outcome(rig, branches(rig)[0]))
    rig.sent(1)
    rig.engine.raises = RuntimeError("gone")
    rig.settle()
    assert isinstance(rig.events[-1][1], Refused)
    rig.settle()
    assert rig.engine.kv.slots == {} and rig.room.booked == {} and rig.stepper._slots == {} and rig.stepper._parents == {}


@pytest.mark.parametrize("method", [DraftMethod.PROBABILISTIC, DraftMethod.GREEDY])
def test_under_the_standard_method_a_guess_has_no_distribution_and_what_follows_has(method: DraftMethod) -> None:
    rig = Rig(fanout=8)
    params = SamplingParams(temperature=1.0)
    rig.open(k=2, sampling=params, rejection_method=RejectionMethod.STANDARD, draft_method=method)
    rig.settle()
    rig.sent(2)
    rig.settle()
    told = [p for p in proposals(rig.events) if any((p.prefix_length, p.tokens[0]) == (b.base, b.tokens[0]) for b in branches(rig))]
    assert told
    for proposal in told:
        if method is DraftMethod.PROBABILISTIC:
            assert proposal.distributions[0] is None and all(d is not None for d in proposal.distributions[1:])
        else:
            assert proposal.distributions == ()


def test_the_draft_learns_which_places_are_worth_guessing() -> None:
    """A target that always refuses the first token and takes the second guess there: the branches go there."""
    rig = Rig(hashed_script(VOCAB), fanout=3, window=4000)
    rig.open(k=2)
    for _ in range(150):
        rig.settle()
        rig.sent(min(2, len(rig.undecided())))
        rig.settle()
        chain = rig.session().chain
        row = rig.engine.script(chain.tokens[: chain.committed])
        rig.commit([row.argsort(descending=True).tolist()[2]])
    rig.settle()
    rig.sent(min(2, len(rig.undecided())))
    rig.settle()
    chain = rig.session().chain
    order = rig.engine.script(chain.tokens[: chain.committed]).argsort(descending=True).tolist()
    assert (chain.committed, order[2]) in {(branch.base, branch.tokens[0]) for branch in branches(rig)}
    assert rig.drafter.tally.grafts > 100
