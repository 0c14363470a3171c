"""Random command sequences against the draft that knows no cache, batch or lookahead: whatever is told, appended to the prefix it names,
is what that draft would say there; what the engine holds is what the decider believes; nothing grows without bound."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.chain import Chain
from draft_service.plan import DraftPlan, PlanOutcome
from specdec.hashing import prefix_hash
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

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.rig = Rig(window=60, step_rows=12, chunk_rows=4, lookahead_floor=self.random.choice((0.0, 0.1, 1.0)))
        self.epochs = dict.fromkeys(NAMES, 0)
        self.pending: tuple[DraftPlan, PlanOutcome] | None = None
        self.checked = 0

    def act(self, kind: int) -> None:
        name = self.random.choice(NAMES)
        session = self.rig.drafter.session(1, name)
        if kind == 0 or session is None:
            self.open(name)
        elif kind == 44:
            self.rig.close(name)
        else:
            (self.step, self.step, self.begin, self.sent, self.agree, self.differ, self.foreign, self.pause, self.stale)[kind % 9](name)
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
        assert self.rig.drafter.num_sessions <= len(NAMES)

    def check_proposal(self, proposal: Any) -> None:
        name = proposal.session_id
        assert proposal.epoch == self.epochs[name]
        prefix = self.rig.session(name).chain.tokens[: proposal.prefix_length]
        assert prefix_hash(prefix) == proposal.prefix_hash and len(prefix) == proposal.prefix_length
        assert list(proposal.tokens) == self.rig.naive(prefix, len(proposal.tokens), name)
        assert len(proposal.confidences) == len(proposal.tokens)
        self.checked += 1

    def check_chain(self, name: str, chain: Chain) -> None:
        assert chain.tokens[: chain.committed] == self.rig.committed[name]
        assert chain.committed <= chain.pushed <= len(chain)
        assert len(chain) - chain.committed <= BUDGET + 4  # a block from elsewhere may exceed the budget
        assert 0 <= chain.kv < len(chain)
        slot = self.rig.stepper._slots.get(self.rig.session(name).handle)
        if self.pending is None and slot is not None:
            assert self.rig.engine.kv.slots[slot][: chain.kv] == chain.tokens[: chain.kv]


@given(seed=st.integers(0, 2**32 - 1), kinds=st.lists(st.integers(0, 44), min_size=20, max_size=120))
@settings(max_examples=300, deadline=None)
def test_everything_told_is_what_a_naive_draft_would_say(seed: int, kinds: list[int]) -> None:
    walk = Walk(seed)
    for kind in kinds:
        walk.act(kind)


def test_the_walk_reaches_what_it_is_meant_to_check() -> None:
    walk = Walk(3)
    kinds = random.Random(5)
    for _ in range(3000):
        walk.act(kinds.randrange(45))
    assert walk.checked > 200


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
