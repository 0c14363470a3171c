"""The noise against its specification, against golden vectors, and against itself in other shapes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats

from specdec import noise, seeds
from tests.tools import missing
from tests.unit import noise_spec as spec

GOLDEN = Path(__file__).resolve().parents[2] / "proto" / "golden" / "noise.json"


def test_golden_file_is_what_the_specification_says():
    assert GOLDEN.read_text() == spec.document()


@pytest.mark.parametrize("tag", range(4))
def test_golden_vectors(tag):
    vectors = [v for v in json.loads(GOLDEN.read_text())["vectors"] if v["tag"] == tag]
    assert len(vectors) >= 40
    for v in vectors:
        key = (int(v["seed"], 16), tag, v["position"])
        ids = torch.tensor([v["id"]])
        assert noise.bits(*key, ids).item() % 2**64 == int(v["h"], 16)
        assert noise.uniform(*key, ids).item() == noise.uniform_one(*key, v["id"]) == float(v["u"])
        assert noise.gumbel(*key, ids).item() == float(v["gumbel_float32"])
        assert noise.gumbel(*key, ids, torch.float64).item() == pytest.approx(float(v["gumbel"]), abs=4e-15)


def test_logarithms_are_right_over_the_whole_range_of_u():
    edges = [2.0**-54, 2.0**-53, 2.0**-30, 0.25, math.nextafter(0.25, 1), 0.5, 1 - math.sqrt(0.5), 1 - 2.0**-40, 1 - 2.0**-53]
    us = [*edges, *np.random.default_rng(0).random(3000), *np.exp(-37 * np.random.default_rng(1).random(1000))]
    ours = noise.gumbel_of_uniform(torch.tensor(us, dtype=torch.float64)).tolist()
    for u, value in zip(us, ours, strict=True):
        assert value == pytest.approx(float(spec.g(u)), abs=4e-15, rel=4e-16), u


def test_one_id_and_a_whole_vocabulary_hear_the_same_bits():
    """A number must not depend on its place in a vector, nor on how many stand beside it."""
    for seed, tag, position in [(2**64 - 5, 0, 77), (3, 2, 0), (2**63, 3, 4095)]:
        ids = torch.arange(5003)
        whole = noise.gumbel(seed, tag, position, 5003, torch.float64)
        assert [noise.gumbel_one(seed, tag, position, i) for i in range(5003)] == whole.tolist()
        for start, stop in [(0, 1), (1, 8), (5, 70), (4990, 5003)]:
            assert torch.equal(noise.gumbel(seed, tag, position, ids[start:stop], torch.float64), whole[start:stop])


@pytest.mark.parametrize("device", ["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def test_every_device_hears_the_same_bits(device):
    ids = torch.arange(20_000, device=device)
    for tag in range(4):
        here = noise.gumbel(2**63 + 12345, tag, 99, ids, torch.float64).cpu().tolist()
        assert here == [noise.gumbel_one(2**63 + 12345, tag, 99, i) for i in range(20_000)]


def test_seeds_and_positions_broadcast_as_tensors():
    raw = [0, 7, 2**63 + 1, 2**64 - 1]
    as_int64 = torch.tensor([s - 2**64 if s >= 2**63 else s for s in raw])
    positions = torch.tensor([0, 9, 100])
    grid = noise.gumbel(as_int64[:, None, None], seeds.DRAFT, positions[None, :, None], torch.arange(11), torch.float64)
    assert grid.shape == (4, 3, 11)
    for i, seed in enumerate(raw):
        for j, position in enumerate(positions.tolist()):
            assert torch.equal(grid[i, j], noise.gumbel(seed, seeds.DRAFT, position, 11, torch.float64))


def test_the_largest_uniform_stays_below_one():
    """h = 2**64 - 1 would round to u = 1, whose noise is infinite."""
    key = seeds.position_key(5, 0, 9)
    unmixed = key  # mix64 is a bijection: this id maps to mix64(key ^ id) = 2**64 - 1
    target = 2**64 - 1
    x = target ^ (target >> 31) ^ (target >> 62)  # undoes x ^ x >> 31
    for multiplier, shift in ((0x94D049BB133111EB, 27), (0xBF58476D1CE4E5B9, 30)):
        x = x * pow(multiplier, -1, 2**64) % 2**64
        x ^= (x >> shift) ^ (x >> 2 * shift)
    token = x ^ unmixed
    assert seeds.mix64(key ^ token) == target
    assert noise.uniform_one(5, 0, 9, token) == 1 - 2.0**-53
    assert noise.gumbel_one(5, 0, 9, token) == pytest.approx(-3.6037789929704576)


def rows():
    """Rows of every kind: peaked, flat, tied, mostly impossible, tiny, in both formats."""
    rng = np.random.default_rng(7)
    for trial in range(240):
        n = int(rng.choice([1, 2, 7, 64, 1000, 12288, 12289, 30000]))
        scale = float(rng.choice([0.0, 0.01, 1.0, 3.0, 30.0, 1e4]))
        row = (rng.standard_normal(n) * scale).astype(np.float32 if trial % 2 else np.float64)
        if trial % 5 == 0:
            row = np.round(row)  # ties
        if trial % 3 == 0:
            row[rng.random(n) < 0.9] = -np.inf
            row[int(rng.integers(n))] = 0.0
        ids = np.sort(rng.choice(2**18, n, replace=False)).astype(np.uint64) if trial % 4 == 0 else None
        yield row, int(rng.integers(2**63)) * 2 + trial % 2, trial % 4, int(rng.integers(10000)), ids


@pytest.fixture(params=["compiled", "numpy"])
def search(request, monkeypatch) -> None:
    """How the ids with loud noise are found."""
    if request.param == "numpy":
        monkeypatch.setattr(noise.native, "load", lambda: None)
    elif noise.native.load() is None:
        missing("the compiled search of the noise", "run make setup")


@pytest.mark.usefixtures("search")
def test_winner_is_the_argmax_of_its_definition():
    for row, seed, tag, position, ids in rows():
        keys = torch.arange(len(row)) if ids is None else torch.from_numpy(ids.astype(np.int64))
        total = torch.from_numpy(row) + noise.gumbel(seed, tag, position, keys)
        assert noise.winner(row, seed, tag, position, ids) == int(np.argmax(total.numpy()))


def test_winner_breaks_ties_to_the_lowest_index():
    """Scores far above the noise swallow it: every total is the same float32."""
    row = np.full(1000, 1e9, dtype=np.float32)
    assert noise.winner(row, 1, 0, 5) == 0
    row[:400] = -np.inf
    assert noise.winner(row, 1, 0, 5) == 400


def test_winner_without_a_possible_id_is_refused():
    with pytest.raises(ValueError, match="no id is possible"):
        noise.winner(np.full(9, -np.inf, dtype=np.float32), 1, 0, 0)


def test_bound_is_never_below_the_noise():
    for seed in range(20):
        bounds = noise._bounds(np.zeros(49152, np.float32), seeds.position_key(seed, 0, 3), noise.all_ids(49152))
        g = noise.gumbel(seed, 0, 3, 49152, torch.float64).numpy()
        assert (bounds + 31 * math.log(2) >= g - 1e-4).all()


@pytest.mark.usefixtures("search")
@pytest.mark.parametrize("ids", [16383, 16384, 20000, 49152, 50257])
def test_loud_ids_found_by_the_table_are_those_whose_words_are_small(ids):
    rng = np.random.default_rng(ids)
    for key in rng.integers(0, 2**64, 8, dtype=np.uint64).tolist():
        words = np.array([seeds.mix64(key ^ i) >> 33 for i in range(0, ids, 7)])
        limit = np.uint64((2**31 // 50 << 33) - 1)
        found = noise._Search(np.zeros(ids, np.float32), key, None)._loud(limit)
        assert len(set(found.tolist())) == len(found) and found.max() < ids
        assert sorted(i for i in found.tolist() if i % 7 == 0) == (7 * np.flatnonzero(words < 2**31 // 50)).tolist()


def test_pruning_by_rank_instead_of_a_bound_finds_another_winner():
    """The broken twin of `winner`: noise for the 64 best scores only."""
    rng = np.random.default_rng(3)
    wrong = 0
    for position in range(300):
        row = (rng.standard_normal(2000)).astype(np.float32)
        best = np.sort(np.argsort(-row)[:64])
        pruned = best[noise.winner(row[best], 11, 0, position, best.astype(np.uint64))]
        wrong += pruned != noise.winner(row, 11, 0, position)
    assert wrong > 100


@pytest.mark.parametrize("tag", range(4))
def test_f38_uniforms_pass_kolmogorov_smirnov(tag):
    """Seeds, positions and ids that differ by one must still give independent-looking uniforms."""
    by_seed = noise.uniform(torch.arange(100_000), tag, 0, torch.tensor(0))
    by_position = noise.uniform(17, tag, torch.arange(100_000), torch.tensor(0))
    by_id = noise.uniform(17, tag, 5, torch.arange(100_000))
    for u in (by_seed, by_position, by_id):
        assert stats.kstest(u.numpy(), "uniform").pvalue > 1e-4
        lagged = np.corrcoef(u[:-1].numpy(), u[1:].numpy())[0, 1]
        assert abs(lagged) < 4 / math.sqrt(100_000)
    degenerate = (by_seed > 0.5).double().numpy()  # the twin: uniforms that collapsed to {0, 1}
    assert stats.kstest(degenerate, "uniform").pvalue < 1e-4


def test_streams_do_not_meet():
    streams = [noise.uniform(123, tag, torch.arange(50_000), torch.tensor(0)).numpy() for tag in range(4)]
    for a in range(4):
        for b in range(a):
            assert abs(np.corrcoef(streams[a], streams[b])[0, 1]) < 4 / math.sqrt(50_000)
