"""The draft's side of the pipeline: what it proposes, and what it says of that."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec import noise
from specdec.errors import NonFinite
from specdec.logprobs import softmax
from specdec.sampling import DRAFT_TOP_K, draft_choice, truncated
from specdec.seeds import DRAFT
from specdec.terms import DraftMethod
from tests.unit.sampling_rig import PARAMS, choose, sampler

COLUMNS = tuple(range(3, 100, 3))  # a reduced head: 33 of 100 ids, EOS not among them


def propose(s, row, method, output=()):
    return draft_choice(s, torch.as_tensor(row), s.prompt_length + len(output), list(output), method)


@pytest.mark.parametrize("params", [*PARAMS, {"temperature": 0.0}], ids=str)
def test_gumbel_draft_with_the_targets_logits_makes_the_targets_choice(params):
    rng = np.random.default_rng(2)
    for trial in range(20):
        row = rng.standard_normal(100).astype(np.float32) * 3
        s = sampler(100, seed=trial, **params)
        assert propose(s, row, DraftMethod.GUMBEL, [1, 1]).token == choose(s, row, [1, 1])


def test_reduced_head_hears_the_noise_of_target_ids():
    """A reduced head decides as the full one does when the other ids are banned."""
    rng = np.random.default_rng(4)
    others = tuple(sorted(set(range(100)) - set(COLUMNS)))
    for trial, params in enumerate(PARAMS * 3):
        row = rng.standard_normal(100).astype(np.float32) * 3
        if params.get("allowed_token_ids"):
            continue
        reduced = sampler(seed=trial, columns=COLUMNS, **params)
        banned = (*params.get("banned_token_ids", ()), *others)
        full = sampler(seed=trial, **{**params, "banned_token_ids": banned})
        output = [6, 9, 9, 1]
        for method in DraftMethod:
            a, b = propose(reduced, row[list(COLUMNS)], method, output), propose(full, row, method, output)
            assert a.token == b.token and a.distribution == b.distribution
            assert a.confidence == pytest.approx(b.confidence, rel=1e-6)


def test_reduced_head_without_an_allowed_id_proposes_nothing():
    s = sampler(columns=COLUMNS, allowed_token_ids=(1, 2))
    assert all(propose(s, np.zeros(33, np.float32), method) is None for method in DraftMethod)


def test_reduced_head_must_ascend():
    with pytest.raises(ValueError, match="ascend"):
        sampler(columns=(5, 3, 9))


def test_greedy_draft_is_one_hot():
    row = np.zeros(100, np.float32)
    row[44] = 2.0
    choice = propose(sampler(), row, DraftMethod.GREEDY)
    assert choice.token == 44 and choice.distribution is None
    assert choice.confidence == pytest.approx(softmax(row)[44], rel=1e-5)
    assert propose(sampler(temperature=0.0), row, DraftMethod.PROBABILISTIC).distribution is None


def test_f08_what_is_sent_is_what_was_sampled_from():
    """Truncated, renormalised and rounded to float32 first; then the token is the Gumbel-max of those very numbers."""
    rng = np.random.default_rng(8)
    for trial in range(100):
        row = rng.standard_normal(3000).astype(np.float32) * 2
        s = sampler(3000, seed=trial, temperature=0.8, top_p=0.98)
        q = propose(s, row, DraftMethod.PROBABILISTIC).distribution
        q.check(3000)
        assert len(q.ids) <= DRAFT_TOP_K and list(q.ids) == sorted(q.ids)
        numbers = torch.tensor(q.floats(), dtype=torch.float64)
        redrawn = int((numbers.log() + noise.gumbel(trial, DRAFT, 3, torch.tensor(q.ids))).argmax())
        assert propose(s, row, DraftMethod.PROBABILISTIC).token == q.ids[redrawn]
        assert abs(sum(q.floats()) - 1) < 1e-5


def test_confidence_does_not_depend_on_what_was_drawn():
    row = np.random.default_rng(3).standard_normal(100).astype(np.float32)
    choices = [propose(sampler(seed=seed), row, DraftMethod.PROBABILISTIC) for seed in range(30)]
    assert len({c.token for c in choices}) > 5 and len({c.confidence for c in choices}) == 1
    assert len({c.distribution for c in choices}) == 1


def test_truncation_keeps_the_best_and_drops_zeros():
    ids, probs = truncated(np.array([2, 5, 9, 11]), np.array([0.1, 0.5, 1e-60, 0.4]), 3)
    assert ids.tolist() == [2, 5, 11] and probs.dtype == np.float32
    ids, probs = truncated(np.array([2, 5]), np.array([1.0, 1e-60]), 5)
    assert ids.tolist() == [2] and probs.tolist() == [1.0]


def test_f84_a_broken_draft_row_raises_and_is_for_the_caller_to_drop():
    with pytest.raises(NonFinite):
        propose(sampler(), np.full(100, math.nan, np.float32), DraftMethod.GUMBEL)
