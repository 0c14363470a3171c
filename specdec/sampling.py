"""Logits to token: one pipeline for plain rows, for every row of a block, and for the draft. Knows no session, no engine.

A row goes through these stages in this order. Each looks at that row alone, and at the tokens before it: no decision depends on a batch
or on the rest of a block.

    1  raw          ids the tokenizer knows (a padded head is cut off); must be finite; log-probabilities are taken here
    2  bans         -inf for banned ids, for ids outside a non-empty allowed list and for ids that a grammar does not let follow
                    here; for ids that end the generation before min_tokens and, under a grammar, where its sentence is not complete
    3  logit_bias   added
    4  penalties    repetition (ids of prompt and output: positive scores divided, negative ones multiplied), then
                    frequency * count + presence subtracted (ids of the output)
    5  temperature  (score - best score) / temperature; below GREEDY_BELOW (1e-5) the argmax of stage 4 is the choice
                    (ties: lowest id), and nothing below applies
    6  top_k        the k best; ties at the border: lowest ids
    7  top_p        of what is left, the smallest set of best ids whose mass reaches top_p (ties: lowest ids)
    8  min_p        of what is left, ids with at least min_p times the probability of the best
    9  noise        argmax of score + noise (specdec.noise); ties: lowest id. Under the standard method the target's token is accepted or
                    drawn with the probabilities that stage 8 leaves (specdec.acceptance)

There is no second pipeline. The target decides every round with it, with a block or without (specdec.acceptance.verify), so an
answer with speculation off is what this page says of each row; the draft proposes with it (draft_choice), told the same parameters
and seed. Fields that are not set have the defaults of SamplingParams: temperature 1, everything else off. No file of a checkpoint
is read.

Where a grammar lets nothing follow, the generation ends without a row, before min_tokens too (`must_end`). Where other fields ban all
that it lets follow, the row raises InvalidRequest. Other fields that leave nothing are refused when the Sampler is made, but a reduced
head of a draft that has none of the ids left proposes nothing.

float64 rows stay float64, all others are float32; rows from an accelerator come to the CPU first, so that sampling is the
same code everywhere. Masses of stage 7 are whole multiples of 2**-34 of the best id's mass: below 2**53 such sums
are exact in float64 and the same in any order, so the set kept does not depend on how it was found.

No row is sorted, and few ids get their noise: what cannot matter is proven not to (specdec.ranking, cuts, noise). The answers are those of
full sorts and of noise for every id.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from specdec import noise
from specdec.cuts import Walk, kept
from specdec.errors import InvalidRequest, NonFinite
from specdec.logprobs import finite, normalized, softmax, token_logprobs
from specdec.penalties import Penalties, penalized
from specdec.ranking import FEW, NEAR, Floats, Places, best
from specdec.seeds import DRAFT, SHARED
from specdec.terms import DraftDistribution, DraftMethod, SamplingParams, TokenLogprobs

Columns = Places
Mask = npt.NDArray[np.bool_]
Row = Tensor | Floats  # logits as an engine gives them, or what stage 1 made of them

DRAFT_TOP_K = 64  # most ids of a distribution on the wire


class Allowed(Protocol):
    """What a grammar lets follow an output: specdec.grammar.Allowed."""

    @property
    def mask(self) -> Mask | None: ...
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
        self._stops = self._columns_of(self.stop_ids)
        self._legal = self._legal_columns()
        self._few_legal = self._legal is not None and np.count_nonzero(self._legal) <= FEW
        if columns is None:
            self._require_a_choice()
        self._bias_columns = self._columns_of(params.logit_bias)
        self._bias = np.array([params.logit_bias[int(self.ids[c])] for c in self._bias_columns], dtype=np.float64)
        self._seen: tuple[weakref.ref[Floats], np.floating[Any]] | None = None  # a row and its largest value
        self._told: tuple[weakref.ref[Floats], Floats] | None = None  # a raw row and its shares, until its log-probabilities were told
        self._guess = -noise.NEAR / max(params.temperature, 1.0)  # of tempered scores, so that heat does not bring more of them
        self._penalties = Penalties(self._column_of, prompt if params.repetition_penalty != 1.0 else ())

    def _legal_columns(self) -> Mask | None:
        """What the allowed and the banned ids leave [width]; None = everything."""
        params = self.params
        if not (params.allowed_token_ids or params.banned_token_ids):
            return None
        legal = np.full(self.width, not params.allowed_token_ids)
        legal[self._columns_of(params.allowed_token_ids)] = True
        legal[self._columns_of(params.banned_token_ids)] = False
        return legal

    def _require_a_choice(self) -> None:
        legal = np.ones(self.width, dtype=bool) if self._legal is None else self._legal
        if not legal.any():
            raise InvalidRequest("sampling.allowed_token_ids", "allowed and banned ids leave nothing to choose from")
        if self.params.min_tokens > 0 and not np.delete(legal, self._stops).any():
            raise InvalidRequest("sampling.min_tokens", "only ids that end the generation may be chosen: must be 0")

    def _columns_of(self, ids: Sequence[int] | set[int] | frozenset[int] | Any) -> Columns:
        """Ascending columns of those ids that the head has."""
        given = np.fromiter(ids, dtype=np.int64, count=len(ids))
        given = given[(given >= 0) & (given < self.vocab_size)]
        if len(given) > FEW:  # a client may name tens of thousands, and all sessions of the step wait meanwhile
            named = np.zeros(self.vocab_size, dtype=bool)
            named[given] = True
            given = np.flatnonzero(named)
        else:
            given = np.unique(given) if len(given) > 1 else given
        if self.width == self.vocab_size:
            return given
        wanted = given.astype(np.uint64)
        columns = np.searchsorted(self.ids, wanted)
        inside = columns < self.width
        columns, wanted = columns[inside], wanted[inside]
        known: Columns = columns[self.ids[columns] == wanted]
        return known

    def _column_of(self, token: int) -> int | None:
        if self.width == self.vocab_size:
            return token if 0 <= token < self.width else None
        return next(iter(self._columns_of((token,)).tolist()), None)

    def raw(self, logits: Row) -> Floats:
        """Stage 1: logits [head rows] -> [width], float32 or float64; shares memory where it can. Raises NonFinite."""
        if isinstance(logits, np.ndarray):
            return logits
        if logits.dim() != 1 or logits.shape[0] < self.width:
            raise ValueError(f"expected one row of at least {self.width} logits, got shape {tuple(logits.shape)}")
        row = logits.detach()
        if row.dtype not in (torch.float32, torch.float64):
            row = row.float()
        values: Floats = row.cpu().numpy()[: self.width]
        if not (math.isfinite(self.highest(values)) and math.isfinite(values.min())):  # NaN comes through both
            raise NonFinite("a row of logits holds NaN or infinity")
        return values

    def highest(self, row: Floats) -> np.floating[Any]:
        """The largest value of `row` [n], which nobody writes to: one decision asks for it up to four times."""
        if self._seen is None or self._seen[0]() is not row:
            self._seen = weakref.ref(row), row.max()
        return self._seen[1]

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        """Stages 1 to 4 [width]. Shares memory with `logits` when nothing applies; never writes to it."""
        row = self.raw(logits)
        early = len(output) < self.params.min_tokens and len(self._stops) > 0
        legal = self._legal if self.constraint is None else self._within(self.constraint.at(output))
        if legal is None and not (early or penalized(self.params) or len(self._bias_columns)):
            return row
        row = row.copy() if legal is None else _only(row, legal)
        if early:
            row[self._stops] = -math.inf
        row[self._bias_columns] += self._bias.astype(row.dtype)
        if penalized(self.params):
            self._penalties.apply(row, output, self.params)
        return row

    def _within(self, allowed: Allowed) -> Mask | None:
        """What a grammar leaves of the legal ids: those that end the text only where a sentence is complete."""
        if allowed.mask is None:
            return self._legal
        mask = allowed.mask.copy() if self.width == self.vocab_size else allowed.mask[self.ids.view(np.int64)]
        mask[self._stops] = allowed.may_end
        return mask if self._legal is None else mask & self._legal

    def must_end(self, output: Sequence[int]) -> bool:
        """Whether a grammar lets nothing follow `output`: the generation ends there, before min_tokens too."""
        return self.constraint is not None and self.constraint.at(output).must_end

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """Ids that a grammar makes the only legal continuation of `output`."""
        return () if self.constraint is None else self.constraint.forced(output)

    def _require_possible(self, row: Floats, output: Sequence[int]) -> Floats:
        """An adjusted row that leaves something to choose. Only a grammar can leave nothing: everything else was checked before."""
        if self.constraint is not None and self.highest(row) == -math.inf:
            others = "allowed_token_ids, banned_token_ids, min_tokens and ids that end the answer"
            raise InvalidRequest("sampling.grammar", f"nothing may follow {len(output)} tokens: {others} rule out all that it allows")
        return row

    def temper(self, row: Floats, out: Floats | None = None) -> Floats:
        """Stage 5 of an adjusted row [width]: log-scores up to a constant, the best is 0. Temperature 1 when greedy. `out`: where to."""
        with np.errstate(over="ignore"):  # beyond the format's range below the best: impossible, -inf is right
            scores: Floats = np.subtract(row, self.highest(row), out=out)
            if not self.params.greedy and self.params.temperature != 1.0:
                scores /= self.params.temperature
        self._seen = None if out is row else self._seen
        return scores

    def cut(self, scores: Floats) -> tuple[Columns | None, Floats]:
        """Stages 6 to 8 of tempered scores [width]: ascending columns that may be chosen [m] (None = all), and their scores."""
        columns = kept(scores, self.params)
        return columns, scores if columns is None else scores[columns]

    def possible(self, row: Floats) -> tuple[Columns | None, Floats]:
        """Stages 5 to 8 of an adjusted row [width]: as `cut`."""
        if self.params.greedy:
            return np.array([row.argmax()]), np.zeros(1, dtype=row.dtype)
        return self.cut(self.temper(row))

    def scores(self, logits: Row, position: int, output: Sequence[int]) -> Tensor:
        """Stages 1 to 8 [width]: log-scores up to a constant, -inf = impossible. Greedy: only the choice is possible."""
        self.check_position(position, output)
        columns, scores = self.possible(self.adjusted(logits, output))
        if columns is None:
            return torch.from_numpy(scores)
        full = np.full(self.width, -math.inf, dtype=scores.dtype)
        full[columns] = scores
        return torch.from_numpy(full)

    def choose(self, logits: Row, position: int, output: Sequence[int]) -> int:
        """The token the target decides: argmax of scores + shared noise. `output` = decided tokens before this row."""
        self.check_position(position, output)
        raw = self.raw(logits)
        row = self._require_possible(self.adjusted(raw, output), output)
        if self.params.greedy:
            return int(self.ids[row.argmax()])
        return self.pick(self.temper(row, None if row is raw else row), position)

    def pick(self, scores: Floats, position: int) -> int:
        """Stages 6 to 9 of tempered scores [width]: the coupled choice."""
        few = self._few(scores)
        ids = self._ids_of(few)
        scores = scores if few is None else scores[few]
        walk = Walk(scores, self.params) if Walk.pays(self.params) else None
        places, scores = self.cut(scores) if walk is None else (None, scores)
        while True:
            left = ids if places is None else ids[places]
            place = noise.winner(scores, self.seed, SHARED, position, left, self._guess)
            if walk is None or walk.ends_at(place):
                return int(left[place])
            places, scores = walk.places, walk.scores

    def _few(self, scores: Floats) -> Columns | None:
        """Columns that may be chosen at all, where bans or a grammar leave few; else None."""
        if self.constraint is None and not self._few_legal:
            return None
        possible = scores > -math.inf
        return np.flatnonzero(possible) if np.count_nonzero(possible) <= FEW else None

    def _ids_of(self, columns: Columns | None) -> noise.Keys:
        if columns is None:
            return self.ids
        return columns.view(np.uint64) if self.width == self.vocab_size else self.ids[columns]

    def distribution(self, logits: Row, position: int, output: Sequence[int]) -> tuple[Columns, Floats]:
        """p of this row: ids [m] ascending and float64 probabilities [m]; all other ids have none."""
        self.check_position(position, output)
        raw = self.raw(logits)
        row = self._require_possible(self.adjusted(raw, output), output)
        columns, scores = self.possible(row)
        if row is not raw or columns is not None or self.params.temperature != 1.0 or self.params.logprobs is None:
            return self.probabilities(columns, scores)
        shares = np.exp(scores)  # as nothing was applied, those of the log-probabilities to the last bit
        self._told = weakref.ref(raw), shares
        return self.ids.view(np.int64), normalized(shares)

    def probabilities(self, columns: Columns | None, scores: Floats) -> tuple[Columns, Floats]:
        """`distribution` of what a cut left."""
        return self._ids_of(columns).view(np.int64), softmax(scores)

    def draw(self, ids: Columns, weights: Floats, tag: int, position: int) -> int:
        """An id drawn with probability proportional to its weight, from the stream `tag`. ids [m] ascending, weights [m]."""
        keys = None if len(ids) == self.vocab_size else ids.view(np.uint64)
        return int(ids[noise.drawn(weights, self.seed, tag, position, keys)])

    def logprobs(self, logits: Row, token: int) -> TokenLogprobs | None:
        """Log-probabilities under the raw logits; None unless asked for. Raises NonFinite."""
        row, count = self.raw(logits), self.params.logprobs
        if count is None:
            return None
        told, self._told = self._told, None
        shares = told[1] if told is not None and told[0]() is row else None
        return finite(token_logprobs(row, token, count, self.highest(row), shares))

    def check_position(self, position: int, output: Sequence[int]) -> None:
        if position != self.prompt_length + len(output):
            raise ValueError(f"position {position} is not prompt {self.prompt_length} + output {len(output)}")


@functools.lru_cache(maxsize=4)
def _reduced(columns: tuple[int, ...]) -> noise.Keys:
    """Ids of a reduced head's columns, built once for all sessions."""
    ids = np.array(columns, dtype=np.uint64)
    if len(ids) == 0 or not (ids[1:] > ids[:-1]).all():
        raise ValueError("the ids of a reduced head must ascend")
    ids.flags.writeable = False
    return ids


