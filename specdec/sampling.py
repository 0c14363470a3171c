"""Logits to token: one pipeline for plain rows, for every row of a block, and for the draft. Knows no session, no engine.

A row goes through these stages in this order. Each looks at that row alone: no decision depends on a batch.

    1  raw          ids the tokenizer knows (a padded head is cut off); must be finite; log-probabilities are taken here
    2  bans         -inf for banned ids, for ids outside a non-empty allowed list, for ids that a grammar does not allow here
                    and, before min_tokens, for every id that would end the generation
    3  logit_bias   added
    4  penalties    repetition (ids of prompt and output: positive scores divided, negative ones multiplied), then
                    frequency * count + presence subtracted (ids of the output)
    5  temperature  (score - best score) / temperature; below GREEDY_BELOW the argmax of stage 4 is the choice, and
                    nothing below applies
    6  top_k        the k best; ties at the border: lowest ids
    7  top_p        of what is left, the smallest set of best ids whose mass reaches top_p (ties: lowest ids)
    8  min_p        of what is left, ids with at least min_p times the probability of the best
    9  noise        argmax of score + noise (specdec.noise); ties: lowest id

float64 rows stay float64, all others are float32; rows from an accelerator come to the CPU first, so that sampling is the
same code everywhere. Masses of stage 7 are whole multiples of 2**-34 of the best id's mass: below 2**53 such sums
are exact in float64 and the same in any order, so the set kept does not depend on how it was found.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec import noise
from specdec.errors import InvalidRequest, NonFinite
from specdec.noise import Floats
from specdec.seeds import DRAFT, SHARED
from specdec.terms import DraftDistribution, DraftMethod, SamplingParams, TokenLogprobs

Columns = npt.NDArray[np.int64]

DRAFT_TOP_K = 64  # most ids of a distribution on the wire
_MASS_UNIT = 2.0**34
_NEAR = 5.0  # how far below the best score the ids that cuts keep are usually found
_SMALL, _BUCKETS, _DEPTH = 512, 2048, 40.0  # values to sort at once; buckets of a histogram, and how far down it reaches


class Allowed(Protocol):
    """What a grammar lets follow an output: specdec.grammar.Allowed."""

    @property
    def mask(self) -> npt.NDArray[np.bool_] | None: ...
    @property
    def may_end(self) -> bool: ...
    @property
    def must_end(self) -> bool: ...


class Constraint(Protocol):
    """A grammar's state: specdec.grammar.Constraint."""

    def at(self, output: Sequence[int]) -> Allowed: ...
    def forced(self, output: Sequence[int]) -> tuple[int, ...]: ...


