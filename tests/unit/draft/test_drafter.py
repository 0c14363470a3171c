"""The draft's decisions as scripts: what is drafted, when it is told, what a commit keeps."""

from __future__ import annotations

import pytest

from specdec.hashing import prefix_hash
from specdec.terms import CloseDraft, Commit, Pause, Refused, Resume, Resync, Sent
from tests.unit.draft.rig import GREEDY, Rig, other, proposals


def opened(k: int = 3, **more: object) -> Rig:
    """A session that has told its first K tokens."""
    rig = Rig()
    rig.open(k=k, **more)
    (first,) = proposals(rig.settle())
    assert first.tokens == tuple(rig.naive([1, 2, 3], k))
    return rig


def test_a_new_session_tells_its_first_block_in_one_message_after_k_forwards() -> None:
    rig = opened(k=3)
    assert rig.forwards() == 3
    assert rig.drafter.plan() is None  # nothing is in flight: rest
    (event,) = proposals(rig.events)
    assert (event.prefix_length, event.prefix_hash, event.epoch) == (3, prefix_hash([1, 2, 3]), 1)
    assert len(event.confidences) == 3 and all(0 < c <= 1 for c in event.confidences)


def test_full_acceptance_goes_on_without_drafting_anything_twice() -> None:
    rig = opened(k=3)
    for _ in range(20):
        rig.sent(3)
        rig.settle()
        ahead = rig.undecided()
        assert len(ahead) == 3 + 1 + 3  # the block, the bonus token, the next block
        told = len(rig.events)
        rig.commit(ahead[:4])
        assert rig.undecided() == ahead[4:]  # the next block is there before the target asks
        assert len(rig.events) == told  # and the orchestrator knows it already
    # One forward for each token but the newest, whose K/V nobody needs yet.
    assert rig.forwards() == len(rig.session().chain) - 3
    assert rig.drafter.tally.wasted_tokens == 0


@pytest.mark.parametrize("accepted", [0, 1, 2])
@pytest.mark.parametrize("looked_ahead", [False, True])
def test_refusal_at_each_slot_costs_one_forward_to_the_first_new_token(accepted: int, looked_ahead: bool) -> None:
    rig = opened(k=3)
    rig.sent(3)
    if looked_ahead:
        rig.settle()
    block = rig.undecided()[:3]
    correction = other(block[accepted])
    rig.commit([*block[:accepted], correction])
    assert rig.undecided() == []
    before = rig.forwards()
    (told,) = proposals(rig.settle())
    assert told.prefix_length == len(rig.committed["s"]) and told.prefix_hash == prefix_hash(rig.committed["s"])
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)
    assert rig.forwards() - before == 3
    assert len(rig.engine.log[before][0].tokens) == 1  # only the correction is fed


def test_refused_bonus_token_feeds_only_the_correction() -> None:
    rig = opened(k=3)
    rig.sent(3)
    rig.settle()
    ahead = rig.undecided()
    rig.commit([*ahead[:3], other(ahead[3])])
    before = rig.forwards()
    (told,) = proposals(rig.settle())
    assert rig.engine.log[before][0].tokens == (other(ahead[3]),)
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)


def test_commit_before_the_draft_is_done_tells_at_once_what_is_there() -> None:
    rig = opened(k=3)
    rig.sent(3)
    rig.step(interrupted=True)
    rig.step(interrupted=True)
    ahead = rig.undecided()
    assert len(ahead) == 5
    (flushed,) = proposals(rig.commit(ahead[:4]))
    assert list(flushed.tokens) == ahead[4:] and flushed.prefix_length == 7
    (rest,) = proposals(rig.settle())
    assert [*flushed.tokens, *rest.tokens] == rig.naive(rig.committed["s"], 3)
    assert rest.prefix_hash == prefix_hash([*rig.committed["s"], *flushed.tokens])


def test_empty_block_in_flight_drafts_past_the_plain_token() -> None:
    rig = Rig()
    rig.open(k=2)
    rig.sent(0)
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive([1, 2, 3], 3)
    rig.commit([told.tokens[0]])
    assert rig.drafter.plan() is None  # two tokens are there, and known


def test_empty_block_and_a_surprise() -> None:
    rig = opened(k=2)
    rig.sent(0)
    rig.settle()
    rig.commit([other(rig.undecided()[0])])
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive(rig.committed["s"], 2)


def test_foreign_block_replaces_the_chain() -> None:
    rig = opened(k=3)
    mine = rig.undecided()
    block = [mine[0], other(mine[1]), 5]
    rig.sent(3, block=block)
    assert rig.undecided() == block
    (told,) = proposals(rig.settle())
    assert (told.prefix_length, told.prefix_hash) == (6, prefix_hash([1, 2, 3, *block]))
    assert list(told.tokens) == rig.naive([1, 2, 3, *block], 4)
    rig.commit([*block, told.tokens[0]])
    assert rig.undecided() == list(told.tokens[1:])


