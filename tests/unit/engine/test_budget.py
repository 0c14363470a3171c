"""KvBudget of sessions that fork, against a model that counts blocks one by one."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.engine import KvBudget

BLOCK, TOTAL = 4, 30


class Naive:
    """Every block is an object; a session is a list of them; booked is what anybody holds. `lent[name]`: how many of its first blocks lie
    in memory that forks can reach: all, until the session was itself forked off or moved out."""

    def __init__(self):
        self.blocks: dict[int, list[object]] = {}
        self.lent: dict[int, int | None] = {}

    @property
    def used(self) -> int:
        return len({id(block) for blocks in self.blocks.values() for block in blocks})

    def room(self, name: int) -> int:
        return len(self.blocks[name]) * BLOCK

    def grow(self, name: int, tokens: int) -> None:
        blocks = self.blocks.setdefault(name, [])
        self.lent.setdefault(name, None)
        blocks += [object() for _ in range(-(-tokens // BLOCK) - len(blocks))]

    def fork(self, child: int, parent: int, tokens: int) -> None:
        lent = self.lent[parent]
        shared = tokens // BLOCK if lent is None else min(lent, tokens // BLOCK)
        self.blocks[child], self.lent[child] = self.blocks[parent][:shared], shared or None
        self.grow(child, tokens)

    def write(self, name: int, start: int, end: int) -> None:
        held = self.blocks[name]
        others = {id(b) for other, blocks in self.blocks.items() if other != name for b in blocks}
        lent, keep = self.lent[name], start // BLOCK
        bound = len(held) if lent is None else lent
        if any(id(b) in others for b in held[keep:bound]) or (lent is not None and keep < lent):
            self.blocks[name] = held[:keep] + [object() for _ in held[keep:]]
            self.lent[name] = keep
        self.grow(name, end)

    def release(self, name: int) -> None:
        self.blocks.pop(name, None)
        self.lent.pop(name, None)


class Forks(RuleBasedStateMachine):
    """Names are numbers; a rule that finds no room leaves everything as it was."""

    def __init__(self):
        super().__init__()
        self.budget, self.naive, self.names = KvBudget(TOTAL * BLOCK, block_tokens=BLOCK), Naive(), 0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.naive.blocks)))

    def attempt(self, act) -> bool:
        """Does it to the naive model; takes it back when that is more than there is."""
        before = {name: list(blocks) for name, blocks in self.naive.blocks.items()}, dict(self.naive.lent)
        act()
        if self.naive.used <= TOTAL:
            return True
        self.naive.blocks, self.naive.lent = before
        return False

    @rule(tokens=st.integers(0, 40))
    def begin(self, tokens):
        self.names += 1
        assert self.budget.grow(self.names, tokens) == self.attempt(lambda: self.naive.grow(self.names, tokens))

    @precondition(lambda self: self.naive.blocks)
    @rule(data=st.data(), tokens=st.integers(0, 60))
    def grow(self, data, tokens):
        name = self.pick(data)
        assert self.budget.grow(name, tokens) == self.attempt(lambda: self.naive.grow(name, tokens))

    @precondition(lambda self: self.naive.blocks)
    @rule(data=st.data())
    def fork(self, data):
        parent = self.pick(data)
        tokens = data.draw(st.integers(0, self.naive.room(parent)))
        self.names += 1
        assert self.budget.fork(self.names, parent, tokens) == self.attempt(lambda: self.naive.fork(self.names, parent, tokens))

    @precondition(lambda self: self.naive.blocks)
    @rule(data=st.data(), more=st.integers(1, 9))
    def write(self, data, more):
        name = self.pick(data)
        start = data.draw(st.integers(0, self.naive.room(name)))
        fits = self.attempt(lambda: self.naive.write(name, start, start + more))
        assert self.budget.write({name: (start, start + more)}) == fits

    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.integers(0, self.names + 1))
        self.budget.release(name)
        self.naive.release(name)

    @invariant()
    def agree(self):
        assert self.budget.used_blocks == self.naive.used <= TOTAL

    def teardown(self):
        for name in list(self.naive.blocks):
            self.budget.release(name)
        assert self.budget.used_tokens == 0


TestForks = Forks.TestCase
TestForks.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_the_prefix_of_many_answers_is_booked_once():
    budget = KvBudget(6400)
    assert budget.grow("first", 500) and budget.used_tokens == 512
    for i in range(7):
        assert budget.fork(i, "first", 500)
    assert budget.used_tokens == 512 + 7 * 64  # the last, partial block is each one's own
    assert budget.grow(0, 512) and budget.used_tokens == 512 + 7 * 64
    assert budget.grow(0, 513) and budget.used_tokens == 512 + 8 * 64
    budget.release("first")
    assert budget.used_tokens == 448 + 8 * 64
    for i in range(7):
        budget.release(i)
    assert budget.used_tokens == 0


def test_no_room_for_the_childs_own_part_changes_nothing():
    budget = KvBudget(256)
    assert budget.grow("a", 250)
    assert not budget.fork("b", "a", 250) and budget.used_tokens == 256
    assert budget.fork("b", "a", 192) and budget.used_tokens == 256
    assert not budget.grow("b", 193)
    budget.release("a")
    assert budget.used_tokens == 192 and budget.grow("b", 193)


def test_a_fork_of_a_fork_shares_what_its_parent_shares():
    budget = KvBudget(6400)
    assert budget.grow("a", 128) and budget.fork("b", "a", 128) and budget.grow("b", 256)
    assert budget.fork("c", "b", 256) and budget.used_tokens == 128 + 128 + 128
    budget.release("b")
    budget.release("a")
    assert budget.used_tokens == 256


def test_all_or_nothing():
    budget = KvBudget(512)
    assert budget.grow("a", 192) and budget.fork("b", "a", 192) and budget.grow("c", 256) and budget.used_tokens == 448
    assert not budget.write({"a": (64, 70), "c": (256, 257)}) and budget.used_tokens == 448
    assert budget.shared_tokens("a") == 192
    assert not budget.write({"a": (100, 120)}), "three blocks for b and two more for a"
    assert budget.write({"a": (130, 140)}) and budget.used_tokens == 512
    assert (budget.shared_tokens("a"), budget.shared_tokens("b"), budget.family_tokens("a")) == (128, 192, 192)


@pytest.mark.parametrize("tokens", [-1, 129])
def test_a_fork_takes_only_what_there_is(tokens):
    budget = KvBudget(640)
    budget.grow("a", 100)
    with pytest.raises(ValueError, match="must lie within the 128 booked for 'a'"):
        budget.fork("b", "a", tokens)
    assert budget.fork("b", "a", 100)
    with pytest.raises(ValueError, match="has room already"):
        budget.fork("b", "a", 100)
