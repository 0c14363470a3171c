"""A row's bits depend on its own text and position only; and variants that break the rule are caught by the same property."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec.engine import Engine, EngineConfig, load_engine_from_module, model, quantize
from specdec.engine.attention import Attention, Group, Plan
from specdec.engine.batch import Layout
from specdec.engine.kv import KvStore
from tests.tiny import tiny_llama, tiny_qwen3
from tests.unit.engine.play import Turn, played, text, whole

WINDOW = 600
TEXT = text(WINDOW)
NEAR = [*range(10), *range(27, 37), *range(58, 70), *range(124, 132), *range(250, 260), *range(500, 520), *range(570, WINDOW)]


def build(dtype: str, path: str = "lean", **options: object) -> Engine:
    config = EngineConfig(dtype=dtype, path=path, kv_tokens=4096, **{"self_test": False, **options})
    return load_engine_from_module(tiny_llama(5, window=WINDOW), config)


@cache
def subject(dtype: str, path: str) -> tuple[Engine, torch.Tensor]:
    engine = build(dtype, path)
    return engine, whole(engine, TEXT)


turns = st.lists(
    st.builds(
        Turn,
        n=st.integers(1, 20),
        refused=st.lists(st.integers(0, 127), max_size=5).map(tuple),
        neighbours=st.lists(st.integers(1, 6), max_size=3).map(tuple),
        before=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def fitted(start: int, drawn: list[Turn]) -> list[Turn]:
    """The turns that fit into the window, refused tokens included."""
    kept, position = [], start
    for turn in drawn:
        n = min(turn.n, WINDOW - position)
        if n > 0:
            kept.append(Turn(n, turn.refused[: WINDOW - position - n], turn.neighbours, turn.before))
        position += n
    return kept


@pytest.mark.parametrize("dtype, path", [("int8", "lean"), ("float64", "lean"), ("float32", "lean"), ("int8", "generic")])
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(start=st.sampled_from(NEAR), drawn=turns, chunk=st.sampled_from([1, 7, 8, 64, 100, 256]))
def test_a_row_is_the_same_in_any_batch(dtype, path, start, drawn, chunk):
    engine, reference = subject(dtype, path)
    fit = fitted(start, drawn)
    rows = played(engine, TEXT, start, fit, chunk if start < 100 else max(chunk, 64))
    assert torch.equal(rows, reference[start : start + len(rows)])
    assert engine.kv.used_tokens == 0


def straddling(engine: Engine) -> bool:
    """The property on a handful of fixed cases around block edges: enough to catch the broken twins below."""
    reference = whole(engine, TEXT[:150])
    ways = [
        played(engine, TEXT, 20, [Turn(1)] * 130),
        played(engine, TEXT, 5, [Turn(3, (9, 9, 9)), Turn(20), Turn(7, (1,)), *[Turn(5, (2, 3))] * 23]),
        played(engine, TEXT, 50, [Turn(4, (), (3, 2), before=bool(i % 2)) for i in range(25)]),
    ]
    return all(torch.equal(rows, reference[150 - len(rows) :]) for rows in ways)


class OneScale(quantize.QuantRows):
    """Dynamic int8 as libraries do it: one scale for the whole matrix."""

    def fill(self, x):
        whole, _ = super().fill(x)
        top = x.abs().amax().expand(len(x), 1)
        whole[:, : x.shape[1]] = x / top
        return whole, top


class FollowsTheCall(Attention):
    """Attention over exactly the keys that are there when the call ends."""

    def plan(self, layout: Layout, store: KvStore) -> Plan:
        plan = super().plan(layout, store)
        groups = iter(plan.groups)
        cut = []
        for segment in layout.segments:
            end, keys = segment.start + len(segment.tokens), segment.start
            while keys < end:
                group = next(groups)
                keys = group.mask.shape[-1]
                seen = min(end, keys)
                views = [(k[:, :, :seen], v[:, :, :seen]) for k, v in group.keys_values]
                cut.append(Group(group.blocks, views, group.mask[..., :seen]))
        return plan._replace(groups=cut)


@pytest.mark.parametrize("dtype, native", [("int8", True), ("int8", False), ("float64", False), ("float32", False)])
def test_the_fixed_cases_hold(dtype, native):
    assert straddling(build(dtype, native=native))


def test_twin_one_scale_for_all_rows_is_caught(monkeypatch):
    monkeypatch.setattr(quantize, "QuantRows", OneScale)
    assert not straddling(build("int8", native=False))
    assert not build("int8", native=False, self_test=True).info.batch_invariant


@pytest.mark.parametrize("dtype", ["int8", "float64"])
def test_twin_key_count_that_follows_the_call_is_caught(monkeypatch, dtype):
    monkeypatch.setattr(model, "Attention", FollowsTheCall)
    assert not straddling(build(dtype, native=False))


def test_twin_products_of_any_height_are_caught(monkeypatch):
    monkeypatch.setattr(quantize, "SLAB_ROWS", 10**6)
    monkeypatch.setattr(torch.nn.functional, "pad", lambda x, *_: x)
    assert not straddling(build("float64"))
    assert not build("float64", self_test=True).info.batch_invariant


@pytest.mark.parametrize("dtype, path, claim", [("int8", "lean", True), ("float64", "lean", True), ("float32", "generic", False)])
def test_the_engine_says_what_it_measured(dtype, path, claim):
    engine = build(dtype, path, self_test=True)
    assert engine.info.batch_invariant is claim
    assert engine.kv.used_tokens == 0


def test_without_the_self_test_nothing_is_claimed():
    assert not build("int8").info.batch_invariant


def test_two_threads_split_the_work_and_not_the_sums():
    try:
        assert straddling(build("int8", threads=2))
    finally:
        torch.set_num_threads(1)


def test_far_positions():
    """Where the precomputed masks have to grow."""
    tokens = text(1300)
    engine = load_engine_from_module(tiny_llama(5, window=1300), EngineConfig(dtype="int8", kv_tokens=4096, self_test=False))
    reference = whole(engine, tokens)
    for start in (1018, 1020, 1279, 1290):
        rows = played(engine, tokens, start, [Turn(3, (1, 1)), Turn(1), Turn(6)])
        assert torch.equal(rows, reference[start : start + len(rows)])


def test_query_norms_too():
    engine = load_engine_from_module(tiny_qwen3(6), EngineConfig(dtype="int8", kv_tokens=4096, self_test=False))
    assert straddling(engine)
