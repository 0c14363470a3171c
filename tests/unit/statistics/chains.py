"""Whole texts through `verify`, with blocks that another distribution proposed, and the exact probability of each text by loops.

A model here is a table: logits of the next token by the last one. The faulty samplers are what other systems did when a block came.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from specdec import noise
from specdec.acceptance import verify
from specdec.sampling import Columns, Floats, Row, Sampler
from specdec.seeds import SHARED, mix64
from specdec.terms import DraftDistribution, RejectionMethod, SamplingParams
from tests.unit.statistics.harness import pooled_p_value

K = 4
LENGTH = 3  # tokens of a text
Text = tuple[int, ...]
Probabilities = Callable[[Text], list[float]]  # of the next token, after a text


@dataclass
class Setting:
    """`target`, `draft`: logits [ids, ids] by last token; `naive` = the target's exact probabilities; `end` = an id that ends a text.

    The draft proposes `letters` only, untouched by any parameter; under coupled with the target's noise.
    """

    target: torch.Tensor
    draft: Any
    params: SamplingParams
    naive: Probabilities
    letters: tuple[int, ...]
    prompt: Text = (1,)
    end: int | None = None
    constraint: Callable[[], Any] | None = None
    truth: dict[Text, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.truth = {text: p for text, p in self._texts((), 1.0) if p > 0.0}
        self.q = {last: softmax([self.draft[last][i] for i in self.letters]) for last in self.letters}
        self.sent = {last: DraftDistribution(self.letters, struct.pack(f"<{len(q)}f", *q)) for last, q in self.q.items()}

    def _texts(self, text: Text, p: float) -> list[tuple[Text, float]]:
        if len(text) == LENGTH or (text and text[-1] == self.end):
            return [(text, p)]
        return [found for token, share in enumerate(self.naive(text)) if share for found in self._texts((*text, token), p * share)]

    def p_value(self, count: int, method: RejectionMethod, kind: type[Sampler] = Sampler, first_seed: int = 0) -> float:
        """Chi-square of `count` texts of as many seeds; 0 when a text that cannot be is among them."""
        seeds = [mix64(seed) for seed in range(first_seed, first_seed + count)]
        ids, draw = torch.tensor(self.letters), np.random.default_rng(first_seed)
        signed = torch.tensor([seed - 2**64 if seed >> 63 else seed for seed in seeds])
        positions = len(self.prompt) + torch.arange(LENGTH + K)
        shared = noise.gumbel(signed[:, None, None], SHARED, positions[None, :, None], ids)
        drawn = torch.from_numpy(draw.gumbel(size=tuple(shared.shape)))
        found: dict[Text, int] = {}
        for seed, g in zip(seeds, shared if method is RejectionMethod.COUPLED else drawn, strict=True):
            text = self._text(seed, method, kind, g.tolist())
            found[text] = found.get(text, 0) + 1
        if any(text not in self.truth for text in found):
            return 0.0
        texts = sorted(self.truth)
        return pooled_p_value(np.array([found.get(text, 0) for text in texts]), np.array([self.truth[text] for text in texts]))

    def _text(self, seed: int, method: RejectionMethod, kind: type[Sampler], g: list[list[float]]) -> Text:
        ends = [] if self.end is None else [self.end]
        sampler = kind(self.params, seed, self.target.shape[1], ends, self.prompt, None, self.constraint and self.constraint())
        output: list[int] = []
        while len(output) < LENGTH:
            rows = [(*self.prompt, *output)[-1]]
            if rows[0] not in self.q:
                break  # no text of this setting: only a fault leads here
            for slot in range(K):
                scores = [math.log(q) + g[len(output) + slot][i] for i, q in enumerate(self.q[rows[-1]])]
                rows.append(self.letters[scores.index(max(scores))])
            sent = [self.sent[last] for last in rows[:-1]] if method is RejectionMethod.STANDARD else ()
            if isinstance(sampler, Faulty):
                sampler.begin(output)
            verdict = verify(self.target[rows], rows[1:], sent, sampler, output, method)
            output += verdict.tokens
            if verdict.stop_token_id is not None:
                output.append(verdict.stop_token_id)
                break
        return tuple(output)


def softmax(scores: Sequence[float]) -> list[float]:
    """-inf has no share."""
    highest = max(scores)
    weights = [math.exp(score - highest) for score in scores]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


class Faulty(Sampler):
    """A sampler that knows where the block begins, and makes something of it."""

    before: list[int]

    def begin(self, output: Sequence[int]) -> None:
        self.before = list(output)

    def slot(self, output: Sequence[int]) -> int:
        return len(output) - len(self.before)


class PenaltiesOfThePrefix(Faulty):
    """F11: a row inside a block is penalised for what stood in front of the block."""

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, self.before)


class PenaltiesOfLastTokens(Faulty):
    """F12: of a block, only the last token that was kept enters the counts."""

    counted: list[int]

    def begin(self, output: Sequence[int]) -> None:
        super().begin(output)
        self.counted = [*getattr(self, "counted", []), *output[-1:]]

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, self.counted)


class PenaltiesCountedTwice(Faulty):
    """F13: from row 1 on the newest token is counted twice."""

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, [*output, *output[-1:]] if self.slot(output) > 0 else output)


class MinPOnTheBonusRow(Faulty):
    """F14: the other rows are not cut."""

    def cut(self, scores: Floats) -> tuple[Columns | None, Floats]:
        return super().cut(scores) if self.bonus else (None, scores)

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        self.bonus = self.slot(output) == K
        return super().adjusted(logits, output)


class BiasOnTheBonusRow(Faulty):
    """F14: the other rows are not biased."""

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, output) if self.slot(output) == K else self.raw(logits)


class MasksOnRowZero(Faulty):
    """Rows behind the first may be anything."""

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, output) if self.slot(output) == 0 else self.raw(logits)

    def must_end(self, output: Sequence[int]) -> bool:
        return False


class EndsOnRowZero(Faulty):
    """F46: before min_tokens, only the first row of a block is kept from ending the text."""

    def adjusted(self, logits: Row, output: Sequence[int]) -> Floats:
        return super().adjusted(logits, output) if self.slot(output) == 0 else self.raw(logits)
