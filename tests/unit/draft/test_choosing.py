"""From a row of logits to a proposed token, without engine and session: what a grammar says alone, what is built once, what is told."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from draft_service import choosing
from draft_service.chain import Draft
from draft_service.choosing import SessionChooser, chooser_factory
from draft_service.plan import Silence
from specdec.sampling import Sampler
from specdec.terms import Grammar, GrammarForm
from tests.unit.draft.rig import GREEDY, VOCAB
from tests.unit.draft.test_limits import GOOD

ROW = torch.arange(VOCAB, dtype=torch.float64) / 10
GRAMMAR = replace(GOOD, sampling=replace(GREEDY, grammar=Grammar(GrammarForm.REGEX, "a")))


@dataclass
class Language:
    """Lets these ids follow, whatever was said; None = all."""

    ids: tuple[int, ...] | None
    may_end: bool = False
    must_end: bool = False
    raises: Exception | None = None

    @property
    def mask(self) -> Any:
        return None if self.ids is None else np.isin(np.arange(VOCAB), self.ids)

    def at(self, output: Sequence[int]) -> Language:
        if self.raises is not None:
            raise self.raises
        return self


def chooser(language: Language | None = None) -> SessionChooser:
    done: Future[Any] = Future()
    done.set_result(language)
    return SessionChooser(GOOD if language is None else GRAMMAR, VOCAB, (2,), None, None if language is None else done)


def drawn(made: Any) -> int | Silence:
    draft = made(ROW, 3, ())
    return draft.token if isinstance(draft, Draft) else draft


def test_the_grammar_alone_decides_where_one_id_is_legal() -> None:
    assert drawn(chooser()) == drawn(chooser(Language(None))) == VOCAB - 1
    only = chooser(Language((5,)))(ROW, 3, ())
    assert isinstance(only, Draft) and (only.token, only.confidence) == (5, 1.0)
    two = chooser(Language((5, 7)))(ROW, 3, ())
    assert isinstance(two, Draft) and two.token == 7 and two.confidence < 1.0, "the model chooses"
    assert drawn(chooser(Language((1,), may_end=True))) == 2, "the end is one more"
    assert drawn(chooser(Language((5,), must_end=True))) is Silence.OVER


def test_a_sampler_is_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Any] = []

    def sampler(*args: Any) -> Sampler:
        built.append(args)
        return Sampler(*args)

    monkeypatch.setattr(choosing, "Sampler", sampler)
    made = chooser()
    assert built == [], "on the engine's thread, with the first row"
    assert [drawn(made) for _ in range(3)] == [VOCAB - 1] * 3 and len(built) == 1


@pytest.mark.parametrize("defect", [False, True])
def test_what_a_row_provokes_is_told_and_costs_its_session_the_proposal(defect: bool, caplog: pytest.LogCaptureFixture) -> None:
    made = chooser(Language(None, raises=RuntimeError("a defect")) if defect else None)
    rows = ROW if defect else torch.full((VOCAB,), float("nan"))
    with caplog.at_level(logging.INFO, "draft"):
        assert [made(rows, 3, ()) for _ in range(2)] == [Silence.BROKEN] * 2
    assert len(caplog.records) == (2 if defect else 1), "what may come again and again is one line"
    assert all((record.exc_info is not None) is defect and record.__dict__["session"] == "s" for record in caplog.records)


def test_guesses_are_for_those_who_branch_and_no_grammar_binds() -> None:
    for guessing in (False, True):
        draft = chooser_factory(VOCAB, (), None, guessing=guessing)(GOOD)(ROW, 3, ())
        assert isinstance(draft, Draft) and (draft.guesses is not None) is guessing
        if draft.guesses is not None:
            assert draft.guesses.ranked()[:2] == (VOCAB - 2, VOCAB - 3)

    class Grammars:
        def compile_roaming(self, grammar: Grammar) -> Any:
            return Language((5, 7))

    grammars: Any = Grammars()
    draft = chooser_factory(VOCAB, (), None, grammars, guessing=True)(GRAMMAR)(ROW, 3, ())
    assert isinstance(draft, Draft) and draft.token == 7 and draft.guesses is None


def test_without_grammars_nothing_follows_and_nothing_is_broken() -> None:
    assert chooser_factory(VOCAB, (), None)(GRAMMAR)(ROW, 3, ()) is Silence.OVER
