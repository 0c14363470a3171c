"""Formal languages for the output: which ids may follow. Our part is the state per row; llguidance knows the languages.

Rules
- A state is a function of the decided tokens alone. It moves to any row by rolling back to what the two outputs share and feeding the
  rest, so a block is explored row by row and what is refused leaves no trace; an end is never fed.
- Ends are ours: where a sentence is complete the ids that end the text become legal beside those that continue it (`may_end`);
  where nothing can follow, the text ends there (`must_end`).
- With `start_after` the output is free up to that text; a token that would run past its end is not legal, so that everything behind it
  is of the language.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark
from tokenizers import Tokenizer

from specdec.errors import InvalidRequest
from specdec.terms import Grammar, GrammarForm
from specdec.vocabulary import special_ids, token_bytes

Mask = npt.NDArray[np.bool_]

MAX_COMPILED = 64  # grammars kept ready for the next session that asks for the same
MAX_FORCED = 16  # ids told to be forced at once
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
FIELD = "sampling.grammar"


@dataclass(frozen=True, slots=True)
class Allowed:
    """What may follow an output. `mask` [vocab_size] = ids that continue it, None = every id; not to be written to. `may_end`: the text
    may end here; `must_end`: nothing else can follow."""

    mask: Mask | None
    may_end: bool
    must_end: bool


class GrammarCompiler:
    """Grammars over one vocabulary. May be used from several threads; compiling lets go of the interpreter lock."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._words = token_bytes(tokenizer)
        self._sorted = sorted((word, i) for i, word in enumerate(self._words) if word)
        self._marker = functools.lru_cache(MAX_COMPILED)(lambda text: Marker(text, self._sorted))
        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Words(tokenizer, self._words)))
        self._compiled = functools.lru_cache(MAX_COMPILED)(self._compile)

    def compile(self, grammar: Grammar) -> Constraint:
        """A fresh state before the first token. Raises InvalidRequest naming the form and what is wrong with it."""
        matcher = self._compiled(Grammar(grammar.form, grammar.text, grammar.options))
        marker = None if grammar.start_after is None else self._marker(grammar.start_after.encode())
        return Constraint(matcher.deep_copy(), self._words, marker)

    def _compile(self, grammar: Grammar) -> llguidance.LLMatcher:
        grammar.check()
        field = f"{FIELD}.{grammar.form.value}"
        try:
            matcher = llguidance.LLMatcher(self._tokens, _source(grammar), log_level=0)
        except (ValueError, TypeError) as error:
            raise InvalidRequest(field, _first_lines(str(error))) from error
        if matcher.is_error():
            raise InvalidRequest(field, _first_lines(matcher.get_error()))
        return matcher


