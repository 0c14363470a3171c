"""Millions of draws of the sampling and acceptance arithmetic at once: one row per seed, tensors of [rows, ids].

Noise comes from specdec.noise.gumbel and uniform; the standard method's decisions are specdec.acceptance.accepts and residual, the very
functions that `verify` calls. test_harness.py checks that each row equals what draft_choice and verify decide with that seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from specdec import noise
from specdec.acceptance import accepts, residual
from specdec.seeds import ACCEPTANCE, DRAFT, RESIDUAL, SHARED

Array = npt.NDArray[np.float64]
Tokens = npt.NDArray[np.int64]
P_LEAST = 1e-4  # a chi-square test passes above this
CHUNK = 1 << 13


def gumbels(seeds: Tokens, tag: int, positions: Tokens | int, vocab_size: int) -> npt.NDArray[np.float32]:
    """g [rows, ids], rounded as it is added."""
    out = np.empty((len(seeds), vocab_size), dtype=np.float32)
    ids = torch.arange(vocab_size)
    for start in range(0, len(seeds), CHUNK):
        part = slice(start, start + CHUNK)
        where = positions if isinstance(positions, int) else torch.from_numpy(positions[part])[:, None]
        out[part] = noise.gumbel(torch.from_numpy(seeds[part])[:, None], tag, where, ids).numpy()
    return out


def uniforms(seeds: Tokens, positions: Tokens | int) -> Array:
    """u of the acceptance test [rows]."""
    where = positions if isinstance(positions, int) else torch.from_numpy(positions)
    values: Array = noise.uniform(torch.from_numpy(seeds), ACCEPTANCE, where, torch.tensor(0)).numpy()
    return values


def draw(weights: Array, g: npt.NDArray[np.float32]) -> Tokens:
    """Gumbel-max of weights [ids] or [rows, ids] with noise [rows, ids]."""
    with np.errstate(divide="ignore"):
        picked: Tokens = (np.log(weights) + g).argmax(-1)
    return picked


def standard(p: Array, q: Array, proposals: Tokens, u: Array, g: npt.NDArray[np.float32]) -> tuple[Tokens, npt.NDArray[np.bool_]]:
    """The standard method on one slot per row: p, q [ids] or [rows, ids]; (token, stands) per row."""
    p, q = np.broadcast_to(p, g.shape), np.broadcast_to(q, g.shape)
    rows = np.arange(len(proposals))
    q_x = q[rows, proposals]
    stands = accepts(p[rows, proposals], q_x, u)
    left = np.where(q_x[:, None] > 0.0, residual(p, q), p)
    return np.where(stands, proposals, draw(left, g)), stands


def on_the_wire(q: Array, top_k: int | None = None) -> Array:
    """q as it travels: truncated to its best, renormalised, rounded to float32; then over its sum, as both ends read it."""
    kept = np.zeros_like(q)
    best = np.argsort(-q, axis=-1, kind="stable")[..., :top_k]
    np.put_along_axis(kept, best, np.take_along_axis(q, best, -1), -1)
    rounded = (kept / kept.sum(-1, keepdims=True)).astype(np.float32).astype(np.float64)
    return rounded / rounded.sum(-1, keepdims=True)


def p_value(tokens: Tokens, p: Array) -> float:
    """Chi-square of counts of tokens against probabilities p [cells]; an impossible token is an outright failure."""
    counts = np.bincount(tokens, minlength=p.size)
    expected = p.ravel() * len(tokens)
    if counts[expected == 0].any():
        return 0.0
    possible = expected > 0
    if possible.sum() == 1:
        return 1.0
    return float(stats.chisquare(counts[possible], expected[possible] * (len(tokens) / expected[possible].sum())).pvalue)


def pooled_p_value(counts: Tokens, p: Array) -> float:
    """Chi-square of counts [cells] against p [cells]; cells that expect fewer than five are one cell."""
    expected = p * counts.sum()
    rare = expected < 5.0
    counts, expected = np.append(counts[~rare], counts[rare].sum()), np.append(expected[~rare], expected[rare].sum())
    possible = expected > 0
    return float(stats.chisquare(counts[possible], expected[possible] * (counts.sum() / expected.sum())).pvalue)


def total_variation(a: Array, b: Array) -> float:
    return float(np.abs(a - b).sum() / 2)


def frequencies(tokens: Tokens, cells: int) -> Array:
    return np.bincount(tokens, minlength=cells) / len(tokens)


@dataclass
class Markov:
    """A target and a draft whose next-token distributions depend on the token before. p, q [ids, ids]; row = previous token."""

    p: Array
    q: Array
    seeds: Tokens
    prompt: Tokens = field(default_factory=lambda: np.array([0], dtype=np.int64))

    def truth(self, length: int) -> Array:
        """Joint probabilities of the first tokens, flattened [ids ** length]."""
        joint, last = np.ones(1), np.array([self.prompt[-1]])
        for _ in range(length):
            joint = (joint[:, None] * self.p[last]).ravel()
            last = np.tile(np.arange(len(self.p)), len(last))
        return joint

    def run(self, num_proposed: int, length: int, method: str, *, peek: float | None = None, residual_tag: int = RESIDUAL) -> Tokens:
        """Rounds of fixed K until every row has `length` tokens; returns them as cell numbers of `truth`.

        Broken twins: `peek` verifies a slot only if q of the token drawn there reaches it; `residual_tag` draws corrections from
        another stream.
        """
        rows = np.arange(len(self.seeds))
        texts = np.zeros((len(rows), length + num_proposed + 1), dtype=np.int64)
        lengths = np.zeros(len(rows), dtype=np.int64)
        while (active := rows[lengths < length]).size:
            self._round(texts, lengths, active, num_proposed, method, peek, residual_tag)
        cells: Tokens = (texts[:, :length] * len(self.p) ** np.arange(length - 1, -1, -1)).sum(1)
        return cells

    def _round(self, texts: Tokens, lengths: Tokens, active: Tokens, k: int, method: str, peek: float | None, residual_tag: int) -> None:
        last = np.where(lengths[active] > 0, texts[active, lengths[active] - 1], self.prompt[-1])
        block = self._block(active, lengths, last, k, method)
        for slot in range(k + 1):
            seeds, at = self.seeds[active], lengths[active] + len(self.prompt)
            p = self.p[last]
            if method == "coupled":
                tokens = draw(p, gumbels(seeds, SHARED, at, len(p[0])))
                stands = tokens == block[slot] if slot < k else np.zeros(len(active), dtype=bool)
            elif slot == k:
                tokens, stands = draw(p, gumbels(seeds, residual_tag, at, len(p[0]))), np.zeros(len(active), dtype=bool)
            else:
                g, q = gumbels(seeds, residual_tag, at, len(p[0])), self.q[last]
                tokens, stands = standard(p, q, block[slot], uniforms(seeds, at), g)
                if peek is not None:
                    seen = q[np.arange(len(active)), block[slot]] >= peek
                    tokens, stands = np.where(seen, tokens, draw(p, g)), stands & seen
            texts[active, lengths[active]] = tokens
            lengths[active] += 1
            active, last = active[stands], tokens[stands]
            block = [proposed[stands] for proposed in block]
            if not active.size:
                return

    def _block(self, active: Tokens, lengths: Tokens, last: Tokens, k: int, method: str) -> list[Tokens]:
        block = []
        tag = SHARED if method == "coupled" else DRAFT
        for slot in range(k):
            at = lengths[active] + len(self.prompt) + slot
            last = draw(self.q[last], gumbels(self.seeds[active], tag, at, len(self.q)))
            block.append(last)
        return block


def markov(seeds: Tokens, ids: int = 8, closeness: float = 0.5, wire_top_k: int | None = None) -> Markov:
    """Two random chains; `closeness` 1 makes the draft the target."""
    rng = np.random.default_rng(6)
    p = rng.dirichlet(np.full(ids, 0.8), ids) * 0.92 + 0.08 / ids
    q = closeness * p + (1 - closeness) * rng.dirichlet(np.full(ids, 0.8), ids)
    return Markov(p, on_the_wire(q, wire_top_k), seeds)


def seeds_from(start: int, count: int) -> Tokens:
    """Neighbouring seeds, on purpose."""
    return np.arange(start, start + count, dtype=np.int64)


def random_distributions(count: int, ids: int, concentration: float = 1.0, seed: int = 0) -> Sequence[Array]:
    rng = np.random.default_rng(seed)
    return [rng.dirichlet(np.full(ids, concentration)) for _ in range(count)]
