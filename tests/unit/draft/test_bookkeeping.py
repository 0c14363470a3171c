"""What the draft's decider remembers of sessions that are gone, what room it books, and what it counts."""

from __future__ import annotations

from typing import Any

from specdec.hashing import prefix_hash
from specdec.terms import Commit, Pause, Refused, Resume, Resync
from tests.unit.draft.rig import Rig, other, plain, proposals

UNKNOWN = Commit("nobody", 3, 1, (4,))


def rejected(rig: Rig) -> list[Any]:
    return [event for _, event in plain(rig.drafter.reject(1, "s", 0, "unreadable"))]


def test_what_ended_is_told_once_until_it_begins_again_or_its_stream_ends() -> None:
    rig = Rig()
    rig.open()
    assert rejected(rig) == [Refused("s", 1, "unreadable", 0)] and rejected(rig) == []
    rig.open(epoch=2)
    assert rejected(rig) == [Refused("s", 2, "unreadable", 0)] and rejected(rig) == []
    assert rig.apply(UNKNOWN) == [Resync("nobody", 0, 0)] and rig.apply(UNKNOWN) == []
    rig.drafter.close_stream(1)
    assert rig.apply(UNKNOWN) == [Resync("nobody", 0, 0)]


def test_room_is_booked_for_what_a_session_may_draft_and_no_more() -> None:
    rig = Rig(total=20, window=18)
    assert rig.open(tokens=(1,) * 10, budget=16) == [] and rig.room.used_tokens == 18, "the window ends it"
    assert rig.commit((4, 5)) == [] and rig.room.used_tokens == 18
    rig = Rig(total=20)
    assert rig.open(budget=17) == [], "the first may have all there is"
    rig = Rig(total=100)
    assert rig.open("a", tokens=(1,) * 34) == []
    assert rig.open("b", tokens=(1,) * 29) == [Refused("b", 1, "no room for keys and values", 1000)], "beside others some is kept free"
    rig = Rig(total=40)
    assert rig.open(tokens=(1,) * 30) == [Refused("s", 1, "no room for keys and values", 0)], "it will never fit"


def test_a_session_that_goes_on_tells_at_once_what_it_has() -> None:
    rig = Rig()
    rig.open()
    plan = rig.drafter.plan()
    assert plan is not None
    rig.apply(Pause("s"))
    assert rig.finish(plan, rig.run(plan)) == []
    assert len(proposals(rig.apply(Resume("s")))) == 1


def test_the_block_length_is_what_the_last_commit_wants_and_no_longer_than_at_first() -> None:
    rig = Rig()
    rig.open(k=3)
    for number, (wanted, k) in enumerate(((2, 2), (9, 3), (None, 3), (1, 1))):
        tokens = rig.session().chain.tokens[: 3 + number]
        rig.apply(Commit("s", len(tokens), prefix_hash(tokens), (7,), num_speculative_tokens=wanted or 0))
        assert rig.session().k == k


def test_behind_a_plain_token_the_draft_looks_ahead_whatever_it_thinks_of_blocks() -> None:
    rig = Rig(lookahead_floor=1.0)
    rig.open()
    rig.drafter._outlook[True].learn(1.0, False)
    rig.sent(0)
    assert rig.session().ahead


def test_what_was_drawn_in_vain_is_counted() -> None:
    rig = Rig()
    rig.open(k=3)
    rig.settle()
    rig.sent(3, block=[other(token) for token in rig.undecided()])
    assert rig.drafter.tally.wasted_tokens == 3
    plan = rig.drafter.plan()
    assert plan is not None
    outcome = rig.run(plan)
    rig.commit([9])
    rig.finish(plan, outcome)
    drawn = sum(len(row.drafts) for row in outcome.rows)
    assert drawn and rig.session().drafted == 0 and rig.drafter.tally.wasted_tokens == 3 + drawn
