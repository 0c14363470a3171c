"""What else could have followed: by the definition, slowly, for every way to choose."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specdec import noise
from specdec.guesses import DEPTH, MOST, Guesses
from specdec.sampling import Sampler, draft_choice
from specdec.seeds import SHARED
from specdec.terms import DraftMethod, SamplingParams

WIDTH = 997


def row(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(WIDTH).astype(np.float32) * 3)


def guesses(params: SamplingParams, method: DraftMethod, seed: int, columns: tuple[int, ...] | None = None) -> tuple[Sampler, Guesses, int]:
    sampler = Sampler(params, seed, 50_000, (), (1, 2), columns)
    logits = row(seed) if columns else torch.cat([row(seed), torch.full((50_000 - WIDTH,), -1e9)])
    choice = draft_choice(sampler, logits, 5, (3, 4, 5), method)
    assert choice is not None
    return sampler, Guesses(sampler, choice.scores, 5, method, choice.token), choice.token


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(
    "method, temperature, top_k",
    [("gumbel", 1.0, 0), ("gumbel", 0.7, 20), ("gumbel", 0.0, 0), ("greedy", 1.0, 0), ("probabilistic", 1.0, 5)],
)
def test_they_are_the_next_best_by_the_score_that_chose(method: str, temperature: float, top_k: int, seed: int, reduced: bool) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k)
    columns = tuple(range(7, 7 + 11 * WIDTH, 11)) if reduced else None
    sampler, found, token = guesses(params, DraftMethod(method), seed, columns)
    ids = np.array(columns if columns else range(WIDTH))
    scores = row(seed).double() / (temperature or 1.0)
    near = scores >= scores.max() - DEPTH
    if top_k:
        near &= scores >= scores.topk(top_k).values[-1]
    total = scores + (noise.gumbel(seed, SHARED, 5, torch.from_numpy(ids), torch.float64) if method == "gumbel" and temperature else 0.0)
    total[~near] = -math.inf
    order = [int(ids[i]) for i in total.argsort(descending=True) if total[i] > -math.inf]
    assert list(found.ranked()) == [i for i in order if i != token][:MOST]
    assert found.ranked() is found.ranked()  # ranked once


def test_what_may_not_follow_is_no_guess() -> None:
    _, found, token = guesses(SamplingParams(temperature=1.0, allowed_token_ids=(1, 2, 3)), DraftMethod.GUMBEL, 1)
    assert {token, *found.ranked()} <= {1, 2, 3} and token not in found.ranked()


def test_guesses_without_the_noise_of_the_target_hit_less() -> None:
    """The broken twin: ranking by q what was chosen by q and noise."""
    hits = {DraftMethod.GUMBEL: 0, DraftMethod.GREEDY: 0}
    for seed in range(300):
        params = SamplingParams(temperature=1.0)
        sampler = Sampler(params, seed, 50_000, (), (1, 2), tuple(range(WIDTH)))
        truth = sampler.choose((row(seed) + 0.7 * row(seed + 1000)).numpy(), 5, (3, 4, 5))
        choice = draft_choice(sampler, row(seed), 5, (3, 4, 5), DraftMethod.GUMBEL)
        assert choice is not None
        for method in hits:
            hits[method] += truth != choice.token and truth in Guesses(sampler, choice.scores, 5, method, choice.token).ranked()[:3]
    assert hits[DraftMethod.GUMBEL] > 1.5 * hits[DraftMethod.GREEDY] > 0
