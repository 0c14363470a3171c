"""Weights of 4 bits: what is packed, products against a slow reference bit for bit, and the engine that has them."""

from __future__ import annotations

import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine import Engine, EngineConfig, load_engine_from_module, model
from specdec.engine.lean import LeanModel
from specdec.engine.native import NativeModel
from specdec.engine.native import model as native_model
from specdec.engine.native.kernels import Kernels, LinearStruct
from tests.compiled import a_cpu_that_runs_them  # noqa: F401  (a fixture)
from tests.tiny import tiny_gpt2, tiny_llama, tiny_qwen3
from tests.unit.engine.play import Turn, played, text, whole

TEXT = text(150)
LEVELS = np.array([-127, -88, -67, -50, -36, -23, -12, 0, 10, 20, 31, 43, 56, 71, 92, 127])


def engine(make=tiny_llama, seed: int = 3, **options: object) -> Engine:
    config = EngineConfig(**{"dtype": "int4", "kv_tokens": 4096, "self_test": False, **options})
    return load_engine_from_module(make(seed), config)


def packed(library: Kernels, weight: np.ndarray, importance: np.ndarray | None = None) -> np.ndarray:
    out, width = weight.shape
    room = torch.full((-(-out // 64) * 64 * width // 32 * 18,), 255, dtype=torch.uint8)
    weighed = torch.ones(width) if importance is None else torch.from_numpy(importance)
    library.pack_coded(torch.from_numpy(weight), weighed, room)
    return room.numpy()


def product(library: Kernels, weights: np.ndarray, rows: np.ndarray, out: int, bias: np.ndarray | None = None) -> np.ndarray:
    kept = None if bias is None else torch.nn.functional.pad(torch.from_numpy(bias), (0, 63))
    linear = LinearStruct(weights.ctypes.data, None, None if kept is None else kept.data_ptr(), out, rows.shape[1], 1)
    return library.product(linear, torch.from_numpy(rows)).numpy()


def unpacked(weights: np.ndarray, out: int, width: int) -> tuple[np.ndarray, np.ndarray]:
    """(levels [out, groups, 32], scales [out, groups] float32), one byte after the other as product4.h says where it lies."""
    groups = width // 32
    levels, scales = np.empty((out, groups, 32), dtype=np.int64), np.empty((out, groups), dtype=np.float32)
    for o in range(out):
        for g in range(groups):
            block = weights[((o // 64 * 2 + o % 64 // 32) * groups + g) * 576 :][:576]
            column = o % 32
            scales[o, g] = np.array([0, 0, *block[2 * column : 2 * column + 2]], dtype=np.uint8).view(np.float32)[0]
            for i in range(32):
                byte = block[64 + i // 8 * 128 + column // 16 * 64 + column % 16 * 4 + i % 4]
                levels[o, g, i] = LEVELS[byte >> 4 if i % 8 >= 4 else byte & 15]
    return levels, scales


def slow_product(levels: np.ndarray, scales: np.ndarray, rows: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Exact sums in a group; the groups one after the other, each multiplied and added with one rounding."""
    one = np.float32(127)
    top = np.maximum(np.abs(rows).max(1), np.float32(1e-30))
    q = np.rint(rows * (one / top)[:, None]).astype(np.int64).reshape(len(rows), -1, 32)
    total = np.zeros((len(rows), len(levels)), dtype=np.float32)
    for g in range(levels.shape[1]):
        sums = (q[:, g] @ levels[:, g].T).astype(np.float64)
        total = (sums * scales[:, g] + total).astype(np.float32)  # the product has 32 bits at most, so one rounding matters
    y = total * (top / one)[:, None]
    return y if bias is None else y + bias


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    out=st.sampled_from([1, 31, 33, 64, 70, 130]),
    width=st.sampled_from([32, 64, 576]),
    count=st.integers(1, 20),
    biased=st.booleans(),
    positive=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_the_slow_one_bit_for_bit(libraries, out, width, count, biased, positive, seed):
    draw = np.random.default_rng(seed)
    weight, rows = (draw.standard_normal((n, width)).astype(np.float32) for n in (out, count))
    if positive:  # sums so long that their products with a scale would be rounded
        weight, rows = np.abs(weight) + 1, np.abs(rows) + 1
    weight[0, :32] = 0.0
    rows[0] *= 1e4  # an outlier of a neighbour
    rows[-1] = 0.0
    bias = draw.standard_normal(out).astype(np.float32) if biased else None
    importance = draw.random(width).astype(np.float32)
    every = [packed(library, weight, importance) for library in libraries.values()]
    want = slow_product(*unpacked(every[0], out, width), rows, bias)
    for library, weights in zip(libraries.values(), every, strict=True):
        assert np.array_equal(weights, every[0])
        assert np.array_equal(product(library, weights, rows, out, bias), want)


def test_a_weight_is_the_nearest_level_under_the_best_of_the_scales(library):
    draw = np.random.default_rng(5)
    weight = draw.standard_normal((70, 64)).astype(np.float32)
    levels, scales = unpacked(packed(library, weight), 70, 64)
    parts = weight.reshape(70, 2, 32)
    distances = np.abs(parts[..., None] - LEVELS * scales[..., None, None].astype(np.float64))
    chosen = np.abs(parts - levels * scales[..., None].astype(np.float64))
    assert (chosen <= distances.min(-1) + 1e-6).all()
    largest = np.abs(parts).max(-1, keepdims=True) / 127  # the scale that cuts nothing off
    plain = np.abs(parts[..., None] - LEVELS * largest[..., None]).min(-1)
    assert (chosen**2).sum() < 0.9 * (plain**2).sum()
    assert (chosen**2).mean() < 0.01


def test_what_matters_more_is_more_right(library):
    weight = np.random.default_rng(6).standard_normal((64, 32)).astype(np.float32)
    importance = np.ones(32, dtype=np.float32)
    importance[7] = 1000.0

    def error(weights: np.ndarray) -> float:
        levels, scales = unpacked(weights, 64, 32)
        return float(((levels * scales[..., None]).reshape(64, 32)[:, 7] - weight[:, 7]).__pow__(2).sum())

    assert error(packed(library, weight, importance)) < 0.5 * error(packed(library, weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_breaks_its_output_alone(library, value):
    draw = np.random.default_rng(7)
    weight, rows = (draw.standard_normal((n, 64)).astype(np.float32) for n in (70, 9))
    fine = product(library, packed(library, weight), rows, 70)
    weight[66, 40] = value
    broken = product(library, packed(library, weight), rows, 70)
    others = [column for column in range(70) if column != 66]
    assert np.isnan(broken[:, 66]).all() and np.array_equal(broken[:, others], fine[:, others])


def test_a_row_that_is_not_finite_answers_nan_alone(library):
    draw = np.random.default_rng(8)
    weight, rows = (draw.standard_normal((n, 64)).astype(np.float32) for n in (70, 9))
    weights = packed(library, weight)
    fine = product(library, weights, rows, 70)
    rows[2, 5] = float("nan")
    broken = product(library, weights, rows, 70)
    others = [0, 1, 3, 4, 5, 6, 7, 8]
    assert np.isnan(broken[2]).all() and np.array_equal(broken[others], fine[others])


# The engine


MAKES = [tiny_llama, tiny_qwen3, lambda seed: tiny_llama(seed, attention_bias=True, tie_word_embeddings=True)]


@pytest.mark.parametrize("make", MAKES)
def test_a_step_is_the_same_on_any_cpu(libraries, make, monkeypatch):
    answers, prints = [], set()
    for library in libraries.values():
        monkeypatch.setattr(model, "load_kernels", lambda library=library: library)
        subject = engine(make)
        answers.append(whole(subject, TEXT))
        prints.add(subject.info.numerics_fingerprint)
    assert all(torch.equal(answer, answers[0]) for answer in answers) and len(prints) == 1
    ordinary = whole(engine(make, dtype="int8"), TEXT)
    assert not torch.allclose(answers[0], ordinary, rtol=0.05)


def on_the_grid(make):
    """A model whose weights 4 bits hold as they are, and 8 bits too: levels times one power of two, the largest in every group, so that
    floats are multiplied without rounding."""

    def made(seed: int):
        module, draw = make(seed), torch.Generator().manual_seed(seed)
        for weight in module.parameters():
            if weight.dim() < 2:
                continue
            scale = 2.0 ** round(math.log2(float(weight.std()) / 60))
            drawn = torch.from_numpy(LEVELS)[torch.randint(0, 16, weight.shape, generator=draw)]
            drawn[:, ::32] = 127
            weight.data.copy_(drawn * scale)
        return module

    return made


@pytest.mark.parametrize("make", MAKES)
def test_a_step_on_weights_that_4_bits_hold_is_that_of_8_bits(make):
    four, eight = (whole(engine(on_the_grid(make), dtype=dtype), TEXT) for dtype in ("int4", "int8"))
    assert torch.equal(four, eight)


@pytest.mark.parametrize("threads", [1, 5])
def test_a_row_is_the_same_in_any_batch_and_on_any_number_of_threads(threads):
    turns = [Turn(3, (9,), (2, 1)), Turn(1), Turn(20, (), (4,), before=True), Turn(7, (1,), (3, 3, 3)), *[Turn(1, (2, 3))] * 20]
    try:
        assert torch.equal(played(engine(threads=threads), TEXT, 40, turns), whole(engine(), TEXT)[40:91])
    finally:
        torch.set_num_threads(1)


def test_the_engine_says_what_it_is():
    four, eight = engine(self_test=True), engine(dtype="int8")
    assert four.info.dtype == "int4" and four.info.batch_invariant and isinstance(four._model, NativeModel)
    assert four.info.numerics_fingerprint != eight.info.numerics_fingerprint
    assert four.info.model_fingerprint == eight.info.model_fingerprint


def test_the_head_is_weighed_by_what_it_meets(monkeypatch):
    """A channel that is large in every row: without the weighing its weights are no better than the others'."""

    def outlying(seed: int):
        module = on_the_grid(lambda seed: tiny_llama(seed, tie_word_embeddings=False))(seed)
        module.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(seed))
        module.model.norm.weight.data[9] *= 50.0
        return module

    exact = whole(engine(outlying, dtype="float32"), TEXT)
    weighed = whole(engine(outlying), TEXT)
    monkeypatch.setattr(native_model, "_importance", lambda *_: None)
    alike = whole(engine(outlying), TEXT)
    assert (weighed - exact).norm() < 0.8 * (alike - exact).norm()


def test_products_whose_width_is_no_multiple_of_32_keep_8_bits():
    """Hidden 48: only what reads attention and the MLP has 4 bits."""

    def odd(seed: int):
        return tiny_llama(seed, hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=96)

    subject, eight = engine(on_the_grid(odd)), whole(engine(on_the_grid(odd), dtype="int8"), TEXT)
    assert isinstance(subject._model, NativeModel)
    assert torch.equal(whole(subject, TEXT), eight)
    assert subject.memory["weights"] < engine(odd, dtype="int8").memory["weights"]


@pytest.mark.parametrize(
    "options, make", [({"native": False}, tiny_llama), ({}, lambda seed: tiny_llama(seed, head_dim=24)), ({}, tiny_gpt2)]
)
def test_where_compiled_code_cannot_compute_it_is_int8(options, make, caplog):
    with caplog.at_level(logging.INFO):
        subject = engine(make, **options)
    assert subject.info.dtype == "int8" and not isinstance(subject._model, NativeModel)
    assert "using int8" in caplog.text
    assert torch.equal(whole(subject, TEXT), whole(engine(make, **options, dtype="int8"), TEXT))


def test_without_a_library_it_is_int8_of_torch(monkeypatch):
    monkeypatch.setattr(model, "load_kernels", lambda: None)
    subject = engine()
    assert isinstance(subject._model, LeanModel) and subject.info.dtype == "int8"
