"""The figures of an answer that several orchestrators decided: sums over its legs. Pure.

Only the leg that ended tells its statistics; one that broke off took them along. What it said of each token is left, and gives rounds,
kept proposals and lengths exactly. Two things it does not give: the proposals behind a refused one, so that of such a round only the
refused one is counted with the kept ones; and hits, so that the hit rate is that of the last leg. The sums agree as in an answer of one
piece: accepted + corrected + bonus + plain = decided, and the histogram's entries are the rounds with a block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import zip_longest

from specdec.client.answers import Finished, SpeculativeStats
from specdec.terms import Origin


@dataclass(slots=True)
class Leg:
    """Tokens by their origin, in order. Each origin but `accepted` ends a round."""

    histogram: list[int] = field(default_factory=list)
    corrected: int = 0
    plain: int = 0
    bonus: int = 0
    _run: int = 0  # accepted ones since a round ended

    def take(self, origins: Iterable[Origin | None]) -> None:
        for origin in origins:
            if origin is Origin.ACCEPTED:
                self._run += 1
            elif origin is Origin.PLAIN:
                self.end()
                self.plain += 1
            elif origin is not None:
                self.corrected += origin is Origin.CORRECTED
                self.bonus += origin is Origin.BONUS
                self._count()

    def end(self) -> None:
        """A block at the end that was kept as a whole, with nothing behind it."""
        if self._run:
            self._count()

    def _count(self) -> None:
        self.histogram += [0] * (self._run + 1 - len(self.histogram))
        self.histogram[self._run] += 1
        self._run = 0

    def stats(self) -> SpeculativeStats:
        accepted, rounds = sum(j * count for j, count in enumerate(self.histogram)), sum(self.histogram)
        return SpeculativeStats(
            acceptance_histogram=tuple(self.histogram),
            num_draft_tokens=accepted + self.corrected,
            num_accepted_draft_tokens=accepted,
            num_spec_steps=rounds,
            num_spec_tokens=accepted + self.corrected + self.bonus,
            num_rounds=rounds + self.plain,
        )


def summed(finished: Finished, legs: Iterable[Leg]) -> Finished:
    """The last event of an answer whose earlier `legs` broke off."""
    stats, usage = finished.speculative, finished.usage
    for leg in legs:
        leg.end()
        more = leg.stats()
        stats = _sum(stats, more)
        usage = replace(
            usage,
            accepted_prediction_tokens=usage.accepted_prediction_tokens + more.num_accepted_draft_tokens,
            rejected_prediction_tokens=usage.rejected_prediction_tokens + more.num_draft_tokens - more.num_accepted_draft_tokens,
        )
    return replace(finished, speculative=stats, usage=usage)


def _sum(one: SpeculativeStats, other: SpeculativeStats) -> SpeculativeStats:
    accepted = one.num_accepted_draft_tokens + other.num_accepted_draft_tokens
    drafted, steps = one.num_draft_tokens + other.num_draft_tokens, one.num_spec_steps + other.num_spec_steps
    pairs = zip_longest(one.acceptance_histogram, other.acceptance_histogram, fillvalue=0)
    return SpeculativeStats(
        mean_acceptance_length=1.0 + accepted / max(1, steps),
        draft_acceptance_rate=accepted / max(1, drafted),
        acceptance_histogram=tuple(a + b for a, b in pairs),
        num_draft_tokens=drafted,
        num_accepted_draft_tokens=accepted,
        num_spec_steps=steps,
        num_spec_tokens=one.num_spec_tokens + other.num_spec_tokens,
        hit_rate=one.hit_rate,
        num_rounds=one.num_rounds + other.num_rounds,
        num_replacements=one.num_replacements + other.num_replacements,
    )
