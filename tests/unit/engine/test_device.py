"""What runs on a GPU, run here on the CPU: paged K/V, padded attention, products of any height."""

from __future__ import annotations

import pytest
import torch

from specdec.engine import (
    Engine,
    EngineConfig,
    OutOfRoom,
    Segment,
    UnsupportedModel,
    lean,
    load_engine_from_module,
    model,
    padded,
    paged,
    replay,
)
from tests.tiny import tiny_gpt2, tiny_llama, tiny_qwen3
from tests.unit.engine.play import Turn, feed, played, text, whole

TEXT = text(300)
TURNS = [Turn(n % 5 + 1, (3,) * (n % 3), (1 + n % 4,) * (n % 3), before=n % 2 == 0) for n in range(40)]
MAKERS = {"llama": tiny_llama, "qwen3": tiny_qwen3, "gpt2": tiny_gpt2}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    monkeypatch.setattr(model, "_device", lambda config: torch.device("cpu"))


def build(make=tiny_llama, dtype: str = "float64", path: str = "auto", **options: object) -> Engine:
    config = EngineConfig(dtype=dtype, path=path, **{"kv_tokens": 4096, "self_test": False, **options})
    return load_engine_from_module(make(3), config)


@pytest.mark.parametrize("family, path", [("llama", "lean"), ("qwen3", "lean"), ("llama", "generic"), ("gpt2", "generic")])
def test_it_says_what_the_cpu_says(family, path, monkeypatch):
    engine = build(MAKERS[family], path=path)
    rows, all_at_once = played(engine, TEXT, 120, TURNS), whole(engine, TEXT)
    monkeypatch.setattr(model, "_device", lambda config: None)
    reference = whole(build(MAKERS[family], path=path), TEXT)
    assert (rows - reference[120 : 120 + len(rows)]).abs().max() < 1e-9
    assert (all_at_once - reference).abs().max() < 1e-9
    assert engine.kv.used_tokens == 0