class Constraint:
    """The state of one session. Used by one thread at a time; every method may be asked about any output, in any order.

    Raises InvalidRequest for an output that is not the beginning of a sentence, and when the grammar grows beyond the library's limits.
    """

    def __init__(self, matcher: llguidance.LLMatcher, words: Sequence[bytes | None], marker: Marker | None) -> None:
        self._matcher, self._words, self._marker = matcher, words, marker
        self._tokens: list[int] = []  # where the state is
        self._tails = [b""]  # while the grammar has not begun: after each token, what may be the first part of the marker
        self._start: int | None = 0 if marker is None else None  # length of the output when it began
        self._seen: Allowed | None = None  # of the present state

    def at(self, output: Sequence[int]) -> Allowed:
        """What may follow `output` (decided tokens, the prompt not among them)."""
        self._move_to(output)
        if self._seen is None:
            self._seen = self._free() if self._start is None else self._bound()
        return self._seen

    def forced(self, output: Sequence[int]) -> tuple[int, ...]:
        """The ids that follow `output` whatever the model thinks, at most MAX_FORCED."""
        self._move_to(output)
        if self._start is None:
            return ()
        return tuple(self._matcher.compute_ff_tokens()[:MAX_FORCED])

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
            self._matcher.rollback(len(self._tokens) - self._start - fed)
        if self._marker is not None:
            del self._tails[length + 1 :]
            if self._start is not None and length < self._start:
                self._start = None
        del self._tokens[length:]

    def _feed(self, token: int) -> None:
        if self._start is not None:
            if self._matcher.validate_tokens([token]) != 1 or not self._matcher.consume_token(token):
                self._require_sound()
                raise InvalidRequest(FIELD, f"token {token} cannot follow {len(self._tokens)} tokens of the answer")
        elif self._marker is not None:
            text = self._tails[-1] + (self._words[token] or b"")
            if self._marker.text in text:
                self._start = len(self._tokens) + 1
            self._tails.append(self._marker.beginning(text))
        self._tokens.append(token)

    def _bound(self) -> Allowed:
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._require_sound()
        mask = np.unpackbits(bits, count=len(self._words), bitorder="little").view(np.bool_)
        may_end = self._matcher.is_accepting()
        return Allowed(mask, may_end, may_end and not mask.any())

    def _free(self) -> Allowed:
        """Before the grammar begins: every id but those that hold the marker's end and more."""
        assert self._marker is not None
        past = self._marker.overrun(self._tails[-1])
        mask = None
        if len(past):
            mask = np.ones(len(self._words), dtype=np.bool_)
            mask[past] = False
        return Allowed(mask, may_end=True, must_end=False)

    def _require_sound(self) -> None:
        if self._matcher.is_error():
            raise InvalidRequest(FIELD, f"the language is too complex here: {_first_lines(self._matcher.get_error())}")


class Marker:
    """The text a grammar begins after. `words`: (bytes, id) of every id that has bytes, ascending."""

    def __init__(self, text: bytes, words: Sequence[tuple[bytes, int]]) -> None:
        self.text, self._words = text, words
        self._inside = [i for word, i in words if 0 <= word.find(text) < len(word) - len(text)]
        self.overrun = functools.cache(self._overrun)

    def beginning(self, text: bytes) -> bytes:
        """The longest end of `text` that the marker begins with, short of all of it."""
        longest = min(len(text), len(self.text) - 1)
        return next((self.text[:n] for n in range(longest, 0, -1) if text.endswith(self.text[:n])), b"")

    def _overrun(self, beginning: bytes) -> npt.NDArray[np.int64]:
        """Ascending ids that complete the marker after such a beginning and go on behind it."""
        found = set(self._inside)
        for n in (n for n in range(1, len(beginning) + 1) if beginning.endswith(self.text[:n])):
            rest = self.text[n:]
            first = bisect.bisect_right(self._words, rest, key=_bytes)
            for word, i in itertools.islice(self._words, first, None):
                if not word.startswith(rest):
                    break
                found.add(i)
        return np.array(sorted(found), dtype=np.int64)


def _bytes(entry: tuple[bytes, int]) -> bytes:
    return entry[0]


class _Words:
    """The vocabulary as llguidance asks for it. Its end token is one that nobody has: ends are decided in this file."""

    def __init__(self, tokenizer: Tokenizer, words: Sequence[bytes | None]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = len(words)
        self.bos_token_id = None
        self.special_token_ids = [*sorted(special_ids(tokenizer)), self.eos_token_id]
        self.tokens = [*(word or b"" for word in words), b"<|end of the language|>"]

    def __call__(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else text.decode("utf-8", "replace")
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _source(grammar: Grammar) -> str:
    """The grammar in llguidance's own form. Raises ValueError."""
    matcher: Any = llguidance.LLMatcher
    if grammar.form is GrammarForm.JSON_SCHEMA:
        return str(matcher.grammar_from_json_schema(grammar.text, defaults=JSON_STYLE))
    if grammar.form is GrammarForm.REGEX:
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.form is GrammarForm.CHOICE:
        return str(matcher.grammar_from_lark("start: " + " | ".join(json.dumps(option) for option in grammar.options)))
    try:
        lark = any_to_lark(grammar.text)
    except Exception as error:  # the converter raises nothing more precise
        raise ValueError(str(error)) from error
    return str(matcher.grammar_from_lark(lark))


def _first_lines(text: str) -> str:
    """A library's error, fit for a status message."""
    return " ".join(text.split())[:400]
