"""Prompt lookup: what followed the last time these tokens occurred. Pure; a source of proposals that costs nothing and waits for nobody.

Text repeats itself: names, keys of a JSON object, variables, phrases of the prompt. When the newest `n` committed tokens occurred before,
the tokens that followed their latest earlier occurrence are proposed (Saxena 2023, "Prompt lookup decoding"; vLLM's `ngram` method).
What is proposed depends on committed tokens alone, so it may be used under speculative sampling as well, as a one-hot distribution.
"""

from __future__ import annotations

from collections.abc import Sequence


class PromptLookup:
    """Of one session. Holds one entry per committed token, so it is bounded by the window."""

    def __init__(self, n: int, committed: Sequence[int] = ()) -> None:
        """`n` = how many tokens must have occurred before; 0 never proposes."""
        self._n = n
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, ...], int] = {}  # n tokens -> where the latest occurrence but the newest one ended
        self._newest: tuple[int, ...] = ()
        self.extend(committed)

    def extend(self, tokens: Sequence[int]) -> None:
        """More tokens were committed."""
        if not self._n:
            return
        for token in tokens:
            if self._newest:
                self._latest[self._newest] = len(self._tokens)
            self._tokens.append(token)
            self._newest = tuple(self._tokens[-self._n :]) if len(self._tokens) >= self._n else ()

    def propose(self, num_tokens: int, behind: Sequence[int] = ()) -> tuple[int, ...]:
        """At most `num_tokens` tokens; empty when the newest tokens are new. `behind`: tokens that might be committed next, and then be
        the newest."""
        newest = tuple((*self._tokens[-self._n :], *behind)[-self._n :]) if behind and self._n else self._newest
        if len(newest) < self._n or not newest:
            return ()
        end = self._latest.get(newest)
        return tuple(self._tokens[end : end + num_tokens]) if end is not None else ()
