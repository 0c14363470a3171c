"""Branches: short continuations that read the beginning of a slot where it is. A row of one is, bit for bit, that of a slot of its own."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import Engine, EngineConfig, OutOfRoom, Segment, load_engine_from_module, model
from specdec.engine.kv import KvStore, Slot
from tests.tiny import tiny_llama
from tests.unit.engine.play import feed, text, whole

TEXT = text(300)


def build(dtype: str = "float64", path: str = "auto", **options: object) -> Engine:
    config = EngineConfig(dtype=dtype, path=path, **{"kv_tokens": 4096, "self_test": False, **options})
    return load_engine_from_module(tiny_llama(3), config)


@pytest.fixture(params=["here", "as on a device"])
def where(request, monkeypatch):
    if request.param != "here":
        monkeypatch.setattr(model, "_device", lambda config: torch.device("cpu"))
    return request.param


def grown(engine: Engine, slot: int, base: int, tokens: list[int]) -> tuple[int, torch.Tensor]:
    """A branch and its rows, fed together with tokens of its slot and one by one."""
    branch = engine.kv.branch(slot, base)
    rows = []
    for i, token in enumerate(tokens):
        at = engine.kv.length(slot)
        _, mine = engine.forward([Segment(slot, at, (TEXT[at],), 1), Segment(branch, base + i, (token,), 0)])
        rows.append(mine)
    return branch, torch.cat(rows)


@pytest.mark.parametrize("dtype, path", [("float64", "lean"), ("int8", "lean")])
@pytest.mark.parametrize("base", [1, 31, 32, 63, 64, 130])
def test_a_row_of_a_branch_is_a_row_of_a_flat_slot(base, dtype, path):
    engine = build(dtype, path)
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:140])
    other = text(40, seed=5)
    branch, rows = grown(engine, slot, base, other[:8])
    assert torch.equal(rows, whole(engine, [*TEXT[:base], *other[:8]])[base:])
    more = feed(engine, branch, other[8:])  # many rows at once, over a border of blocks
    assert torch.equal(more, whole(engine, [*TEXT[:base], *other])[base + 8 :])
    assert torch.equal(feed(engine, slot, TEXT[148:160]), whole(engine, TEXT[:160])[148:])  # the slot did not notice


def test_the_generic_path_reads_branches_too():
    engine = build(path="generic")
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:40])
    _, rows = grown(engine, slot, 33, [4, 5, 6])
    assert (rows - whole(engine, [*TEXT[:33], 4, 5, 6])[33:]).abs().max() < 1e-9


@pytest.mark.parametrize("base", [1, 63, 64, 100])
def test_a_graft_is_as_if_it_had_been_fed(base, where):
    engine = build()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:110])
    used = engine.kv.used_tokens
    other = text(40, seed=5)
    near, far = engine.kv.branch(slot, base), engine.kv.branch(slot, base - 1)
    engine.forward([Segment(near, base, tuple(other[:7]), 7), Segment(far, base - 1, (4,), 1)])
    engine.kv.truncate(near, base + 5)
    engine.kv.graft(slot, near)
    assert engine.kv.length(slot) == base + 5
    line = [*TEXT[:base], *other]
    assert (feed(engine, slot, other[5:]) - whole(engine, line)[base + 5 :]).abs().max() < 1e-9
    engine.kv.close(far)
    assert engine.kv.used_tokens == max(used, -(-len(line) // 64) * 64)
    with pytest.raises(KeyError):
        engine.kv.length(near)


def test_what_a_branch_reads_stays(where):
    engine = build()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:50])
    early, late = engine.kv.branch(slot, 20), engine.kv.branch(slot, 40)
    for complaint, call in {
        "cut to 39: a branch reads 40": lambda: engine.kv.truncate(slot, 39),
        "behind 40 tokens and cannot be cut to 30": lambda: engine.kv.truncate(late, 30) if engine.kv.length(late) == 41 else None,
        "another branch reads 40": lambda: engine.kv.graft(slot, early),
        "is no branch of slot": lambda: engine.kv.graft(early, late),
        "is a branch and cannot have any": lambda: engine.kv.branch(early, 20),
        "a branch cannot read 51": lambda: engine.kv.branch(slot, 51),
        "cannot hold 85: 64 more at most": lambda: engine.forward([Segment(early, 20, (1,) * 65, 65)]),
    }.items():
        if "cut to 30" in complaint:
            feed(engine, late, [1])
        with pytest.raises(ValueError, match=complaint):
            call()
    assert [engine.kv.length(s) for s in (slot, early, late)] == [50, 20, 41]
    engine.kv.close(late)
    engine.kv.truncate(slot, 20)
    assert (feed(engine, early, [7, 8]) - whole(engine, [*TEXT[:20], 7, 8])[20:]).abs().max() < 1e-9
    engine.kv.close(slot)
    assert engine.kv.used_tokens == 0
    with pytest.raises(KeyError):
        engine.kv.length(early)


def test_without_room_nothing_changes(where):
    engine = build(kv_tokens=192)
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:60])
    branch = engine.kv.branch(slot, 60)
    feed(engine, branch, TEXT[60:124])
    feed(engine, slot, [1] * 4)
    rest = engine.kv.open()
    if engine.kv.used_tokens < 192:
        feed(engine, rest, TEXT[:64])
    with pytest.raises(OutOfRoom, match="no room for"):
        engine.kv.branch(slot, 59)
    with pytest.raises(OutOfRoom):
        engine.kv.graft(slot, branch)
    assert (engine.kv.length(slot), engine.kv.length(branch)) == (64, 124)
    engine.kv.close(rest)


def test_a_fork_may_have_branches_and_a_slot_with_branches_forks():
    engine = build()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:130])
    before = engine.kv.branch(slot, 100)
    child = engine.kv.fork(slot, 130)
    after = engine.kv.branch(child, 129)
    engine.kv.truncate(slot, 100)
    feed(engine, slot, [5, 5, 5])  # the slot parts from what its fork sees
    rows = engine.forward([Segment(before, 100, (9, 8), 0), Segment(after, 129, (9, 8), 0)])
    assert torch.equal(rows[0], whole(engine, [*TEXT[:100], 9, 8])[100:])
    assert torch.equal(rows[1], whole(engine, [*TEXT[:129], 9, 8])[129:])


def test_memory_of_branches_is_used_again():
    store = KvStore(2, 1, 4, torch.float64, window=256, total_tokens=1024)
    slot = store.open()
    store.reserve({slot: 10})
    store.slot(slot).length = 10
    memory = store.slot(store.branch(slot, 10)).memory
    for branch in list(store.slot(slot).branches):
        store.close(branch)
    assert store.slot(store.branch(slot, 3)).memory is memory


def test_a_branch_that_reads_its_slot_a_token_short_is_found(monkeypatch):
    """The broken twin: the parent's last token is missing."""
    layer = Slot.layer

    def short(self, number, keys):
        kept = layer(self, number, keys).clone()
        if self.parent is None:
            kept[:, :, keys - 1 :] = 0
        return kept

    monkeypatch.setattr(Slot, "layer", short)
    engine = build()
    slot = engine.kv.open()
    feed(engine, slot, TEXT[:140])
    _, rows = grown(engine, slot, 33, [1, 2])
    assert not torch.equal(rows, whole(engine, [*TEXT[:33], 1, 2])[33:])
