"""Speculative sampling over an outcome tree, counted: whatever is guessed, the text has the target's distribution.

Every round is begun twice, as when a target is lost: with all that was told, behind which the draft branches out, then with a longer block
that reaches over the place where its guesses are. Only then could a guess be proposed at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from draft_service.chain import Draft
from draft_service.session import Session
from draft_service.tree import Branch
from orchestrator.lookahead import Lookahead
from specdec.acceptance import verify
from specdec.sampling import Sampler
from specdec.terms import DraftDistribution, DraftMethod, RejectionMethod, SamplingParams
from tests.unit.draft import rig as rigs
from tests.unit.draft.rig import Rig, proposals

IDS, PROMPT, LENGTH = 3, (0, 1), 6
PARAMS = SamplingParams(temperature=1.0, max_tokens=LENGTH + 30)
P_LEAST = 1e-4
ANSWERS = 200


def target_row(prefix: Sequence[int]) -> torch.Tensor:
    return torch.tensor([(0.9, 0.0, -0.4), (-0.3, 0.8, 0.2), (0.1, -0.5, 1.0)][prefix[-1]], dtype=torch.float64)


def draft_row(prefix: Sequence[int]) -> torch.Tensor:
    return torch.tensor([(0.7, 0.3, -0.4), (-0.1, 0.6, 0.4), (0.3, -0.4, 0.7)][prefix[-1]], dtype=torch.float64)


class Text:
    """One answer, and how often a block began with a token of a branch."""

    def __init__(self, rig: Rig, seed: int) -> None:
        self.rig, self.name, self.tokens = rig, f"s{seed}", list(PROMPT)
        self.sampler = Sampler(PARAMS, seed, IDS, (), PROMPT)
        self.lookahead = Lookahead(PROMPT)
        standard = {"rejection_method": RejectionMethod.STANDARD, "draft_method": DraftMethod.PROBABILISTIC}
        rig.open(self.name, PROMPT, k=2, seed=seed, sampling=PARAMS, **standard)
        self.hear()

    def hear(self) -> None:
        self.rig.settle()
        for proposal in proposals(self.rig.events, self.name):
            self.lookahead.add(proposal)
        self.rig.events.clear()

    def round(self) -> tuple[int, int] | None:
        """The token decided where the guesses of the bonus were, if it came to that, and the one before it."""
        place = len(self.tokens) + len(self.lookahead.block(9).tokens)
        self.rig.sent(place - len(self.tokens), self.name)
        self.hear()
        block = self.lookahead.block(9)
        self.rig.sent(len(block.tokens), self.name, block.tokens)
        self.hear()
        rows = torch.stack([target_row([*self.tokens, *block.tokens[:i]]) for i in range(len(block.tokens) + 1)])
        output = self.tokens[len(PROMPT) :]
        decided = verify(rows, block.tokens, block.distributions, self.sampler, output, RejectionMethod.STANDARD).tokens
        self.lookahead.commit(decided)
        self.rig.commit(decided, self.name)
        self.tokens += decided
        self.hear()
        return (self.tokens[place - 1], self.tokens[place]) if place < len(self.tokens) else None


def answers(count: int) -> tuple[Any, Rig]:
    """How often which token followed which [2, 3, 3]: everywhere; where guesses of a bonus were."""
    rig = Rig(draft_row, fanout=8)
    rig.engine.info = replace(rig.engine.info, vocab_size=IDS)
    seen = np.zeros((2, IDS, IDS), dtype=np.int64)
    for seed in range(count):
        text = Text(rig, seed)
        while len(text.tokens) < len(PROMPT) + LENGTH:
            if (pair := text.round()) is not None:
                seen[1][pair] += 1
        for pair in pairwise(text.tokens[len(PROMPT) - 1 : len(PROMPT) + LENGTH]):
            seen[0][pair] += 1
        rig.close(text.name)
    return seen, rig


def p_value(seen: Any) -> float:
    """What follows hangs on the last token alone, so each row is a draw of its own."""
    p = torch.stack([torch.softmax(target_row([token]), -1) for token in range(IDS)]).numpy()
    expected = p * seen.sum(1, keepdims=True)
    return float(stats.chi2.sf(((seen - expected) ** 2 / expected).sum(), IDS * (IDS - 1)))


@pytest.fixture(autouse=True)
def few_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rigs, "VOCAB", IDS)


def test_the_text_has_the_targets_distribution() -> None:
    seen, rig = answers(ANSWERS)
    assert min(map(p_value, seen)) > P_LEAST
    assert rig.drafter.tally.grafts > ANSWERS / 4


@pytest.mark.long
def test_the_text_has_the_targets_distribution_long() -> None:
    seen, _ = answers(5 * ANSWERS)
    assert min(map(p_value, seen)) > P_LEAST


def test_a_guess_that_passes_for_drawn_and_comes_first_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: branches are told before the chain's own token, and their guess with the q of its place."""
    honest = Branch.take_untold

    def told(self: Session) -> list[Any]:
        chain, pieces = self.chain, []
        for branch in [branch for branch in self.tree.branches.values() if branch.untold]:
            begins, piece = branch.told == 0, honest(branch)
            here = chain.draft_at(branch.base)
            if begins and here is not None:
                q: DraftDistribution | None = here.distribution
                piece = replace(piece, drafts=(Draft(piece.drafts[0].token, 0.5, q), *piece.drafts[1:]))
            pieces.append(piece)
        own = self._due()
        return [self._proposal(piece) for piece in (*pieces, *([] if own is None else [own]))]

    monkeypatch.setattr(Session, "told", told)
    seen, _ = answers(ANSWERS)
    assert p_value(seen[1]) < P_LEAST
