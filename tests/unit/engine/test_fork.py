"""Slots that fork: the same bits as slots that share nothing, whatever the others do; one memory for what they share."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterable

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from specdec.engine import KvBudget, OutOfRoom, Segment, kv, pages
from specdec.engine.kv import KvStore
from specdec.engine.paged import PagedStore
from tests.tiny import tiny_engine
from tests.unit.engine.play import feed, text, whole

TEXT = text(400)
PAGE_TOKENS = 8  # of the store below: a block of 64 is eight pages
DIM = 4096 // 8 // PAGE_TOKENS


def store(total: int = 2048, window: int = 400, **sizes: int) -> KvStore:
    return KvStore(sizes.get("layers", 2), sizes.get("heads", 1), sizes.get("dim", DIM), torch.float64, window=window, total_tokens=total)


def held_bytes(shared: KvStore, slots: Iterable[int]) -> int:
    """What forked slots take: pages of their files, mapped or not, and pages that forks made their own."""
    files = {id(file): file for file in (shared.slot(slot).file for slot in slots) if file is not None}
    total = sum(512 * os.fstat(file.pages._fd).st_blocks for file in files.values())
    inside = False
    with open("/proc/self/smaps") as smaps:
        for line in smaps:
            head = line.split(maxsplit=1)[0]
            if "-" in head:
                inside = "specdec-kv" in line
            elif inside and head == "Anonymous:":
                total += 1024 * int(line.split()[1])
    return total


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def mappings() -> int:
    """Of stores that somebody holds: one that an earlier test left to the collector is none."""
    if _mapped():
        gc.collect()
    return _mapped()


def _mapped() -> int:
    with open("/proc/self/maps") as file:
        return sum("specdec-kv" in line for line in file)


class Forks(RuleBasedStateMachine):
    """Slots hold numbers that no other write ever used; `told[slot]` = what each token must read as."""

    dim = DIM

    def make_store(self):
        return store(dim=self.dim)

    def put(self, slot: int, start: int, numbers: torch.Tensor) -> None:
        self.store.slot(slot).written(start, start + len(numbers)).copy_(numbers)

    def get(self, slot: int, length: int) -> torch.Tensor:
        memory = self.store.slot(slot).memory
        assert memory.isfinite().all()
        return memory[:, :, :length]

    def __init__(self):
        super().__init__()
        self.store = self.make_store()
        self.budget = KvBudget(2048)
        self.told: dict[int, list[float]] = {}
        self.next = 1.0

    def pick(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.told)))

    @precondition(lambda self: len(self.told) < 8)
    @rule()
    def begin(self):
        self.told[self.store.open()] = []

    @precondition(lambda self: self.told)
    @rule(data=st.data(), n=st.integers(1, 90))
    def write(self, data, n):
        slot = self.pick(data)
        start = self.store.length(slot)
        n = min(n, 400 - start)
        fits = self.budget.write({slot: (start, start + n)})
        try:
            self.store.reserve({slot: start + n})
        except OutOfRoom:
            assert not fits
            return
        assert fits
        numbers = [self.next + i for i in range(n)]
        self.next += n
        self.put(slot, start, torch.tensor(numbers, dtype=torch.float64)[:, None])
        self.store.slot(slot).length = start + n
        self.told[slot] += numbers

    @precondition(lambda self: self.told and len(self.told) < 8)
    @rule(data=st.data(), whole=st.booleans())
    def fork(self, data, whole):
        slot = self.pick(data)
        length = self.store.length(slot) if whole else data.draw(st.integers(0, self.store.length(slot)))
        try:
            child = self.store.fork(slot, length)
        except OutOfRoom:
            assert not self.budget.fork("refused", slot, length)
            return
        assert self.budget.fork(child, slot, length)
        self.told[child] = self.told[slot][:length]

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def roll_back(self, data):
        slot = self.pick(data)
        length = data.draw(st.integers(0, self.store.length(slot)))
        self.store.truncate(slot, length)
        del self.told[slot][length:]

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def close(self, data):
        slot = self.pick(data)
        self.store.close(slot)
        self.budget.release(slot)
        del self.told[slot]

    @invariant()
    def everybody_reads_what_it_wrote(self):
        for slot, numbers in self.told.items():
            assert (self.get(slot, len(numbers)) == torch.tensor(numbers, dtype=torch.float64)[:, None]).all(), slot
            assert self.store.length(slot) == len(numbers)

    @invariant()
    def room_is_counted_as_the_budget_does(self):
        assert self.store.used_tokens == self.budget.used_tokens <= 2048

    def teardown(self):
        for slot in self.told:
            self.store.close(slot)
        assert self.store.used_tokens == 0 and mappings() == 0


class Straddling(Forks):
    """A page holds the end of one head and the beginning of the next."""

    dim = 3


class Paged(Forks):
    """The pool of an accelerator."""

    def make_store(self):
        return PagedStore(2, 1, 2, torch.float64, torch.device("cpu"), total_tokens=2048)

    def put(self, slot, start, numbers):
        layer = self.store.pool.flatten(1, 2)
        layer[:, self.store.slot(slot).places(start, start + len(numbers))] = numbers[:, None]

    def get(self, slot, length):
        return self.store.pool.flatten(1, 2)[:, self.store.slot(slot).places(0, length)].transpose(1, 2)

    @invariant()
    def the_pool_is_never_short(self):
        assert self.store.total_tokens - 64 * len(self.store._free) <= self.store.used_tokens
        assert not self.store.pool[:, 0].any()


TestForks, TestStraddling, TestPaged = Forks.TestCase, Straddling.TestCase, Paged.TestCase
TestForks.settings = TestStraddling.settings = TestPaged.settings = settings(
    max_examples=15, stateful_step_count=25, deadline=None, derandomize=True
)


def test_memory_is_never_more_than_what_is_counted():
    """Random walks; pages, which whole blocks are made of here, against the books."""
    draw = random.Random(3)
    shared, token = store(4096), 4 * DIM * 8
    slots = [shared.open()]
    shared.reserve({slots[0]: 200})
    shared.slot(slots[0]).written(0, 200).fill_(1.0)
    shared.slot(slots[0]).length = 200
    for _ in range(50):
        slot = draw.choice(slots)
        length = shared.length(slot)
        match draw.randrange(4):
            case 0 if len(slots) < 8:
                slots.append(shared.fork(slot, draw.randrange(length + 1)))
            case 1 if len(slots) > 1:
                shared.close(slot)
                slots.remove(slot)
            case 2:
                shared.truncate(slot, draw.randrange(length + 1))
            case _:
                end = min(400, length + draw.randrange(1, 60))
                shared.reserve({slot: end})
                shared.slot(slot).written(length, end).fill_(2.0)
                shared.slot(slot).length = end
        assert held_bytes(shared, slots) <= shared.used_tokens * token
    for slot in slots:
        shared.close(slot)


def test_eight_forks_of_a_prompt_share_its_memory():
    shared = store(8192, 1024, layers=8, heads=4, dim=64)
    token = 8 * 8 * 64 * 8
    first = shared.open()
    shared.reserve({first: 500})
    shared.slot(first).written(0, 500).fill_(1.0)
    shared.slot(first).length = 500
    forks = [shared.fork(first, 500) for _ in range(7)]
    for slot in (first, *forks):
        assert bool((shared.slot(slot).memory[:, :, :500] == 1.0).all())
        shared.reserve({slot: 520})
        shared.slot(slot).written(500, 520).fill_(float(slot))
    assert shared.used_tokens == 8 * 64 + 64 + 7 * 2 * 64  # all cross a block's edge
    assert 520 * token < held_bytes(shared, (first, *forks)) <= shared.used_tokens * token < 0.5 * 8 * 576 * token
    shared.close(first)
    assert held_bytes(shared, forks) <= shared.used_tokens * token
    for slot in forks:
        assert bool((shared.slot(slot).memory[:, :, :500] == 1.0).all())
        shared.close(slot)
    assert mappings() == 0


def test_a_thousand_forks_leave_nothing_behind():
    shared = store(4096)
    gc.collect()
    before = descriptors()
    first = shared.open()
    shared.reserve({first: 130})
    shared.slot(first).length = 130
    for _ in range(250):
        forks = [shared.fork(first, 130) for _ in range(3)]
        forks.append(shared.fork(forks[0], 129))
        assert descriptors() == before + 1
        for slot in forks:
            shared.close(slot)
    assert mappings() == 1
    shared.close(first)
    assert (descriptors(), mappings(), shared.used_tokens) == (before, 0, 0)


def test_what_only_the_parent_needed_is_given_back():
    shared = store(4096)
    token = 4 * DIM * 8
    first = shared.open()
    shared.reserve({first: 400})
    shared.slot(first).written(0, 400).fill_(1.0)
    shared.slot(first).length = 400
    near, far = shared.fork(first, 128), shared.fork(first, 256)
    assert held_bytes(shared, (first, near, far)) == 400 * token
    shared.close(first)
    assert held_bytes(shared, (near, far)) == 256 * token
    shared.close(far)
    assert held_bytes(shared, (near,)) == 128 * token == shared.used_tokens * token
    shared.close(near)


def test_a_parent_that_rewrites_what_others_share():
    engine = tiny_engine(3)
    parent = engine.kv.open()
    feed(engine, parent, TEXT[:200])
    child = engine.kv.fork(parent, 150)
    engine.kv.truncate(parent, 70)
    other = [*TEXT[:70], *text(130, seed=5)]
    assert torch.equal(feed(engine, parent, other[70:]), whole(engine, other)[70:])
    assert torch.equal(feed(engine, child, TEXT[150:160]), whole(engine, TEXT[:160])[150:])
    engine.kv.close(parent)
    engine.kv.truncate(child, 100)
    grandchild = engine.kv.fork(child, 100)
    for slot in (child, grandchild):
        assert torch.equal(feed(engine, slot, TEXT[100:160]), whole(engine, TEXT[:160])[100:])


def test_a_slot_that_never_forks_is_no_file():
    shared = store()
    slot = shared.open()
    shared.reserve({slot: 100})
    assert mappings() == 0 and shared.slot(slot).file is None


@pytest.mark.parametrize("missing", ["can_share", "memfd", "mapping"])
def test_without_files_a_fork_is_a_copy(missing, monkeypatch):
    if missing == "can_share":
        monkeypatch.setattr(kv, "can_share", lambda: False)
    else:
        monkeypatch.setattr(pages.SharedFile, "private" if missing == "mapping" else "__init__", refused)
    engine = tiny_engine(3)
    parent = engine.kv.open()
    feed(engine, parent, TEXT[:150])
    child = engine.kv.fork(parent, 140)
    engine.kv.truncate(parent, 10)
    feed(engine, parent, [5] * 150)
    engine.kv.close(parent)
    assert torch.equal(feed(engine, child, TEXT[140:150]), whole(engine, TEXT[:150])[140:])


def refused(*_: object) -> None:
    raise OSError(24, "too many open files")


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 191, 200])
@pytest.mark.parametrize("first_to_go", ["parent", "child"])
def test_a_fork_computes_as_if_it_had_read_the_text_itself(length, first_to_go):
    """Parent and child write in one call, roll back, and one of them closes."""
    engine = tiny_engine(3)
    one, two = TEXT[:260], [*TEXT[:length], *text(60, seed=9)]
    references = whole(engine, one), whole(engine, two)
    parent = engine.kv.open()
    feed(engine, parent, one[:200])
    child = engine.kv.fork(parent, length)
    for n in (3, 1, 20):
        a, b = engine.kv.length(parent), engine.kv.length(child)
        rows = engine.forward([Segment(parent, a, (*one[a : a + n], 7, 7), 0), Segment(child, b, (*two[b : b + n], 8), 0)])
        assert torch.equal(rows[0][:n], references[0][a : a + n]) and torch.equal(rows[1][:n], references[1][b : b + n])
        engine.kv.truncate(parent, a + n)
        engine.kv.truncate(child, b + n)
    gone, stays, rest, rows_of = (parent, child, two, 1) if first_to_go == "parent" else (child, parent, one, 0)
    engine.kv.close(gone)
    at = engine.kv.length(stays)
    assert torch.equal(feed(engine, stays, rest[at:]), references[rows_of][at:])
    engine.kv.truncate(stays, length // 2)  # below what was shared
    assert torch.equal(feed(engine, stays, rest[length // 2 :]), references[rows_of][length // 2 :])
    engine.kv.close(stays)
    assert engine.kv.used_tokens == 0


def test_a_fork_without_room_changes_nothing():
    shared = store(256)
    slot = shared.open()
    shared.reserve({slot: 250})
    shared.slot(slot).length = 250
    with pytest.raises(OutOfRoom, match="0 of 256 are free"):
        shared.fork(slot, 250)
    assert shared.used_tokens == 256 and mappings() == 0
    with pytest.raises(ValueError, match="holds 250 tokens, 251 of them"):
        shared.fork(slot, 251)
