"""Logits to token: one pipeline for the plain path, for every row of a block, and for the draft. Knows no session and no engine.

A row goes through these stages, in this order. Each works on that row alone, so a decision never depends on what else is in a batch.

    1  raw          ids the tokenizer knows (a padded head is cut off); must be finite; log-probabilities are taken here
    2  bans         banned ids, ids outside a non-empty allowed list, and, before min_tokens, every id that would end the generation: -inf
    3  logit_bias   added
    4  penalties    repetition (prompt and output: positive scores divided, negative multiplied), then frequency * count and presence
                    (output) subtracted
    5  temperature  (score - largest score) / temperature; below GREEDY_BELOW the choice is the argmax of stage 4 and nothing below applies
    6  top_k        the k best; ties at the border: lowest ids
    7  top_p        of what is left, the smallest set of best ids whose mass reaches top_p (ties: lowest ids); at least one
    8  min_p        of what is left, ids with at least min_p times the probability of the best
    9  noise        argmax of score + noise (specdec.noise); ties: lowest id

float64 rows stay float64; all others are float32. Masses of stage 7 are whole multiples of 2**-40 of the best id's mass: integers add up to
the same total in any order, so the set kept does not depend on how the sum was computed.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import noise
from specdec.errors import InvalidRequest, NonFinite
from specdec.seeds import DRAFT, SHARED
from specdec.terms import DraftDistribution, DraftMethod, SamplingParams, TokenLogprobs

DRAFT_TOP_K = 64  # most ids of a distribution on the wire
_MASS_UNIT = 2.0**40


class Sampler:
    """The pipeline of one generation: its parameters, its seed, its prompt. Rows are scored one at a time, in any order.

    `vocab_size` = ids the tokenizer knows. `columns`: ascending target ids of a reduced head's columns (draft only); rows then have one
    logit per column, and answers are target ids all the same. Raises InvalidRequest when bans leave nothing to choose from.
    """

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        vocab_size: int,
        eos_ids: Sequence[int],
        prompt: Sequence[int],
        columns: Sequence[int] | None = None,
    ) -> None:
        self.params, self.seed, self.vocab_size = params, seed, vocab_size
        self.prompt_length = len(prompt)
        self.stop_ids = frozenset(params.stop_token_ids) | frozenset(() if params.ignore_eos else eos_ids)
        self._ids = torch.arange(vocab_size) if columns is None else torch.tensor(columns, dtype=torch.int64)
        self._column = None if columns is None else {token: column for column, token in enumerate(columns)}
        self.width = self._ids.shape[0]
        self._forbidden = self._columns_of(self._forbidden_ids(params))
        self._stops = self._columns_of(sorted(self.stop_ids))
        bias = [(c, v) for token, v in params.logit_bias.items() for c in self._columns_of([token]).tolist()]
        self._bias_columns = torch.tensor([c for c, _ in bias], dtype=torch.int64)
        self._bias_values = torch.tensor([v for _, v in bias], dtype=torch.float64)
        self._prompt_ids = frozenset(prompt) if params.repetition_penalty != 1.0 else frozenset()
        self._counts = _Counts()
        if columns is None:
            self._require_a_choice()

    def _forbidden_ids(self, params: SamplingParams) -> list[int]:
        banned = set(params.banned_token_ids)
        if params.allowed_token_ids:
            banned |= set(range(self.vocab_size)) - set(params.allowed_token_ids)
        return sorted(banned)

    def _require_a_choice(self) -> None:
        shut = set(self._forbidden.tolist())
        if len(shut) >= self.vocab_size:
            raise InvalidRequest("sampling.allowed_token_ids", "allowed and banned ids leave nothing to choose from")
        if self.params.min_tokens > 0 and len(shut | set(self._stops.tolist())) >= self.vocab_size:
            raise InvalidRequest("sampling.min_tokens", "only ids that end the answer are allowed; set min_tokens to 0")

    def _columns_of(self, ids: Sequence[int]) -> Tensor:
        """Columns of those ids that the head has, int64."""
        if self._column is None:
            columns = [token for token in ids if 0 <= token < self.vocab_size]
        else:
            columns = [self._column[token] for token in ids if token in self._column]
        return torch.tensor(columns, dtype=torch.int64)

    def token_of(self, column: int) -> int:
        return column if self._column is None else int(self._ids[column])

    def ids_of(self, columns: Tensor) -> Tensor:
        return self._ids[columns]

    def raw(self, logits: Tensor) -> Tensor:
        """Stage 1: logits [head rows] -> [width] float32 or float64, a view where possible. Raises NonFinite."""
        if logits.dim() != 1 or logits.shape[0] < self.width:
            raise ValueError(f"expected one row of at least {self.width} logits, got shape {tuple(logits.shape)}")
        row = logits[: self.width]
        if row.dtype != torch.float64:
            row = row.float()
        low, high = torch.aminmax(row)  # both are NaN when any logit is
        if not (math.isfinite(low) and math.isfinite(high)):
            raise NonFinite("a row of logits holds NaN or infinity")
        return row

    def adjusted(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Stages 1 to 4. Shares memory with `logits` when nothing applies; never writes to it."""
        raw, params = self.raw(logits), self.params
        masked = [self._forbidden] if len(self._forbidden) else []
        if len(output) < params.min_tokens:
            masked.append(self._stops)
        penalized = (
            params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
        )
        if not (masked or len(self._bias_columns) or penalized):
            return raw
        row = raw.clone()
        for columns in masked:
            row[columns] = -math.inf
        if len(self._bias_columns):
            row[self._bias_columns] += self._bias_values.to(row.dtype)
        if penalized:
            self._penalize(row, output)
        return row

    def _penalize(self, row: Tensor, output: Sequence[int]) -> None:
        """Stage 4, in place on a private row."""
        params = self.params
        counts = self._counts.move_to(output)
        if params.repetition_penalty != 1.0:
            seen = self._columns_of(sorted(self._prompt_ids.union(counts)))
            scores = row[seen]
            row[seen] = torch.where(scores > 0, scores / params.repetition_penalty, scores * params.repetition_penalty)
        if counts and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            known = [token for token in counts if self._column is None or token in self._column]
            times = torch.tensor([counts[token] for token in known], dtype=row.dtype)
            row[self._columns_of(known)] -= times * params.frequency_penalty + params.presence_penalty

    def tempered(self, logits: Tensor, output: Sequence[int]) -> Tensor:
        """Stages 1 to 5: log-scores [width] up to a constant, the best is 0. Greedy: temperature 1."""
        row = self.adjusted(logits, output)
        row = row - row.max()
        return row if self.params.greedy or self.params.temperature == 1.0 else row / self.params.temperature

    def scores(self, logits: Tensor, position: int, output: Sequence[int]) -> Tensor:
        """Stages 1 to 8: log-scores [width] up to a constant; -inf = impossible. Greedy: only the choice is possible."""
        self._check_position(position, output)
        if self.params.greedy:
            best = self.adjusted(logits, output).argmax()
            return torch.full((self.width,), -math.inf, dtype=torch.float64).index_fill_(0, best, 0.0)
        return cut(self.tempered(logits, output), self.params)

    def choose(self, logits: Tensor, position: int, output: Sequence[int]) -> int:
        """The token that the target decides on this row: argmax of scores + shared noise. `output` = decided tokens before it."""
        self._check_position(position, output)
        if self.params.greedy:
            return self.token_of(int(self.adjusted(logits, output).argmax()))
        return self.token_of(self.draw(cut(self.tempered(logits, output), self.params), SHARED, position))

    def draw(self, scores: Tensor, tag: int, position: int) -> int:
        """Column drawn with probability proportional to exp(scores) from the stream `tag`. scores [width]."""
        return noise.winner(scores, self.seed, tag, position, self._ids)

    def logprobs(self, logits: Tensor, token: int) -> TokenLogprobs | None:
        """Log-probabilities under the raw logits; None unless asked for."""
        return None if self.params.logprobs is None else token_logprobs(self.raw(logits), token, self.params.logprobs)

    def _check_position(self, position: int, output: Sequence[int]) -> None:
        if position != self.prompt_length + len(output):
            raise ValueError(f"position {position} is not prompt {self.prompt_length} + output {len(output)}")


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


