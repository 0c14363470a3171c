"""The sampling pipeline as its page reads, for comparison only. It shares nothing with specdec.sampling but the noise's definition.

`scores` and `choice`: cuts in loops over ids. `Reference`: every answer of a Sampler and of draft_choice by full sorts and noise for
every id, fast enough for rows of a real vocabulary; a test holds it against the loops.
"""

from __future__ import annotations

import functools
import math
import struct
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from specdec import noise
from specdec.seeds import DRAFT, SHARED
from specdec.terms import DraftMethod, SamplingParams

Floats = npt.NDArray[np.floating[Any]]
Legal = tuple[Collection[int] | None, bool]  # ids that a grammar lets follow (None = all), and whether the text may end here
FREE: Legal = (None, True)
WIRE = 64


def legal(n: int, params: SamplingParams, stops: set[int], length: int, grammar: Legal) -> npt.NDArray[np.bool_]:
    """Stage 2, after `length` decided tokens [n]."""
    left, free = set(range(n)), grammar[0] is None
    if params.allowed_token_ids:
        left &= set(params.allowed_token_ids)
    left -= set(params.banned_token_ids)
    if not free:
        left &= set(grammar[0] or ()) | stops
    if length < params.min_tokens or not (free or grammar[1]):
        left -= stops
    mask = np.zeros(n, dtype=bool)
    mask[sorted(left)] = True
    return mask


def adjusted(
    logits: Sequence[float] | Floats, params: SamplingParams, stops: set[int], prompt: Sequence[int], output: Sequence[int], grammar: Legal
) -> Floats:
    """Stages 1 to 4. logits [vocab_size] float32 or float64."""
    row = np.array(logits)
    row[~legal(len(row), params, stops, len(output), grammar)] = -math.inf
    for i, bias in params.logit_bias.items():
        row[i] += row.dtype.type(bias)
    if params.repetition_penalty != 1.0:
        for i in set(prompt) | set(output):
            row[i] = row[i] / params.repetition_penalty if row[i] > 0 else row[i] * params.repetition_penalty
    for i, count in Counter(output).items():
        row[i] -= row.dtype.type(count) * params.frequency_penalty + params.presence_penalty
    return row


def scores(
    logits: Sequence[float] | Floats,
    params: SamplingParams,
    stops: set[int],
    prompt: Sequence[int],
    output: Sequence[int],
    grammar: Legal = FREE,
) -> Floats:
    """Stages 1 to 8 for a sampler that is not greedy. logits [vocab_size] float32 or float64."""
    row = adjusted(logits, params, stops, prompt, output, grammar)
    with np.errstate(over="ignore"):
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