class Sampler:
    """The pipeline of one generation: its parameters, its seed, its prompt. Rows may come in any order.

    `vocab_size` = ids the tokenizer knows. `columns` (drafts with a reduced head): the ascending target ids of the head's
    columns; rows then have one logit per column, answers are target ids all the same. `constraint`: the fresh state of
    params.grammar, and of nothing else. Raises InvalidRequest when bans leave nothing to choose from.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        prompt: Sequence[int],
        columns: Sequence[int] | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        if (params.grammar is None) != (constraint is None):
            raise ValueError("a sampler with a grammar needs its constraint, one without has none")
        self.constraint = constraint
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self.prompt_length = len(prompt)
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self.ids = noise.all_ids(vocab_size) if columns is None else _reduced(tuple(columns))
        self.width = len(self.ids)
        self._forbidden = self._forbidden_columns()
        self._stops = self._columns_of(self.stop_ids)
        self._bias_columns = self._columns_of(params.logit_bias)
        self._bias = np.array([params.logit_bias[int(self.ids[c])] for c in self._bias_columns], dtype=np.float64)
        self._prompt_columns = self._columns_of(set(prompt)) if params.repetition_penalty != 1.0 else _NONE
        self._counts = _Counts()
        if columns is None:
            self._require_a_choice()

    def _forbidden_columns(self) -> Columns:
        forbidden = np.zeros(self.width, dtype=bool)
        if self.params.allowed_token_ids:
            forbidden[:] = True
            forbidden[self._columns_of(self.params.allowed_token_ids)] = False
        forbidden[self._columns_of(self.params.banned_token_ids)] = True
        return np.flatnonzero(forbidden)

    def _require_a_choice(self) -> None:
        if len(self._forbidden) == self.width:
            raise InvalidRequest("sampling.allowed_token_ids", "allowed and banned ids leave nothing to choose from")
        if self.params.min_tokens > 0 and len(np.union1d(self._forbidden, self._stops)) == self.width:
            raise InvalidRequest("sampling.min_tokens", "only ids that end the generation may be chosen: must be 0")

    def _columns_of(self, ids: Sequence[int] | set[int] | frozenset[int] | Any) -> Columns:
        """Ascending columns of those ids that the head has."""
        wanted = np.array(sorted(i for i in ids if 0 <= i < self.vocab_size), dtype=np.uint64)
        columns = np.searchsorted(self.ids, wanted)
        inside = columns < self.width
        columns, wanted = columns[inside], wanted[inside]
        known: Columns = columns[self.ids[columns] == wanted]
        return known

    def raw(self, logits: Tensor) -> Floats:
        """Stage 1: logits [head rows] -> [width], float32 or float64; shares memory where it can. Raises NonFinite."""
        if logits.dim() != 1 or logits.shape[0] < self.width:
            raise ValueError(f"expected one row of at least {self.width} logits, got shape {tuple(logits.shape)}")
        row = logits.detach()[: self.width]
        if row.dtype != torch.float64:
            row = row.float()
        values: Floats = row.cpu().numpy()
        if not (math.isfinite(values.max()) and math.isfinite(values.min())):  # NaN comes through both
            raise NonFinite("a row of logits holds NaN or infinity")
        return values

    def adjusted(self, logits: Tensor, output: Sequence[int]) -> Floats:
        """Stages 1 to 4 [width]. Shares memory with `logits` when nothing applies; never writes to it."""
        row, params = self.raw(logits), self.params
        early = len(output) < params.min_tokens
        penalized = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) != (1.0, 0.0, 0.0)
        if not (early or penalized or len(self._forbidden) or len(self._bias_columns) or self.constraint):
            return row
        row = row.copy()
        row[self._forbidden] = -math.inf
        if self.constraint is not None:
            self._constrain(row, self.constraint.at(output))
        if early:
            row[self._stops] = -math.inf
        row[self._bias_columns] += self._bias.astype(row.dtype)
        if penalized:
            self._penalize(row, output)
        return row

    def _constrain(self, row: Floats, allowed: Allowed) -> None:
        """The grammar's part of stage 2, in place on a private row."""
        if allowed.mask is None:
            return
        ends = row[self._stops]
        row[~(allowed.mask if self.width == self.vocab_size else allowed.mask[self.ids])] = -math.inf
        if allowed.may_end:
            row[self._stops] = ends

    def must_end(self, output: Sequence[int]) -> bool:
        """Whether a grammar lets nothing follow `output`: the generation ends there, before min_tokens too."""
        return self.constraint is not None and self.constraint.at(output).must_end

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Ids that a grammar makes the only legal continuation of `output`."""
        return () if self.constraint is None else self.constraint.forced(output)

    def _require_possible(self, row: Floats, output: Sequence[int]) -> Floats:
        """An adjusted row that leaves something to choose. Only a grammar can leave nothing: everything else was checked before."""
        if self.constraint is not None and row.max() == -math.inf:
            raise InvalidRequest("sampling.grammar", f"nothing may follow {len(output)} tokens: other fields ban what it needs")
        return row

    def _penalize(self, row: Floats, output: Sequence[int]) -> None:
        """Stage 4, in place on a private row; only touched columns are visited."""
        params, counts = self.params, self._counts.move_to(output)
        columns = self._columns_of(counts)
        if params.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt_columns, columns)
            scores = row[seen]
            row[seen] = np.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        times = np.array([counts[int(token)] for token in self.ids[columns]], dtype=row.dtype)
        row[columns] -= times * params.frequency_penalty + params.presence_penalty

    def temper(self, row: Floats) -> Floats:
        """Stage 5 of an adjusted row [width]: log-scores up to a constant, the best is 0. Temperature 1 when greedy."""
        with np.errstate(over="ignore"):  # beyond the format's range below the best: impossible, -inf is right
            row = row - row.max()
            if not self.params.greedy and self.params.temperature != 1.0:
                row /= self.params.temperature
        return row

    def possible(self, row: Floats) -> tuple[Columns | None, Floats]:
        """Stages 5 to 8 of an adjusted row [width]: ascending columns that may be chosen (None = all), their log-scores."""
        if self.params.greedy:
            return np.array([row.argmax()]), np.zeros(1, dtype=row.dtype)
        scores = self.temper(row)
        columns = kept(scores, self.params)
        return columns, scores if columns is None else scores[columns]

    def scores(self, logits: Tensor, position: int, output: Sequence[int]) -> Tensor:
        """Stages 1 to 8 [width]: log-scores up to a constant, -inf = impossible. Greedy: only the choice is possible."""
        self.check_position(position, output)
        columns, scores = self.possible(self.adjusted(logits, output))
        if columns is None:
            return torch.from_numpy(scores)
        full = np.full(self.width, -math.inf, dtype=scores.dtype)
        full[columns] = scores
        return torch.from_numpy(full)

    def choose(self, logits: Tensor, position: int, output: Sequence[int]) -> int:
        """The token the target decides: argmax of scores + shared noise. `output` = decided tokens before this row."""
        self.check_position(position, output)
        return self.pick(self._require_possible(self.adjusted(logits, output), output), position)

    def pick(self, row: Floats, position: int) -> int:
        """Stages 5 to 9 of an adjusted row [width]: the coupled choice."""
        if self.params.greedy:
            return int(self.ids[row.argmax()])
        columns, scores = self.possible(row)
        ids = self.ids if columns is None else self.ids[columns]
        return int(ids[noise.winner(scores, self.seed, SHARED, position, ids)])

    def distribution(self, logits: Tensor, position: int, output: Sequence[int]) -> tuple[Columns, Floats]:
        """p of this row: ids [m] ascending and float64 probabilities [m]; all other ids have none."""
        self.check_position(position, output)
        return self.probabilities(self._require_possible(self.adjusted(logits, output), output))

    def probabilities(self, row: Floats) -> tuple[Columns, Floats]:
        """`distribution` of an adjusted row [width]."""
        columns, scores = self.possible(row)
        ids = self.ids if columns is None else self.ids[columns]
        return ids.view(np.int64), softmax(scores)

    def draw(self, ids: Columns, weights: Floats, tag: int, position: int) -> int:
        """An id drawn with probability proportional to its weight, from the stream `tag`. ids, weights [m]."""
        with np.errstate(divide="ignore"):
            scores = np.log(weights)
        return int(ids[noise.winner(scores, self.seed, tag, position, ids.view(np.uint64))])

    def logprobs(self, logits: Tensor, token: int) -> TokenLogprobs | None:
        """Log-probabilities under the raw logits; None unless asked for."""
        return None if self.params.logprobs is None else token_logprobs(self.raw(logits), token, self.params.logprobs)

    def check_position(self, position: int, output: Sequence[int]) -> None:
        if position != self.prompt_length + len(output):
            raise ValueError(f"position {position} is not prompt {self.prompt_length} + output {len(output)}")


_NONE: Columns = np.zeros(0, dtype=np.int64)


@functools.lru_cache(maxsize=4)
def _reduced(columns: tuple[int, ...]) -> noise.Keys:
    """Ids of a reduced head's columns, built once for all sessions."""
    ids = np.array(columns, dtype=np.uint64)
    if len(ids) == 0 or not (ids[1:] > ids[:-1]).all():
        raise ValueError("the ids of a reduced head must ascend")
    ids.flags.writeable = False
    return ids


