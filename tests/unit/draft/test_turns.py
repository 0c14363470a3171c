"""Orchestrators share the passes of a draft, whatever the numbers of their sessions. Broken twins beside them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from draft_service import planner
from specdec.hashing import prefix_hash
from specdec.terms import Sent
from tests.unit.draft.rig import Rig, proposals

PROMPT = tuple(range(1, 11))
MOST = 200  # passes


def crowd(prompt: int, sessions: int = 50, **limits: int) -> Rig:
    """Stream 1 with many sessions, stream 2 with one, the last to come."""
    rig = Rig(**{"step_rows": 32, "chunk_rows": 16, **limits})
    for i in range(sessions):
        rig.open(f"m{i}", [1 + (i + j) % 30 for j in range(prompt)])
    rig.apply(replace(rig.opened["m0"], session_id="one", tokens=PROMPT, prompt_length=len(PROMPT)), stream=2)
    return rig


def passes_until_told(rig: Rig) -> int:
    for count in range(1, MOST):
        _, told = rig.step(interrupted=True)
        if proposals(told, "one"):
            return count
    return MOST


def rounds_of_the_one(rig: Rig) -> list[int]:
    """Passes until its first block, and, that one in flight, until it has drafted all of the next."""
    first = passes_until_told(rig)
    session = rig.drafter.session(2, "one")
    assert session is not None
    rig.apply(Sent("one", len(PROMPT), prefix_hash(PROMPT), 3), stream=2)
    passes = 0
    while session.wanted and passes < MOST:
        rig.step(interrupted=True)
        passes += 1
    return [first, passes]


def test_prompts_of_one_orchestrator_do_not_starve_another() -> None:
    rig = crowd(prompt=100)
    assert rounds_of_the_one(rig) == [3, 4], "as many as if it were alone: one per token"
    rig.settle(interrupted=True)
    assert all(proposals(rig.events, f"m{i}") for i in range(50)), "and all come to theirs"


def test_twin_the_most_urgent_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "in_turns", lambda items, whose: list(items))
    assert passes_until_told(crowd(prompt=100)) > 100


def test_a_piece_of_a_prompt_leaves_room_for_the_other() -> None:
    """Also where a piece may be as long as a pass, and the other's turn is the second."""
    rig = crowd(prompt=100, sessions=3, step_rows=8, chunk_rows=64)
    assert rounds_of_the_one(rig)[0] <= 3 + len(PROMPT) // 4


def test_branches_are_shared_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def branches(rig: Rig) -> set[int]:
        """Streams that have some in the first pass that has branches of everybody's blocks to choose from."""
        rig.settle()
        for stream, name in [(1, f"m{i}") for i in range(50)] + [(2, "one")]:
            session = rig.drafter.session(stream, name)
            assert session is not None
            tokens = session.chain.tokens[: session.chain.committed]
            rig.apply(Sent(name, len(tokens), prefix_hash(tokens), 3), stream=stream)
            session.tree.seeds = [seed._replace(chance=0.9 if stream == 1 else 0.5) for seed in session.tree.seeds]
        plan = rig.drafter.plan()
        assert plan is not None
        rows = [row for row in plan.rows if row.branch]
        assert len(rows) == planner.BRANCH_ROWS
        return {rig.drafter._state.by_handle[row.handle].stream for row in rows}

    assert branches(crowd(prompt=10, step_rows=256, fanout=4)) == {1, 2}
    monkeypatch.setattr(planner, "in_turns", lambda items, whose: list(items))
    assert branches(crowd(prompt=10, step_rows=256, fanout=4)) == {1}
