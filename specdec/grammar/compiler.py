"""From a grammar's text to a state before the first token."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable

import llguidance
from tokenizers import Tokenizer

from specdec.errors import InvalidRequest, Unsupported
from specdec.grammar.constraint import Constraint
from specdec.grammar.forms import said, source, unforced
from specdec.grammar.marker import Marker
from specdec.grammar.reading import FIELD, DeadEnd
from specdec.grammar.roamer import Roamer
from specdec.grammar.words import Words
from specdec.terms import Grammar, GrammarForm

MAX_COMPILED = 64  # grammars, and refusals, kept ready for the next request that asks for the same
PROBED = 3  # rows that are looked at before a grammar is accepted

# Counted work, so that all replicas refuse the same grammar. Of hostile grammars over a vocabulary of 49k, on one core, one row takes less
# than 25 ms, and an answer's matcher less than 100 MB.
LIMITS = llguidance.LLParserLimits(
    max_items_in_row=2000,
    initial_lexer_fuel=1_000_000,
    step_lexer_fuel=100_000,
    step_max_items=5_000,
    max_lexer_states=100_000,
    max_grammar_size=50_000,
    verbose_errors=False,
)


class GrammarCompiler:
    """Grammars over one vocabulary. May be used from several threads; compiling lets go of the interpreter lock.

    `trial`: called with a grammar before it is compiled here for the first time; raises InvalidRequest for one that would take this
    process with it.
    """

    def __init__(self, tokenizer: Tokenizer, trial: Callable[[Grammar], None] | None = None) -> None:
        self._words = Words(tokenizer)
        self._trial = trial
        self._tokens = llguidance.LLTokenizer(llguidance.TokenizerWrapper(self._words))
        self._marker = functools.lru_cache(MAX_COMPILED)(lambda text: Marker(text, self._words.by_bytes))
        self._accepted = functools.lru_cache(MAX_COMPILED)(self._accept)

    def compile(self, grammar: Grammar) -> Constraint:
        """The state before the first token. What takes long is done here, not when the state is used first.

        Raises InvalidRequest naming the form and what is wrong with it, Unsupported when no grammar can be followed in this vocabulary."""
        return Constraint(*self._compiled(grammar))

    def compile_roaming(self, grammar: Grammar) -> Roamer:
        """The same for outputs in any order."""
        return Roamer(*self._compiled(grammar))

    def _compiled(self, grammar: Grammar) -> tuple[Accepted, Words, Marker | None]:
        grammar.check()
        if not self._words.concatenate:
            raise Unsupported(FIELD, "not served with this tokenizer: its decoder trims every piece of a text")
        accepted = self._accepted(Grammar(grammar.form, grammar.text, grammar.options))
        if isinstance(accepted, str):
            raise InvalidRequest(f"{FIELD}.{grammar.form.value}", accepted)
        accepted.prepare()
        marker = None if grammar.start_after is None else self._marker(grammar.start_after.encode())
        return accepted, self._words, marker

    def _accept(self, grammar: Grammar) -> Accepted | str:
        """The grammar ready for use, or what is wrong with it."""
        try:
            if self._trial is not None:
                self._trial(grammar)
            accepted = Accepted(self._tokens, source(grammar))
            warnings = accepted.prepare().get_grammar_warnings()
            if warnings:
                return said("; ".join(warnings))
            self._probe(Roamer(accepted, self._words, None))
        except _Refused as error:
            return said(str(error), with_place=grammar.form is GrammarForm.EBNF)
        except InvalidRequest as error:
            return error.remedy
        except (ValueError, TypeError) as error:
            return said(str(error))
        return accepted

    def _probe(self, roamer: Roamer) -> None:
        """Looks at the first rows along one way, and goes back: an empty language, one whose beginning outgrows the limits, and one that
        cannot be rolled back are told at once. Raises InvalidRequest."""
        output: list[int] = []
        with contextlib.suppress(DeadEnd):  # behind the first row there are other ways
            while len(output) < PROBED and (mask := roamer.at(output).mask) is not None and mask.any():
                output.append(int(mask.argmax()))
        roamer.at([])


class Accepted:
    """A grammar in the library's notation, and a matcher of it that nobody has taken yet."""

    def __init__(self, tokens: llguidance.LLTokenizer, written: str) -> None:
        self._tokens, self._written = tokens, written
        self._spare: collections.deque[llguidance.LLMatcher] = collections.deque(maxlen=1)

    def prepare(self) -> llguidance.LLMatcher:
        """Sees to it that `take` has nothing to build. The matcher is only to be looked at. Raises _Refused."""
        try:
            return self._spare[0]
        except IndexError:
            made = self._built(self._written)
            self._spare.append(made)
            return made

    def take(self) -> llguidance.LLMatcher:
        """A matcher that is nobody else's. Raises _Refused for a grammar that was never prepared."""
        try:
            return self._spare.pop()
        except IndexError:
            return self._built(self._written)

    def unforced(self) -> llguidance.LLMatcher:
        """As `take`, with masks that name every way to write a text that is known."""
        return self._built(unforced(self._written))

    def _built(self, written: str) -> llguidance.LLMatcher:
        try:
            matcher = llguidance.LLMatcher(self._tokens, written, log_level=0, limits=LIMITS)
        except BaseException as error:  # the library's panics are no Exception
            if type(error).__name__ != "PanicException":
                raise
            raise _Refused(f"panic: {error}") from None
        if matcher.is_error():
            raise _Refused(matcher.get_error())
        return matcher


class _Refused(Exception):
    """The library's words about a grammar that it does not take."""
