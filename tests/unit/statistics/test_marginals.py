"""One slot, two million seeds: what comes out is distributed as p, whatever q is. And the ways in which it would not be."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.acceptance import residual
from specdec.seeds import DRAFT, RESIDUAL, SHARED
from tests.unit.statistics.harness import (
    P_LEAST,
    draw,
    frequencies,
    gumbels,
    on_the_wire,
    p_value,
    random_distributions,
    seeds_from,
    standard,
    total_variation,
    uniforms,
)

IDS = 8
COUNT = 2_000_000
P = np.array([0.32, 0.21, 0.17, 0.11, 0.09, 0.06, 0.03, 0.01])


class Noise:
    """The noise of COUNT neighbouring seeds at position 7, drawn once for the module."""

    def __init__(self, count):
        self.seeds = seeds_from(2**40, count)
        self.shared, self.draft, self.residual = (gumbels(self.seeds, tag, 7, IDS) for tag in (SHARED, DRAFT, RESIDUAL))
        self.u = uniforms(self.seeds, 7)


@pytest.fixture(scope="module")
def noise():
    return Noise(COUNT)


def drafts():
    one_hot = np.zeros(IDS)
    one_hot[2] = 1.0
    named = {"p": P, "uniform": np.full(IDS, 1 / IDS), "one-hot": one_hot, "reversed": P[::-1].copy()}
    return named | {f"random-{i}": q for i, q in enumerate(random_distributions(3, IDS, 0.5))}


def test_coupled_marginal_is_p(noise):
    assert p_value(draw(P, noise.shared), P) > P_LEAST


@pytest.mark.parametrize("name", drafts())
def test_standard_marginal_is_p_for_every_q(noise, name):
    q = on_the_wire(drafts()[name])
    proposals = draw(q, noise.draft)
    assert p_value(proposals, q) > P_LEAST
    tokens, stands = standard(P, q, proposals, noise.u, noise.residual)
    assert p_value(tokens, P) > P_LEAST
    accepted = float(np.minimum(P, q).sum())
    assert abs(stands.mean() - accepted) < 5 * np.sqrt(accepted * (1 - accepted) / COUNT) + 1e-6


def test_standard_marginal_is_p_for_truncated_q(noise):
    """F08: truncated, renormalised and rounded; the numbers sent are the numbers drawn from."""
    for q in random_distributions(2, IDS, 2.0, seed=5):
        sent = on_the_wire(q, top_k=3)
        tokens, _ = standard(P, sent, draw(sent, noise.draft), noise.u, noise.residual)
        assert p_value(tokens, P) > P_LEAST


def test_f08_nearly_equal_probabilities():
    """q values a thousandth apart, rounded for the wire; total variation below 0.003 on a million draws."""
    p, q = np.array([0.25, 0.25, 0.25, 0.25]), np.array([0.2485, 0.2495, 0.2505, 0.2515])
    seeds = seeds_from(5, 1_000_000)
    sent = on_the_wire(q.astype(np.float16).astype(np.float64))
    proposals = draw(sent, gumbels(seeds, DRAFT, 3, 4))
    tokens, _ = standard(p, sent, proposals, uniforms(seeds, 3), gumbels(seeds, RESIDUAL, 3, 4))
    assert total_variation(frequencies(tokens, 4), p) < 0.003 and p_value(tokens, p) > P_LEAST


def test_neighbouring_seeds_positions_and_ids_are_independent(noise):
    """Joint of the tokens of seeds s and s + 1, of positions 7 and 8, and of two disjoint sets of ids."""
    joint = np.outer(P, P)
    tokens = draw(P, noise.shared)
    assert p_value(tokens[:-1:2] * IDS + tokens[1::2], joint) > P_LEAST
    next_position = draw(P, gumbels(noise.seeds, SHARED, 8, IDS))
    assert p_value(tokens * IDS + next_position, joint) > P_LEAST
    low, high = draw(P[:4], noise.shared[:, :4]), draw(P[4:], noise.shared[:, 4:])
    assert p_value(low * 4 + high, np.outer(P[:4] / P[:4].sum(), P[4:] / P[4:].sum())) > P_LEAST


def test_streams_are_independent(noise):
    q = random_distributions(1, IDS)[0]
    shared, draft, corrected = draw(P, noise.shared), draw(q, noise.draft), draw(P, noise.residual)
    assert p_value(shared * IDS + draft, np.outer(P, q)) > P_LEAST
    assert p_value(draft * IDS + corrected, np.outer(q, P)) > P_LEAST
    halves = (noise.u < 0.5).astype(np.int64)
    assert p_value(draft * 2 + halves, np.outer(q, [0.5, 0.5])) > P_LEAST


@pytest.mark.parametrize("pair", range(6))
def test_coupled_agreement_is_at_least_the_bound(noise, pair):
    """P(agree) >= (1 - TV) / (1 + TV) (Daliri, Musco, Suresh 2024), and equals sum over x of 1 / sum over y of max(p_y/p_x, q_y/q_x)."""
    p, q = random_distributions(2, IDS, concentration=0.7, seed=pair)
    agreed = float((draw(p, noise.shared) == draw(q, noise.shared)).mean())
    tv = total_variation(p, q)
    margin = 4 * 0.5 / np.sqrt(COUNT)
    assert agreed >= (1 - tv) / (1 + tv) - margin
    exact = sum(1 / np.maximum(p / p[x], q / q[x]).sum() for x in range(IDS))
    assert abs(agreed - exact) < margin


# ---------------------------------------------------------------------------- broken twins, each at a size where it shows


def test_twin_raw_q_sent_though_truncated_q_was_sampled(noise):
    raw = random_distributions(1, IDS, 2.0, seed=5)[0]
    proposals = draw(on_the_wire(raw, top_k=3), noise.draft)
    tokens, _ = standard(P, on_the_wire(raw), proposals, noise.u, noise.residual)
    assert p_value(tokens[:50_000], P) < P_LEAST


def test_twin_shared_noise_with_the_ratio_test(noise):
    """The correction hears the noise that already chose the proposal."""
    q = P[::-1].copy()
    tokens, _ = standard(P, q, draw(q, noise.draft), noise.u, noise.draft)
    assert p_value(tokens[:50_000], P) < P_LEAST


def test_twin_acceptance_uniform_that_chose_the_proposal(noise):
    """Inverse-transform sampling of x and the test of x with one uniform."""
    q = P[::-1].copy()
    proposals = np.minimum(np.searchsorted(q.cumsum(), noise.u), IDS - 1)
    tokens, _ = standard(P, q, proposals, noise.u, noise.residual)
    assert p_value(tokens[:50_000], P) < P_LEAST


def test_twin_peeking_controller(noise):
    """p = q = (.5, .3, .2) and 'verify only if q(x) >= .4' yields (.75, .15, .10)."""
    p = np.array([0.5, 0.3, 0.2])
    proposals = draw(p, noise.draft[:, :3])
    checked, _ = standard(p, p, proposals, noise.u, noise.residual[:, :3])
    honest, peeked = checked, np.where(p[proposals] >= 0.4, checked, draw(p, noise.residual[:, :3]))
    assert p_value(honest, p) > P_LEAST
    assert p_value(peeked[:2_000], p) < P_LEAST
    np.testing.assert_allclose(frequencies(peeked, 3), [0.75, 0.15, 0.10], atol=0.002)


def test_twin_pruned_noise():
    """Noise for the 64 best ids only: the tail is never chosen, and the rest is chosen too often."""
    p = np.random.default_rng(1).dirichlet(np.full(128, 20.0))
    g = gumbels(seeds_from(0, 20_000), SHARED, 3, 128)
    best = np.sort(np.argsort(-p)[:64])
    tokens, pruned = draw(p, g), best[draw(p[best], g[:, best])]
    assert p_value(tokens, p) > P_LEAST and p_value(pruned, p) < P_LEAST
    # Even among the 64 alone, as three cells: best half, other half, and what belongs to the tail.
    halves = np.full(128, 2)
    halves[best] = np.arange(64) // 32
    merged = np.bincount(halves, p)
    assert p_value(halves[tokens], merged) > P_LEAST and p_value(halves[pruned[:200]], merged) < P_LEAST


def test_twin_residual_made_a_softmax(noise):
    """F05: the residual soft-maxed instead of divided by its sum."""
    q = P[::-1].copy()
    proposals = draw(q, noise.draft)
    right, stands = standard(P, q, proposals, noise.u, noise.residual)
    wrong = np.where(stands, right, draw(np.exp(residual(P, q)), noise.residual))
    assert p_value(wrong[:50_000], P) < P_LEAST


def test_twin_acceptance_by_equality(noise):
    """F04: accept only where the proposal is the argmax of p: the stream is too deterministic."""
    q = P[::-1].copy()
    proposals = draw(q, noise.draft)
    wrong = np.where(proposals == P.argmax(), proposals, P.argmax())
    assert p_value(wrong[:1_000], P) < P_LEAST


def test_f04_frequencies_and_acceptance_for_every_q(noise):
    p = np.array([0.6, 0.3, 0.1])
    for q in (p, np.full(3, 1 / 3), np.array([0.0, 0.0, 1.0])):
        proposals = draw(q, noise.draft[:100_000, :3])
        tokens, stands = standard(p, q, proposals, noise.u[:100_000], noise.residual[:100_000, :3])
        np.testing.assert_allclose(frequencies(tokens, 3), p, atol=0.005)
        if q[2] == 1.0:
            assert abs(stands.mean() - p[2]) < 0.005


def test_f05_corrections_come_from_the_divided_residual(noise):
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.8, 0.1, 0.1])
    zero = np.zeros(COUNT, dtype=np.int64)
    tokens, stands = standard(p, q, zero, noise.u, noise.residual[:, :3])
    assert p_value(tokens[~stands], np.array([0.0, 2 / 3, 1 / 3])) > P_LEAST
