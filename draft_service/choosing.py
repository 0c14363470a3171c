"""From a row of the draft's logits to a proposed token, as the session asked for it. Lives on the engine's thread.

The draft runs its own logits through the pipeline of the target (bans, grammar, bias, penalties, temperature, cuts), with the session's
seed and the position as the key of the noise. What it gets wrong costs agreement, never correctness.

A grammar is compiled beside the engine, unless its session goes first; until that is done the session's rows say nothing. Behind tokens
that no sentence begins with (a block from elsewhere may hold some) and behind a whole sentence they say nothing either.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np

from draft_service.chain import Draft
from draft_service.plan import Chooser, Silence
from specdec.errors import InvalidRequest, SpecdecError
from specdec.grammar import DeadEnd, GrammarCompiler, NoBeginning
from specdec.guesses import Guesses
from specdec.sampling import Constraint, DraftChoice, Sampler, draft_choice
from specdec.terms import Open

T = TypeVar("T")
Beside = Callable[[Callable[[], T]], "Future[T]"]
"""Calls something on another thread: concurrent.futures.Executor.submit."""

log = logging.getLogger("draft")


class SessionChooser:
    """A Chooser. Its sampler is built with the first row, on the engine's thread: tables over the vocabulary take milliseconds.

    `guessing`: its drafts know what else could have followed.

    `constraint`: of the session's grammar, when it is compiled; None without a grammar.
    """

    def __init__(
        self,
        command: Open,
        vocab_size: int,
        eos_ids: Sequence[int],
        columns: Sequence[int] | None,
        constraint: Future[Constraint] | None,
        guessing: bool = False,
    ) -> None:
        self._command, self._vocab_size, self._eos_ids, self._columns = command, vocab_size, eos_ids, columns
        self._compiling, self._guessing = constraint, guessing
        self._sampler: Sampler | None = None
        self._told = False

    def __call__(self, logits: Any, position: int, output: Sequence[int]) -> Draft | Silence:
        if self._sampler is None and self._compiling is not None and not self._compiling.done():
            return Silence.OVER
        try:
            sampler = self._sampler = self._sampler or self._built()
            draft = self._draft(sampler, logits, position, output)
        except SpecdecError as error:
            self._tell(str(error))
            return Silence.BROKEN
        except Exception:  # whatever one session's parameters provoke is not its neighbours' trouble
            log.exception("a session gets no proposal", extra=self._about())
            return Silence.BROKEN
        return draft

    def _built(self) -> Sampler:
        """Raises InvalidRequest for a grammar that is none, and when nothing may be chosen at all."""
        command = self._command
        prompt = command.tokens[: command.prompt_length]
        constraint = None if self._compiling is None else self._compiling.result()
        return Sampler(command.sampling, command.seed, self._vocab_size, self._eos_ids, prompt, self._columns, constraint)

    def _draft(self, sampler: Sampler, logits: Any, position: int, output: Sequence[int]) -> Draft | Silence:
        """Raises NonFinite, and what a defect raises."""
        if sampler.constraint is not None and (bound := self._bound(sampler.constraint, output)) is not None:
            return bound
        choice = draft_choice(sampler, logits, position, output, self._command.draft_method)
        if choice is not None:
            return Draft(choice.token, choice.confidence, choice.distribution, self._guesses(sampler, choice, position))
        return Silence.BROKEN if sampler.constraint is None else Silence.OVER

    def _guesses(self, sampler: Sampler, choice: DraftChoice, position: int) -> Guesses | None:
        if not self._guessing:
            return None
        return Guesses(sampler, choice.scores, position, self._command.draft_method, choice.token)

    def _bound(self, constraint: Constraint, output: Sequence[int]) -> Draft | Silence | None:
        """What the grammar alone says: the only token there is, also one that a reduced head does not have, or that nothing may follow."""
        try:
            allowed = constraint.at(output)
        except (NoBeginning, DeadEnd):
            return Silence.OVER
        except InvalidRequest as error:
            self._tell(str(error))
            return Silence.OVER
        if allowed.must_end:
            return Silence.OVER
        if allowed.mask is None or allowed.may_end or np.count_nonzero(allowed.mask) > 1:
            return None
        return Draft(int(allowed.mask.argmax()), 1.0)

    def _tell(self, why: str) -> None:
        """One line for a session; its rows would repeat it."""
        if not self._told:
            log.warning("a session gets no proposal: %s", why, extra=self._about())
        self._told = True

    def _about(self) -> dict[str, str]:
        return {"session": self._command.session_id, "traceparent": self._command.traceparent}


def chooser_factory(
    vocab_size: int,
    eos_ids: Sequence[int],
    columns: Sequence[int] | None,
    grammars: GrammarCompiler | None = None,
    beside: Beside[Constraint] | None = None,
    guessing: bool = False,
) -> Callable[[Open], Chooser]:
    """`columns` = the target ids of a reduced head's columns, None when the head covers the vocabulary. `grammars`: None = sessions with
    a grammar get no proposals. `beside`: where they are compiled; None = at once. `guessing`: not under a grammar, where every branch
    would walk the language on its own."""

    def made(command: Open) -> Chooser:
        grammar = command.sampling.grammar
        if grammar is None:
            return SessionChooser(command, vocab_size, eos_ids, columns, None, guessing)
        if grammars is None:
            return lambda logits, position, output: Silence.OVER
        compiling = (beside or _at_once)(lambda: grammars.compile_roaming(grammar))
        chooser = SessionChooser(command, vocab_size, eos_ids, columns, compiling)
        weakref.finalize(chooser, compiling.cancel)  # of a session that is gone: others wait behind it
        return chooser

    return made


def _at_once(call: Callable[[], T]) -> Future[T]:
    done: Future[T] = Future()
    try:
        done.set_result(call())
    except Exception as error:
        done.set_exception(error)
    return done
