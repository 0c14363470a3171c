"""The standard method on one slot: the ratio test, the residual, q that is missing, wrong or malformed. Millions of draws: statistics/."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from scipy import stats

from specdec.acceptance import RESIDUAL_FLOOR, accepts, check_distributions, decide, numbers_of, residual, verify
from specdec.errors import InvalidRequest
from specdec.sampling import Sampler, draft_choice
from specdec.seeds import DRAFT
from specdec.terms import DraftDistribution, DraftMethod, RejectionMethod, SamplingParams

COUPLED, STANDARD = RejectionMethod.COUPLED, RejectionMethod.STANDARD


def sampler(vocab_size=128, seed=3, **params):
    return Sampler(SamplingParams(**params), seed, vocab_size, [2], [5, 6, 7])


def q_of(**probs):
    """q_of(t3=0.5, t9=0.5)"""
    ids = tuple(int(name[1:]) for name in probs)
    return DraftDistribution(ids, struct.pack(f"<{len(ids)}f", *probs.values()))


def test_f05_residual_is_divided_by_its_sum_and_falls_back_to_p():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.8, 0.1, 0.1])
    np.testing.assert_allclose(residual(p, q) / residual(p, q).sum(), [0, 2 / 3, 1 / 3])
    np.testing.assert_array_equal(residual(p, p), p)
    nearly = p + np.array([1e-12, -1e-12, 0.0])
    np.testing.assert_array_equal(residual(nearly, p), nearly)
    assert RESIDUAL_FLOOR > 1e-12
    batch = residual(np.stack([p, p]), np.stack([q, p]))
    np.testing.assert_array_equal(batch, np.stack([residual(p, q), p]))


def test_acceptance_test_by_hand():
    assert accepts(0.5, 0.25, 0.999) and accepts(0.25, 0.5, 0.49) and not accepts(0.25, 0.5, 0.51)
    assert not accepts(0.0, 0.5, 1e-17) and not accepts(0.0, 0.0, 1e-17) and not accepts(0.5, 0.0, 1e-17)
    assert accepts([0.5, 0.1], [0.5, 1.0], [0.999, 0.5]).tolist() == [True, False]


def test_f03_a_proposal_that_q_does_not_hold_never_stands():
    """q(token) = 0 though p(token) = 1: refused, and the token comes from p."""
    row = torch.full((8,), -50.0)
    row[4] = 50.0
    for params in ({}, {"temperature": 0.0}):
        for q in (q_of(t3=1.0), q_of(t3=1.0, t4=0.0)):
            verdict = verify(torch.stack([row, row]), [4], [q], sampler(8, **params), [], STANDARD)
            assert (verdict.tokens, verdict.num_accepted, verdict.num_verified) == ((4,), 0, 1)


def drawn(count, p_logits, q_logits, send, **params):
    """First tokens of `count` seeds through draft_choice and verify; `send` turns the honest q into what is sent."""
    p_row, q_row = torch.tensor(p_logits), torch.tensor(q_logits)
    tokens = np.zeros(count, dtype=np.int64)
    for seed in range(count):
        s = Sampler(SamplingParams(**params), seed, len(p_logits), [], [1])
        choice = draft_choice(s, q_row, 1, [], DraftMethod.PROBABILISTIC)
        tokens[seed] = verify([p_row, p_row], [choice.token], [send(choice.distribution)], s, [], STANDARD).tokens[0]
    return np.bincount(tokens, minlength=len(p_logits)) / count


P_LOGITS = [1.0, 0.2, 0.8, -0.5, 0.0, 0.3, -1.0, -2.0]
Q_LOGITS = [0.1, 1.4, 1.2, 0.9, 0.0, -0.3, 1.0, -2.0]


def test_f03_top_k_two_through_draft_and_verification():
    """Vocabulary of 8, top_k = 2: what the target alone would say, within a total variation of 0.01. Then a draft that samples
    processed logits and sends the raw softmax."""
    kept = np.exp(np.array([1.0, 0.8]))
    reference = np.zeros(8)
    reference[[0, 2]] = kept / kept.sum()
    honest = drawn(6_000, P_LOGITS, Q_LOGITS, lambda q: q, top_k=2)
    assert np.abs(honest - reference).sum() / 2 < 0.01
    raw = np.exp(Q_LOGITS) / np.exp(Q_LOGITS).sum()
    lie = DraftDistribution(tuple(range(8)), raw.astype("<f4").tobytes())
    lying = drawn(2_000, P_LOGITS, Q_LOGITS, lambda q: lie, top_k=2)
    assert np.abs(lying - reference).sum() / 2 > 0.02


@pytest.mark.long
@pytest.mark.timeout(600)
def test_f03_top_k_two_long():
    kept = np.exp(np.array([1.0, 0.8]))
    frequencies = drawn(200_000, P_LOGITS, Q_LOGITS, lambda q: q, top_k=2)
    np.testing.assert_allclose(frequencies[[0, 2]], kept / kept.sum(), atol=0.005)
    assert frequencies.sum() == pytest.approx(frequencies[[0, 2]].sum())


def test_f04_frequencies_through_verification():
    """p = (.6, .3, .1) and a one-hot proposal of token 2: it stands with probability p(2), and the text is p's."""
    row = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    counts, stood = np.zeros(3), 0
    for seed in range(6_000):
        verdict = verify([row, row], [2], [None], Sampler(SamplingParams(), seed, 3, [], [1]), [], STANDARD)
        counts[verdict.tokens[0]] += 1
        stood += verdict.num_accepted
    np.testing.assert_allclose(counts / 6_000, [0.6, 0.3, 0.1], atol=0.01)
    assert abs(stood / 6_000 - 0.1) < 0.01


