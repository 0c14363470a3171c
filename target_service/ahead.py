"""Continuations that wait at the target, named by the prefix they continue. Pure.

One of them fits where its prefix, compared by hash, is what was decided and its tokens begin with what was decided behind that prefix: the
rest is proposals. Its prefix may reach past what is decided; then it waits. One that turns out wrong, or says no more than is known, goes.

Only a coupled session may have any: there a block decides when tokens arrive, never which.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from specdec.terms import MAX_AHEADS, Ahead


@dataclass(frozen=True, slots=True)
class Waiting:
    """`tokens` follow the first `length` tokens. `hash` = what those must have, None once it was compared."""

    length: int
    hash: int | None
    tokens: tuple[int, ...]

    def behind(self, decided: Sequence[int], hash_at: Callable[[int], int]) -> Waiting | None:
        """The same, named by `decided` as far as that can be said; None when it cannot be used."""
        if self.length > len(decided):
            return self
        if self.hash is not None and self.hash != hash_at(self.length):
            return None
        since = tuple(decided[self.length :])
        if self.tokens[: len(since)] != since or len(self.tokens) == len(since):
            return None
        return replace(self, length=len(decided), hash=None, tokens=self.tokens[len(since) :])


class Shelf:
    """Those of one session, in order of arrival: at most MAX_AHEADS, the oldest makes way."""

    def __init__(self) -> None:
        self._waiting: list[Waiting] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, ahead: Ahead) -> None:
        self._waiting.append(Waiting(ahead.prefix_length, ahead.prefix_hash, ahead.tokens))
        del self._waiting[:-MAX_AHEADS]

    def clear(self) -> None:
        self._waiting.clear()

    def fit(self, decided: Sequence[int], hash_at: Callable[[int], int]) -> tuple[int, ...]:
        """What is proposed behind the `decided` tokens: the first that came and fits, as far as later ones carry it on; empty = nothing.

        `hash_at(n)` = hash of the first n decided tokens. The first is the likeliest: a draft tells its own chain before branches off it.
        """
        found = [waiting.behind(decided, hash_at) for waiting in self._waiting]
        self._waiting = list(dict.fromkeys(waiting for waiting in found if waiting is not None))
        chain: tuple[int, ...] = ()
        for waiting in self._waiting:
            if waiting.length == len(decided) and waiting.tokens[: len(chain)] == chain:
                chain = waiting.tokens
        return chain
