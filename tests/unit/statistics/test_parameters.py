"""Texts under each parameter, at temperature 1, are distributed as the parameter says, whatever a draft proposes: three tokens through
`verify` with blocks of four, both methods. For each the fault that would not be noticed token by token, at a size where it shows."""

from __future__ import annotations

import math
import re
from functools import cache

import numpy as np
import pytest
import torch

from specdec.grammar import GrammarCompiler
from specdec.terms import Grammar, GrammarForm, RejectionMethod, SamplingParams
from tests.tiny import TOKENIZER_VOCAB, tiny_tokenizer
from tests.unit.statistics import chains
from tests.unit.statistics.chains import Setting, Text, softmax
from tests.unit.statistics.harness import P_LEAST

IDS = 4
END = 3
SHORT, LONG = 200, 20_000
METHODS = [RejectionMethod.COUPLED, RejectionMethod.STANDARD]
LETTERS = "abcd"
LANGUAGE = "(a[bc]|[bcd])*"  # behind an a comes b or c


def tables() -> tuple[list[list[float]], list[list[float]]]:
    """Logits of target and draft by the last token; the draft is right often enough to be believed for a few tokens."""
    draw = np.random.default_rng(2)
    target = draw.normal(2.0, 0.7, (IDS, IDS))
    return target.tolist(), (0.7 * target + draw.normal(0, 0.4, (IDS, IDS))).tolist()


def setting(naive_scores, end=None, **params) -> Setting:
    """`naive_scores(scores, output)` turns the raw logits of a row into what the parameter makes of them."""
    target, draft = tables()

    def naive(output: Text) -> list[float]:
        return softmax(naive_scores(list(target[(1, *output)[-1]]), output))

    params = SamplingParams(max_tokens=chains.LENGTH, **params)
    return Setting(torch.tensor(target, dtype=torch.float64), draft, params, naive, tuple(range(IDS)), end=end)


def least_probability(scores, output):
    probabilities = softmax(scores)
    return [s if p >= 0.6 * max(probabilities) else -math.inf for s, p in zip(scores, probabilities, strict=True)]


def repetition(scores, output):
    for i in range(IDS):
        if i == 1 or i in output:  # 1 is the prompt
            scores[i] = scores[i] / 8.0 if scores[i] > 0 else scores[i] * 8.0
    return scores


def frequency(scores, output):
    return [scores[i] + 1.5 * sum(1 for token in output if token == i) for i in range(IDS)]


def presence(scores, output):
    return [scores[i] - (2.0 if i in output else 0.0) for i in range(IDS)]


def bias(scores, output):
    scores[0] += 1.5
    scores[3] -= 100.0
    return scores


def masks(scores, output):
    return [scores[i] if i in (0, 2) else -math.inf for i in range(IDS)]


def minimum(scores, output):
    return [-math.inf if i == END and len(output) < 2 else scores[i] for i in range(IDS)]


@cache
def settings() -> dict[str, Setting]:
    return {
        "min_p": setting(least_probability, min_p=0.6),
        "repetition_penalty": setting(repetition, repetition_penalty=8.0),
        "frequency_penalty": setting(frequency, frequency_penalty=-1.5),
        "presence_penalty": setting(presence, presence_penalty=2.0),
        "logit_bias": setting(bias, logit_bias={0: 1.5, 3: -100.0}),
        "allowed and banned ids": setting(masks, allowed_token_ids=(0, 2, 3), banned_token_ids=(3,)),
        "min_tokens": setting(minimum, end=END, min_tokens=2),
        "grammar": grammar_setting(),
    }


def grammar_setting() -> Setting:
    """Four letters among the ids of a real tokenizer, all others likely too: which of them may follow is what Python's `re` says."""
    tokenizer = tiny_tokenizer()
    letters = tuple(tokenizer.token_to_id(letter) for letter in LETTERS)
    compiled, grammar = GrammarCompiler(tokenizer), Grammar(GrammarForm.REGEX, LANGUAGE)
    target = torch.full((TOKENIZER_VOCAB, TOKENIZER_VOCAB), -4.0, dtype=torch.float64)
    draft = {}
    for i, (row, draft_row) in enumerate(zip(*tables(), strict=True)):
        target[letters[i], list(letters)] = torch.tensor(row, dtype=torch.float64)
        draft[letters[i]] = dict(zip(letters, draft_row, strict=True))
    prompt = (letters[1],)
    table = target.tolist()

    def naive(output: Text) -> list[float]:
        scores = [-math.inf] * TOKENIZER_VOCAB
        for letter, i in zip(LETTERS, letters, strict=True):
            text = "".join(LETTERS[letters.index(token)] for token in output) + letter
            if re.fullmatch(LANGUAGE, text) or re.fullmatch(LANGUAGE, text + "b"):
                scores[i] = table[(*prompt, *output)[-1]][i]
        return softmax(scores)

    params = SamplingParams(max_tokens=chains.LENGTH, grammar=grammar, banned_token_ids=longer_words(tokenizer))
    return Setting(target, draft, params, naive, letters, prompt, constraint=lambda: compiled.compile(grammar))


def longer_words(tokenizer) -> tuple[int, ...]:
    """Ids of several letters of the language, so that a text has one way to be written."""
    return tuple(i for i in range(TOKENIZER_VOCAB) if len(word := tokenizer.decode([i])) > 1 and set(word) <= set(LETTERS))


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.value)
@pytest.mark.parametrize("name", settings())
def test_texts_are_distributed_as_the_parameter_says(name, method):
    assert settings()[name].p_value(SHORT, method) > P_LEAST


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.value)
@pytest.mark.parametrize("name", settings())
def test_texts_are_distributed_as_the_parameter_says_long(name, method):
    assert settings()[name].p_value(LONG, method, first_seed=10**6) > P_LEAST


TWINS = [
    ("frequency_penalty", chains.PenaltiesOfThePrefix),
    ("presence_penalty", chains.PenaltiesOfThePrefix),
    ("repetition_penalty", chains.PenaltiesOfThePrefix),
    ("frequency_penalty", chains.PenaltiesOfLastTokens),
    ("frequency_penalty", chains.PenaltiesCountedTwice),
    ("min_p", chains.MinPOnTheBonusRow),
    ("logit_bias", chains.BiasOnTheBonusRow),
    ("allowed and banned ids", chains.MasksOnRowZero),
    ("grammar", chains.MasksOnRowZero),
    ("min_tokens", chains.EndsOnRowZero),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.value)
@pytest.mark.parametrize(("name", "twin"), TWINS, ids=lambda value: getattr(value, "__name__", value))
def test_twin(name, twin, method):
    """F11, F12, F13, F14, F46: the fault shows."""
    assert settings()[name].p_value(SHORT, method, twin) < P_LEAST
