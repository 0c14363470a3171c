"""Texts by the standard method with the block lengths that the adaptive pace chooses are distributed as the target's alone; with those of
a pace that peeks they are not.

One process-wide desk learns over all texts, as in the service; the clock is a simulated target whose steps are the dearer the more rows
they have, so that lengths from nothing to the whole chain occur.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.control import Desk
from orchestrator.control.adaptive import AdaptivePace
from orchestrator.events import Admitted
from orchestrator.lookahead import Block
from specdec.acceptance import accepts, residual
from specdec.seeds import DRAFT, RESIDUAL
from specdec.terms import Answer, RejectionMethod, Result, SamplingParams
from tests.unit.statistics.harness import P_LEAST, Markov, gumbels, markov, p_value, seeds_from, uniforms

LENGTH, MOST = 3, 3
TEXTS = 5000


class Peeks(AdaptivePace):
    """Goes by what q gives to the token that was drawn, instead of by its largest value."""

    def length(self, source: str, confidences: Sequence[float]) -> int:
        n = super().length(source, confidences)
        return next((i for i in range(n) if self.probabilities[i] < 0.4), n)

    probabilities: Sequence[float] = ()


class LooksBehind(AdaptivePace):
    """A slot is verified only if the next one, whose distribution follows from the token drawn here, is a sure one."""

    def length(self, source: str, confidences: Sequence[float]) -> int:
        n = super().length(source, confidences)
        return next((i for i in range(n - 1) if confidences[i + 1] < 0.65), n)


class Run:
    """Texts of a Markov chain, one after the other; `lengths` = of the blocks that were verified."""

    def __init__(self, chain: Markov, kind: type[AdaptivePace] = AdaptivePace) -> None:
        self.chain, self.kind, self.desk = chain, kind, Desk(50.0)
        count, ids, places = len(chain.seeds), len(chain.p), LENGTH + MOST
        self.drafted = [gumbels(chain.seeds, DRAFT, 1 + at, ids) for at in range(places)]
        self.corrected = [gumbels(chain.seeds, RESIDUAL, 1 + at, ids) for at in range(places)]
        self.tests = [uniforms(chain.seeds, 1 + at) for at in range(places)]
        self.residuals = [residual(chain.p[i][None], chain.q[i][None])[0] for i in range(ids)]
        self.lengths: list[int] = []
        self.cells = np.array([self._text(text) for text in range(count)])

    def _text(self, text: int) -> int:
        request = Admitted("s", (0,), 1, SamplingParams(), 1, 1000, MOST, 16, rejection_method=RejectionMethod.STANDARD, adaptive=True)
        pace = self.desk.pace(request, 1)
        assert isinstance(pace, AdaptivePace)
        pace.__class__ = self.kind
        pace.moved("target")
        pace.committed(False)
        tokens: list[int] = []
        while len(tokens) < LENGTH:
            tokens += self._round(pace, text, tokens)
        pace.moved("")
        cell = 0
        for token in tokens[:LENGTH]:
            cell = cell * len(self.chain.p) + token
        return cell

    def _round(self, pace: AdaptivePace, text: int, tokens: list[int]) -> list[int]:
        last, begin = (tokens[-1] if tokens else 0), len(tokens)
        chain, wanted = self.chain, pace.wanted if pace.speculates else 0
        block: list[int] = []
        rows = [last]
        for slot in range(wanted):
            scores = np.log(chain.q[rows[-1]]) + self.drafted[begin + slot][text]
            block.append(int(scores.argmax()))
            rows.append(block[-1])
        self.desk.now_ms += 1.0
        if wanted:
            pace.proposed()
        confidences = tuple(float(chain.q[row].max()) for row in rows[:wanted])
        if isinstance(pace, Peeks):
            pace.probabilities = [float(chain.q[row][token]) for row, token in zip(rows, block, strict=False)]
        n = pace.length("draft", confidences) if wanted else 0
        self.lengths.append(n)
        pace.opened()
        decided, accepted = self._decide(text, begin, rows, block[:n])
        took = 8.0 + 2.5 * n
        self.desk.now_ms += took
        result = Result(1, 1, n, accepted, tuple(decided))
        self.desk.heard("target", 1 + n, round(took * 1000), (Answer("s", 1, 1, result),))
        if n:
            pace.learn("draft", Block(tuple(block[:n]), (None,) * n, confidences=confidences[:n]), result)
        pace.committed(False)
        return decided

    def _decide(self, text: int, begin: int, rows: list[int], block: list[int]) -> tuple[list[int], int]:
        decided: list[int] = []
        for slot, row in enumerate(rows[: len(block) + 1]):
            p, q, at = self.chain.p[row], self.chain.q[row], begin + slot
            if slot == len(block):
                weights = p
            elif accepts(p[block[slot]], q[block[slot]], self.tests[at][text]):
                decided.append(block[slot])
                continue
            else:
                weights = self.residuals[row]
            with np.errstate(divide="ignore"):
                decided.append(int((np.log(weights) + self.corrected[at][text]).argmax()))
            return decided, slot
        raise AssertionError("the last slot decides")


def test_texts_of_adaptive_lengths_are_the_targets() -> None:
    chain = markov(seeds_from(11_000_000, TEXTS), ids=4, closeness=0.6)
    run = Run(chain)
    assert len(set(run.lengths)) >= 3, "lengths have to differ"
    assert p_value(run.cells, chain.truth(LENGTH)) > P_LEAST


@pytest.mark.parametrize("kind", [Peeks, LooksBehind])
def test_twin_a_pace_that_looks_at_the_tokens(kind: type[AdaptivePace]) -> None:
    chain = markov(seeds_from(11_000_000, TEXTS), ids=4, closeness=1.0)
    assert p_value(Run(chain, kind).cells, chain.truth(LENGTH)) < P_LEAST


def test_the_example_of_three_ids() -> None:
    """p = q = (.5, .3, .2): whoever verifies what q gives at least .4 gets (.75, .15, .1)."""
    p = np.tile([0.5, 0.3, 0.2], (3, 1))
    chain = Markov(p, p, seeds_from(5_000_000, 2000))
    assert p_value(Run(chain).cells, chain.truth(LENGTH)) > P_LEAST
    assert p_value(Run(chain, Peeks).cells, chain.truth(LENGTH)) < 1e-12
