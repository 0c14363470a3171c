"""Random command sequences against the draft that knows no cache, batch or lookahead: whatever is told, appended to the prefix it names,
is what that draft would say there, or a guess that a branch begins with, told after what the draft says; what the engine holds is what the
decider believes; nothing grows without bound."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.chain import Chain
from draft_service.plan import DraftPlan, PlanOutcome
from draft_service.session import Session
from draft_service.tree import Tree
from specdec.hashing import prefix_hash
from specdec.sampling import Sampler
from specdec.terms import Commit, DraftMethod, Pause, RejectionMethod, Resume, SamplingParams, Sent
from tests.unit.draft.rig import VOCAB, Rig, other, proposals

NAMES = ("a", "b", "c")
BUDGET = 9
METHODS: list[dict[str, Any]] = [
    {"sampling": SamplingParams(temperature=0.0), "draft_method": DraftMethod.GREEDY},
    {"sampling": SamplingParams(temperature=1.0, top_k=9), "draft_method": DraftMethod.GUMBEL},
    {
        "sampling": SamplingParams(temperature=0.8, frequency_penalty=0.5),
        "draft_method": DraftMethod.PROBABILISTIC,
        "rejection_method": RejectionMethod.STANDARD,
    },
]


class Walk:
    """One random walk. `pending` = a step that runs while commands arrive."""

    def __init__(self, seed: int, fanout: int | None = None) -> None:
        self.random = random.Random(seed)
        self.fanout = fanout if fanout is not None else self.random.choice((0, 2, 5, 8))
        floors = {"lookahead_floor": self.random.choice((0.0, 0.1, 1.0)), "branch_floor": self.random.choice((0.0, 0.01, 0.1))}
        total = self.random.choice((10_000, 300))
        self.rig = Rig(window=60, step_rows=12, chunk_rows=4, total=total, fanout=self.fanout, **floors)
        self.epochs = dict.fromkeys(NAMES, 0)
        self.pending: tuple[DraftPlan, PlanOutcome] | None = None
        self.checked = self.guesses = self.grafts = 0

    def act(self, kind: int) -> None:
        name = self.random.choice(NAMES)
        session = self.rig.drafter.session(1, name)
        if kind == 0 or session is None:
            self.open(name)
        elif kind == 44:
            self.rig.close(name)
        else:
            (self.step, self.step, self.begin, self.sent, self.agree, self.guessed, self.differ, self.foreign, self.pause, self.stale)[
                kind % 10
            ](name)
        self.check()

    def open(self, name: str) -> None:
        self.epochs[name] += 1
        tokens = [self.random.randrange(VOCAB) for _ in range(self.random.randint(1, 20))]
        index = NAMES.index(name)
        self.rig.open(name, tokens, k=self.random.randint(1, 4), budget=BUDGET, epoch=self.epochs[name], seed=index, **METHODS[index])

    def step(self, name: str) -> None:
        if self.pending is not None:
            plan, outcome = self.pending
            self.pending = None
            self.rig.finish(plan, outcome)
        else:
            self.rig.step(interrupted=self.random.random() < 0.5)

    def begin(self, name: str) -> None:
        if self.pending is None and (plan := self.rig.drafter.plan()) is not None:
            self.pending = plan, self.rig.run(plan, self.random.random() < 0.5)

    def sent(self, name: str) -> None:
        self.rig.sent(self.random.randint(0, min(4, len(self.rig.undecided(name)))), name)

    def agree(self, name: str) -> None:
        ahead = self.rig.undecided(name)
        if ahead:
            self.rig.commit(ahead[: self.random.randint(1, len(ahead))], name)

    def differ(self, name: str) -> None:
        ahead = self.rig.undecided(name)
        keep = self.random.randint(0, len(ahead))
        last = other(ahead[keep]) if keep < len(ahead) else self.random.randrange(VOCAB)
        self.rig.commit([*ahead[:keep], last], name)

    def guessed(self, name: str) -> None:
        """One of the branches was right."""
        session = self.rig.session(name)
        if not session.tree.branches:
            return self.sent(name)
        branch = self.random.choice(list(session.tree.branches.values()))
        chain = session.chain
        told = branch.tokens[1 : branch.told]
        more = branch.tokens[1 : self.random.choice((1, 1, 1, len(branch.tokens)))]
        self.rig.commit([*chain.tokens[chain.committed : branch.base], branch.tokens[0], *more], name)
        if len(more) < len(told) and (held := self.rig.drafter.session(1, name)) is not None:
            assert self.rig.undecided(name)[: len(told) - len(more)] == told[len(more) :], "what was told is dropped"
            assert held.tree.branches == {}
        self.grafts += 1

    def foreign(self, name: str) -> None:
        ahead = self.rig.undecided(name)
        block = [*ahead[: self.random.randint(0, 2)], self.random.randrange(VOCAB), self.random.randrange(VOCAB)]
        self.rig.sent(len(block), name, block)

    def pause(self, name: str) -> None:
        self.rig.apply(self.random.choice((Pause(name), Resume(name), Resume(name))))

    def stale(self, name: str) -> None:
        """Late repeats, which change nothing, and now and then nonsense, which ends the session."""
        tokens = self.rig.committed[name]
        length = self.random.randint(1, len(tokens))
        before = list(self.rig.session(name).chain.tokens)
        if self.random.random() < 0.1:
            self.rig.apply(Commit(name, length, 12345, (1,)))
            return
        hash_ = prefix_hash(tokens[:length])
        if length < len(tokens):
            self.rig.apply(Commit(name, length, hash_, tuple(tokens[length : length + 2])))
            self.rig.apply(Sent(name, length, hash_, 2))
            assert self.rig.session(name).chain.tokens == before

    def check(self) -> None:
        for stream, event in self.rig.events:
            assert stream == 1
            for proposal in proposals([event], event.session_id):
                self.check_proposal(proposal)
        self.rig.events.clear()
        for name in NAMES:
            if (session := self.rig.drafter.session(1, name)) is not None:
                self.check_chain(name, session.chain)
                self.check_branches(name, session.tree)
        sessions = [s for name in NAMES if (s := self.rig.drafter.session(1, name)) is not None]
        handles = {s.handle for s in sessions} | {handle for s in sessions for handle in s.tree.branches}
        assert set(self.rig.room.booked) == handles, "room of what is gone"
        assert self.rig.drafter.num_sessions <= len(NAMES)

    def check_proposal(self, proposal: Any) -> None:
        name = proposal.session_id
        assert proposal.epoch == self.epochs[name]
        prefix = self.prefix_of(name, proposal)
        tokens, chain = list(proposal.tokens), self.rig.session(name).chain
        first = self.rig.naive(prefix, 1, name)
        if tokens[:1] != first:
            place = len(prefix)
            assert tokens[0] in self.possible(name, prefix), "a guess has a reason"
            assert chain.committed <= place < chain.pushed and chain.tokens[place] != tokens[0], "a guess is told before what was drawn"
            prefix, tokens = [*prefix, tokens.pop(0)], tokens
            assert tokens, "a guess and nothing behind it"
            self.guesses += 1
        assert tokens == self.rig.naive(prefix, len(tokens), name)
        assert len(proposal.confidences) == len(proposal.tokens)
        self.checked += 1

    def prefix_of(self, name: str, proposal: Any) -> list[int]:
        """Of the chain or of a branch."""
        session = self.rig.session(name)
        lines = [session.chain.tokens, *([*session.chain.tokens[: b.base], *b.tokens] for b in session.tree.branches.values())]
        (prefix, *_) = [
            line[: proposal.prefix_length] for line in lines if prefix_hash(line[: proposal.prefix_length]) == proposal.prefix_hash
        ]
        assert len(prefix) == proposal.prefix_length
        return prefix

    def possible(self, name: str, prefix: list[int]) -> list[int]:
        """All that may follow."""
        command = self.rig.opened[name]
        sampler = Sampler(command.sampling, command.seed, VOCAB, (), command.tokens[: command.prompt_length])
        row = sampler.adjusted(self.rig.engine.script(prefix), prefix[command.prompt_length :])
        return [token for token in range(VOCAB) if row[token] > -math.inf]

    def check_chain(self, name: str, chain: Chain) -> None:
        assert chain.tokens[: chain.committed] == self.rig.committed[name]
        assert chain.committed <= chain.pushed <= len(chain)
        assert len(chain) - chain.committed <= BUDGET + 4  # a block from elsewhere may exceed the budget
        assert 0 <= chain.kv < len(chain)
        session = self.rig.session(name)
        slot = self.rig.stepper._slots.get(session.tree.graft or session.handle)
        if self.pending is None and slot is not None:
            assert self.rig.engine.kv.slots[slot][: chain.kv] == chain.tokens[: chain.kv]

    def check_branches(self, name: str, tree: Tree) -> None:
        chain = tree.chain
        assert len(tree.branches) <= max(0, self.fanout - 1) and not tree.dead
        assert len({(b.base, b.tokens[0]) for b in tree.branches.values()}) == len(tree.branches)
        for branch in tree.branches.values():
            assert chain.committed <= branch.base <= chain.kv and branch.tokens[0] != chain.tokens[branch.base]
            assert len(branch) - chain.committed <= BUDGET and 0 <= branch.kv < len(branch.tokens)
            assert branch.told <= len(branch.tokens)
            line = [*chain.tokens[: branch.base], *branch.tokens]
            assert line[branch.base + 1 :] == self.rig.naive(line[: branch.base + 1], len(branch.drafts), name)
            slot = self.rig.stepper._slots.get(branch.handle)
            if self.pending is None and slot is not None:
                assert self.rig.engine.kv.slots[slot][: branch.base + branch.kv] == line[: branch.base + branch.kv]


@given(seed=st.integers(0, 2**32 - 1), kinds=st.lists(st.integers(0, 44), min_size=20, max_size=120))
@settings(max_examples=300, deadline=None)
def test_everything_told_is_what_a_naive_draft_would_say(seed: int, kinds: list[int]) -> None:
    walk = Walk(seed)
    for kind in kinds:
        walk.act(kind)


def test_the_walk_reaches_what_it_is_meant_to_check() -> None:
    walk = Walk(3, fanout=6)
    kinds = random.Random(5)
    for _ in range(3000):
        walk.act(kinds.randrange(45))
    assert walk.checked > 200 and walk.guesses > 50 and walk.grafts > 20


def test_a_chain_that_keeps_kv_of_a_replaced_token_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a cut that forgets to roll K/V back."""
    honest = Chain._overwrite

    def forgetful(self: Chain, start: int, tokens: Any) -> int:
        kv = self.kv
        dropped = honest(self, start, tokens)
        self.kv = min(kv, len(self.tokens) - 1)
        return dropped

    monkeypatch.setattr(Chain, "_overwrite", forgetful)
    with pytest.raises(AssertionError):
        test_the_walk_reaches_what_it_is_meant_to_check()


def test_a_graft_that_the_engine_never_hears_of_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Tree._grow

    def forgetful(self: Tree, branch: Any) -> int:
        dropped = honest(self, branch)
        self.graft = None
        return dropped

    monkeypatch.setattr(Tree, "_grow", forgetful)
    with pytest.raises(AssertionError):
        test_the_walk_reaches_what_it_is_meant_to_check()


def test_a_guess_that_is_told_before_what_was_drawn_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: Session) -> list[Any]:
        piece = self._due()
        told = [] if piece is None else [self._proposal(piece)]
        return [*told, *(self._proposal(branch.take_untold()) for branch in self.tree.branches.values() if branch.untold)]

    monkeypatch.setattr(Session, "told", hasty)
    with pytest.raises(AssertionError, match="told before what was drawn"):
        test_the_walk_reaches_what_it_is_meant_to_check()


def test_branches_that_outlive_a_change_of_their_prefix_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tree, "clear", lambda self: None)
    with pytest.raises(AssertionError):
        test_the_walk_reaches_what_it_is_meant_to_check()