def _only(row: Floats, legal: Mask) -> Floats:
    """A copy of `row` [n] with -inf where it is not legal [n]: without a branch, whatever the pattern of the mask."""
    kind = np.int32 if row.dtype == np.float32 else np.int64
    bits = (legal.view(np.int8) - np.int8(1)).astype(kind)  # -1, all bits set, where it is not legal
    np.bitwise_and(bits, row.dtype.type(-math.inf).view(kind), out=bits)
    bound: Floats = bits.view(row.dtype)  # 0 or -inf
    return np.add(row, bound, out=bound)


@dataclass(frozen=True, slots=True)
class DraftChoice:
    """A proposed token.

    `confidence`: the largest probability of the draft's tempered distribution before cuts (at temperature 1 when greedy),
    whatever token was drawn. `distribution`: with `probabilistic` only; None = one-hot on the token. `scores` [width]: what it was chosen
    by, tempered and not cut.
    """

    token: int
    confidence: float
    distribution: DraftDistribution | None
    scores: Floats = field(compare=False, repr=False)


def draft_choice(sampler: Sampler, logits: Tensor, position: int, output: Sequence[int], method: DraftMethod) -> DraftChoice | None:
    """What the draft proposes after `output`; None when a reduced head has no allowed id. Raises NonFinite.

    The draft puts its own logits through the same pipeline as the target, cuts included: the closer the two
    distributions, the more often they agree.
    """
    sampler.check_position(position, output)
    row = sampler.adjusted(logits, output)
    if sampler.highest(row) == -math.inf:
        return None
    scores = sampler.temper(row)
    confidence = 1.0 / float(np.exp(scores).sum())
    if sampler.params.greedy or method is DraftMethod.GREEDY:
        return DraftChoice(int(sampler.ids[row.argmax()]), confidence, None, scores)
    if method is DraftMethod.GUMBEL:
        return DraftChoice(sampler.pick(scores, position), confidence, None, scores)
    ids, probs = truncated(*sampler.probabilities(*sampler.cut(scores)), DRAFT_TOP_K)
    token = sampler.draw(ids, probs.astype(np.float64), DRAFT, position)
    return DraftChoice(token, confidence, DraftDistribution(tuple(ids.tolist()), probs.astype("<f4").tobytes()), scores)


def truncated(ids: Columns, probs: Floats, count: int) -> tuple[Columns, npt.NDArray[np.float32]]:
    """The `count` likeliest ids, ascending, with renormalised float32 probabilities, all positive. ids, probs [m].

    Rounded before anything is drawn: the numbers that are sent are the very numbers that are sampled from.
    """
    likeliest = best(probs, None, count, float(probs.max()) * math.exp(-NEAR)) if count < len(probs) else np.arange(len(probs))
    rounded = (probs[likeliest] / probs[likeliest].sum()).astype(np.float32)
    return ids[likeliest][rounded > 0], rounded[rounded > 0]