def test_foreign_block_that_agrees_keeps_the_chain() -> None:
    rig = opened(k=3)
    mine = rig.undecided()
    rig.sent(2, block=mine[:2])
    assert rig.undecided() == mine


def test_commit_of_many_foreign_tokens() -> None:
    rig = opened(k=3)
    rig.commit([9, 9, 9, 9, 9, 9])
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)


def test_a_repeated_or_partly_late_commit_changes_nothing_or_adds_the_rest() -> None:
    rig = opened(k=3)
    prefix = list(rig.committed["s"])
    rig.commit([4, 5])
    rig.settle()
    kept = rig.undecided()
    assert rig.apply(Commit("s", 3, prefix_hash(prefix), (4, 5))) == []
    assert rig.undecided() == kept
    assert rig.apply(Commit("s", 3, prefix_hash(prefix), (4, 5, 6))) == []
    assert rig.session().chain.committed == 6
    (lost,) = rig.apply(Commit("s", 3, prefix_hash(prefix), (4, 6)))
    assert lost == Resync("s", 1, 6)


def test_an_early_commit_whose_prefix_is_on_the_chain_is_taken() -> None:
    rig = opened(k=3)
    ahead = rig.undecided()
    rig.apply(Commit("s", 5, prefix_hash([1, 2, 3, *ahead[:2]]), (8,)))
    assert rig.session().chain.tokens == [1, 2, 3, *ahead[:2], 8]


@pytest.mark.parametrize("length, tokens", [(3, [1, 2, 4]), (4, [1, 2, 4, 9]), (90, [1] * 90), (2, [1, 1])])
def test_a_prefix_that_is_not_ours_means_resync_and_silence(length: int, tokens: list[int]) -> None:
    rig = opened(k=3)
    assert rig.apply(Commit("s", length, prefix_hash(tokens), (4,))) == [Resync("s", 1, 3)]
    assert rig.apply(Commit("s", length, prefix_hash(tokens), (4,))) == []  # told once
    assert rig.apply(Sent("s", 3, prefix_hash([1, 2, 3]), 3)) == []
    rig.settle()
    assert rig.engine.kv.slots == {} and rig.room.used_tokens == 0
    rig.open(epoch=2, tokens=(1, 2, 4))
    assert len(proposals(rig.settle())) == 1


def test_late_and_lost_sent() -> None:
    rig = opened(k=3)
    old = list(rig.committed["s"])
    rig.commit([4])
    assert rig.apply(Sent("s", 3, prefix_hash(old), 3)) == []
    assert rig.session().block_end is None
    (lost,) = rig.apply(Sent("s", 4, prefix_hash([0] * 4), 3))
    assert isinstance(lost, Resync)


def test_sent_names_more_than_is_drafted() -> None:
    """A block from an earlier placement: the draft follows it with its own guess, and the commit settles the matter."""
    rig = Rig()
    rig.open(k=3)
    rig.sent(3)
    rig.settle()
    assert len(rig.undecided()) == 7


def test_unknown_session() -> None:
    rig = Rig()
    assert rig.apply(Commit("nobody", 3, 1, (4,))) == [Resync("nobody", 0, 0)]
    assert rig.apply(CloseDraft("nobody")) == []
    assert rig.apply(CloseDraft("nobody")) == []


def test_pause_keeps_state_and_resume_goes_on() -> None:
    rig = opened(k=3)
    rig.apply(Pause("s"))
    rig.sent(3)
    assert rig.drafter.plan() is None
    ahead = rig.undecided()
    rig.commit([*ahead, 9])
    assert rig.drafter.plan() is None
    rig.apply(Resume("s"))
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)


def test_epochs_replace_and_old_ones_are_refused() -> None:
    rig = opened(k=3)
    assert isinstance(rig.open(epoch=1)[0], Refused)
    assert rig.session().epoch == 1  # the open one goes on
    rig.open(epoch=2, tokens=(5, 6), seed=8)
    (told,) = proposals(rig.settle())
    assert told.epoch == 2 and list(told.tokens) == rig.naive([5, 6], 3)
    (old,) = rig.apply(rig.opened["s"].__class__("s", 1, (1,), 1, GREEDY, 0, told_methods(rig)[0], told_methods(rig)[1], 4, 2))
    assert isinstance(old, Refused) and old.epoch == 1
    assert rig.session().epoch == 2
    rig.settle()
    assert len(rig.engine.kv.slots) == 1


def told_methods(rig: Rig) -> tuple[object, object]:
    command = rig.opened["s"]
    return command.rejection_method, command.draft_method


