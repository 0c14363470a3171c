"""A place in a text of the language: one matcher of the library, and the marker in front of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

import llguidance
import numpy as np
import numpy.typing as npt

from specdec.errors import InvalidRequest
from specdec.grammar.forms import said
from specdec.grammar.marker import Marker
from specdec.grammar.words import Words

Mask = npt.NDArray[np.bool_]
T = TypeVar("T")

FIELD = "sampling.grammar"
DEAD_END = "NoExtensionBias"  # the library's word for: neither complete nor continued by any id
NO_WAY_BACK = "rollback not supported"  # for rules that count tokens; told of each by its first rolling back


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow an output. `mask` [vocab_size] = ids that continue it, None = every id; read-only. `may_end`: the text may end
    here; `must_end`: nothing else can follow."""

    mask: Mask | None
    may_end: bool
    must_end: bool


class Language(Protocol):
    """compiler.Accepted."""

    def take(self) -> llguidance.LLMatcher:
        """A matcher that was never fed and shares nothing with others: copies of one matcher share what they learn of the language, its
        limits and a lock."""

    def unforced(self) -> llguidance.LLMatcher:
        """The same, whose masks name every way to write a text that is known."""


class Reading:
    """`tokens` = those read so far. The library counts its work per look, and remembers what it learnt: whether a text stays within the
    limits hangs on everything that was asked before, so who wants the same answer has to ask the same.

    Raises NoBeginning for a token that cannot follow, DeadEnd where nothing can, Broken when the matcher says nothing more, and
    InvalidRequest for a grammar that cannot be rolled back.
    """

    def __init__(self, language: Language, words: Words, marker: Marker | None) -> None:
        self._language, self._words, self._marker = language, words, marker
        self._table = words.table
        self._made: llguidance.LLMatcher | None = None
        self.tokens: list[int] = []
        self._tails = [b""]  # while the grammar has not begun: after each token, what may be the first part of the marker
        self._start: int | None = 0 if marker is None else None  # length of the text when the grammar began

    @property
    def begun(self) -> bool:
        """Whether the grammar has: behind its marker."""
        return self._start is not None

    @property
    def _matcher(self) -> llguidance.LLMatcher:
        if self._made is None:
            self._made = self._language.take()
        return self._made

    def look(self) -> Allowed:
        """What may follow."""
        return self._free() if self._start is None else self._bound()

    def feed(self, token: int, mask: Mask | None = None) -> None:
        """Reads on. `mask`: what was seen at this place, if anyone looked."""
        known = 0 <= token < len(self._table)
        if not known or not (self._begins(token) if self._start is None else self._continues(token, mask)):
            raise NoBeginning(FIELD, f"token {token} cannot follow {len(self.tokens)} tokens of the answer")
        self.tokens.append(token)

    def roll_back(self, length: int) -> None:
        """To the first `length` tokens."""
        if self._start is not None:
            fed = max(0, length - self._start)
            self._call(self._matcher.rollback, len(self.tokens) - self._start - fed)
        if self._marker is not None:
            del self._tails[length + 1 :]
            if self._start is not None and length < self._start:
                self._start = None
        del self.tokens[length:]

    def _begins(self, token: int) -> bool:
        """Takes a token of the free part; False, changing nothing, for one that runs past the marker."""
        assert self._marker is not None
        text = self._tails[-1] + (self._table[token] or b"")
        place = text.find(self._marker.text)
        if 0 <= place < len(text) - len(self._marker.text):
            return False
        if place >= 0:
            self._start = len(self.tokens) + 1
        self._tails.append(self._marker.beginning(text))
        return True

    def _continues(self, token: int, mask: Mask | None) -> bool:
        """Takes a token of the language; False for one that is none. One that the mask lacks may be another way to write a known text."""
        fits = mask is not None and bool(mask[token])
        if not fits and self._call(self._matcher.validate_tokens, [token]) != 1 and not (mask is None and self._should_fit(token)):
            return False
        self._call(self._matcher.consume_token, token)
        return True

    def _should_fit(self, token: int) -> bool:
        """The library says "no" to a token also when it is at its limits; only a mask tells which."""
        mask = self._bound().mask
        return mask is not None and bool(mask[token])

    def _bound(self) -> Allowed:
        self._words.take_unwritable()  # of somebody else
        bits = self._call(self._matcher.compute_bitmask)
        if self._words.take_unwritable():
            bits = self._unforced_bits()
        mask = np.unpackbits(np.frombuffer(bits, dtype=np.uint8), count=len(self._table), bitorder="little").view(np.bool_)
        mask.flags.writeable = False
        may_end, goes_on = self._call(self._matcher.is_accepting), bool(mask.any())
        if not (may_end or goes_on):  # the library would go on with its own end
            raise self._dead_end()
        return Allowed(mask, may_end, must_end=not goes_on)

    def _unforced_bits(self) -> bytes:
        """Where the text that must follow cannot be written by itself, an id that goes on behind it may still write it."""
        matcher = self._language.unforced()
        self._call(matcher.consume_tokens, self.tokens[self._start :], matcher=matcher)
        return self._call(matcher.compute_bitmask, matcher=matcher)

    def _free(self) -> Allowed:
        """Before the grammar begins: every id but those that hold the marker's end and more."""
        assert self._marker is not None
        past = self._marker.overrun(self._tails[-1])
        mask = None
        if len(past):
            mask = np.ones(len(self._table), dtype=np.bool_)
            mask[past] = False
            mask.flags.writeable = False
        return Allowed(mask, may_end=True, must_end=False)

    def _call(self, ask: Callable[..., T], *args: object, matcher: llguidance.LLMatcher | None = None) -> T:
        """One call of the library."""
        matcher = matcher or self._matcher
        try:
            answer = ask(*args)
            fault = matcher.get_error() if matcher.is_error() else ""
        except BaseException as error:  # its panics are no Exception
            if type(error).__name__ != "PanicException":
                raise
            fault = f"panic: {error}"
        if not fault:
            return answer
        if NO_WAY_BACK in fault:
            raise InvalidRequest(FIELD, "attributes max_tokens and stop of a rule are not served; suffix is")
        if DEAD_END in fault:
            raise Broken(self._dead_end())
        raise Broken(InvalidRequest(FIELD, f"too complex after {len(self.tokens)} tokens of the answer: {said(fault)}"))

    def _dead_end(self) -> DeadEnd:
        return DeadEnd(FIELD, f"no id continues the text after {len(self.tokens)} tokens of the answer")


class NoBeginning(InvalidRequest):
    """No text of the language begins like this."""


class DeadEnd(InvalidRequest):
    """A text of the language begins like this, and the vocabulary cannot write the rest."""


class Broken(Exception):
    """A matcher that outgrew its limits, or has nowhere to go, says nothing more. Holds what to tell the session."""

    def __init__(self, told: InvalidRequest) -> None:
        super().__init__(str(told))
        self.told = told
