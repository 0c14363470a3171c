"""A row that is not finite stays as it is and touches nobody: not its neighbours, not the rows before it, not what follows in its slot."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import Engine, EngineConfig, Segment, load_engine_from_module
from tests.tiny import tiny_gpt2, tiny_llama
from tests.unit.engine.play import feed, text, whole

BROKEN = 127  # the id whose embedding is not finite
TEXT = [token % BROKEN for token in text(40)]
EIGHT = [("int8", "lean"), ("int8 torch", "lean"), ("int8", "generic")]
CASES = [*EIGHT, ("int4", "lean"), ("float64", "lean"), ("float32", "lean"), ("float64", "generic")]


def build(dtype: str, path: str, value: float, make=tiny_llama) -> Engine:
    module = make(8, tie_word_embeddings=False)
    module.get_input_embeddings().weight[BROKEN, 3] = value
    dtype, _, torchs = dtype.partition(" ")
    return load_engine_from_module(module, EngineConfig(dtype=dtype, path=path, native=not torchs, kv_tokens=1024, self_test=False))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype, path", CASES)
def test_neighbours_and_earlier_rows_do_not_notice(dtype, path, value):
    engine = build(dtype, path, value)
    reference = whole(engine, TEXT)
    a, b = engine.kv.open(), engine.kv.open()
    feed(engine, a, TEXT[:10])
    broken, fine = engine.forward([Segment(a, 10, (*TEXT[10:13], BROKEN, 5), 0), Segment(b, 0, tuple(TEXT), 0)])
    exact = 0.0 if engine.info.path == "lean" or dtype == "int8" else 1e-9
    assert (fine - reference).abs().max() <= exact
    assert (broken[:3] - reference[10:13]).abs().max() <= exact
    assert not broken[3].isfinite().any()
    engine.kv.truncate(a, 13)
    assert (feed(engine, a, TEXT[13:20]) - reference[13:20]).abs().max() <= exact


@pytest.mark.parametrize("dtype, path", CASES)
def test_cached_numbers_are_always_finite(dtype, path):
    engine = build(dtype, path, float("nan"))
    slot = engine.kv.open()
    feed(engine, slot, [1, BROKEN, 2])
    assert engine.kv.slot(slot).memory.isfinite().all()


def test_overflow_in_the_middle_of_a_layer():
    """Keys that overflow in float32 break their own row only."""
    module = tiny_llama(8).float()
    module.model.embed_tokens.weight[BROKEN].fill_(0.0)
    module.model.embed_tokens.weight[BROKEN, 5] = 1.0
    module.model.layers[1].self_attn.k_proj.weight[0, 5] = 3e38
    engine = load_engine_from_module(module, EngineConfig(dtype="float32", kv_tokens=1024, self_test=False))
    slot = engine.kv.open()
    feed(engine, slot, [*TEXT[:5], BROKEN, *TEXT[5:9]])
    assert engine.kv.slot(slot).memory.isfinite().all()


def test_the_generic_path_of_another_family():
    engine = build("float64", "generic", float("nan"), tiny_gpt2)
    assert whole(engine, TEXT).isfinite().all()
    reference = whole(engine, TEXT)
    a, b = engine.kv.open(), engine.kv.open()
    broken, fine = engine.forward([Segment(a, 0, (1, BROKEN), 0), Segment(b, 0, tuple(TEXT), 0)])
    assert (fine - reference).abs().max() < 1e-9 and broken[0].isfinite().all() and not broken[1].isfinite().any()


def test_a_row_of_zeros_is_not_divided_by_nothing():
    module = tiny_llama(8)
    module.model.embed_tokens.weight[BROKEN].zero_()
    engine = load_engine_from_module(module, EngineConfig(kv_tokens=1024, self_test=False))
    assert whole(engine, [BROKEN, 1, 2, BROKEN]).isfinite().all()


def test_the_guard_comes_down_again():
    engine = build("int8 torch", "lean", float("nan"))
    slot = engine.kv.open()
    assert not feed(engine, slot, [1, BROKEN])[1].isfinite().any()
    engine.kv.truncate(slot, 1)
    assert torch.equal(feed(engine, slot, TEXT[1:9]), feed_fresh(engine, [1, *TEXT[1:9]])[1:])


def feed_fresh(engine: Engine, tokens: list[int]) -> torch.Tensor:
    return feed(engine, engine.kv.open(), tokens)