def test_close_and_stream_end_free_everything() -> None:
    rig = opened(k=3)
    rig.open("t")
    rig.settle()
    rig.close("s")
    assert rig.drafter.session(1, "s") is None
    rig.settle()
    assert len(rig.engine.kv.slots) == 1
    rig.drafter.close_stream(1)
    rig.settle()
    assert rig.engine.kv.slots == {} and rig.room.used_tokens == 0 and rig.drafter.num_sessions == 0


def test_budget_bounds_the_chain() -> None:
    rig = Rig()
    rig.open(k=4, budget=6)
    rig.settle()
    rig.sent(4)
    rig.settle()
    assert len(rig.undecided()) == 6
    rig.commit(rig.undecided()[:1])
    rig.sent(4)
    rig.settle()
    assert len(rig.undecided()) == 6


def test_nothing_is_drafted_behind_the_last_token_the_request_may_have() -> None:
    rig = Rig()
    rig.open(k=4, sampling=GREEDY.__class__(temperature=0.0, max_tokens=6))
    rig.settle()
    rig.sent(4)
    rig.settle()
    assert len(rig.undecided()) == 6


def test_nothing_is_drafted_behind_the_end_of_the_text_until_the_target_says_otherwise() -> None:
    plain = Rig()
    plain.open(k=5)
    end = plain.naive([1, 2, 3], 5)[2]
    rig = Rig(eos_ids=(end,))
    rig.open(k=5)
    (told,) = proposals(rig.settle())
    assert list(told.tokens) == plain.naive([1, 2, 3], 3)  # the end itself is proposed
    rig.sent(3)
    assert rig.drafter.plan() is None
    rig.commit([*told.tokens, 9])  # an ordinary token for this target
    (more,) = proposals(rig.settle())
    assert end in more.tokens or len(more.tokens) == 5


@pytest.mark.parametrize("when", ["close", "stream", "reopen"])
def test_a_session_that_goes_during_a_step_leaves_nothing(when: str) -> None:
    rig = Rig()
    rig.open(k=3)
    rig.open("t", k=3)
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan)
    if when == "close":
        rig.close("s")
    elif when == "stream":
        rig.drafter.close_stream(1)
    else:
        rig.open("s", epoch=2, tokens=(7, 8))
    rig.finish(plan, outcome)
    told = proposals(rig.settle())
    assert len(rig.engine.kv.slots) == {"close": 1, "stream": 0, "reopen": 2}[when]
    if when == "reopen":
        assert [list(p.tokens) for p in told] == [rig.naive([7, 8], 3)]


@pytest.mark.parametrize("keep", [0, 1, 2, 3, 4, 5, 6, 7])
def test_a_commit_during_a_step_keeps_what_still_fits(keep: int) -> None:
    rig = opened(k=3)
    rig.sent(3)
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan)
    true = rig.naive([1, 2, 3], 7)
    decided = [*true[:keep], other(true[keep])] if keep < 7 else true
    events = rig.commit(decided)
    events += rig.finish(plan, outcome)
    events += rig.settle()
    tokens = rig.committed["s"]
    assert [t for p in proposals(events) for t in p.tokens] == rig.naive(tokens, 3)
    assert rig.kv_tokens() == [*tokens, *rig.undecided()][:-1]


def test_agreeing_commit_during_a_step_uses_the_steps_tokens() -> None:
    rig = opened(k=3)
    rig.sent(3)
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan)
    rig.commit(rig.naive([1, 2, 3], 4))
    (told,) = proposals(rig.finish(plan, outcome))
    assert list(told.tokens) == rig.naive(rig.committed["s"], 3)
    assert rig.drafter.plan() is None


def test_tokens_of_a_step_that_was_running_at_a_fitting_commit_are_told_with_it() -> None:
    rig = opened(k=3)
    rig.sent(3)
    rig.step(interrupted=True)
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan, interrupted=True)  # the fifth token past the old commit is in the making
    assert proposals(rig.commit(rig.naive([1, 2, 3], 4))) == []
    (told,) = proposals(rig.finish(plan, outcome))
    assert list(told.tokens) == rig.naive(rig.committed["s"], 1)
    (rest,) = proposals(rig.settle(interrupted=True))  # from here on whole blocks again
    assert list(rest.tokens) == rig.naive([*rig.committed["s"], *told.tokens], 2)


def test_tokens_that_left_and_came_back_during_a_step() -> None:
    """The running step has fed all there is; the next one must have something to feed."""
    rig = Rig()
    rig.open(k=3)
    a, b, c = (other(token) for token in rig.naive([1, 2, 3], 3))
    rig.sent(3, block=[a, b, c])
    plan = rig.drafter.plan()
    assert plan is not None and plan.rows[0].tokens == (1, 2, 3, a, b, c)
    outcome = rig.run(plan)
    rig.sent(2, block=[a, other(b)])
    rig.commit([a, b])
    rig.finish(plan, outcome)
    rig.settle()
    assert rig.drafter.num_sessions == 1 and rig.undecided() == rig.naive(rig.committed["s"], 3)
