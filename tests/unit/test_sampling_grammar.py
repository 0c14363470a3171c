"""The pipeline under a grammar: which ids are left, and what is said when none is."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec.errors import InvalidRequest
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, Grammar, GrammarForm, SamplingParams

EOS = 2
PROMPT = (5, 6, 7)


class Fixed:
    """A grammar whose every row is the same."""

    def __init__(self, ids, may_end, size=20):
        self.mask = np.isin(np.arange(size), ids)
        self.mask.flags.writeable = False
        self.may_end, self.must_end = may_end, False

    def at(self, output):
        return self

    def forced(self, output):
        return ()


def under(grammar, columns=None, **params):
    params = SamplingParams(grammar=Grammar(GrammarForm.REGEX, "."), **params)
    return Sampler(params, 1, 20, [EOS], PROMPT, columns, grammar)


def left(s, size=20):
    return s.scores(torch.zeros(size), len(PROMPT), []).isfinite().nonzero().flatten().tolist()


def test_ends_are_legal_under_a_grammar_only_where_a_sentence_is_complete():
    """Also a stop id that could continue the sentence, as no answer may end inside one; and never before min_tokens, nor when banned."""
    assert left(under(Fixed([4, 9], may_end=False), stop_token_ids=(9,))) == [4]
    assert left(under(Fixed([4, 9], may_end=True), stop_token_ids=(9,))) == [EOS, 4, 9]
    assert left(under(Fixed([4], may_end=True), ignore_eos=True)) == [4]
    assert left(under(Fixed([4], may_end=True), min_tokens=1)) == [4]
    assert left(under(Fixed([4, 5, 8], may_end=True), banned_token_ids=(EOS, 5), allowed_token_ids=(EOS, 4, 5))) == [4]
    assert left(under(Fixed([4, 9], may_end=True), columns=(0, EOS, 4, 8)), 4) == [1, 2]


def test_other_fields_that_ban_all_a_grammar_lets_follow_are_told():
    s = under(Fixed([4, 9], may_end=False), banned_token_ids=(4,), stop_token_ids=(9,))
    with pytest.raises(InvalidRequest, match=r"sampling\.grammar"):
        s.choose(torch.zeros(20), len(PROMPT), [])
    assert draft_choice(s, torch.zeros(20), len(PROMPT), [], DraftMethod.GUMBEL) is None


def test_a_grammar_and_its_constraint_come_together():
    with pytest.raises(ValueError, match="constraint"):
        Sampler(SamplingParams(), 1, 20, [EOS], (), constraint=Fixed([1], True))
    with pytest.raises(ValueError, match="constraint"):
        Sampler(SamplingParams(grammar=Grammar(GrammarForm.REGEX, ".")), 1, 20, [EOS], ())