def mass(scores: Tensor) -> Tensor:
    """exp(scores) as int64 multiples of 2**-40, rounded down; scores [...] <= 0."""
    return (scores.double().exp() * _MASS_UNIT).long()


def cut(scores: Tensor, params: SamplingParams) -> Tensor:
    """Stages 6 to 8 on scores [n] whose best is 0: the same scores, -inf where cut. The definition; `Sampler.choose` agrees with it."""
    n = scores.shape[0]
    top_k = params.top_k if 0 < params.top_k < n else n
    if top_k == n and params.top_p >= 1.0 and params.min_p <= 0.0:
        return scores
    ranked, order = torch.sort(scores, descending=True, stable=True)
    keep = top_k
    if params.top_p < 1.0:
        running = mass(ranked[:top_k]).cumsum(0)
        target = max(1, math.ceil(params.top_p * int(running[-1])))
        keep = int(torch.searchsorted(running, target)) + 1
    if params.min_p > 0.0:
        keep = min(keep, int((ranked >= math.log(params.min_p)).sum()))
    kept = order[:keep]
    return torch.full_like(scores, -math.inf).scatter_(0, kept, scores[kept])


def probabilities(scores: Tensor) -> Tensor:
    """Softmax of log-scores [..., n] in float64."""
    return torch.softmax(scores.double(), dim=-1)


