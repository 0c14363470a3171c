"""Field cases of sampling parameters and seeds under speculation, each against the same request without blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

from specdec.acceptance import verify
from specdec.sampling import Sampler, draft_choice
from specdec.terms import DraftMethod, FinishReason
from tests.unit.acceptance_rig import COUPLED, PROMPT, STANDARD, Model, anti_draft, end, rounds, sampler, self_draft, wrong_at

LONG = {"max_tokens": 64, "ignore_eos": True}


class Repeater(Model):
    """Likes to say what it said before: the more often, the more, up to four times."""

    def row(self, text):
        row = super().row(text) * 0.3
        for token, count in Counter(text).items():
            row[token] += 1.0 + 0.5 * min(count, 4)
        return row


class Echo(Model):
    """Prefers what it said before, by so little that a penalty turns it."""

    def row(self, text):
        row = super().row(text) * 0.3
        row[list(set(text))] += 1.0
        return row


def told(**params):
    """A draft with the target's own model that knows these parameters, and no others."""
    known = sampler(**params)

    def draft(model, s, output, k):
        block: list[int] = []
        for _ in range(k):
            text = [*PROMPT, *output, *block]
            block.append(draft_choice(known, model.row(text), len(text), [*output, *block], DraftMethod.GUMBEL).token)
        return block

    return draft


def accepted(done) -> int:
    return sum(verdict.num_accepted for verdict, _ in done)


# ---------------------------------------------------------------------------- penalties, bias, cuts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_f11_frequency_penalties_of_either_sign_act_and_equal_plain_decoding(temperature):
    model, texts = Repeater(), {}
    for penalty in (-2.0, 0.0, 2.0):
        params = {"frequency_penalty": penalty, "temperature": temperature, "max_tokens": 40, "ignore_eos": True}
        _, texts[penalty] = rounds(model, sampler(**params), 0)
        for draft in (self_draft, wrong_at(2)):
            assert rounds(model, sampler(**params), 4, draft)[1] == texts[penalty]
    assert len({tuple(text) for text in texts.values()}) == 3
    variety = [len(set(texts[penalty])) for penalty in (-2.0, 0.0, 2.0)]
    assert variety == sorted(variety) and variety[0] < variety[2]


def test_f12_counts_are_the_histogram_of_all_committed_tokens():
    """After each round: what a flat row of zeros is penalised by, id by id, is 0.7 for each time an id was decided."""
    model, s = Repeater(), sampler(frequency_penalty=0.7, **LONG)
    done, text = rounds(model, s, 4)
    assert accepted(done) > 40
    for verdict, before in [*done, (done[0][0], [])]:  # and cut back to nothing at the end
        output = [*before, *verdict.tokens]
        found = s.adjusted(torch.zeros(128, dtype=torch.float64), output)
        np.testing.assert_allclose(-found / 0.7, [Counter(output)[i] for i in range(128)], atol=1e-12)
    assert text == rounds(model, sampler(frequency_penalty=0.7, **LONG), 0)[1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", [COUPLED, STANDARD])
def test_f14_a_biased_id_never_comes_at_any_slot(method, temperature):
    """logit_bias {t: -100}; t is the raw argmax of every row, and all that the draft proposes."""
    model = Model(favourites={i: 77 for i in range(40)})
    s, output = sampler(logit_bias={77: -100.0}, temperature=temperature, ignore_eos=True), []
    while len(output) < 24:
        block = [77] * 4
        verdict = verify(model.rows(output, block), block, (), s, output, method)
        assert verdict.num_accepted == 0 and len(verdict.tokens) == 1
        right = [*self_draft(model, s, output, 3), 77]
        output += verify(model.rows(output, right), right, (), s, output, method).tokens
    assert 77 not in output


@pytest.mark.parametrize("method", [COUPLED, STANDARD])
def test_f14_min_p_holds_at_every_slot(method):
    """min_p = 0.5 and p = (.6, .25, .15): only the first id appears, whatever is proposed."""
    row = torch.tensor([0.6, 0.25, 0.15], dtype=torch.float64).log()
    for seed in range(60):
        s = sampler(3, seed, eos=99, min_p=0.5)
        for block in ([0, 0, 0, 0], [0, 0, 1, 2], [1, 2, 1, 2], [0, 2]):
            verdict = verify([row] * (len(block) + 1), block, (), s, [], method)
            assert set(verdict.tokens) == {0} and verdict.num_accepted == next((i for i, x in enumerate(block) if x), len(block))


def test_f15_a_draft_that_is_told_the_penalties_is_believed_more_often():
    """Text that repeats itself, repetition_penalty = 1.3: the text is the same either way, the acceptance is not."""
    model, params = Echo(), {"repetition_penalty": 1.3, "temperature": 0.0, **LONG}
    _, expected = rounds(model, sampler(**params), 0)
    knowing, text = rounds(model, sampler(**params), 4, told(**params))
    assert text == expected and all(v.num_accepted == len(v.tokens) - 1 for v, _ in knowing[:-1])
    unaware, text = rounds(model, sampler(**params), 4, told(temperature=0.0, **LONG))
    assert text == expected and accepted(unaware) < 0.8 * accepted(knowing)


@pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e-30])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_f18_tiny_repetition_penalties_never_overflow(penalty, dtype):
    """Positive scores of what was said are lifted to the end of the format's range, and not beyond; the rest becomes impossible."""
    row = torch.full((128,), -1.0, dtype=dtype)
    row[[9, 40]] = 6e4
    row[3] = 0.0
    for temperature in (0.0, 1e-3, 1.0):
        s = sampler(repetition_penalty=penalty, temperature=temperature, banned_token_ids=(5, 11))
        s.params.check(128)
        assert s.choose(row, 3 + 4, [40, 9, 3, 1]) in (9, 40)
        assert not torch.isnan(s.scores(row, 3 + 4, [40, 9, 3, 1])).any()


