"""The door's word on a grammar against the sampler that the target uses."""

from __future__ import annotations

import random

import torch

from orchestrator.opening import _may_begin, is_whole_sentence
from specdec.errors import InvalidRequest
from specdec.grammar import GrammarCompiler
from specdec.sampling import Sampler
from specdec.terms import Grammar, GrammarForm, SamplingParams
from tests.unit.orchestrator.tokenizers_here import byte_level

TOKENIZER = byte_level()
GRAMMARS = GrammarCompiler(TOKENIZER)
SIZE = TOKENIZER.get_vocab_size()
LANGUAGES = [
    Grammar(GrammarForm.REGEX, "[ab]"),
    Grammar(GrammarForm.REGEX, "[ab]?"),
    Grammar(GrammarForm.REGEX, "the"),
    Grammar(GrammarForm.CHOICE, options=("a", "the")),
    Grammar(GrammarForm.REGEX, "[ab]", start_after="x"),
    Grammar(GrammarForm.REGEX, "[ab]*", start_after="e"),
]


def legal(sampling: SamplingParams, eos_ids: tuple[int, ...]) -> bool:
    """Whether the target's sampler leaves a first token."""
    assert sampling.grammar is not None
    sampler = Sampler(sampling, 7, SIZE, eos_ids, [1], constraint=GRAMMARS.compile(sampling.grammar))
    return bool(sampler.adjusted(torch.zeros(SIZE), []).max() > -torch.inf)


def test_the_same_first_tokens_as_the_sampler() -> None:
    rng = random.Random(3)
    letters = [TOKENIZER.token_to_id(char) for char in "abtx"]
    words = [*letters, TOKENIZER.encode("the").ids[0]]
    seen = set()
    for _ in range(150):
        eos = tuple(rng.sample(range(SIZE - 3, SIZE), rng.randint(0, 2)))
        pick = [*words, *eos, 7]
        sampling = SamplingParams(
            grammar=rng.choice(LANGUAGES),
            allowed_token_ids=tuple(rng.sample(pick, rng.choice((0, 0, 1, 3)))),
            banned_token_ids=tuple(rng.sample(pick, rng.choice((0, 1, 3, 5)))),
            stop_token_ids=tuple(rng.sample(pick, rng.choice((0, 0, 1)))),
            min_tokens=rng.choice((0, 0, 1)),
            ignore_eos=rng.random() < 0.3,
            max_tokens=9,
        )
        assert sampling.grammar is not None
        allowed = GRAMMARS.compile(sampling.grammar).at(())
        try:
            expected = legal(sampling, eos)
        except InvalidRequest as error:
            assert error.field != "sampling.grammar"  # bans alone leave nothing, which is refused before
            continue
        assert _may_begin(allowed, sampling, eos) == expected
        try:
            got = not is_whole_sentence(GRAMMARS, sampling, (), eos)
        except InvalidRequest as error:
            assert error.field == "sampling.grammar"
            got = False
        assert got == expected
        seen.add(expected)
    assert seen == {True, False}


def test_without_a_grammar_nothing_is_whole() -> None:
    assert not is_whole_sentence(GRAMMARS, SamplingParams(), (1, 2), ())
