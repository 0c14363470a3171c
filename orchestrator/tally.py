"""Counts of one generation, by the glossary. Pure.

A round's outcome is one of
    hit       a fitting lookahead token was there when the commit before was processed
    late      one came within the grace
    forced    a grammar left no choice: the ids it forces were proposed, beyond what the lookahead had
    ngram     none was there, and the newest tokens had occurred before: what followed them then was proposed
    miss      none came in time
    no_draft  speculation was wanted and no draft held the session
    prefill   the first round on a target, tail: no room for a proposal, off: block length 0
The first six are the rounds that wanted speculation.
"""

from __future__ import annotations

from orchestrator.lookahead import Block
from orchestrator.output import GenerationStats
from specdec.terms import Origin, Result

SOURCES = {"hit": "draft", "late": "draft", "prefill": "draft", "forced": "forced", "ngram": "ngram"}
"""Where the block of a round came from, by outcome."""
WANTED = frozenset({"hit", "late", "forced", "ngram", "miss", "no_draft"})


class Tally:
    def __init__(self, num_speculative_tokens: int) -> None:
        self.rounds = self.spec_rounds = self.drafted = self.accepted = self.spec_tokens = self.tokens = 0
        self.hits = self.wanted = self.replacements = 0
        self._histogram = [0] * (num_speculative_tokens + 1) if num_speculative_tokens else []

    def opened(self, outcome: str) -> None:
        self.wanted += outcome in WANTED
        self.hits += outcome == "hit"

    def decided(self, result: Result) -> None:
        self.rounds += 1
        self.tokens += len(result.tokens)
        if result.num_verified:
            self.spec_rounds += 1
            self.drafted += result.num_verified
            self.accepted += result.num_accepted
            self.spec_tokens += len(result.tokens)
            longer = result.num_accepted + 1 - len(self._histogram)  # forced ids may be more than a block
            self._histogram += [0] * longer
            self._histogram[result.num_accepted] += 1

    def stats(self) -> GenerationStats:
        return GenerationStats(
            rounds=self.rounds,
            spec_rounds=self.spec_rounds,
            drafted=self.drafted,
            accepted=self.accepted,
            histogram=tuple(self._histogram),
            spec_tokens=self.spec_tokens,
            hits=self.hits,
            wanted=self.wanted,
            replacements=self.replacements,
            decided=self.tokens,
        )


def word(block: Block, speculates: bool) -> str:
    """The outcome of a round that nobody asked for."""
    if not block.tokens:
        return "miss" if speculates else "off"
    return "hit" if block.own else block.source


def origins(result: Result) -> tuple[Origin, ...]:
    """Where each decided token came from: kept proposals first, then at most one token of the target's own."""
    own = Origin.CORRECTED
    if not result.num_verified:
        own = Origin.PLAIN
    elif result.num_accepted == result.num_verified:
        own = Origin.BONUS
    return (Origin.ACCEPTED,) * result.num_accepted + (own,) * (len(result.tokens) - result.num_accepted)
