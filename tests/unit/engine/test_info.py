"""What an engine says of itself, and the thread that owns it."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from specdec.engine import EngineConfig, EngineThread, load_engine, load_engine_from_module
from specdec.engine.weights import eos_ids, read_draft_ids, weights_digest
from specdec.errors import EngineFault
from tests.tiny import save_tiny, tiny_llama


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def fingerprint(seed: int = 0, **options: object) -> str:
    config = EngineConfig(**{"dtype": "float64", "self_test": False, **options})
    return load_engine_from_module(tiny_llama(seed), config).info.numerics_fingerprint


def test_fingerprint_follows_what_decides_the_bits():
    prints = [
        fingerprint(),
        fingerprint(1),
        fingerprint(dtype="int8"),
        fingerprint(dtype="float32"),
        fingerprint(path="generic"),
        fingerprint(threads=2),
    ]
    assert len(set(prints)) == len(prints)


def test_fingerprint_ignores_what_does_not():
    assert fingerprint() == fingerprint(kv_tokens=1024, max_rows=64, window=100, self_test=True)
    assert fingerprint(dtype="int8") == fingerprint(dtype="int8", threads=2)


def test_a_model_is_its_files_whatever_computes_it(tmp_path):
    """Of one folder every path and format says the same; another folder of that name, or a config that computes otherwise, says another."""

    def said(folder: Path, **options: object) -> str:
        return load_engine(EngineConfig(model_dir=folder, self_test=False, **options)).info.model_fingerprint

    one, other, turned = (save_tiny(tmp_path / name / "model", seed) for name, seed in (("a", 0), ("b", 1), ("c", 0)))
    config = json.loads((turned / "config.json").read_text())
    config["rms_norm_eps"] *= 2
    (turned / "config.json").write_text(json.dumps(config | {"transformers_version": "0"}))
    same = {said(one, dtype=dtype, path=path) for dtype, path in (("float32", "auto"), ("int8", "auto"), ("float64", "generic"))}
    assert len(same) == 1 and said(other) not in same and said(turned) not in same


def test_one_weight_changes_the_digest():
    module = tiny_llama()
    before = weights_digest(module.state_dict())
    module.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-12
    assert weights_digest(module.state_dict()) != before


def test_end_of_sequence_ids_come_from_both_files():
    assert eos_ids({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, {}) == (2, 7)
    assert eos_ids({"eos_token_id": None}) == ()


@pytest.mark.parametrize("content", ["[]", "[3, 1]", "[1, 1]", "[5, 128]", "[-1, 2]"])
def test_a_draft_vocabulary_must_ascend(tmp_path, content):
    (tmp_path / "draft_vocab.json").write_text(content)
    with pytest.raises(Exception, match="ascending ids below 128"):
        read_draft_ids(tmp_path, 128)


async def test_thread_runs_calls_in_order_on_one_thread():
    thread = EngineThread("engine-test")
    try:
        names = await asyncio.gather(*[thread.run(lambda i=i: (i, threading.current_thread().name)) for i in range(5)])
        assert [i for i, _ in names] == [0, 1, 2, 3, 4]
        assert len({name for _, name in names}) == 1 and names[0][1].startswith("engine-test")
    finally:
        thread.close()


async def test_thread_leaves_the_loop_free_and_shows_its_age():
    thread = EngineThread()
    release = threading.Event()
    assert thread.running_since is None
    call = asyncio.ensure_future(thread.run(release.wait, 5.0))
    while thread.running_since is None:
        await asyncio.sleep(0.001)
    assert 0.0 <= time.monotonic() - thread.running_since < 5.0
    release.set()
    assert await call is True
    while thread.running_since is not None:
        await asyncio.sleep(0.001)
    thread.close()


async def test_thread_passes_errors_on_and_lives():
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(divmod, 7, 2) == (3, 1)
    thread.close()
    with pytest.raises(RuntimeError):
        await thread.run(divmod, 7, 2)


@pytest.mark.parametrize("end", [SystemExit(0), KeyboardInterrupt(), GeneratorExit()])
async def test_f170_a_call_cannot_end_the_process_in_silence(end):
    def leave():
        raise end

    thread = EngineThread()
    with pytest.raises(EngineFault, match=type(end).__name__):
        await thread.run(leave)
    assert await thread.run(divmod, 7, 2) == (3, 1) and thread.alive(1.0)
    thread.close()


async def test_f170_when_the_thread_is_gone_every_call_hears_of_it(caplog):
    thread = EngineThread()
    release = threading.Event()
    running = asyncio.ensure_future(thread.run(release.wait, 5.0))
    while thread.running_since is None:
        await asyncio.sleep(0.001)
    thread._calls.put("what is no call")
    queued = asyncio.ensure_future(thread.run(divmod, 7, 2))
    await asyncio.sleep(0)
    release.set()
    assert await running is True
    for call in (queued, thread.run(divmod, 7, 2)):
        with pytest.raises(EngineFault, match="thread ended"):
            await asyncio.wait_for(call, 5.0)
    with pytest.raises(EngineFault, match="thread ended"):
        thread.alive(1.0)
    assert "thread ended" in caplog.text
    thread.close()


async def test_close_drops_what_is_queued():
    thread = EngineThread()
    release = threading.Event()
    running = asyncio.ensure_future(thread.run(release.wait, 5.0))
    while thread.running_since is None:
        await asyncio.sleep(0.001)
    queued = asyncio.ensure_future(thread.run(divmod, 1, 1))
    await asyncio.sleep(0)
    release.set()
    thread.close()
    assert await running is True
    with pytest.raises(asyncio.CancelledError):
        await queued


@pytest.mark.parametrize("limits", [{"max_rows": 1}, {"window": 3}, {"kv_tokens": 64}, {"max_rows": 13}, {"window": 20}])
def test_the_self_test_fits_into_small_engines(limits):
    load_engine_from_module(tiny_llama(), EngineConfig(dtype="float64", **limits))
