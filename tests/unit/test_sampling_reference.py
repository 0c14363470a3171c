"""Whatever the parameters and the row: the same bits as without any short cut, in every answer of a Sampler and of the draft."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from specdec.errors import InvalidRequest
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, Grammar, GrammarForm, SamplingParams
from tests.unit.sampling_oracle import FREE, Legal, Reference

EOS = 2
SIZES = [3, 41, 300, 513, 1100, 2300, 5000, 9000]


@dataclass(frozen=True)
class Allowed:
    mask: Any
    may_end: bool
    must_end: bool = False


class Random:
    """A grammar that is nothing but a function of the output's length."""

    def __init__(self, vocab_size: int, density: float, seed: int) -> None:
        self.vocab_size, self.density, self.seed = vocab_size, density, seed

    def at(self, output: Any) -> Allowed:
        draw = np.random.default_rng([self.seed, len(output)])
        mask = draw.random(self.vocab_size) < self.density
        mask[draw.integers(self.vocab_size)] = True
        mask.flags.writeable = False
        return Allowed(None if draw.random() < 0.2 else mask, bool(draw.random() < 0.5))

    def forced(self, output: Any) -> tuple[int, ...]:
        return ()

    def legal(self, output: Any) -> Legal:
        found = self.at(output)
        return FREE if found.mask is None else (set(np.flatnonzero(found.mask).tolist()), found.may_end)


def made_row(rng: np.random.Generator, n: int, scale: float, kind: str, dtype: Any) -> Any:
    row = rng.standard_normal(n) * scale
    if kind == "ties":
        row = np.round(row)
    elif kind == "peaked":
        row[rng.integers(n, size=1 + n // 500)] += 12.0
    elif kind == "far":
        row[rng.random(n) < 0.9] -= 1e4
    elif kind == "constant":
        row[:] = scale
    return row.astype(dtype)


@st.composite
def params(draw: Any, n: int) -> SamplingParams:
    """Each field is unset half of the time, so that few and many are set."""

    def some(*values: Any) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), st.sampled_from(values))

    ids = st.lists(st.integers(0, n - 1), min_size=1, max_size=12).map(tuple)
    fields = {
        "temperature": some(0.0, 0.05, 0.7, 3.0, 1e4),
        "top_k": some(1, 2, 50, n // 8, 600, n - 1, n, 10 * n),
        "top_p": some(1e-9, 0.1, 0.5, 0.9, 0.99, 0.999, 1.0 - 1e-12),
        "min_p": some(1e-6, 0.01, 0.3, 1.0),
        "frequency_penalty": some(-2.0, 0.3, 2.0),
        "presence_penalty": some(-0.7, 1.1),
        "repetition_penalty": some(0.6, 1.3),
        "logit_bias": st.one_of(st.none(), st.dictionaries(st.integers(0, n - 1), st.floats(-100, 100, width=32), max_size=12)),
        "banned_token_ids": st.one_of(st.none(), ids),
        "allowed_token_ids": st.one_of(st.none(), ids, st.just(tuple(range(0, n, 3)))),
        "min_tokens": some(1, 5),
        "stop_token_ids": st.one_of(st.none(), ids),
        "ignore_eos": st.one_of(st.none(), st.just(True)),
        "logprobs": some(0, 1, 20),
    }
    chosen = {name: draw(values) for name, values in fields.items()}
    return SamplingParams(**{name: value for name, value in chosen.items() if value is not None})


@st.composite
def cases(draw: Any, sizes: list[int]) -> tuple[Any, ...]:
    n = draw(st.sampled_from(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    kind = draw(st.sampled_from(["plain", "ties", "peaked", "far", "constant"]))
    row = made_row(rng, n, draw(st.sampled_from([0.02, 1.0, 3.0, 30.0])), kind, draw(st.sampled_from([np.float32, np.float64])))
    found = draw(params(n))
    density = draw(st.sampled_from([0.0, 0.01, 0.5, 1.0, None, None]))
    columns = None
    if draw(st.booleans()):
        columns = sorted({int(i) for i in rng.integers(0, n, n)})
    prompt, outputs = rng.integers(0, n, 5).tolist(), []
    for length in draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)):  # forward and back, and edited
        outputs.append([*(outputs[-1][:2] if outputs else []), *rng.integers(0, min(n, 20), length).tolist()])
    return row, found, density, columns, prompt, outputs, int(rng.integers(2**63)) * 2 + 1


def compare(case: tuple[Any, ...]) -> None:
    row, found, density, columns, prompt, outputs, seed = case
    n = len(row)
    grammar = None if density is None else Random(n, density, seed % 1000)
    params = found if grammar is None else SamplingParams(**{**fields(found), "grammar": Grammar(GrammarForm.REGEX, ".")})
    reference = Reference(found, seed, n, [EOS], prompt, grammar=(lambda output: FREE) if grammar is None else grammar.legal)
    try:
        sampler = Sampler(params, seed, n, [EOS], prompt, constraint=grammar)
    except InvalidRequest:
        row0 = np.zeros(n, np.float32)
        assert np.isneginf(Reference(found, seed, n, [EOS], prompt).adjusted(row0, [])).all() or found.min_tokens > 0
        return
    tensor = torch.from_numpy(row)
    before = row.tobytes()
    for output in outputs:
        at = len(prompt) + len(output)
        if np.isneginf(reference.adjusted(row, output)).all():
            with pytest.raises(InvalidRequest, match=r"sampling\.grammar"):
                sampler.choose(tensor, at, output)
        else:
            np.testing.assert_array_equal(sampler.scores(tensor, at, output).numpy(), reference.scores(row, output))
            token = reference.choose(row, output)
            assert sampler.choose(tensor, at, output) == token
            ids, p = sampler.distribution(tensor, at, output)
            expected_ids, expected = reference.distribution(row, output)
            assert ids.tolist() == expected_ids.tolist() and p.tobytes() == expected.tobytes()
            assert sampler.draw(ids, p, 3, at) == reference.draw(ids, p, 3, at)
            if found.logprobs is not None:
                told = sampler.logprobs(tensor, token)
                assert (told.logprob, told.top_ids, told.top_logprobs) == reference.logprobs(row, token)
        compare_drafts(sampler, reference, row, output)
    if columns is not None:
        reduced = Sampler(params, seed, n, [EOS], prompt, columns, grammar)
        seen = Reference(found, seed, n, [EOS], prompt, columns, (lambda output: FREE) if grammar is None else grammar.legal)
        for output in outputs:
            compare_drafts(reduced, seen, row[columns], output)
    assert row.tobytes() == before


def compare_drafts(sampler: Sampler, reference: Reference, row: Any, output: list[int]) -> None:
    for method in DraftMethod:
        choice = draft_choice(sampler, torch.from_numpy(row), len(reference.prompt) + len(output), output, method)
        expected = reference.propose(row, output, method)
        if choice is None or expected is None:
            assert choice is expected
            continue
        sent = None if choice.distribution is None else (choice.distribution.ids, choice.distribution.probs)
        assert (choice.token, choice.confidence, sent) == expected


def fields(found: SamplingParams) -> dict[str, Any]:
    return {name: getattr(found, name) for name in SamplingParams.__dataclass_fields__}


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases(SIZES))
def test_every_answer_equals_the_reference(case):
    compare(case)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases([49152]))
def test_every_answer_equals_the_reference_at_the_size_of_a_vocabulary(case):
    compare(case)


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(cases([*SIZES, 20_000, 49152]))
def test_every_answer_equals_the_reference_long(case):
    compare(case)
