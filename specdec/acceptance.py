"""Which proposals stand: the theorem of the system. Logits and a block in, decided tokens out. Knows no session, wire or clock.

Row i of a step scores the token that follows prefix + block[:i]; n proposals come with n + 1 rows.

Coupled (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The target runs its ordinary sampler on row 0, 1, ... and stops after the first
token that differs from the block. What it emits is, token by token, what it would have emitted without a block: the block decides only how
many rows are worth looking at.

Standard (Leviathan, Kalman, Matias 2022, arXiv 2211.17192, theorem 1; Chen et al. 2023, arXiv 2302.01318). Proposal x, drawn from q, is
accepted with probability min(1, p(x)/q(x)); else the token is drawn from norm(max(0, p - q)). For any y:
    P(y) = q(y) min(1, p(y)/q(y)) + P(reject) * max(0, p(y) - q(y)) / sum max(0, p - q) = min(p, q) + max(0, p - q) = p(y),
since P(reject) = 1 - sum min(p, q) = sum max(0, p - q). It holds for any q, as long as x was drawn from that very q, independently of
the uniform of the test: hence separate streams of noise, and q is the numbers that travelled, normalised.

At temperature 0 both methods are: accept while equal to the argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import noise
from specdec.errors import InvalidRequest
from specdec.sampling import Sampler, probabilities
from specdec.seeds import ACCEPTANCE, RESIDUAL
from specdec.terms import DraftDistribution, FinishReason, Origin, RejectionMethod, TokenLogprobs

RESIDUAL_FLOOR = 1e-10  # a residual lighter than this is rounding: p and q are the same distribution


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one round decided. An end-of-sequence or stop token is not among `tokens`. No tokens only with a `finish`.

    tokens[:num_accepted] were proposed; at most one more follows: corrected, bonus or plain.
    """

    tokens: tuple[int, ...]
    num_verified: int
    num_accepted: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish: FinishReason | None = None
    stop_token_id: int | None = None

    @property
    def origins(self) -> tuple[Origin, ...]:
        """One per token."""
        if self.num_verified == 0:
            last = Origin.PLAIN
        else:
            last = Origin.BONUS if self.num_accepted == self.num_verified else Origin.CORRECTED
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
    """Decides a block of n proposals from their n + 1 rows [n + 1, head rows]. Inputs are not modified.

    `output` = decided tokens before the block; `distributions` standard only: one per proposal, None = one-hot, or empty for all
    one-hot; `max_room` = tokens the window still takes. Rows behind the first refusal are not looked at.
    Raises NonFinite for a row that is used, InvalidRequest for distributions that do not fit the block.
    """
    if len(logits) != len(block) + 1:
        raise ValueError(f"{len(block)} proposals need {len(block) + 1} rows, got {len(logits)}")
    check_distributions(block, distributions, sampler.vocab_size, method)
    room = min(_left(sampler.params.max_tokens, len(output)), _left(max_room, 0))
    history = list(output)
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish: FinishReason | None = None
    stop_token_id: int | None = None
    accepted = 0
    for slot in range(len(block) + 1):
        if len(tokens) >= room:
            finish = FinishReason.LENGTH
            break
        proposal = block[slot] if slot < len(block) else None
        q = distributions[slot] if proposal is not None and distributions else None
        token, stands = decide(logits[slot], proposal, q, sampler, history, method)
        if token in sampler.stop_ids:
            finish, stop_token_id = FinishReason.STOP, token
            break
        row_logprobs = sampler.logprobs(logits[slot], token)
        if row_logprobs is not None:
            logprobs.append(row_logprobs)
        tokens.append(token)
        history.append(token)
        accepted += stands
        if not stands:
            break
    if finish is None and len(tokens) >= room:
        finish = FinishReason.LENGTH
    return Verdict(tuple(tokens), len(block), accepted, tuple(logprobs), finish, stop_token_id)


def _left(limit: int | None, used: int) -> float:
    return math.inf if limit is None else limit - used


def check_distributions(
    block: Sequence[int],
    distributions: Sequence[DraftDistribution | None],
    vocab_size: int,
    method: RejectionMethod,
) -> None:
    """Raises InvalidRequest naming what does not fit. Needs no logits, so it can refuse a block before it is scored."""
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
    row: Tensor,
    proposal: int | None,
    q: DraftDistribution | None,
    sampler: Sampler,
    history: Sequence[int],
    method: RejectionMethod,
) -> tuple[int, bool]:
    """The token after `history`, and whether it is the proposal, kept. row [head rows]; proposal None on the last row; q None = one-hot."""
    position = sampler.prompt_length + len(history)
    if method is RejectionMethod.COUPLED or sampler.params.greedy:
        token = sampler.choose(row, position, history)
        return token, token == proposal
    p = probabilities(sampler.scores(row, position, history))
    if proposal is None:
        return sampler.draw(p.log(), RESIDUAL, position), False
    ids, numbers = numbers_of(q, proposal, sampler.vocab_size)
    q_token = float(numbers[ids == proposal].sum())
    p_token = float(p[proposal]) if 0 <= proposal < sampler.vocab_size else 0.0
    u = noise.uniform_one(sampler.seed, ACCEPTANCE, position, 0)
    if bool(accepts(torch.tensor(p_token), torch.tensor(q_token), torch.tensor(u))):
        return proposal, True
    if q_token > 0.0:
        p = residual(p, torch.zeros_like(p).index_put_((ids,), numbers))
    return sampler.draw(p.log(), RESIDUAL, position), False


def numbers_of(q: DraftDistribution | None, proposal: int, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Ids [m] and float64 probabilities [m] that sum to 1 exactly as the draft drew: the float32 numbers over their sum."""
    if q is None:
        ids, numbers = [proposal] if 0 <= proposal < vocab_size else [], [1.0] if 0 <= proposal < vocab_size else []
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(numbers, dtype=torch.float64)
    floats = q.floats()
    return torch.tensor(q.ids, dtype=torch.int64), torch.tensor(floats, dtype=torch.float64) / math.fsum(floats)


def accepts(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Elementwise: does a proposal with target probability p and draft probability q stand? u uniform in (0, 1).

    With q = 0 it cannot have been drawn from q and never stands.
    """
    return (q > 0.0) & (u * q < p)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """max(0, p - q) along the last axis, p where that is next to nothing. Unnormalised; p and q [..., n] float64."""
    left = (p - q).clamp(min=0.0)
    return torch.where(left.sum(-1, keepdim=True) > RESIDUAL_FLOOR, left, p)