def test_corrections_respect_masks_and_cuts():
    """The residual of a processed p holds nothing that p does not."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(4))
    allowed = tuple(range(10, 20))
    for seed in range(200):
        s = sampler(seed=seed, allowed_token_ids=allowed, banned_token_ids=(12,), min_tokens=5, top_k=6)
        token, stands = decide(row, 50, q_of(t50=0.5, t11=0.5), s, [], STANDARD)
        assert token in set(allowed) - {12} and not stands


BAD = {
    "no ids": DraftDistribution((), b""),
    "length": DraftDistribution((1, 2), struct.pack("<f", 1.0)),
    "odd bytes": DraftDistribution((1,), b"\0\0\x80?\0"),
    "twice": DraftDistribution((1, 1), struct.pack("<2f", 0.5, 0.5)),
    "vocabulary": q_of(t128=1.0),
    "nan": q_of(t1=math.nan, t2=1.0),
    "infinite": q_of(t1=math.inf),
    "negative": q_of(t1=-0.5, t2=1.5),
    "sum": q_of(t1=0.5, t2=0.3),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_distributions_are_refused_by_name(name):
    with pytest.raises(InvalidRequest, match=r"distributions\[1\]"):
        check_distributions([1, 1], [None, BAD[name]], 128, STANDARD)
    rows = torch.zeros(3, 128)
    with pytest.raises(InvalidRequest, match=r"distributions\[1\]"):
        verify(rows, [1, 1], [None, BAD[name]], sampler(), [], STANDARD)


def test_distributions_must_fit_the_block_and_the_method():
    good = q_of(t1=0.25, t2=0.75)
    check_distributions([1, 2], [good, None], 128, STANDARD)
    check_distributions([1, 2], [], 128, COUPLED)
    with pytest.raises(InvalidRequest, match="one per proposal"):
        check_distributions([1, 2], [good], 128, STANDARD)
    with pytest.raises(InvalidRequest, match="standard method only"):
        check_distributions([1], [good], 128, COUPLED)


def shares(count, p, proposal, q, **params):
    """How often each id comes out where the draft drew `proposal`, or, if that is None, drew from q."""
    row = torch.tensor(p, dtype=torch.float64).log()
    counts = np.zeros(len(p))
    for seed in range(count):
        s = Sampler(SamplingParams(**params), seed, len(p), [], [1])
        x = proposal if proposal is not None else q.ids[s.draw(np.arange(len(q.ids)), np.array(q.floats()), DRAFT, 1)]
        counts[decide(row, x, q, s, [], STANDARD)[0]] += 1
    return counts


def test_order_of_ids_in_a_distribution_does_not_matter():
    p = [0.1, 0.4, 0.2, 0.3]
    for x in (0, 1, 3):
        a, b = q_of(t0=0.5, t1=0.3, t3=0.2), q_of(t3=0.2, t0=0.5, t1=0.3)
        assert shares(300, p, x, a).tolist() == shares(300, p, x, b).tolist()


def test_f03_without_q_of_the_token_the_text_is_drawn_from_p():
    p = [0.6, 0.3, 0.1]
    counts = shares(2_000, p, 2, q_of(t0=1.0))
    assert stats.chisquare(counts, np.array(p) * 2_000).pvalue > 1e-4


def test_ids_that_the_target_cut_may_be_in_q():
    """top_k = 3 keeps ids 1, 2 and 4; the draft kept others. The text is the cut p all the same."""
    p = [0.1, 0.35, 0.15, 0.05, 0.25, 0.1]
    counts = shares(3_000, p, None, q_of(t0=0.3, t1=0.1, t3=0.1, t5=0.5), top_k=3)
    assert counts[[0, 3, 5]].tolist() == [0, 0, 0]
    assert stats.chisquare(counts[[1, 2, 4]], np.array([0.35, 0.15, 0.25]) / 0.75 * 3_000).pvalue > 1e-4


def test_q_is_read_over_its_sum():
    """What Gumbel-max draws from numbers that sum to 0.9995 is those numbers over 0.9995."""
    ids, numbers = numbers_of(q_of(t7=0.2495, t3=0.75))
    assert ids.tolist() == [3, 7] and numbers.sum() == pytest.approx(1.0, abs=1e-15)
    assert numbers[0] == pytest.approx(0.75 / 0.9995, rel=1e-7)
