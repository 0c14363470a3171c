"""The state of one session: what its grammar lets follow an output."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np

from specdec.errors import InvalidRequest
from specdec.grammar.marker import Marker
from specdec.grammar.reading import Allowed, Broken, Language, Reading
from specdec.grammar.words import Words

MAX_FORCED = 16  # ids told to be forced at once


class Constraint:
    """Used by one thread at a time. What it says of an output depends on that output alone, and so does where the language outgrows the
    limits: every text is read in one way, from its first token, each row looked at once before the next token is read, whatever blocks it
    comes in. Another text, or a row that is long past, is read anew from the beginning: for outputs that grow. Who asks in any order takes
    a Roamer.

    Raises NoBeginning for an output that no sentence begins with, DeadEnd for one that cannot be gone on with, and InvalidRequest where
    the language outgrows the limits.
    """

    def __init__(self, language: Language, words: Words, marker: Marker | None) -> None:
        self._anew = functools.partial(Reading, language, words, marker)
        self._oldest = 0  # row that is kept
        self._begin()

    def _begin(self) -> None:
        self._reading = self._anew()
        self._tokens: list[int] = []  # read so far, or broken at
        self._here: Allowed | None = None  # the row behind them, once it was looked at
        self._fault: InvalidRequest | None = None  # what is told of that row, and of all behind it
        self._rows: dict[int, Allowed] = {}  # by length of the output

    def at(self, output: Sequence[int]) -> Allowed:
        """What may follow `output` (decided tokens, the prompt not among them). A round that breaks off in front of a row asks for the row
        before once more."""
        wanted = list(output)
        self._oldest = max(0, len(wanted) - 1)
        self._rows = {length: row for length, row in self._rows.items() if length >= self._oldest}
        return self._row(wanted)

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """The ids that follow `output` whatever the model thinks, at most MAX_FORCED: each is the whole mask of its row. Fewer where the
        limits are met on the way: these rows may never be asked for. They are read as they will be if they are, so it leaves no trace."""
        self.at(output)
        return chain(self._row, output)

    def _row(self, wanted: list[int]) -> Allowed:
        length, known = len(wanted), len(self._tokens)
        if wanted[:known] != self._tokens[:length] or (length < known and length not in self._rows):
            self._begin()
        if length in self._rows:
            return self._rows[length]
        if self._fault is None:
            try:
                for token in wanted[len(self._tokens) :]:
                    self._feed(token)
                return self._look()
            except Broken as error:
                self._fault = error.told
            except InvalidRequest as error:
                self._fault = error
        raise self._fault.with_traceback(None)

    def _feed(self, token: int) -> None:
        mask = self._look().mask
        self._tokens.append(token)
        self._here = None
        self._reading.feed(token, mask)

    def _look(self) -> Allowed:
        if self._here is None:
            self._here = self._reading.look()
            if len(self._tokens) >= self._oldest:
                self._rows[len(self._tokens)] = self._here
        return self._here


def chain(row: Callable[[list[int]], Allowed], output: Sequence[int]) -> tuple[int, ...]:
    """The only ids that can follow `output`, one after the other, at most MAX_FORCED. `row`: what may follow an output."""
    found: list[int] = []
    try:
        while len(found) < MAX_FORCED:
            allowed = row([*output, *found])
            if allowed.mask is None or allowed.may_end or np.count_nonzero(allowed.mask) != 1:
                break
            found.append(int(allowed.mask.argmax()))
    except InvalidRequest:
        pass
    return tuple(found)
