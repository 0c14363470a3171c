"""Which proposals stand: the theorem of the system. Logits and a block in, tokens out. Knows no session, wire or clock.

Row i of a step scores the token that follows prefix + block[:i]; n proposals come with n + 1 rows.

Coupled (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The target runs its ordinary sampler on row 0, 1, ... and stops
after the first token that differs from the block. Token by token it emits what it would have emitted without a block;
the block decides only how many rows are worth looking at.

Standard (Leviathan, Kalman, Matias 2022, arXiv 2211.17192, theorem 1; Chen et al. 2023, arXiv 2302.01318). Proposal x,
drawn from q, stands with probability min(1, p(x)/q(x)); else the token is drawn from norm(max(0, p - q)). For any y:

    P(y) = q(y) min(1, p(y)/q(y)) + P(x refused) max(0, p(y) - q(y)) / sum max(0, p - q)
         = min(p(y), q(y)) + max(0, p(y) - q(y)) = p(y),   as P(x refused) = 1 - sum min(p, q) = sum max(0, p - q).

It holds for any q, as long as x was drawn from that very q and independently of the test's uniform. Hence separate
streams of noise; hence q is the numbers that travelled, over their sum. An id with q = 0 was not drawn from q: it is no
proposal, never stands, and the token is drawn from p.

At temperature 0 both methods are: stand while equal to the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from specdec import noise
from specdec.errors import InvalidRequest, NonFinite
from specdec.ranking import Floats
from specdec.sampling import Columns, Row, Sampler
from specdec.seeds import ACCEPTANCE, RESIDUAL
from specdec.terms import DraftDistribution, FinishReason, Origin, RejectionMethod, TokenLogprobs

RESIDUAL_FLOOR = 1e-10  # a residual lighter than this is rounding: p and q are the same distribution


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round decided. An end-of-sequence or stop token is not among `tokens`; no tokens only with a `finish`.

    tokens[:num_accepted] were proposed; at most one more follows. num_verified = proposals that were scored.
    """

    tokens: tuple[int, ...]
    num_verified: int
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def origins(self) -> tuple[Origin, ...]:
        """Where each token came from."""
        after_block = Origin.BONUS if self.num_accepted == self.num_verified else Origin.CORRECTED
        last = after_block if self.num_verified else Origin.PLAIN
        return (Origin.ACCEPTED,) * self.num_accepted + (last,) * (len(self.tokens) - self.num_accepted)


def verify(
    logits: Sequence[Tensor] | Tensor,
    block: Sequence[int],
    distributions: Sequence[DraftDistribution | None],
    sampler: Sampler,
    output: Sequence[int],
    method: RejectionMethod,
    max_room: int | None = None,
) -> Verdict:
    """Decides a block of n proposals by its n + 1 rows [n + 1, head rows]. Inputs are not modified.

    A grammar that lets nothing follow ends the round, and the generation, with `stop` and no stop token. In front of a row that cannot be
    decided (it is not finite, or other fields ban all that a grammar lets follow) the round ends and the next one fails there: what is
    decided until then does not depend on the block.

    `output` = decided tokens before the block. `distributions`, standard only: one per proposal, None = one-hot, or
    empty for all one-hot. `max_room` = tokens the window still takes. Rows behind the first refusal are not looked at.
    Raises InvalidRequest for distributions that do not fit the block; for the first row NonFinite when it or a log-probability is not
    finite, and InvalidRequest when nothing may be chosen of it.
    """
    if len(logits) != len(block) + 1:
        raise ValueError(f"{len(block)} proposals need {len(block) + 1} rows, got {len(logits)}")
    check_distributions(block, distributions, sampler.vocab_size, method)
    limits = [sampler.params.max_tokens, None if max_room is None else len(output) + max_room]
    most = min((limit for limit in limits if limit is not None), default=math.inf)
    history, logprobs = list(output), []
    stop_token_id: int | None = None
    accepted = 0
    ended = sampler.must_end(history)
    for slot, row in enumerate(logits):
        if ended or len(history) >= most:
            break
        proposal = block[slot] if slot < len(block) else None
        q = distributions[slot] if distributions and proposal is not None else None
        try:
            raw = sampler.raw(row)
            token, stands = decide(raw, proposal, q, sampler, history, method)
            stops = token in sampler.stop_ids
            entry = None if stops else sampler.logprobs(raw, token)
            ended = not stops and sampler.must_end([*history, token])
        except (InvalidRequest, NonFinite):
            if slot == 0:
                raise
            break
        if stops:
            stop_token_id = token
            break
        logprobs.append(entry)
        history.append(token)
        accepted += int(stands)
        if not stands:
            break
    finish = FinishReason.STOP if ended else FinishReason.LENGTH if len(history) >= most else None
    return Verdict(
        tokens=tuple(history[len(output) :]),
        num_verified=len(block),
        num_accepted=accepted,
        logprobs=tuple(entry for entry in logprobs if entry is not None),
        finish=finish if stop_token_id is None else FinishReason.STOP,
        stop_token_id=stop_token_id,
    )


