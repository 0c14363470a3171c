"""The sampling pipeline as its page reads: whole rows, full sorts, noise for every id. Slow; for comparison only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from specdec import noise
from specdec.sampling import Floats
from specdec.seeds import SHARED
from specdec.terms import SamplingParams


def scores(
    logits: Sequence[float] | Floats, params: SamplingParams, stops: set[int], prompt: Sequence[int], output: Sequence[int]
) -> Floats:
    """Stages 1 to 8 for a sampler that is not greedy. logits [vocab_size] float32 or float64."""
    row = np.array(logits)
    for i in range(len(row)):
        outside = bool(params.allowed_token_ids) and i not in params.allowed_token_ids
        if i in params.banned_token_ids or outside or (i in stops and len(output) < params.min_tokens):
            row[i] = -math.inf
    for i, bias in params.logit_bias.items():
        row[i] += row.dtype.type(bias)
    for i in set(prompt) | set(output):
        r = params.repetition_penalty
        row[i] = row[i] / r if row[i] > 0 else row[i] * r
    for i, count in Counter(output).items():
        row[i] -= row.dtype.type(count) * params.frequency_penalty + params.presence_penalty
    row = (row - row.max()) / params.temperature
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    if 0 < params.top_k < len(row):
        order = order[: params.top_k]
    if params.top_p < 1.0:
        masses = [int(float(np.exp(row[i])) * 2.0**34) for i in order]
        wanted, reached, n = max(1, math.ceil(params.top_p * sum(masses))), 0, 0
        while reached < wanted:
            reached, n = reached + masses[n], n + 1
        order = order[:n]
    if params.min_p > 0.0:
        order = [i for i in order if row[i] >= math.log(params.min_p)]
    cut = np.full_like(row, -math.inf)
    cut[order] = row[order]
    return cut


def choice(cut: Floats, seed: int, position: int) -> int:
    """Stage 9."""
    return int(np.argmax((torch.from_numpy(cut) + noise.gumbel(seed, SHARED, position, len(cut))).numpy()))
