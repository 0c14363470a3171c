"""What an engine says it holds, against counts by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from specdec.engine import Engine, EngineConfig, Segment, load_engine_from_module
from specdec.engine.paged import PagedStore
from specdec.engine.sim import simulated_engine
from specdec.engine.weights import held_bytes
from specdec.vocabulary import Vocabulary
from tests.tiny import tiny_llama, tiny_qwen3
from tests.tools import missing

LAYERS, HIDDEN, INNER, VOCAB, WINDOW = 2, 64, 128, 130, 256
PAIRS = 8  # half a head
MATRICES = ((128, HIDDEN), (HIDDEN, 64), (2 * INNER, HIDDEN), (HIDDEN, INNER))  # (out, in) of a layer: qkv, out, gate and up, down
ELEMENTS = LAYERS * sum(out * wide for out, wide in MATRICES)
NORMS = (2 * LAYERS + 1) * HIDDEN
TABLE = VOCAB * HIDDEN  # the embedding, and the head
TOKEN = LAYERS * 2 * 2 * 16  # numbers of a token's keys and values


def built(make: Any = tiny_llama, model: dict[str, Any] | None = None, **options: Any) -> Engine:
    config = EngineConfig(**{"kv_tokens": 1000, "window": WINDOW, "self_test": False, **options})
    return load_engine_from_module(make(0, vocab=VOCAB, **(model or {})), config)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("float64", 8)])
def test_lean(dtype: str, size: int) -> None:
    found = built(dtype=dtype).memory["weights"]
    assert found == size * (ELEMENTS + NORMS + 2 * TABLE + WINDOW * 2 * PAIRS)


def test_lean_with_norms_of_heads_and_a_tied_head() -> None:
    """The head is a copy of its own: the embedding is kept for look-ups."""
    plain, normed = (built(make, {"tie_word_embeddings": True}, dtype="float32").memory["weights"] for make in (tiny_llama, tiny_qwen3))
    assert plain == 4 * (ELEMENTS + NORMS + 2 * TABLE + WINDOW * 2 * PAIRS)
    assert normed - plain == 4 * LAYERS * 6 * 16, "one for every query and key head"


def test_native() -> None:
    """Rows in panels of 64."""
    engine = built(dtype="int8")
    if type(engine._model).__name__ != "NativeModel":  # type: ignore[attr-defined]
        missing("the engine's compiled kernels", "run make setup, or make ci-tools on Debian")
    rows = LAYERS * sum(out for out, _ in MATRICES) + 192
    assert engine.memory["weights"] == ELEMENTS + 192 * HIDDEN + 4 * (rows + NORMS + TABLE + 2 * WINDOW * PAIRS)


def test_int8_of_torch() -> None:
    """Eight columns of pins; a scale, a zero point and a sum for each row."""
    packed = sum(out * (wide + 8 + 12) for out, wide in [*MATRICES * LAYERS, (VOCAB, HIDDEN)])
    assert built(dtype="int8", native=False).memory["weights"] == packed + 4 * (NORMS + TABLE + WINDOW * 2 * PAIRS)
    unpacked = built(dtype="int8", path="generic").memory["weights"] - packed
    assert unpacked - 4 * (NORMS + TABLE) in (4 * PAIRS, 8 * PAIRS)


@pytest.mark.parametrize("tied", [False, True])
def test_generic(tied: bool) -> None:
    """A tied head is no memory; beside the parameters there are frequencies, once or twice."""
    found = built(model={"tie_word_embeddings": tied}, dtype="float32", path="generic").memory["weights"]
    assert found - 4 * (ELEMENTS + NORMS + (1 if tied else 2) * TABLE) in (4 * PAIRS, 8 * PAIRS)


def test_room_for_keys_and_values() -> None:
    engine = built(dtype="float32")
    assert engine.memory["kv"] == 960 * TOKEN * 4 and engine.memory["kv_used"] == 0, "whole blocks of 64"
    slot = engine.kv.open()
    engine.forward([Segment(slot, 0, tuple(range(65)), 64)])
    assert engine.memory["kv_used"] == 128 * TOKEN * 4
    engine.kv.fork(slot, 64)
    assert engine.memory["kv_used"] == 128 * TOKEN * 4, "shared blocks count once"
    engine.kv.close(slot)
    assert engine.memory["kv_used"] == 64 * TOKEN * 4 and set(engine.memory) == {"weights", "kv", "kv_used"}
    paged = PagedStore(LAYERS, 2, 16, torch.float32, torch.device("cpu"), total_tokens=1000)
    assert paged.room_bytes == (960 + 64) * TOKEN * 4 and paged.token_bytes == TOKEN * 4, "and the block of zeros"


def test_on_a_gpu_what_is_allocated_there_comes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the device that holds the room."""
    engine, device = built(dtype="float32"), torch.device("cuda", 0)
    here = dict(engine.memory)
    monkeypatch.setattr(engine.kv, "device", device, raising=True)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {device: 5000}.__getitem__)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", {device: 7000}.__getitem__)
    assert engine.memory == {**here, "device": 5000, "device_peak": 7000}


def test_simulated() -> None:
    words = Vocabulary(size=VOCAB, fingerprint=b"f", eos_ids=(2,), max_model_len=None)
    assert set(simulated_engine(EngineConfig(path="sim"), words).memory.values()) == {0}


def test_a_byte_counts_once() -> None:
    whole = torch.zeros(8, 16)
    assert held_bytes([]) == held_bytes([torch.zeros(0)]) == 0
    assert held_bytes([whole, whole.t(), whole[2:5], whole.clone()]) == 2 * 8 * 16 * 4
    assert held_bytes([whole[:3], whole[2:5]]) == 5 * 16 * 4
    assert held_bytes([torch.zeros(1, 16).expand(8, 16)]) == 16 * 4