def check_distributions(
    block: Sequence[int],
    distributions: Sequence[DraftDistribution | None],
    vocab_size: int,
    method: RejectionMethod,
) -> None:
    """Raises InvalidRequest naming what does not fit. Needs no logits: a block can be refused before it is scored."""
    if not distributions:
        return
    if method is not RejectionMethod.STANDARD:
        raise InvalidRequest("distributions", "go with the standard method only; send none")
    if len(distributions) != len(block):
        raise InvalidRequest("distributions", f"must be one per proposal ({len(block)}), got {len(distributions)}")
    for slot, q in enumerate(distributions):
        if q is not None:
            q.check(vocab_size, f"distributions[{slot}]")


def decide(
    row: Row,
    proposal: int | None,
    q: DraftDistribution | None,
    sampler: Sampler,
    history: Sequence[int],
    method: RejectionMethod,
) -> tuple[int, bool]:
    """The token after `history`, and whether it is the proposal and stands.

    row [head rows]; proposal None on the last row of a step; q None = one-hot on the proposal.
    """
    position = sampler.prompt_length + len(history)
    if method is RejectionMethod.COUPLED or sampler.params.greedy:
        token = sampler.choose(row, position, history)
        return token, token == proposal and (q is None or _at(*numbers_of(q), token) > 0.0)
    ids, p = sampler.distribution(row, position, history)
    if proposal is None:
        return sampler.draw(ids, p, RESIDUAL, position), False
    q_ids, q_numbers = (np.array([proposal]), np.ones(1)) if q is None else numbers_of(q)
    q_proposal = _at(q_ids, q_numbers, proposal)
    u = noise.uniform_one(sampler.seed, ACCEPTANCE, position, 0)
    if accepts(_at(ids, p, proposal), q_proposal, u):
        return proposal, True
    left = residual(p, _aligned(ids, q_ids, q_numbers)) if q_proposal > 0.0 else p
    return sampler.draw(ids, left, RESIDUAL, position), False


def numbers_of(q: DraftDistribution) -> tuple[Columns, Floats]:
    """ids [m] ascending and float64 probabilities [m] as the draft drew: the float32 numbers over their sum."""
    ids, numbers = np.array(q.ids, dtype=np.int64), np.frombuffer(q.probs, dtype="<f4").astype(np.float64)
    order = np.argsort(ids)
    return ids[order], numbers[order] / math.fsum(numbers)


def _at(ids: Columns, values: Floats, token: int) -> float:
    """The value of `token`, 0 where it is not among the ascending ids [m]."""
    index = int(np.searchsorted(ids, token))
    return float(values[index]) if index < len(ids) and ids[index] == token else 0.0


def _aligned(ids: Columns, other_ids: Columns, values: Floats) -> Floats:
    """values of other_ids [m] put where `ids` [n] has the same id, 0 elsewhere. Both ascend."""
    places = np.searchsorted(ids, other_ids)
    places[places == len(ids)] = 0
    found = ids[places] == other_ids
    aligned = np.zeros(len(ids), dtype=np.float64)
    aligned[places[found]] = values[found]
    return aligned


def accepts(p: npt.ArrayLike, q: npt.ArrayLike, u: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """Does a proposal with probability p at the target and q at the draft stand? Elementwise; u uniform in (0, 1)."""
    return np.logical_and(np.greater(q, 0.0), np.less(np.multiply(u, q), p))


def residual(p: Floats, q: Floats) -> Floats:
    """max(0, p - q) along the last axis, or p where that is next to nothing. Not normalised. p, q [..., n]."""
    left = p - q
    np.maximum(left, 0.0, out=left)
    enough = left.sum(-1, keepdims=True) > RESIDUAL_FLOOR
    return left if enough.all() else np.where(enough, left, p)