class _Counts:
    """How often each id occurs in a list that grows and is cut back; costs only the difference to the list before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._counts: dict[int, int] = {}

    def move_to(self, tokens: Sequence[int]) -> dict[int, int]:
        known, wanted = self._tokens, list(tokens)
        shared = min(len(known), len(wanted))
        if known[:shared] != wanted[:shared]:
            shared = next(i for i in range(shared) if known[i] != wanted[i])
        for token in known[shared:]:
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]
        for token in wanted[shared:]:
            self._counts[token] = self._counts.get(token, 0) + 1
        self._tokens = wanted
        return self._counts


def mass(scores: Floats) -> Floats:
    """exp(scores) in multiples of 2**-34, rounded down: whole float64 numbers. scores [n] <= 0."""
    masses: Floats = np.floor(np.exp(scores).astype(np.float64) * _MASS_UNIT)
    return masses


def kept(scores: Floats, params: SamplingParams) -> Columns | None:
    """Stages 6 to 8 on scores [n] whose best is 0: ascending columns that stay, None = all that are not -inf."""
    columns: Columns | None = None
    if 0 < params.top_k < len(scores):
        columns = np.flatnonzero(scores > -math.inf)
        if len(columns) > params.top_k:
            columns = best(scores, None, params.top_k)
    if params.top_p < 1.0:
        values = scores if columns is None else scores[columns]
        masses = mass(values)
        total = int(masses.sum())
        inside = best(values, masses, min(total, max(1, math.ceil(params.top_p * total))))
        columns = inside if columns is None else columns[inside]
    if params.min_p > 0.0:
        likely = scores >= math.log(params.min_p)
        columns = np.flatnonzero(likely) if columns is None else columns[likely[columns]]
    return columns


def best(values: Floats, weights: Floats | None, target: int) -> Columns:
    """Ascending places of the fewest largest values [n] whose weights reach `target`; among equals the first come first.

    weights [n]: whole numbers whose sum is at least `target` >= 1 and below 2**53; equal values have equal weights; None =
    each weighs 1.
    """
    border = _border(values, weights, target)
    above, ties = np.flatnonzero(values > border), np.flatnonzero(values == border)
    each = 1 if weights is None else int(weights[ties[0]])
    inside = values >= border
    inside[ties[-((_weigh(weights, above) - target) // each) :]] = False
    return np.flatnonzero(inside)


def _weigh(weights: Floats | None, places: Columns) -> int:
    return len(places) if weights is None else int(weights[places].sum())


def _border(values: Floats, weights: Floats | None, target: int) -> float:
    """The value v with weight(values > v) < target <= weight(values >= v), without sorting more than a few hundred.

    First a guess that is usually right: the border is near the best value. Then a histogram finds the bucket it is in.
    """
    highest, lowest = float(values.max()), float(values.min())
    inside = np.flatnonzero(values > highest - _NEAR)
    if _weigh(weights, inside) >= target:
        values, weights = values[inside], None if weights is None else weights[inside]
    if len(values) > _SMALL:
        depth = min(highest - lowest, _DEPTH) or 1.0
        bucket = np.minimum((highest - values) * (_BUCKETS / depth), _BUCKETS - 1).astype(np.intp)
        running = np.bincount(bucket, weights, _BUCKETS).cumsum()
        place = int(np.searchsorted(running, target))
        target -= int(running[place - 1]) if place else 0
        inside = np.flatnonzero(bucket == place)
        values, weights = values[inside], None if weights is None else weights[inside]
    order = np.argsort(-values)
    running = np.arange(1, len(values) + 1) if weights is None else weights[order].cumsum()
    return float(values[order[np.searchsorted(running, target)]])


def softmax(scores: Floats) -> Floats:
    """Probabilities [n] of log-scores [n], float64. numpy adds pairwise, in an order that only n decides."""
    weights = np.exp(scores.astype(np.float64) - float(scores.max()))
    probabilities: Floats = weights / weights.sum()
    return probabilities


def token_logprobs(row: Floats, token: int, count: int) -> TokenLogprobs:
    """log p of `token` and of the `count` likeliest ids, likeliest first, ties by id. row [vocab_size]: raw logits.

    float64, rounded to float32 at the end.
    """
    exact = row.astype(np.float64)
    highest = float(exact.max())
    total = highest + math.log(float(np.exp(exact - highest).sum()))
    top = best(row, None, count) if 0 < count < len(row) else np.arange(len(row) if count else 0)
    top = top[np.argsort(-exact[top], kind="stable")]
    values = [float(np.float32(x - total)) for x in (exact[token], *exact[top])]
    return TokenLogprobs(values[0], tuple(top.tolist()), tuple(values[1:]))


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A proposed token.

    `confidence`: the largest probability of the draft's tempered distribution before cuts (at temperature 1 when greedy),
    whatever token was drawn. `distribution`: with `probabilistic` only; None = one-hot on the token.
    """

    token: int
    confidence: float
    distribution: DraftDistribution | None = None


