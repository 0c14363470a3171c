"""The state of one session: what its grammar lets follow an output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

MAX_FORCED = 16  # ids told to be forced at once
MAX_REBUILT = 8  # matchers that one session may use up: building one may take as long as compiling
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


class Constraint:
    """Used by one thread at a time; every method may be asked about any output, in any order, and what it says depends on that output
    alone.

    Raises NoBeginning for an output that no sentence begins with, DeadEnd for one that cannot be gone on with, and InvalidRequest where
    the language outgrows the limits.
    """

    def __init__(self, language: Language, words: Words, marker: Marker | None) -> None:
        self._language, self._words, self._marker = language, words, marker
        self._table = words.table
        self._rebuilt = 0
        self._made: llguidance.LLMatcher | None = None
        self._begin()

    def _begin(self) -> None:
        self._made = None
        self._tokens: list[int] = []  # where the state is
        self._tails = [b""]  # while the grammar has not begun: after each token, what may be the first part of the marker
        self._start: int | None = 0 if self._marker is None else None  # length of the output when it began
        self._seen: Allowed | None = None  # of the present state

    @property
    def _matcher(self) -> llguidance.LLMatcher:
        if self._made is None:
            self._made = self._language.take()
        return self._made

    def at(self, output: Sequence[int]) -> Allowed:
        """What may follow `output` (decided tokens, the prompt not among them)."""
        return self._sound(lambda: self._allowed(output))

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """The ids that follow `output` whatever the model thinks, at most MAX_FORCED: each is the whole mask of its row. Fewer where the
        limits are met on the way: these rows may never be asked for.

        The library names several ids, but where they are asked for one by one it may cut the same text otherwise; a row's mask is the
        first of those named in that very row."""
        self._sound(lambda: self._move_to(output))
        found: list[int] = []
        try:
            while self._start is not None and len(found) < MAX_FORCED:
                following = self._call(self._matcher.compute_ff_tokens)
                if self._words.take_unwritable() or not following:
                    break
                self._seen = None
                self._feed(following[0])
                found.append(following[0])
        except _Broken:
            self._begin()
        return tuple(found)

    def _sound(self, ask: Callable[[], T]) -> T:
        """An answer that does not hang on what was asked before: the limits count all that a matcher has seen, so one that fails is
        replaced by one that sees this output alone."""
        try:
            return ask()
        except _Broken as error:
            told = error.told
        self._begin()
        if self._rebuilt < MAX_REBUILT:
            self._rebuilt += 1
            try:
                return ask()
            except _Broken as error:
                told = error.told
                self._begin()
        raise told

    def _allowed(self, output: Sequence[int]) -> Allowed:
        """A new matcher takes the last step as one that looked at the row before would: a row looked at alone may be within the limits
        where the step to it is not, and how often one begins anew hangs on the blocks."""
        if self._made is None and output:
            self._move_to(output[:-1])
            if self._start is not None:
                self._bound()
        self._move_to(output)
        if self._seen is None:
            self._seen = self._free() if self._start is None else self._bound()
        return self._seen

    def _move_to(self, output: Sequence[int]) -> None:
        known, wanted = self._tokens, list(output)
        shared = min(len(known), len(wanted))
        if known[:shared] != wanted[:shared]:
            shared = next(i for i in range(shared) if known[i] != wanted[i])
        if shared == len(known) == len(wanted):
            return
        self._seen = None
        self._roll_back(shared)
        for token in wanted[shared:]:
            self._feed(token)

    def _roll_back(self, length: int) -> None:
        """To the first `length` tokens of the state's own."""
        if self._start is not None:
            fed = max(0, length - self._start)
            self._call(self._matcher.rollback, len(self._tokens) - self._start - fed)
        if self._marker is not None:
            del self._tails[length + 1 :]
            if self._start is not None and length < self._start:
                self._start = None
        del self._tokens[length:]

    def _feed(self, token: int) -> None:
        if not 0 <= token < len(self._table) or not (self._begins(token) if self._start is None else self._continues(token)):
            raise NoBeginning(FIELD, f"token {token} cannot follow {len(self._tokens)} tokens of the answer")
        self._tokens.append(token)

    def _begins(self, token: int) -> bool:
        """Takes a token of the free part; False, changing nothing, for one that runs past the marker."""
        assert self._marker is not None
        text = self._tails[-1] + (self._table[token] or b"")
        place = text.find(self._marker.text)
        if 0 <= place < len(text) - len(self._marker.text):
            return False
        if place >= 0:
            self._start = len(self._tokens) + 1
        self._tails.append(self._marker.beginning(text))
        return True

    def _continues(self, token: int) -> bool:
        """Takes a token of the language; False for one that is none."""
        if self._call(self._matcher.validate_tokens, [token]) != 1 and not self._should_fit(token):
            return False
        self._call(self._matcher.consume_token, token)
        return True

    def _should_fit(self, token: int) -> bool:
        """The library says "no" to a token also when it is at its limits; only a mask tells which."""
        mask = self._bound().mask
        return mask is not None and bool(mask[token])

    def _bound(self) -> Allowed:
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
        self._call(matcher.consume_tokens, self._tokens[self._start :], matcher=matcher)
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
        """One call of the library. Raises _Broken when the matcher is of no use any more."""
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
            raise _Broken(self._dead_end())
        raise _Broken(InvalidRequest(FIELD, f"too complex after {len(self._tokens)} tokens of the answer: {said(fault)}"))

    def _dead_end(self) -> DeadEnd:
        return DeadEnd(FIELD, f"no id continues the text after {len(self._tokens)} tokens of the answer")


class NoBeginning(InvalidRequest):
    """No text of the language begins like this."""


class DeadEnd(InvalidRequest):
    """A text of the language begins like this, and the vocabulary cannot write the rest."""


class _Broken(Exception):
    """A matcher that outgrew its limits, or has nowhere to go, says nothing more. Holds what to tell the session."""

    def __init__(self, told: InvalidRequest) -> None:
        super().__init__(str(told))
        self.told = told