class Reference:
    """What a Sampler says. `columns` = the target ids of a reduced head; `grammar` says what may follow an output."""

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        prompt: Sequence[int],
        columns: Sequence[int] | None = None,
        grammar: Callable[[Sequence[int]], Legal] = lambda output: FREE,
    ) -> None:
        self.params, self.seed, self.vocab_size, self.prompt, self.grammar = params, seed, vocab_size, list(prompt), grammar
        self.stops = {*params.stop_token_ids, *(() if params.ignore_eos else eos_ids)}
        self.ids = np.arange(vocab_size) if columns is None else np.array(columns)
        self.limited = 0 < params.top_k < len(self.ids) or params.top_p < 1.0 or params.min_p > 0.0

    def adjusted(self, logits: Floats, output: Sequence[int]) -> Floats:
        """As the full row would be, seen through the columns of the head."""
        full = np.zeros(self.vocab_size, dtype=logits.dtype)
        full[self.ids] = logits[: len(self.ids)]
        return adjusted(full, self.params, self.stops, self.prompt, output, self.grammar(output))[self.ids]

    def tempered(self, row: Floats) -> Floats:
        with np.errstate(over="ignore"):
            row = row - row.max()
            return row if self.params.greedy or self.params.temperature == 1.0 else row / self.params.temperature

    def cut(self, values: Floats) -> Floats:
        """Stages 6 to 8: -inf = dropped."""
        params, order = self.params, np.argsort(-values, kind="stable")
        order = order[values[order] > -math.inf]
        if 0 < params.top_k < len(values):
            order = order[: params.top_k]
        if params.top_p < 1.0:
            running = np.floor(np.exp(values[order]).astype(np.float64) * 2.0**34).cumsum()
            wanted = max(1, math.ceil(params.top_p * int(running[-1])))
            order = order[: int((running < wanted).sum()) + 1]
        if params.min_p > 0.0:
            order = order[values[order] >= math.log(params.min_p)]
        left = np.full_like(values, -math.inf)
        left[order] = values[order]
        return left

    def scores(self, logits: Floats, output: Sequence[int]) -> Floats:
        row = self.adjusted(logits, output)
        if not self.params.greedy:
            return self.cut(self.tempered(row))
        left = np.full_like(row, -math.inf)
        left[row.argmax()] = 0.0
        return left

    def choose(self, logits: Floats, output: Sequence[int]) -> int:
        cut = self.scores(logits, output)
        g = noise.gumbel(self.seed, SHARED, len(self.prompt) + len(output), torch.from_numpy(self.ids)).numpy()
        return int(self.ids[np.argmax(cut + g)])

    def distribution(self, logits: Floats, output: Sequence[int]) -> tuple[npt.NDArray[np.int64], Floats]:
        return self.probabilities(self.scores(logits, output))

    def probabilities(self, cut: Floats) -> tuple[npt.NDArray[np.int64], Floats]:
        kept = np.flatnonzero(cut > -math.inf) if self.limited or self.params.greedy else np.arange(len(cut))
        weights = np.exp(cut[kept] - cut[kept].max()).astype(np.float64)
        return self.ids[kept], weights / weights.sum()

    def draw(self, ids: npt.NDArray[np.int64], weights: Floats, tag: int, position: int) -> int:
        with np.errstate(divide="ignore"):
            return int(ids[np.argmax(np.log(weights) + noise.gumbel(self.seed, tag, position, torch.tensor(ids.tolist())).numpy())])

    def logprobs(self, logits: Floats, token: int) -> tuple[float, tuple[int, ...], tuple[float, ...]]:
        row = logits[: self.vocab_size]
        exact = row.astype(np.float64)
        shares, step = np.exp(row - row.max()), len(row) // 8
        sums = [functools.reduce(lambda a, b: a + b, shares[i : 8 * step : step]) for i in range(step)] + list(shares[8 * step :])
        total = float(row.max()) + math.log(math.fsum(float(part) for part in sums))
        top = np.argsort(-exact, kind="stable")[: self.params.logprobs].tolist()
        values = [float(np.float32(exact[i] - total)) for i in (token, *top)]
        return values[0], tuple(top), tuple(values[1:])

    def propose(
        self, logits: Floats, output: Sequence[int], method: DraftMethod
    ) -> tuple[int, float, tuple[tuple[int, ...], bytes] | None] | None:
        row = self.adjusted(logits, output)
        if row.max() == -math.inf:
            return None
        values, position = self.tempered(row), len(self.prompt) + len(output)
        confidence = 1.0 / float(np.exp(values).sum())
        if self.params.greedy or method is DraftMethod.GREEDY:
            return int(self.ids[row.argmax()]), confidence, None
        if method is DraftMethod.GUMBEL:
            return self.choose(logits, output), confidence, None
        ids, p = self.probabilities(self.cut(values))
        likeliest = np.sort(np.argsort(-p, kind="stable")[:WIRE])
        sent = (p[likeliest] / p[likeliest].sum()).astype(np.float32)
        ids, sent = ids[likeliest][sent > 0], sent[sent > 0]
        token = self.draw(ids, sent.astype(np.float64), DRAFT, position)
        return token, confidence, (tuple(ids.tolist()), struct.pack(f"<{len(sent)}f", *sent))
