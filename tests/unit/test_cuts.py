"""Cuts at their very borders: a walk ends where the set of what is kept says, with nothing to spare."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.cuts import Walk, kept, mass
from specdec.ranking import ahead, best, best_possible
from specdec.sampling import Sampler
from specdec.terms import SamplingParams


def rows():
    draw = np.random.default_rng(3)
    for n, scale, kind in [
        (50, 2.0, "plain"),
        (900, 1.0, "ties"),
        (6000, 0.3, "plain"),
        (6000, 0.2, "ties"),
        (9000, 5.0, "peaked"),
        (5000, 0.0, ""),
    ]:
        row = draw.standard_normal(n) * scale
        if kind == "ties":
            row = np.round(row, 1)
        if kind == "peaked":
            row[draw.integers(n, size=5)] += 25.0
        for dtype in (np.float32, np.float64):
            scores = row.astype(dtype)
            yield scores - scores.max()


def test_a_walk_ends_exactly_where_the_kept_set_ends():
    """top_p is the running mass up to a rank, or the next number to it: the hardest question for sums that round."""
    for scores in rows():
        order = np.argsort(-scores, kind="stable")
        running = mass(scores)[order].cumsum()
        ranks = {1, 2, len(scores) // 2, *(int(i) for i in np.searchsorted(running, np.array([0.55, 0.9, 0.97]) * running[-1]))}
        for rank in (r for r in ranks if 0.5 < running[r] / running[-1] < 1.0):
            for top_p in (running[rank] / running[-1], np.nextafter(running[rank] / running[-1], 1.0)):
                params = SamplingParams(top_p=float(top_p))
                inside = set(kept(scores, params).tolist())
                assert Walk.pays(params) and len(inside) in (rank + 1, rank + 2)
                for place in order[max(0, rank - 2) : rank + 5].tolist():
                    assert Walk(scores, params).ends_at(place) == (place in inside), (len(scores), rank, place)


@pytest.mark.parametrize("top_k", [600, 2500])
def test_a_walk_counts_top_k_exactly(top_k):
    for scores in (scores for scores in rows() if len(scores) > top_k):
        params = SamplingParams(top_k=top_k, min_p=1e-3)
        inside = set(kept(scores, params).tolist())
        for place in np.argsort(-scores, kind="stable")[top_k - 3 : top_k + 3].tolist():
            assert Walk(scores, params).ends_at(place) == (place in inside)


@pytest.mark.parametrize("impossible", [0.0, 0.5, 0.97, 0.999])
def test_the_best_of_what_is_possible_however_little_that_is(impossible):
    draw = np.random.default_rng(4)
    for scores in rows():
        values = np.where(draw.random(len(scores)) < impossible, -np.inf, scores).astype(scores.dtype)
        values[draw.integers(len(values))] = 0.0
        possible = int(np.count_nonzero(values > -np.inf))
        for count in {1, 2, 50, 512, 513, 600, max(1, possible - 1), possible, possible + 1} & set(range(1, len(values) + 1)):
            expected = np.sort(np.argsort(-values, kind="stable")[: min(count, possible)])
            assert best_possible(values, count, -11.0).tolist() == expected.tolist(), (len(values), count, possible)


@pytest.mark.parametrize("min_p", [0.0, 1e-3])
def test_a_walk_under_top_k_and_top_p_ends_exactly_where_the_kept_set_ends(min_p):
    for scores in (scores for scores in rows() if len(scores) > 600):
        for top_k, top_p in ((600, 0.6), (600, 0.999), (2500, 0.9)):
            params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
            inside, order = kept(scores, params), np.argsort(-scores, kind="stable")
            assert Walk.pays(params)
            ranks = [0, *range(max(0, len(inside) - 3), len(inside) + 3), top_k - 1, top_k, -1]
            for place in (int(order[rank]) for rank in ranks if rank < len(order)):
                walk = Walk(scores, params)
                assert walk.ends_at(place) == (place in inside)
                assert place in inside or (walk.places.tolist() == inside.tolist() and walk.ends_at(len(inside) - 1))


def test_a_walk_goes_on_with_what_is_in_front():
    scores = np.array([-1.0, 0.0, -1.0, -2.0, -1.0], dtype=np.float32)
    walk = Walk(scores, SamplingParams(top_p=0.6))
    assert not walk.ends_at(4) and walk.places.tolist() == [0, 1, 2] and walk.scores.tolist() == [-1.0, 0.0, -1.0]
    assert not walk.ends_at(2) and walk.places.tolist() == [0, 1]
    assert walk.ends_at(0) and walk.ends_at(1)
    assert ahead(scores, 2).tolist() == [True, True, False, False, False]


@pytest.mark.parametrize(("ids", "top_p", "left"), [(2, 0.5, 1), (4, 0.5, 2), (4, 0.75, 3), (8192, 0.5, 4096), (8192, 0.75, 6144)])
def test_of_equals_exactly_the_first_are_picked(ids, top_p, left):
    row = np.zeros(ids, dtype=np.float32)
    picked = {Sampler(SamplingParams(top_p=top_p), seed, ids, [], [1]).choose(row, 1, []) for seed in range(60)}
    assert max(picked) < left and len(picked) >= min(left, 3)


@pytest.mark.parametrize("low", [-1e-45, -1e-38, -3e38, -np.inf])
def test_values_that_hardly_differ_and_values_that_differ_beyond_measure(low):
    values = np.full(3000, low, dtype=np.float32)
    values[[5, 1999]] = 0.0
    assert best(values, None, 2).tolist() == [5, 1999]
    assert best(values, None, 1000).tolist() == sorted([5, 1999, *(i for i in range(999) if i != 5)])
    raw = np.where(values == 0.0, np.float32(3e38), np.float32(-3e38))
    assert best(raw, None, 1000).tolist() == sorted([5, 1999, *(i for i in range(999) if i != 5)])