def draft_choice(sampler: Sampler, logits: Tensor, position: int, output: Sequence[int], method: DraftMethod) -> DraftChoice | None:
    """What the draft proposes after `output`; None when a reduced head has no allowed id. Raises NonFinite.

    The draft puts its own logits through the same pipeline as the target, cuts included: the closer the two
    distributions, the more often they agree.
    """
    sampler.check_position(position, output)
    row = sampler.adjusted(logits, output)
    if row.max() == -math.inf:
        return None
    confidence = 1.0 / float(np.exp(sampler.temper(row)).sum())
    if sampler.params.greedy or method is DraftMethod.GREEDY:
        return DraftChoice(int(sampler.ids[row.argmax()]), confidence)
    if method is DraftMethod.GUMBEL:
        return DraftChoice(sampler.pick(row, position), confidence)
    ids, probs = truncated(*sampler.probabilities(row), DRAFT_TOP_K)
    token = sampler.draw(ids, probs.astype(np.float64), DRAFT, position)
    return DraftChoice(token, confidence, DraftDistribution(tuple(ids.tolist()), probs.astype("<f4").tobytes()))


def truncated(ids: Columns, probs: Floats, count: int) -> tuple[Columns, npt.NDArray[np.float32]]:
    """The `count` likeliest ids, ascending, with renormalised float32 probabilities, all positive. ids, probs [m].

    Rounded before anything is drawn: the numbers that are sent are the very numbers that are sampled from.
    """
    likeliest = best(probs, None, count) if count < len(probs) else np.arange(len(probs))
    rounded = (probs[likeliest] / probs[likeliest].sum()).astype(np.float32)
    return ids[likeliest][rounded > 0], rounded[rounded > 0]
