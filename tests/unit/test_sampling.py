"""The pipeline against a slow reading of its page, stage by stage."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec.cuts import mass
from specdec.errors import InvalidRequest, NonFinite
from specdec.logprobs import softmax, token_logprobs
from specdec.ranking import best
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, SamplingParams
from tests.unit import sampling_oracle as oracle
from tests.unit.sampling_rig import EOS, PARAMS, choose, sampler, scores


def rows(count):
    rng = np.random.default_rng(5)
    for trial in range(count):
        n = int(rng.choice([40, 41, 200, 999]))
        row = (rng.standard_normal(n) * rng.choice([0.0, 0.3, 3.0, 20.0])).astype(np.float64 if trial % 4 == 0 else np.float32)
        yield np.round(row) if trial % 3 == 0 else row, rng  # every third has many ties


@pytest.mark.parametrize("params", PARAMS, ids=str)
def test_pipeline_equals_its_slow_reading(params):
    """Same bits in every score, also in those of the reference; the fast choice is the argmax of score + noise over the whole row."""
    for row, rng in rows(12):
        prompt, output = rng.integers(0, len(row), 6).tolist(), rng.integers(0, 40, int(rng.integers(0, 50))).tolist()
        seed = int(rng.integers(2**63))
        s = sampler(len(row), prompt, seed, **params)
        expected = oracle.scores(row, s.params, {EOS, *s.params.stop_token_ids}, prompt, output)
        np.testing.assert_array_equal(scores(s, row, output), expected)
        np.testing.assert_array_equal(oracle.Reference(s.params, seed, len(row), [EOS], prompt).scores(row, output), expected)
        assert choose(s, row, output) == oracle.choice(expected, seed, len(prompt) + len(output))


@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.95}, {"top_p": 0.95, "temperature": 2.0}, {"top_k": 50}, {"top_k": 2000}, {"min_p": 0.05}],
    ids=str,
)
def test_vocabulary_sized_rows_equal_a_full_sort(params):
    rng = np.random.default_rng(9)
    s = sampler(49152, **params)
    for scale in (0.0, 1.0, 3.0):
        row = (rng.standard_normal(49152) * scale).astype(np.float32)
        tempered = (row - row.max()) / s.params.temperature
        order = np.argsort(-tempered, kind="stable")[: s.params.top_k or None]
        if s.params.top_p < 1.0:
            running = mass(tempered)[order].cumsum()
            order = order[: int((running < math.ceil(s.params.top_p * int(running[-1]))).sum()) + 1]
        order = order[tempered[order] >= math.log(s.params.min_p)] if s.params.min_p else order
        expected = np.full_like(tempered, -math.inf)
        expected[order] = tempered[order]
        np.testing.assert_array_equal(scores(s, row), expected)
        assert choose(s, row) == oracle.choice(expected, 11, 3)


@pytest.mark.parametrize("scale", [0.0, 0.02, 1.0, 3.0, 200.0])
@pytest.mark.parametrize("ties", [False, True])
def test_best_equals_a_full_sort(scale, ties):
    rng = np.random.default_rng(int(scale * 100))
    for n in (1, 2, 513, 5000):
        values = (rng.standard_normal(n) * scale).astype(np.float32)
        values = np.round(values) if ties else values
        values -= values.max()
        values[rng.random(n) < 0.1] = -np.inf
        values[n // 2] = 0.0
        order = np.argsort(-values, kind="stable")
        for k in {1, max(1, n // 50), max(1, n // 2)}:
            assert best(values, None, k).tolist() == sorted(order[:k])
        masses = mass(values)
        running = masses[order].cumsum()
        for share in (1e-9, 0.3, 0.9, 0.9999, 1.0):
            target = max(1, math.ceil(share * running[-1]))
            assert best(values, masses, target).tolist() == sorted(order[: np.searchsorted(running, target) + 1])


def test_borders_of_top_p_and_of_mass():
    """Two equal ids hold half each: top_p = 0.5 keeps one, anything more keeps both. Mass is rounded down."""
    row = np.zeros(2, np.float32)
    assert np.isfinite(scores(sampler(2, top_p=0.5), row)).tolist() == [True, False]
    assert np.isfinite(scores(sampler(2, top_p=0.5 + 1e-12), row)).all()
    assert mass(np.array([0.0, -23.5, -24.0])).tolist() == [2.0**34, 1.0, 0.0]


def test_a_row_is_decided_alone():
    """The same bits whatever the row's neighbours, its place in memory and what was asked of the sampler before."""
    rng = np.random.default_rng(1)
    batch = torch.from_numpy((rng.standard_normal((9, 1003)) * 3).astype(np.float32))
    s = sampler(1000, top_p=0.9, repetition_penalty=1.2)
    alone = [sampler(1000, top_p=0.9, repetition_penalty=1.2).choose(batch[i].clone(), 3 + i, list(range(i))) for i in range(9)]
    for i in reversed(range(9)):
        assert s.choose(batch[i], 3 + i, list(range(i))) == alone[i]