def token_logprobs(row: Tensor, token: int, count: int) -> TokenLogprobs:
    """log p of `token` and of the `count` likeliest ids, likeliest first, ties by id. row [vocab_size] finite raw logits.

    Computed in float64, rounded to float32.
    """
    exact = row.double()
    top = exact.max()
    log_total = top + torch.log(_sum(torch.exp(exact - top)))
    ids: list[int] = []
    if count > 0:
        border = torch.topk(row, min(count, row.shape[0])).values[-1]
        candidates = torch.nonzero(row >= border).flatten()  # ascending ids
        order = torch.sort(row[candidates], descending=True, stable=True).indices
        ids = candidates[order[:count]].tolist()
    values = (exact[[token, *ids]] - log_total).float().tolist()
    return TokenLogprobs(values[0], tuple(ids), tuple(values[1:]))


def _sum(values: Tensor) -> Tensor:
    """Sum of values [n] in an order that does not depend on the number of threads: rows of 64, then the rows' sums."""
    whole = values.shape[0] // 64 * 64
    return values[:whole].view(-1, 64).sum(1).sum() + values[whole:].sum()


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A proposed token. `confidence` = largest probability of the tempered distribution it came from, before cuts (T = 1 when greedy);
    `distribution` only for `probabilistic`: None means one-hot on the token."""

    token: int
    confidence: float
    distribution: DraftDistribution | None = None


def draft_choice(
    sampler: Sampler, logits: Tensor, position: int, output: Sequence[int], method: DraftMethod
) -> DraftChoice | None:
    """What the draft proposes after `output`; None when a reduced head has no allowed id. Raises NonFinite.

    The draft puts its own logits through the same pipeline as the target, cuts included: the closer the two distributions, the
    more often they agree.
    """
    row = sampler.adjusted(logits, output)
    if not math.isfinite(row.max()):
        return None
    tempered = sampler.tempered(logits, output)
    confidence = 1.0 / float(torch.exp(tempered).sum())
    if sampler.params.greedy or method is DraftMethod.GREEDY:
        return DraftChoice(sampler.token_of(int(tempered.argmax())), confidence)
    if method is DraftMethod.GUMBEL:
        return DraftChoice(sampler.choose(logits, position, output), confidence)
    ids, probs = truncated(cut(tempered, sampler.params), DRAFT_TOP_K)
    token_ids = sampler.ids_of(ids)
    token = int(token_ids[noise.winner(probs.double().log(), sampler.seed, DRAFT, position, token_ids)])
    distribution = DraftDistribution(tuple(token_ids.tolist()), struct.pack(f"<{len(ids)}f", *probs.tolist()))
    return DraftChoice(token, confidence, distribution)


def truncated(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` likeliest columns of scores [n], ascending, and their renormalised float32 probabilities, all positive.

    Rounded first: these very numbers are sent and drawn from.
    """
    order = torch.sort(scores, descending=True, stable=True).indices[:count].sort().values
    probs = probabilities(scores[order]).float()
    positive = probs > 0
    return order[positive], probs[positive]
