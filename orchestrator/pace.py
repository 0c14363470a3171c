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
    # Asked. Answers change with `committed` alone.

    @property
    def speculates(self) -> bool:
        """False: the next round goes without a block, no source is asked."""

    @property
    def waits(self) -> bool:
        """Whether a round that finds no block waits for the draft; else the target decides a plain token meanwhile, where it may."""

    @property
    def drafts(self) -> bool:
        """False: the draft rests."""

    @property
    def wanted(self) -> int:
        """Tokens the draft is asked for, 1 to `most`."""

    @property
    def most(self) -> int:
        """Longest block it ever asks for; 0 = the request has no draft session at all."""

    def length(self, source: str, confidences: Sequence[float]) -> int:
        """How many leading slots of a chain are worth verifying. `source`: draft, or ngram with a confidence of 0 per slot."""

    def lookup_first(self, guess: int, ready: bool) -> bool:
        """Whether the lookup's `guess` tokens are taken before the draft's: those are there (`ready`), or have to be waited for."""

    def grace_ms(self) -> float:
        """How long a round may wait for a proposal when no source has one."""

    # Told, in this order.

    def moved(self, target: str) -> None:
        """The session is at this target; empty = at none."""

    def opened(self) -> None:
        """A Step left, or what the target goes on with is known."""

    def proposed(self) -> None:
        """The draft said something that can be used."""

    def learn(self, source: str, block: Block, result: Result) -> None:
        """A round that verified some of this block ended. `source`: draft, ngram or forced."""

    def committed(self, ready: bool) -> None:
        """A round ended, the session goes on. `ready`: the draft's next tokens are there already."""


class FixedPace:
    """Exactly K, always: where the draft is late, it is waited for."""

    def __init__(self, num_speculative_tokens: int, max_grace_ms: float) -> None:
        self.waits = True
        self.most = self.wanted = num_speculative_tokens
        self.speculates = self.drafts = num_speculative_tokens > 0
        self._grace_ms = max_grace_ms

    def length(self, source: str, confidences: Sequence[float]) -> int:
        return min(self.most, len(confidences))

    def lookup_first(self, guess: int, ready: bool) -> bool:
        return not ready

    def grace_ms(self) -> float:
        return self._grace_ms

    def moved(self, target: str) -> None:
        pass

    def opened(self) -> None:
        pass

    def proposed(self) -> None:
        pass

    def learn(self, source: str, block: Block, result: Result) -> None:
        pass

    def committed(self, ready: bool) -> None:
        pass
