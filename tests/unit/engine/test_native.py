"""The compiled step: its parts against slow references, the same bits on any CPU, and what happens where it cannot be had."""

from __future__ import annotations

import logging
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.engine import Engine, EngineConfig, Segment, load_engine_from_module, model
from specdec.engine.lean import LeanModel
from specdec.engine.native import NativeModel, kernels, why_not
from specdec.engine.native.kernels import Kernels, LinearStruct
from specdec.engine.shape import llama_shape
from specdec.native import build
from specdec.native.build import KERNELS
from tests.compiled import KINDS, a_cpu_that_runs_them  # noqa: F401  (a fixture)
from tests.tiny import tiny_llama, tiny_qwen3
from tests.unit.engine.play import Turn, feed, played, text, whole

TEXT = text(150)


def engine(make=tiny_llama, seed: int = 3, **options: object) -> Engine:
    config = EngineConfig(**{"dtype": "int8", "kv_tokens": 4096, "self_test": False, **options})
    return load_engine_from_module(make(seed), config)


# Parts


def packed(library: Kernels, weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[LinearStruct, list[torch.Tensor]]:
    out, width = weight.shape
    room = -(-out // 64) * 64
    kept = [torch.empty(room * width, dtype=torch.uint8), torch.empty(room), torch.zeros(room)]
    library.pack(weight, kept[0], kept[1])
    if bias is not None:
        kept[2][:out] = bias
    return LinearStruct(kept[0].data_ptr(), kept[1].data_ptr(), None if bias is None else kept[2].data_ptr(), out, width), kept


def slow_product(weight: np.ndarray, rows: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """One scale per row and one per output, sums of integers, everything else one float32 operation after the other."""
    one = np.float32(127)
    scale = np.maximum(np.abs(weight).max(1) / one, np.float32(1e-8))
    w = np.rint(weight / scale[:, None]).clip(-127, 127).astype(np.int64)
    top = np.maximum(np.abs(rows).max(1), np.float32(1e-30))
    q = np.rint(rows * (one / top)[:, None]).astype(np.int64)
    y = (q @ w.T).astype(np.float32) * scale * (top / one)[:, None]
    return y if bias is None else y + bias


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    out=st.sampled_from([1, 63, 64, 65, 130]),
    width=st.sampled_from([16, 48, 64, 576]),
    count=st.integers(1, 20),
    biased=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_product_is_the_slow_one_bit_for_bit(libraries, out, width, count, biased, seed):
    draw = np.random.default_rng(seed)
    weight, rows = (draw.standard_normal((n, width)).astype(np.float32) for n in (out, count))
    rows[0] *= 1e4  # an outlier of a neighbour
    rows[-1] = 0.0
    bias = draw.standard_normal(out).astype(np.float32) if biased else None
    for library in libraries.values():
        linear, kept = packed(library, torch.from_numpy(weight), None if bias is None else torch.from_numpy(bias))
        for paced in (False, True):
            assert np.array_equal(library.product(linear, torch.from_numpy(rows), paced).numpy(), slow_product(weight, rows, bias))
        del kept


def test_a_row_of_a_product_that_is_not_finite_answers_nan_alone(library):
    linear, kept = packed(library, torch.randn(70, 64), None)
    rows = torch.randn(9, 64)
    fine = library.product(linear, rows)
    rows[2, 5], rows[7, 0] = float("nan"), float("-inf")
    broken = library.product(linear, rows)
    assert broken[[2, 7]].isnan().all()
    others = [0, 1, 3, 4, 5, 6, 8]
    assert torch.equal(broken[others], fine[others])
    del kept


def slow_attention(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, start: int) -> torch.Tensor:
    """queries [rows, heads, dim], keys and values [kv, tokens, dim], in float64."""
    rows, heads, dim = queries.shape
    out = torch.empty(rows, heads, dim, dtype=torch.float64)
    for r in range(rows):
        for h in range(heads):
            kv = h * len(keys) // heads
            seen = start + r + 1
            weights = torch.softmax(keys[kv, :seen].double() @ queries[r, h].double() / dim**0.5, 0)
            out[r, h] = weights @ values[kv, :seen].double()
    return out


CASES = [(4, 2, 16), (9, 3, 64), (5, 5, 48), (8, 1, 80), (2, 2, 128), (7, 1, 32)]


@pytest.mark.parametrize("heads, kv, dim", CASES)
@pytest.mark.parametrize("start, rows", [(0, 1), (0, 9), (14, 3), (63, 2), (130, 17)])
def test_attention_is_the_slow_one_and_reads_no_further(libraries, heads, kv, dim, start, rows):
    draw = torch.Generator().manual_seed(start + dim)
    memory = torch.full((2 * kv, 160, dim), float("nan"))
    memory[:, : start + rows] = torch.randn(2 * kv, start + rows, dim, generator=draw)
    queries = 3 * torch.randn(rows, heads, dim, generator=draw)
    want = slow_attention(queries, memory[:kv], memory[kv:], start)
    whole_slot = (memory.data_ptr(), 0, 160, 0, 0, start, rows)
    base = start // 2
    own = torch.full((2 * kv, 96, dim), float("nan"))
    own[:, : start + rows - base] = memory[:, base : start + rows]
    branch = (own.data_ptr(), memory.data_ptr(), 96, 160, base, start, rows)
    answers = [library.attend(where, kv, queries) for library in libraries.values() for where in (whole_slot, branch)]
    assert (answers[0] - want).abs().max() < 2e-6
    assert all(torch.equal(answer, answers[0]) for answer in answers)
    alone = (memory.data_ptr(), 0, 160, 0, 0, start + rows - 1, 1)
    assert torch.equal(next(iter(libraries.values())).attend(alone, kv, queries[-1:].contiguous())[0], answers[0][-1])


# The whole step


@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3, lambda seed: tiny_llama(seed, attention_bias=True, tie_word_embeddings=True)])
def test_a_step_is_close_to_float32_and_the_same_on_any_cpu(libraries, make, monkeypatch):
    answers, prints = [], set()
    for library in libraries.values():
        monkeypatch.setattr(model, "load_kernels", lambda library=library: library)
        subject = engine(make)
        answers.append(whole(subject, TEXT))
        prints.add(subject.info.numerics_fingerprint)
    assert all(torch.equal(answer, answers[0]) for answer in answers) and len(prints) == 1
    exact = whole(engine(make, dtype="float32"), TEXT)
    torchs = whole(engine(make, native=False), TEXT)
    error, usual = ((answer - exact).abs().mean() for answer in (answers[0], torchs))
    assert error < 1.2 * usual


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_share_the_work_and_not_the_sums(threads):
    """Five: more than there are panels of the head."""
    turns = [Turn(3, (9,), (2, 1)), Turn(1), Turn(20, (), (4,), before=True)]
    try:
        assert torch.equal(played(engine(threads=threads), TEXT, 40, turns), whole(engine(), TEXT)[40:64])
    finally:
        torch.set_num_threads(1)


def test_nothing_behind_a_slots_tokens_is_read():
    subject = engine()
    slot = subject.kv.open()
    feed(subject, slot, TEXT[:70])
    subject.kv.truncate(slot, 61)
    subject.kv.slot(slot).memory[:, :, 61:] = float("nan")
    assert torch.equal(feed(subject, slot, TEXT[61:80]), whole(subject, TEXT)[61:80])


def test_models_that_the_compiled_code_does_not_compute_go_to_torch(caplog):
    shape = llama_shape(tiny_llama(head_dim=24).config.to_dict())
    assert not isinstance(shape, str)
    assert "head size 24" in (why_not(shape, 128) or "") and "intermediate size 100" in (why_not(llama(), 100) or "")
    assert why_not(llama(), 128) is None
    with caplog.at_level(logging.INFO):
        subject = engine(lambda seed: tiny_llama(seed, head_dim=24))
    assert isinstance(subject._model, LeanModel) and "head size 24" in caplog.text


def llama():
    shape = llama_shape(tiny_llama().config.to_dict())
    assert not isinstance(shape, str)
    return shape


# Where the library comes from


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty place for libraries, and nothing loaded."""
    monkeypatch.setattr(KERNELS, "places", lambda: [tmp_path / "built"])
    monkeypatch.setattr(kernels, "load_kernels", kernels.load_kernels.__wrapped__)
    monkeypatch.setattr(model, "load_kernels", kernels.load_kernels)
    return tmp_path


def compiler(folder: Path, script: str) -> str:
    """A program that is called as a compiler is; $out is where the library goes."""
    path = folder / "compiler"
    path.write_text(f'#!/bin/sh\nfor word; do out="$word"; done\n{script}\n')
    path.chmod(0o755)
    return str(path)


def good() -> Path:
    """This CPU's library, as it is in the usual place. What is behind an ELF file's own bytes does not matter."""
    found = KERNELS.find(build.variant(), [KERNELS.sources.parent / "built", Path.home() / ".cache" / "specdec"])
    assert found is not None
    return found


@pytest.mark.parametrize(
    "script, reason",
    [
        (None, "no C++ compiler"),
        ("echo no such header >&2; exit 1", "no such header"),
        ('echo garbage > "$out"', "invalid ELF header|file too short"),
        ('cp /lib/x86_64-linux-gnu/libm.so.6 "$out"', "another library"),
    ],
)
def test_without_a_library_torch_computes_and_the_log_says_so(elsewhere, monkeypatch, caplog, script, reason):
    monkeypatch.setattr(build, "COMPILERS", () if script is None else (compiler(elsewhere, script),))
    subject = engine()
    assert isinstance(subject._model, LeanModel) and subject.info.dtype == "int8"
    (line,) = [record.getMessage() for record in caplog.records if "compiled kernels" in record.getMessage()]
    assert any(part in line for part in reason.split("|")) and "torch" in line
    assert not list((elsewhere / "built").glob(".building-*")) if script else True


def test_a_library_that_was_cut_short_is_made_again(elsewhere, monkeypatch, libraries):
    monkeypatch.setattr(build, "COMPILERS", (compiler(elsewhere, f'cp "{good()}" "$out"'),))
    broken = elsewhere / "built" / KERNELS.file_name(build.variant())
    broken.parent.mkdir()
    broken.write_bytes(good().read_bytes()[:5000])
    assert isinstance(engine()._model, NativeModel)
    assert build.is_whole(broken)


def test_two_who_build_at_once_do_no_harm(elsewhere, libraries):
    slow = compiler(elsewhere, f'head -c 3000 "{good()}" > "$out"; sleep 0.2; cp "{good()}" "$out"')
    with ThreadPoolExecutor(3) as pool:
        built = list(pool.map(lambda _: KERNELS.ready(slow), range(3)))
    assert set(built) == {elsewhere / "built" / KERNELS.file_name(build.variant())}
    assert [path.name for path in built[0].parent.iterdir()] == [built[0].name]
    assert Kernels(built[0]).source == KERNELS.source_hash()


def test_a_place_that_cannot_be_written_is_passed_over(tmp_path, libraries):
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = KERNELS.build(KINDS[-1], [blocked / "built", tmp_path / "other"], compiler(tmp_path, 'echo > "$out"'))
    assert path.parent == tmp_path / "other"
    with pytest.raises(build.BuildFailed, match="written nowhere"):
        KERNELS.build(KINDS[-1], [blocked / "built"], shutil.which("true"))


@pytest.mark.parametrize(
    "flags, kind",
    [
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni", "avx512vnni"),
        ("fpu avx2 fma avx512f avx512bw avx512vl avx512dq", "avx2"),
        ("fpu avx2 fma avx_vnni", "avx2"),
        ("fpu sse4_2", "no AVX2"),
    ],
)
def test_the_variant_follows_the_cpu(tmp_path, flags, kind):
    info = tmp_path / "cpuinfo"
    info.write_text(f"processor\t: 0\nflags\t\t: {flags}\nbugs\t\t:\n")
    if kind in KINDS:
        assert build.variant(info) == kind
    else:
        with pytest.raises(build.BuildFailed, match=kind):
            build.variant(info)
    with pytest.raises(build.BuildFailed, match="unknown"):
        build.variant(tmp_path / "none")


def test_torch_and_compiled_code_have_fingerprints_of_their_own():
    assert engine().info.numerics_fingerprint != engine(native=False).info.numerics_fingerprint


def test_a_step_of_many_sessions_is_each_ones_own():
    """Sixteen sessions of other lengths, one row each, and a prefill beside them."""
    subject = engine()
    reference = whole(subject, TEXT)
    slots = [subject.kv.open() for _ in range(17)]
    for i, slot in enumerate(slots[1:], 1):
        feed(subject, slot, TEXT[: 7 * i], logits=False)
    segments = [Segment(slot, 7 * i, (TEXT[7 * i],), 0) for i, slot in enumerate(slots[1:], 1)]
    segments.insert(5, Segment(slots[0], 0, tuple(TEXT[:90]), 88))
    answers = subject.forward(segments)
    assert torch.equal(answers.pop(5), reference[88:90])
    assert all(torch.equal(answer[0], reference[7 * i]) for i, answer in enumerate(answers, 1))
