"""The compiled search of the noise against the numbers it stands for, and what happens where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from specdec import noise, seeds
from specdec.native import build, loud
from specdec.native.build import NOISE
from tests.compiled import KINDS, a_cpu_that_runs_them, supported  # noqa: F401  (a fixture)
from tests.tools import missing

MOST = 2**64 - 1
load = loud.load.__wrapped__  # a process keeps what it found first


def compiled(kind: str, folder: Path | None = None) -> Path:
    """The usual one, or one made in `folder`."""
    try:
        usual = NOISE.find(kind, NOISE.places()) if folder is None else None
        return usual or NOISE.build(kind, NOISE.places() if folder is None else [folder])
    except build.BuildFailed as reason:
        missing(f"the compiled search of the noise ({reason})", "run make setup, or make ci-tools on Debian")
        raise


@pytest.mark.parametrize("kind", supported())
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 64, 1000, 49152, 50257])
def test_it_finds_every_id_whose_word_is_small_and_no_other(kind, count):
    search, rng = loud.bound(compiled(kind)), np.random.default_rng(count)
    spread = np.sort(rng.choice(2**30, count, replace=False)).astype(np.uint64)
    for key in (*rng.integers(0, 2**64, 4, dtype=np.uint64).tolist(), 0, MOST):
        for ids in (None, spread, spread[::2]):
            every = noise.all_ids(count) if ids is None else ids
            words = noise._words(key, every)
            some = [int(word) for word in words[:2]]  # a word that is the very limit is small, one above it is not
            for limit in (0, 1 << 33, MOST // 50, *some, *(word - 1 for word in some if word), MOST):
                found = search(key, ids, len(every), limit)
                assert found.dtype == np.int64 and found.tolist() == np.flatnonzero(words <= np.uint64(limit)).tolist()


@pytest.mark.parametrize("kind", supported()[:1])
def test_the_words_are_those_of_the_noise(kind):
    """Against the hash as its page has it, in Python's integers."""
    search, key = loud.bound(compiled(kind)), seeds.position_key(2**64 - 3, 1, 4095)
    limit = ((2**31 // 50) << 33) - 1
    assert search(key, None, 20_000, limit).tolist() == [i for i in range(20_000) if seeds.mix64(key ^ i) >> 33 < 2**31 // 50]


@pytest.fixture
def elsewhere(tmp_path, monkeypatch) -> Path:
    """An empty place for libraries."""
    monkeypatch.setattr(NOISE, "places", lambda: [tmp_path])
    return tmp_path


def winners() -> list[int]:
    rows = np.random.default_rng(5).standard_normal((20, 20_000)).astype(np.float32) * 3
    return [noise.winner(row, 2**63 + 7, 0, position) for position, row in enumerate(rows)]


@pytest.mark.parametrize(
    "content, reason",
    [
        (None, "not compiled"),
        (b"cut short", "not compiled"),
        (b"garbage", "invalid ELF header|file too short"),
        (Path("/lib/x86_64-linux-gnu/libm.so.6"), "another library"),
    ],
)
def test_without_a_library_numpy_finds_the_same_and_the_log_says_so(elsewhere, monkeypatch, caplog, content, reason):
    path = elsewhere / NOISE.file_name(build.variant())
    if content == b"cut short":
        path.write_bytes(compiled(build.variant(), elsewhere / "whole").read_bytes()[:-1])
    elif content is not None:
        whole = content if isinstance(content, bytes) else content.read_bytes()
        path.write_bytes(whole + build._seal(whole))
    with caplog.at_level("INFO"):
        assert load() is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert "numpy" in line and any(part in line for part in reason.split("|"))
    monkeypatch.setattr(noise.native, "load", lambda: None)
    without = winners()
    search = loud.bound(compiled(build.variant(), elsewhere / "whole"))
    monkeypatch.setattr(noise.native, "load", lambda: search)
    assert winners() == without


def test_what_make_setup_left_is_loaded_and_nothing_is_compiled_for_a_request(elsewhere, monkeypatch):
    monkeypatch.setattr(build, "COMPILERS", ())
    assert load() is None
    monkeypatch.undo()
    assert compiled(build.variant()).exists() and load() is not None
