"""One session's tokens at the draft: what is committed, then the one chain of undecided tokens that continues it. Pure; knows no
engine, clock or session. Other continuations hang on it as branches (tree.py).

Rules
1. tokens = committed tokens, then undecided ones (drafted here, or a block from elsewhere that is in flight).
2. `kv` counts the leading tokens whose keys and values the engine holds for exactly these tokens. It never exceeds the tokens, and a
   token that changes takes everything from its place on out of `kv`, and the newest token is never counted: it is what the next step
   feeds. The engine may hold more; the next step truncates it to `kv`.
3. `pushed` counts the leading tokens the orchestrator knows; committed <= pushed <= len(tokens).
4. Results of a step are compared with the tokens as they are now, not as they were planned: what still agrees is used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from specdec.hashing import PrefixHash
from specdec.terms import DraftDistribution


class Ranked(Protocol):
    """The part of specdec.guesses.Guesses that is used here."""

    def ranked(self) -> tuple[int, ...]:
        """What else could have followed, likeliest first."""


@dataclass(frozen=True, slots=True)
class Draft:
    """One drafted token; `confidence` = largest value of q at its place; `distribution` only under the standard method; `guesses` None =
    nothing else is worth trying in its place."""

    token: int
    confidence: float = 0.0
    distribution: DraftDistribution | None = None
    guesses: Ranked | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Piece:
    """Drafted tokens that continue the first `prefix_length` tokens."""

    prefix_length: int
    prefix_hash: int
    drafts: tuple[Draft, ...]


class Chain:
    def __init__(self, committed: Sequence[int]) -> None:
        self.tokens = list(committed)
        self.committed = self.pushed = len(self.tokens)
        self.kv = 0
        self._hash = PrefixHash(self.tokens)  # of the committed tokens
        self._drafts: list[Draft | None] = []  # one per undecided token; None = not drafted here

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def unfed(self) -> int:
        """Tokens the engine has not seen; at least 1 whenever a token is wanted, since drafting leaves the newest one out."""
        return len(self.tokens) - self.kv

    @property
    def last_draft(self) -> Draft | None:
        """The newest undecided token if it was drafted here."""
        return self._drafts[-1] if self._drafts else None

    def draft_at(self, place: int) -> Draft | None:
        """The undecided token at index `place`, if it was drafted here."""
        return self._drafts[place - self.committed] if self.committed <= place < len(self.tokens) else None

    def names(self, length: int, hash_: int) -> bool:
        """Whether (length, hash) names a prefix of these tokens, undecided ones included."""
        return 0 < length <= len(self.tokens) and self.hash_at(length).value == hash_

    def hash_at(self, length: int) -> PrefixHash:
        """Of the first `length` tokens; the caller's own."""
        if length < self.committed:  # a late command: rare, so the hash is not kept
            return PrefixHash(self.tokens[:length])
        return self._hash.copy().extend(self.tokens[self.committed : length])

    def product(self, start: int, end: int) -> float:
        """Product of the confidences of the undecided tokens from index `start` to `end`; tokens from elsewhere count as certain."""
        drafts = self._drafts[start - self.committed : end - self.committed]
        return math.prod(d.confidence for d in drafts if d is not None)

    def commit(self, start: int, tokens: Sequence[int]) -> int | None:
        """Takes `tokens` as decided from index `start` on; the caller has checked that `names(start, …)`.

        Returns the number of undecided tokens that were dropped (0 = all fitted), or None, changing nothing, when they contradict
        what is committed.
        """
        if self.contradicts(start, tokens):
            return None
        end = start + len(tokens)
        if end <= self.committed:
            return 0  # a repeat
        dropped = self._overwrite(start, tokens)
        self._hash.extend(self.tokens[self.committed : end])
        del self._drafts[: end - self.committed]
        self.committed = end
        self.pushed = max(self.pushed, end)
        return dropped

    def contradicts(self, start: int, tokens: Sequence[int]) -> bool:
        """Whether other tokens than these are committed from index `start` on."""
        overlap = max(0, self.committed - start)
        return list(tokens[:overlap]) != self.tokens[start : start + min(overlap, len(tokens))]

    def cut_by(self, start: int, tokens: Sequence[int]) -> int | None:
        """The first index at which `tokens`, from index `start` on, are not what is here; None when all that is here agrees."""
        for place, (here, there) in enumerate(zip(self.tokens[start:], tokens, strict=False), start):
            if here != there:
                return place
        return None

    def replace(self, place: int, token: int, drafts: Sequence[Draft], kv: int, pushed: int) -> int:
        """Another continuation takes the place of this one from the undecided token at `place` on: `token`, then `drafts`. `kv`, `pushed`:
        what the chain then has of both. Returns the number of tokens dropped."""
        dropped = len(self.tokens) - place
        self.tokens[place:] = [token, *(d.token for d in drafts)]
        self._drafts[place - self.committed :] = [None, *drafts]
        self.kv, self.pushed = kv, pushed
        return dropped

    def assume(self, start: int, block: Sequence[int]) -> int:
        """A block drafted elsewhere is in flight from index `start` >= committed on. Returns the number of tokens dropped."""
        dropped = self._overwrite(start, block)
        self.pushed = max(self.pushed, start + len(block))
        return dropped

    def _overwrite(self, start: int, tokens: Sequence[int]) -> int:
        """Makes tokens[start:] begin with `tokens`. What agrees stays, with all that follows; the first difference cuts."""
        place = start
        for token in tokens:
            if place == len(self.tokens) or self.tokens[place] != token:
                break
            place += 1
        if place - start == len(tokens):
            return 0
        dropped = len(self.tokens) - place
        del self.tokens[place:]
        del self._drafts[place - self.committed :]
        rest = tokens[place - start :]
        self.tokens.extend(rest)
        self._drafts.extend([None] * len(rest))
        self.kv = min(self.kv, place)
        self.pushed = min(self.pushed, place)
        return dropped

    def absorb(self, start: int, fed: Sequence[int], drafts: Sequence[Draft]) -> int:
        """A step wrote K/V of `fed` from index `start` on, drew `drafts` after it and fed all of them but the last.

        Returns how many of the drafts joined. Tokens may have changed since the step was planned.
        """
        if self.kv < start:  # cut below the step's beginning: the engine's K/V from here on belong to other tokens
            return 0
        place = start + len(fed)
        joined = self._join(place, drafts) if self.tokens[start:place] == list(fed) else 0
        for token in (*fed, *(d.token for d in drafts[:-1])):
            if self.kv == len(self.tokens) or self.tokens[self.kv] != token:
                break
            self.kv += 1
        self.kv = min(self.kv, len(self.tokens) - 1)  # the newest is fed again when a token is wanted behind it
        return joined

    def ends_with(self, start: int, seen: Sequence[int]) -> bool:
        """After `absorb`: whether what a step saw from index `start` on is still there, and still the end."""
        return self.kv >= start and self.tokens[start:] == list(seen)

    def _join(self, place: int, drafts: Sequence[Draft]) -> int:
        """Appends drafts that continue tokens[:place], as far as they agree with what is there by now."""
        joined = 0
        for draft in drafts:
            if place < len(self.tokens):
                if self.tokens[place] != draft.token:
                    break
            else:
                self.tokens.append(draft.token)
                self._drafts.append(draft)
                joined += 1
            place += 1
        return joined

    def take_unpushed(self) -> Piece | None:
        """What the orchestrator does not know yet, marked as known."""
        drafts = [d for d in self._drafts[self.pushed - self.committed :] if d is not None]
        if not drafts:
            return None
        piece = Piece(self.pushed, self.hash_at(self.pushed).value, tuple(drafts))
        self.pushed = len(self.tokens)
        return piece
