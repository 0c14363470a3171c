"""The state of a grammar for who guesses: outputs in any order, on and back."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.grammar.constraint import chain
from specdec.grammar.marker import Marker
from specdec.grammar.reading import Allowed, Broken, Language, Reading
from specdec.grammar.words import Words

T = TypeVar("T")

MAX_REBUILT = 8  # matchers that one session may use up: building one may take as long as compiling


class Roamer:
    """As Constraint, but rolls back instead of reading anew: quick in any order, and what it says is the same while the limits are not met.
    Where they are met hangs on what was asked before."""

    def __init__(self, language: Language, words: Words, marker: Marker | None) -> None:
        self._anew = functools.partial(Reading, language, words, marker)
        self._rebuilt = 0
        self._begin()

    def _begin(self) -> None:
        self._reading, self._fresh = self._anew(), True
        self._seen: Allowed | None = None  # of the present place

    def at(self, output: Sequence[int]) -> Allowed:
        return self._sound(lambda: self._allowed(output))

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        self.at(output)
        return chain(self.at, output)

    def _sound(self, ask: Callable[[], T]) -> T:
        """The limits count all that a matcher has seen, so one that fails is replaced by one that sees this output alone."""
        try:
            return ask()
        except Broken as error:
            told = error.told
        self._begin()
        if self._rebuilt < MAX_REBUILT:
            self._rebuilt += 1
            try:
                return ask()
            except Broken as error:
                told = error.told
                self._begin()
        raise told

    def _allowed(self, output: Sequence[int]) -> Allowed:
        """A new matcher takes the last step as one that looked at the row before would: a row looked at alone may be within the limits
        where the step to it is not."""
        if self._fresh and output:
            self._move_to(output[:-1])
            if self._reading.begun:
                self._reading.look()
        self._move_to(output)
        self._fresh = False
        if self._seen is None:
            self._seen = self._reading.look()
        return self._seen

    def _move_to(self, output: Sequence[int]) -> None:
        known, wanted = self._reading.tokens, list(output)
        shared = min(len(known), len(wanted))
        if known[:shared] != wanted[:shared]:
            shared = next(i for i in range(shared) if known[i] != wanted[i])
        if shared == len(known) == len(wanted):
            return
        self._seen = None
        self._reading.roll_back(shared)
        for token in wanted[shared:]:
            self._reading.feed(token)
