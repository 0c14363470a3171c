"""How much speculation pays for one session now. Pure; a generation asks before each round and tells what came of it.

Whether slot i of a chain is verified may rest on the session's past, on the confidences of slots up to i, on other sessions, load and time;
never on the token drawn at slot i or later, nor on its probability (design: the no-peek rule). So `length` sees confidences alone, and
its answer for slot i must not change with what lies behind i.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from orchestrator.lookahead import Block
from specdec.terms import Result


class Pace(Protocol):
    @property
    def speculates(self) -> bool:
        """False: the next round goes without a block, no source is asked, the draft rests."""

    @property
    def most(self) -> int:
        """Longest block it ever asks for; 0 = the request has no draft session at all."""

    def length(self, source: str, confidences: Sequence[float]) -> int:
        """How many leading slots of a chain are worth verifying. `source`: draft, or ngram with a confidence of 0 per slot."""

    def grace_ms(self) -> float:
        """How long a round may wait for a proposal when no source has one."""

    def learn(self, source: str, block: Block, result: Result) -> None:
        """A round with this block ended. `source`: draft, ngram or forced."""


class FixedPace:
    """Exactly K, always."""

    def __init__(self, num_speculative_tokens: int, max_grace_ms: float) -> None:
        self.most, self._grace_ms = num_speculative_tokens, max_grace_ms

    @property
    def speculates(self) -> bool:
        return self.most > 0

    def length(self, source: str, confidences: Sequence[float]) -> int:
        return min(self.most, len(confidences))

    def grace_ms(self) -> float:
        return self._grace_ms

    def learn(self, source: str, block: Block, result: Result) -> None:
        pass