def test_sessions_of_all_lengths_in_one_call():
    """Short and long pieces, near and far positions, blocks of several lengths: groups of every kind."""
    engine = build(kv_tokens=8192, max_rows=1024)
    starts, counts = (0, 1, 63, 64, 200, 250, 0, 130, 10), (1, 6, 3, 40, 5, 1, 100, 33, 32)
    texts = [text(300, seed=i) for i in range(len(starts))]
    slots = [engine.kv.open() for _ in starts]
    for slot, tokens, start in zip(slots, texts, starts, strict=True):
        if start:
            feed(engine, slot, tokens[:start], logits=False)
    segments = [
        Segment(slot, start, tuple(tokens[start : start + n]), n // 2)
        for slot, tokens, start, n in zip(slots, texts, starts, counts, strict=True)
    ]
    for segment, tokens, rows in zip(segments, texts, engine.forward(segments), strict=True):
        n = len(segment.tokens)
        expected = whole(engine, tokens[: segment.start + n])[segment.start + n // 2 :]
        assert rows.shape == expected.shape and (rows - expected).abs().max() < 1e-9


def test_one_transfer_each_way_a_step(monkeypatch):
    sent, fetched = [], []
    move, fetch = padded.PaddedAttention.moved, lean.to_host
    monkeypatch.setattr(padded.PaddedAttention, "moved", lambda self, numbers: sent.append(1) or move(self, numbers))
    monkeypatch.setattr(lean, "to_host", lambda *tensors: fetched.append(1) or fetch(*tensors))
    engine = build(replay=False)
    slots = [engine.kv.open() for _ in range(6)]
    engine.forward([Segment(slot, 0, tuple(TEXT[:40]), 39) for slot in slots])
    assert (len(sent), len(fetched)) == (1, 1)


@pytest.mark.parametrize("path", ["lean", "generic"])
def test_a_broken_row_stays_alone_and_its_blocks_are_clean(path):
    module = tiny_llama(3)
    module.model.embed_tokens.weight.data[9] = float("nan")
    config = EngineConfig(dtype="float64", path=path, kv_tokens=256, self_test=False)
    engine = load_engine_from_module(module, config)
    good, bad = engine.kv.open(), engine.kv.open()
    rows = engine.forward([Segment(bad, 0, (1, 9, 2), 0), Segment(good, 0, (5, 6, 7), 0)])
    assert rows[0][0].isfinite().all() and rows[0][1].isnan().all()
    assert rows[1].isfinite().all()
    for slot in (bad, good):
        engine.kv.close(slot)
    fresh = [token for token in TEXT if token != 9][:200]
    assert whole(engine, fresh).isfinite().all()  # in every block, those of the broken row too


@pytest.mark.parametrize("length", [1, 63, 64, 130, 200])
def test_forks(length):
    engine = build()
    parent = engine.kv.open()
    feed(engine, parent, TEXT[:200])
    used = engine.kv.used_tokens
    child = engine.kv.fork(parent, length)
    assert engine.kv.used_tokens == used + (64 if length % 64 else 0)
    two = [*TEXT[:length], *text(60, seed=9)]
    engine.kv.truncate(parent, length // 2)
    rows = engine.forward([Segment(parent, length // 2, (8, 7, 6), 0), Segment(child, length, tuple(two[length:]), 0)])
    assert (rows[0] - whole(engine, [*TEXT[: length // 2], 8, 7, 6])[length // 2 :]).abs().max() < 1e-9
    engine.kv.close(parent)
    assert (rows[1] - whole(engine, two)[length:]).abs().max() < 1e-9
    assert (feed(engine, child, [1, 2]) - whole(engine, [*two, 1, 2])[-2:]).abs().max() < 1e-9


def test_out_of_room_changes_nothing():
    engine = build(kv_tokens=128)
    a, b = engine.kv.open(), engine.kv.open()
    feed(engine, a, TEXT[:64])
    feed(engine, b, TEXT[:60])
    with pytest.raises(OutOfRoom, match="0 of 128 are free"):
        engine.forward([Segment(b, 60, (1,), 0), Segment(a, 64, (1,), 0)])
    assert (engine.kv.length(a), engine.kv.length(b), engine.kv.used_tokens) == (64, 60, 128)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_the_self_test_measures(dtype):
    engine = build(dtype=dtype, self_test=True)
    assert engine.info.dtype == dtype and engine.kv.used_tokens == 0


def test_a_cache_that_depends_on_the_cutting_is_found(monkeypatch):
    """Tokens fed one by one are written where the first one is."""
    places = paged.PagedSlot.places
    monkeypatch.setattr(paged.PagedSlot, "places", lambda self, start, end: places(self, *((start, end) if end - start > 1 else (0, 1))))
    with pytest.raises(UnsupportedModel, match="one at a time and all at once disagree"):
        build(self_test=True)


def test_bfloat16_stays_close_to_float32():
    a, b = whole(build(dtype="float32"), TEXT), whole(build(dtype="bfloat16"), TEXT).float()
    assert (a - b).abs().mean() < 0.1 * a.std()


class Tape:
    """Records as a GPU does: nothing is computed while recording, and a replay knows only the buffers."""

    def record(self, compute, shape, numbers):
        answers = tuple(torch.full_like(answer, float("nan")) for answer in compute(shape, torch.zeros_like(numbers)))

        def play() -> None:
            for answer, value in zip(answers, compute(shape, numbers), strict=True):
                answer.copy_(value)

        return replay.Recording(numbers, answers, play)


def test_replayed_steps_say_the_same(monkeypatch):
    monkeypatch.setattr(replay, "Graphs", Tape)
    monkeypatch.setattr(replay, "MOST", 3)
    monkeypatch.setattr(lean, "to_host", lambda *tensors: [tensor.clone() for tensor in tensors])
    engine = build()
    engine._model._replayer = replay.Replayer(engine._model._logits_and_sums, torch.device("cpu"))
    reference = whole(build(), TEXT)
    turns = [Turn(n % 3 + 1, (4,) * (n % 2), (2,) * (n % 2)) for n in range(60)]
    for start in (20, 100):
        rows = played(engine, TEXT, start, turns)
        assert (rows - reference[start : start + len(rows)]).abs().max() < 1e-9
    replayer = engine._model._replayer
    assert replayer.replays > 30 and len(replayer._recorded) <= 3


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_few_bits_are_for_the_cpu(dtype):
    with pytest.raises(ValueError, match=f"dtype '{dtype}' runs on the CPU only"):
        EngineConfig(device="cuda", dtype=dtype)


@pytest.mark.parametrize("there", [False, True])
def test_a_gpu_must_be_there(there, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    if there:
        assert EngineConfig(device="cuda", dtype="bfloat16").device == "cuda"
    else:
        with pytest.raises(ValueError, match="device 'cuda' is not there: .* sees no GPU"):
            EngineConfig(device="cuda", dtype="bfloat16")
    with pytest.raises(ValueError, match="device 'tpu' must be one of cpu, cuda"):
        EngineConfig(device="tpu", dtype="bfloat16")