def test_choice_depends_on_seed_and_position():
    flat = np.zeros(128, np.float32)
    by_seed = {choose(sampler(128, seed=seed), flat) for seed in range(50)}
    by_position = {choose(sampler(128), flat, range(i)) for i in range(50)}
    assert len(by_seed) > 30 and len(by_position) > 30


def test_f38_seeds_change_the_text():
    flat = np.zeros(128, np.float32)
    texts = {tuple(choose(sampler(128, seed=seed), flat, range(i)) for i in range(4)) for seed in range(50)}
    assert len(texts) >= 45


def test_position_must_fit_the_output():
    with pytest.raises(ValueError, match="position"):
        sampler().choose(torch.zeros(100), 3, [1])


def test_greedy_takes_the_lowest_of_equals_and_ignores_cuts():
    row = np.zeros(100, np.float32)
    row[[40, 7, 90]] = 3.0
    s = sampler(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0)
    assert choose(s, row) == 7
    assert np.flatnonzero(np.isfinite(scores(s, row))).tolist() == [7]


@pytest.mark.parametrize("temperature", [1e-3, 1e-5, 1e-6, 1e-30, 5e-324, -0.0, 0.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_f18_tiny_temperatures_never_overflow(temperature, dtype):
    """Some logits at 6e4, some banned: below GREEDY_BELOW argmax; above it differences divide to at worst -inf."""
    row = torch.randn(100, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    row[17], row[18], row[3] = 6e4, -6e4, 6e4
    params = SamplingParams(temperature=temperature, banned_token_ids=(3, 4), top_p=0.9)
    params.check(100)
    s = Sampler(params, 1, 100, [EOS], [1])
    assert s.choose(row.to(dtype), 1, []) == 17
    assert not torch.isnan(s.scores(row.to(dtype), 1, [])).any()


@pytest.mark.parametrize("temperature", [-1.0, -1e-9, math.nan, math.inf, -math.inf])
def test_f18_impossible_temperatures_are_refused(temperature):
    with pytest.raises(InvalidRequest, match=r"sampling\.temperature"):
        SamplingParams(temperature=temperature).check(100)


def test_differences_beyond_the_format_mean_impossible():
    row = torch.zeros(10)
    row[0], row[1] = 3e38, -3e38
    s = sampler(10, temperature=1e-4)
    assert s.scores(row, 3, [])[1] == -math.inf and s.choose(row, 3, []) == 0


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_f92_non_finite_logits_are_refused_wherever_they_are(bad):
    for place in (0, 50, 99):
        for params in ({"temperature": 0.0}, {}, {"banned_token_ids": (place,)}):
            row = torch.randn(100)
            row[place] = bad
            with pytest.raises(NonFinite):
                choose(sampler(**params), row)
    with pytest.raises(NonFinite):
        choose(sampler(), torch.full((100,), bad))


def test_f48_padded_head_rows_are_never_chosen():
    """A head of 128 rows over 118 ids: the padding may even be the largest or not finite."""
    row = torch.randn(128)
    row[118:] = 1e4
    row[127] = math.inf
    for params in ({"temperature": 0.0}, {}, {"top_k": 3}):
        picked = {choose(sampler(118, seed=seed, **params), row) for seed in range(20)}
        assert max(picked) < 118


def test_a_head_smaller_than_the_vocabulary_is_a_defect():
    with pytest.raises(ValueError, match="at least 118"):
        choose(sampler(118), torch.zeros(100))


def test_min_tokens_masks_every_id_that_ends_the_generation():
    row = np.zeros(100, np.float32)
    row[[EOS, 9]] = 50.0
    s = sampler(temperature=0.0, min_tokens=4, stop_token_ids=(9,))
    assert [choose(s, row, range(10, 10 + n)) for n in (0, 3, 4, 5)] == [0, 0, EOS, EOS]
    s = sampler(temperature=0.0, min_tokens=4, stop_token_ids=(9,), ignore_eos=True)
    assert [choose(s, row, range(10, 10 + n)) for n in (0, 3, 4)] == [EOS, EOS, EOS]
    assert s.stop_ids == {9}


def test_nothing_left_to_choose_is_refused_at_once():
    with pytest.raises(InvalidRequest, match=r"sampling\.allowed_token_ids"):
        sampler(allowed_token_ids=(1, 2), banned_token_ids=(1, 2, 3))
    with pytest.raises(InvalidRequest, match=r"sampling\.min_tokens"):
        sampler(allowed_token_ids=(EOS,), min_tokens=1)
    sampler(allowed_token_ids=(EOS,))


def test_penalties_count_the_output_row_by_row_and_forget_what_was_cut_back():
    row = np.zeros(20, np.float64)
    s = sampler(20, frequency_penalty=1.0)
    for output in ([], [4], [4, 4], [4, 4, 4], [4, 5], [], [9] * 7):
        expected = oracle.scores(row, s.params, {EOS}, (5, 6, 7), output)
        np.testing.assert_array_equal(scores(s, row, output), expected)


def test_logprobs_are_those_of_the_raw_logits():
    row = torch.randn(1000, generator=torch.Generator().manual_seed(3)) * 4
    row[[10, 700]] = row.max() + 1  # a tie at the top
    expected = torch.log_softmax(row.double(), 0)
    found = sampler(1000, logprobs=5, temperature=0.3, banned_token_ids=(10,)).logprobs(row, 33)
    assert found.logprob == pytest.approx(expected[33].item(), abs=1e-6)
    assert found.top_ids[:2] == (10, 700) and len(found.top_ids) == 5
    assert list(found.top_ids) == sorted(range(1000), key=lambda i: (-row[i].item(), i))[:5]
    assert found.top_logprobs == pytest.approx(expected[list(found.top_ids)].tolist(), abs=1e-6)
    assert all(value == np.float32(value) for value in (found.logprob, *found.top_logprobs))
    assert sampler(1000).logprobs(row, 33) is None
    assert sampler(1000, logprobs=0).logprobs(row, 33).top_ids == ()


@pytest.mark.parametrize("scale", [0.0, 0.3, 4.0, 30.0])
def test_logprobs_of_a_vocabulary_are_within_a_millionth_and_a_rounding(scale):
    rng = np.random.default_rng(6)
    for n in (49152, 50257):
        row = (rng.standard_normal(n) * scale - 7.0).astype(np.float32)
        exact = torch.log_softmax(torch.from_numpy(row).double(), 0).numpy()
        order = np.argsort(-row, kind="stable")
        found = token_logprobs(row, int(order[n // 2]), 20)
        assert found.top_ids == tuple(order[:20].tolist())
        for value, i in zip((found.logprob, *found.top_logprobs), (order[n // 2], *found.top_ids), strict=True):
            assert abs(value - exact[i]) <= 1e-6 + 2.0**-24 * abs(exact[i])


def test_logprobs_of_few_ids_and_of_far_apart_ones():
    row = np.array([0.0, -1e4, -2e4], dtype=np.float32)
    found = token_logprobs(row, 2, 20)
    assert found.top_ids == (0, 1, 2) and math.isfinite(found.logprob) and found.logprob == -2e4


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.9}, {"top_k": 200}, {"frequency_penalty": 1.0}], ids=str
)
def test_a_distribution_leaves_the_log_probabilities_of_its_row_as_they_are(params, dtype):
    """Where nothing was applied to a row both take the same shares: the same bits, whatever was asked for before."""
    generator, s = torch.Generator().manual_seed(9), sampler(1003, logprobs=20, **params)
    for scale in (0.0, 1.0, 30.0):
        row, other = (s.raw((torch.randn(1003, generator=generator) * scale).to(dtype)) for _ in range(2))
        ids, p = s.distribution(row, 4, [5])
        fresh_ids, fresh = sampler(1003, **params).distribution(row, 4, [5])
        assert ids.tolist() == fresh_ids.tolist() and p.tobytes() == fresh.tobytes()
        if not params:
            assert p.tobytes() == softmax(row - row.max()).tobytes()
        assert s.logprobs(row, 33) == s.logprobs(row, 33) == token_logprobs(row, 33, 20)
        s.distribution(row, 4, [5])
        assert s.logprobs(other, 33) == token_logprobs(other, 33, 20)


@pytest.mark.parametrize("row", [[0.0, -3e38, -1.0], [3e38, -3e38, 0.0]])
def test_a_log_probability_that_is_no_number_is_refused(row):
    s, found = sampler(3, prompt=(1, 2), logprobs=2), np.array(row, dtype=np.float32)
    told = [token_logprobs(found, token, 2) for token in range(3)]
    for token, entry in enumerate(told):
        if all(math.isfinite(value) for value in (entry.logprob, *entry.top_logprobs)):
            assert s.logprobs(found, token) == entry
        else:
            with pytest.raises(NonFinite):
                s.logprobs(found, token)
    assert sum(math.isfinite(entry.logprob) for entry in told) in (2, 3)


def test_inputs_are_never_written():
    row = torch.randn(100, generator=torch.Generator().manual_seed(5))
    before = row.clone()
    s = sampler(top_p=0.8, temperature=0.5, frequency_penalty=1.0, logit_bias={1: 5.0}, min_tokens=9, banned_token_ids=(8,), logprobs=3)
    output = [4, 4, 5]
    choose(s, row, output), scores(s, row, output), s.logprobs(row, 3)
    draft_choice(s, row, 6, output, DraftMethod.PROBABILISTIC)
    assert torch.equal(row, before) and output == [4, 4, 5]


def test_parameters_are_not_shared_between_samplers():
    a, b = sampler(seed=1), sampler(seed=1, temperature=0.5)
    row = np.random.default_rng(0).standard_normal(100).astype(np.float32)
    assert choose(a, row) == choose(sampler(seed=1), row)
    assert choose(b, row) == choose(Sampler(replace(a.params, temperature=0.5), 1, 100, [EOS], [5, 6, 7]), row)


@pytest.mark.parametrize("count", [0, 1, 2, 500, 3000])
@pytest.mark.parametrize("reduced", [False, True])
def test_ids_of_a_list_in_any_order_and_number(count: int, reduced: bool) -> None:
    """Each once, ascending, of those that the head has."""
    vocab, draw = 4000, random.Random(count)
    head = sorted(draw.sample(range(vocab), 1500)) if reduced else list(range(vocab))
    ids = tuple(draw.choice((draw.randrange(vocab), vocab + 5, -1, 7)) for _ in range(count))
    reads = Sampler(SamplingParams(), 0, vocab, (), (), columns=head if reduced else None)
    columns = reads._columns_of(ids)
    assert [head[c] for c in columns] == sorted(set(ids) & set(head)) and columns.dtype == np.int64