# ---------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("params", [{}, {"top_p": 0.9, "presence_penalty": 0.5}], ids=str)
def test_f37_a_seed_gives_one_text_whatever_k(params):
    """Ten times the same request for each K; coupled also promises that K does not matter."""
    model, params = Model(spread=1.0), {"seed": 7, "max_tokens": 20, "ignore_eos": True, **params}
    texts = {tuple(rounds(model, sampler(**params), k, wrong_at(3))[1]) for k in (0, 2, 4) for _ in range(10)}
    assert len(texts) == 1


def test_f38_seeds_change_the_text_with_blocks_too():
    model = Model(spread=0.0)
    texts = {tuple(rounds(model, sampler(seed=seed, max_tokens=4, ignore_eos=True), 3)[1]) for seed in range(50)}
    assert len(texts) >= 45


def test_f40_a_seeded_text_does_not_depend_on_other_work():
    """Seed 7 alone; after a hundred other requests; among eight that take turns; and with another draft from the middle on."""
    model, params = Model(spread=1.5), {"top_p": 0.95, "repetition_penalty": 1.2, "max_tokens": 40, "ignore_eos": True}
    _, alone = rounds(model, sampler(seed=7, **params), 4)
    for seed in range(100):
        rounds(model, sampler(seed=seed, top_k=seed, max_tokens=2), seed % 4)
    assert rounds(model, sampler(seed=7, **params), 4)[1] == alone
    drafts = [self_draft, anti_draft, wrong_at(1), wrong_at(3)]
    batch: list[tuple[Sampler, list[int]]] = [(sampler(seed=seed, **params), []) for seed in range(8)]
    for turn in range(120):
        s, output = batch[turn * 5 % 8]
        block = drafts[turn // 40](model, s, output, turn % 5)
        output += verify(model.rows(output, block), block, (), s, output, COUPLED).tokens
    assert len(batch[7][1]) > 15 and batch[7][1] == alone[: len(batch[7][1])]


@pytest.mark.parametrize("slot", range(4))
def test_f42_after_a_stop_inside_a_block_nothing_of_the_block_is_left(slot):
    """A session goes on behind a stop at each slot of a block: with the sampler that stopped, as with one that never saw that block."""
    params: dict[str, Any] = {"frequency_penalty": 1.0, "top_p": 0.9, "max_tokens": 60}
    model = Repeater()
    _, plain = rounds(model, sampler(ignore_eos=True, seed=5, **params), 0)
    stop = next(token for i, token in enumerate(plain) if i % 5 == slot and token not in plain[:i])
    s = sampler(seed=5, stop_token_ids=(stop,), ignore_eos=True, **params)
    done, text = rounds(model, s, 4)
    verdict, before = done[-1]
    assert end(done) == (FinishReason.STOP, stop) and len(text) - len(before) == slot and verdict.num_verified == 4
    follow_up = [*text, stop, 50, 51, 52]  # the stop token and the next message

    def goes_on(with_sampler: Sampler, k: int) -> list[int]:
        output = list(follow_up)
        while len(output) < len(follow_up) + 10:
            block = self_draft(model, with_sampler, output, k)
            tokens = verify(model.rows(output, block), block, (), with_sampler, output, COUPLED).tokens
            if not tokens:
                break
            output += tokens
        return output[: len(follow_up) + 10]

    fresh = sampler(seed=5, stop_token_ids=(stop,), ignore_eos=True, **params)
    assert goes_on(s, 4) == goes_on(fresh, 0)
