"""K/V memory and its accounting."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import EngineConfig, KvBudget, OutOfRoom, Segment, load_engine_from_module
from specdec.engine.kv import KvStore
from tests.tiny import tiny_engine, tiny_llama
from tests.unit.engine.play import feed, text, whole

TEXT = text(300)


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def test_rollback_to_any_length_equals_fresh():
    engine = tiny_engine(3)
    reference = whole(engine, TEXT)
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:200])
    for length in (199, 193, 192, 191, 130, 129, 128, 127, 65, 64, 63, 33, 31, 8, 5, 3, 1, 0):
        engine.kv.truncate(slot, length)
        assert engine.kv.length(slot) == length
        wrong = feed(engine, slot, [7] * 9)  # what is refused must leave no trace
        assert wrong.isfinite().all()
        engine.kv.truncate(slot, length)
        assert torch.equal(feed(engine, slot, TEXT[length : length + 6]), reference[length : length + 6])


@pytest.mark.parametrize("length", [-1, 11, 400])
def test_a_slot_is_never_cut_to_what_it_does_not_hold(length):
    engine = tiny_engine()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:10])
    with pytest.raises(ValueError, match="holds 10 tokens"):
        engine.kv.truncate(slot, length)
    assert engine.kv.length(slot) == 10


def test_a_closed_slot_is_gone():
    engine = tiny_engine()
    slot = engine.kv.open()
    engine.kv.close(slot)
    for call in (engine.kv.close, engine.kv.length):
        with pytest.raises(KeyError):
            call(slot)
    assert engine.kv.open() != slot


def test_out_of_room_changes_nothing():
    engine = tiny_engine(kv_tokens=256)
    a, b = engine.kv.open(), engine.kv.open()
    feed(engine, a, TEXT[:128])
    feed(engine, b, TEXT[:100])
    assert engine.kv.used_tokens == 256
    with pytest.raises(OutOfRoom):
        engine.forward([Segment(b, 100, (1,), 0), Segment(a, 128, (1,), 0)])
    assert (engine.kv.length(a), engine.kv.length(b), engine.kv.used_tokens) == (128, 100, 256)
    feed(engine, b, [1] * 28)  # the block was booked in full
    engine.kv.close(a)
    feed(engine, b, [1] * 100)
    assert engine.kv.used_tokens == 256


def test_memory_comes_with_tokens_and_goes_with_the_slot():
    store = KvStore(8, 4, 64, torch.float32, window=8192, total_tokens=8192)  # 128 MiB when full
    before = resident_bytes()
    slot = store.open()
    assert resident_bytes() - before < 4 << 20
    store.slot(slot).written(0, 4096).fill_(1.0)
    assert resident_bytes() - before > 48 << 20
    store.close(slot)
    assert resident_bytes() - before < 8 << 20


def test_new_memory_is_zero():
    store = KvStore(2, 1, 4, torch.float64, window=100, total_tokens=128)
    store.slot(store.open()).written(0, 100).fill_(1.0)
    assert not store.slot(store.open()).memory.any()


def test_memory_does_not_grow_round_by_round():
    engine = tiny_engine()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:60])
    for _ in range(200):
        feed(engine, slot, [1] * 5)
        engine.kv.truncate(slot, 60)
    assert engine.kv.used_tokens == 128


@pytest.mark.parametrize(
    "segment, complaint",
    [
        (Segment(0, 5, (1,), 0), "starts at 5, slot 0 holds 0"),
        (Segment(0, 0, (), 0), "no tokens"),
        (Segment(0, 0, (1, 128), 0), "ids outside 0..127"),
        (Segment(0, 0, (-1,), 0), "ids outside 0..127"),
        (Segment(0, 0, (1, 2), 3), "logits_from 3"),
        (Segment(0, 0, (1,) * 41, 0), "past the window of 40"),
    ],
)
def test_segments_that_do_not_fit_are_refused_before_anything_changes(segment, complaint):
    config = EngineConfig(dtype="float64", kv_tokens=256, window=40, self_test=False)
    engine = load_engine_from_module(tiny_llama(), config)
    a, b = engine.kv.open(), engine.kv.open()
    with pytest.raises(ValueError, match=complaint):
        engine.forward([Segment(b, 0, (1, 2), 0), segment])
    assert (engine.kv.length(a), engine.kv.length(b), engine.kv.used_tokens) == (0, 0, 0)


def test_one_slot_twice_and_too_many_rows_are_refused():
    engine = load_engine_from_module(tiny_llama(), EngineConfig(dtype="float64", max_rows=16, self_test=False))
    slot = engine.kv.open()
    with pytest.raises(ValueError, match="twice"):
        engine.forward([Segment(slot, 0, (1,), 0), Segment(slot, 0, (1,), 0)])
    with pytest.raises(ValueError, match="17 rows in one call, the engine was built for 16"):
        feed(engine, slot, [1] * 17)
    feed(engine, slot, [1] * 16)


def test_budget_books_whole_blocks():
    budget = KvBudget(640, block_tokens=64, watermark=0.8)
    assert (budget.total_tokens, budget.used_tokens, budget.utilization) == (640, 0, 0.0)
    assert budget.grow("a", 1) and budget.used_tokens == 64
    assert budget.grow("a", 64) and budget.used_tokens == 64
    assert budget.grow("a", 65) and budget.used_tokens == 128
    assert budget.grow("a", 3) and budget.used_tokens == 128  # never shrinks
    assert budget.grow("b", 512) and budget.used_tokens == 640
    assert not budget.grow("a", 129) and budget.used_tokens == 640
    assert not budget.grow("c", 1) and budget.grow("c", 0)
    budget.release("b")
    budget.release("b")
    assert budget.used_tokens == 128 and budget.utilization == 0.2


def test_budget_admits_below_the_watermark_only():
    budget = KvBudget(640, block_tokens=64, watermark=0.8)
    assert budget.can_admit(512, 0) and budget.can_admit(400, 112) and not budget.can_admit(512, 1)
    assert budget.grow("a", 448)
    assert budget.can_admit(64, 0) and not budget.can_admit(64, 1)
    assert budget.used_tokens == 448  # asking books nothing


@pytest.mark.parametrize("bad", [{"total_tokens": 63}, {"block_tokens": 0}, {"watermark": 0.0}, {"watermark": 1.1}])
def test_budget_refuses_nonsense(bad):
    with pytest.raises(ValueError):
        KvBudget(**{"total_tokens": 640, **bad})
    with pytest.raises(ValueError):
        KvBudget(640).grow("a", -1)


def test_what_the_budget_grants_the_store_has():
    """F69: rows are booked before the call, and a block's edge is no exception."""
    engine = tiny_engine(kv_tokens=640)
    budget = KvBudget(engine.info.kv_total_tokens)
    slots = {}
    for i, length in enumerate((63, 64, 65, 127, 128)):
        slots[i] = engine.kv.open()
        assert budget.grow(i, length)
        feed(engine, slots[i], TEXT[:length])
    for i, slot in slots.items():
        end = engine.kv.length(slot) + 5
        if budget.grow(i, end):
            feed(engine, slot, [1] * 5)
    assert engine.kv.used_tokens <= budget.used_tokens <= budget.total_tokens
