"""From a row of the draft's logits to a proposed token, as the session asked for it. Lives on the engine's thread.

The draft runs its own logits through the pipeline of the target (bans, bias, penalties, temperature, cuts), with the session's seed and
the position as the key of the noise. What it gets wrong costs agreement, never correctness.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from draft_service.chain import Draft
from draft_service.plan import Chooser
from specdec.errors import InvalidRequest, NonFinite
from specdec.grammar import GrammarCompiler
from specdec.sampling import Sampler, draft_choice
from specdec.terms import Open

log = logging.getLogger("draft")


class SessionChooser:
    """A Chooser. Its sampler is built with the first row, on the engine's thread: tables over the vocabulary take milliseconds."""

    def __init__(
        self, command: Open, vocab_size: int, eos_ids: Sequence[int], columns: Sequence[int] | None, grammars: GrammarCompiler | None
    ) -> None:
        self._command, self._vocab_size, self._eos_ids, self._columns = command, vocab_size, eos_ids, columns
        self._grammars = grammars
        self._sampler: Sampler | None = None

    def __call__(self, logits: Any, position: int, output: Sequence[int]) -> Draft | None:
        try:
            choice = draft_choice(self._ready(), logits, position, output, self._command.draft_method)
        except (NonFinite, InvalidRequest) as error:
            log.warning("session %s: no proposal: %s", self._command.session_id, error)
            return None
        except Exception:  # whatever one session's parameters provoke is not its neighbours' trouble
            log.exception("session %s: no proposal", self._command.session_id)
            return None
        return None if choice is None else Draft(choice.token, choice.confidence, choice.distribution)

    def _ready(self) -> Sampler:
        if self._sampler is None:
            command = self._command
            prompt = command.tokens[: command.prompt_length]
            grammar = command.sampling.grammar
            constraint = None if grammar is None or self._grammars is None else self._grammars.compile(grammar)
            self._sampler = Sampler(command.sampling, command.seed, self._vocab_size, self._eos_ids, prompt, self._columns, constraint)
        return self._sampler


def chooser_factory(
    vocab_size: int, eos_ids: Sequence[int], columns: Sequence[int] | None, grammars: GrammarCompiler | None = None
) -> Callable[[Open], Chooser]:
    """`columns` = the target ids of a reduced head's columns, None when the head covers the vocabulary. `grammars`: None = sessions with
    a grammar get no proposals."""
    return lambda command: SessionChooser(command, vocab_size, eos_ids, columns, grammars)
