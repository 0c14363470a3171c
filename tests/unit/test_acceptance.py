"""Decisions inside one block: agreement, stops, limits, broken rows. The standard method: test_acceptance_standard.py, statistics/."""

from __future__ import annotations

import hashlib
import math
import struct

import pytest
import torch

from specdec.acceptance import Verdict, verify
from specdec.errors import NonFinite
from specdec.sampling import draft_choice
from specdec.terms import DraftDistribution, DraftMethod, FinishReason, Origin
from tests.unit.acceptance_rig import COUPLED, EOS, STANDARD, Model, anti_draft, end, rounds, sampler, self_draft, wrong_at

# ---------------------------------------------------------------------------- agreement


@pytest.mark.parametrize("params", [{}, {"temperature": 0.0}, {"top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.5}], ids=str)
@pytest.mark.parametrize("draft", [self_draft, anti_draft, wrong_at(0), wrong_at(1)], ids=["self", "anti", "wrong0", "wrong1"])
@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_text_and_logprobs_equal_plain_decoding(params, draft, k):
    model = Model()
    plain, expected = rounds(model, sampler(max_tokens=32, logprobs=2, **params), 0)
    done, text = rounds(model, sampler(max_tokens=32, logprobs=2, **params), k, draft)
    assert text == expected and end(done) == end(plain)
    assert [e for v, _ in done for e in v.logprobs] == [e for v, _ in plain for e in v.logprobs]
    assert all(v.origins == (Origin.PLAIN,) * len(v.tokens) for v, _ in plain)


def test_origins_and_counts_of_each_kind_of_round():
    model, s = Model(), sampler()
    block = self_draft(model, s, [], 4)
    full = verify(model.rows([], block), block, (), s, [], COUPLED)
    assert (full.num_verified, full.num_accepted, full.tokens[:4]) == (4, 4, tuple(block))
    assert full.origins == (Origin.ACCEPTED,) * 4 + (Origin.BONUS,)
    for slot in range(4):
        bad = wrong_at(slot)(model, s, [], 4)
        verdict = verify(model.rows([], bad), bad, (), s, [], COUPLED)
        assert (verdict.num_verified, verdict.num_accepted) == (4, slot)
        assert verdict.tokens == full.tokens[: slot + 1]
        assert verdict.origins == (Origin.ACCEPTED,) * slot + (Origin.CORRECTED,)
    empty = verify(model.rows([], []), [], (), s, [], COUPLED)
    assert empty.tokens == full.tokens[:1] and empty.origins == (Origin.PLAIN,) and empty.num_verified == 0


@pytest.mark.parametrize("method", [COUPLED, STANDARD])
@pytest.mark.parametrize("slot", [0, 1, 2, 3])
def test_f07_a_refusal_at_each_slot(slot, method):
    """K = 4, the proposal at `slot` is wrong in each of 50 rounds: text equals plain decoding (standard: at temperature 0)."""
    model = Model()
    params = {"temperature": 0.0} if method is STANDARD else {}
    _, expected = rounds(model, sampler(max_tokens=50 * (slot + 1), ignore_eos=True, **params), 0, most_rounds=500)
    s = sampler(max_tokens=50 * (slot + 1), ignore_eos=True, **params)
    output = []
    for _ in range(50):
        block = wrong_at(slot)(model, s, output, 4)
        verdict = verify(model.rows(output, block), block, (), s, output, method)
        assert len(verdict.tokens) == verdict.num_accepted + 1 == slot + 1
        output += verdict.tokens
    assert output == expected


def test_f07_one_proposal_always_wrong():
    model = Model()
    done, text = rounds(model, sampler(max_tokens=50, ignore_eos=True), 1, anti_draft)
    assert len(done) == 50 and all(v.num_accepted == 0 and len(v.tokens) == 1 for v, _ in done)
    assert text == rounds(model, sampler(max_tokens=50, ignore_eos=True), 0)[1]


@pytest.mark.parametrize("method", [COUPLED, STANDARD])
def test_f06_inputs_are_unchanged_and_verification_repeats(method):
    """Twice the same call, then two sessions that share one tensor: nothing is written, everything is equal."""

    def fingerprint():
        return hashlib.sha256(logits.numpy().tobytes() + repr((block, distributions, output)).encode()).hexdigest()

    logits = torch.randn(4, 130, generator=torch.Generator().manual_seed(1))
    q = DraftDistribution((3, 4, 9), struct.pack("<3f", 0.5, 0.25, 0.25))
    block, output = [3, 4, 9], [8, 8]
    distributions = (q, None, q) if method is STANDARD else ()
    before = fingerprint()
    s = sampler(top_p=0.9, frequency_penalty=0.3, logit_bias={1: 2.0}, logprobs=3, banned_token_ids=(77,))
    first = verify(logits, block, distributions, s, output, method)
    assert verify(logits, block, distributions, s, output, method) == first
    other = sampler(seed=99, top_p=0.9, frequency_penalty=0.3, logit_bias={1: 2.0}, logprobs=3, banned_token_ids=(77,))
    verify(logits, block, distributions, other, [], method)
    assert verify(logits, block, distributions, s, output, method) == first
    assert fingerprint() == before


# ---------------------------------------------------------------------------- ends inside a block


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("index", range(8))
def test_f21_eos_at_every_slot_of_a_block(index, k):
    """The token that plain decoding produced at `index` is declared EOS; a draft that is always right hits every slot with it."""
    model = Model()
    _, text = rounds(model, sampler(max_tokens=9, ignore_eos=True), 0)
    eos = text[index]
    first = text.index(eos)
    done, cut = rounds(model, sampler(eos=eos, max_tokens=9), k)
    assert cut == text[:first] and end(done) == (FinishReason.STOP, eos)
    verdict, before = done[-1]
    assert verdict.num_accepted == len(verdict.tokens) == first - len(before)  # EOS itself is neither token nor accepted
    assert len(verdict.logprobs) == 0 and verdict.origins == (Origin.ACCEPTED if k else Origin.PLAIN,) * len(verdict.tokens)


def test_f21_stop_token_ids_end_like_eos_and_eos_can_be_ignored():
    model = Model(favourites={2: EOS, 4: 9})
    done, text = rounds(model, sampler(max_tokens=9, ignore_eos=True, stop_token_ids=(9,)), 4)
    assert text[2] == EOS and len(text) == 4 and end(done) == (FinishReason.STOP, 9)


@pytest.mark.parametrize("k", range(1, 6))
@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_f25_exactly_max_tokens(max_tokens, k):
    model = Model()
    done, text = rounds(model, sampler(max_tokens=max_tokens, ignore_eos=True), k)
    assert len(text) == max_tokens == sum(len(v.origins) for v, _ in done)
    assert end(done) == (FinishReason.LENGTH, None)
    assert [v.finish for v, _ in done[:-1]] == [None] * (len(done) - 1)
    assert all(v.num_accepted <= len(v.tokens) <= v.num_accepted + 1 for v, _ in done)


def test_room_of_the_window_ends_like_max_tokens():
    model, s = Model(), sampler(max_tokens=100, ignore_eos=True)
    block = self_draft(model, s, [], 4)
    rows = model.rows([], block)
    for room in range(1, 6):
        verdict = verify(rows, block, (), s, [], COUPLED, max_room=room)
        assert len(verdict.tokens) == room and verdict.finish is FinishReason.LENGTH
    assert verify(rows, block, (), s, [], COUPLED, max_room=6).finish is None
    assert verify(rows, block, (), s, [], COUPLED, max_room=0) == Verdict((), 4, 0, (), FinishReason.LENGTH)
    resumed = sampler(max_tokens=3)
    assert verify(model.rows([8, 8, 8], []), [], (), resumed, [8, 8, 8], COUPLED) == Verdict((), 0, 0, (), FinishReason.LENGTH)


def test_eos_right_behind_the_last_allowed_token_is_not_looked_at():
    model = Model(favourites={3: EOS})
    done, text = rounds(model, sampler(max_tokens=3), 4)
    assert len(text) == 3 and end(done) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5, 8])
def test_f43_min_tokens_counts_tokens_not_steps(k):
    model = Model(favourites={i: EOS for i in range(5, 40)})
    done, text = rounds(model, sampler(min_tokens=4, max_tokens=40), k)
    assert len(text) == 5 and end(done) == (FinishReason.STOP, EOS)


@pytest.mark.parametrize("k", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize("min_tokens", range(1, 8))
def test_f44_eos_is_taken_at_the_first_index_where_it_is_legal(min_tokens, k):
    """That index falls on each slot of a block."""
    model = Model(favourites={i: EOS for i in range(40)})
    done, text = rounds(model, sampler(min_tokens=min_tokens, max_tokens=40), k)
    assert len(text) == min_tokens and EOS not in text and end(done) == (FinishReason.STOP, EOS)


@pytest.mark.parametrize("stop", [EOS, 9])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_f46_ends_are_masked_on_every_row_before_min_tokens(slot, stop):
    """min_tokens = 8, the draft proposes an end early and the target's logits agree."""
    model = Model(favourites={slot: stop})

    def eager(model, s, output, k):
        block = self_draft(model, s, output, k)
        if not output:
            block[slot] = stop
        return block

    s = sampler(min_tokens=8, max_tokens=20, stop_token_ids=(9,))
    done, text = rounds(model, s, 4, eager)
    assert stop not in text[:8] and done[0][0].num_accepted == slot
    assert text == rounds(model, sampler(min_tokens=8, max_tokens=20, stop_token_ids=(9,)), 0)[1]


@pytest.mark.parametrize("k", [0, 4])
def test_f09_first_tokens(k):
    model = Model()
    done, text = rounds(model, sampler(max_tokens=1, ignore_eos=True), k)
    assert text == rounds(model, sampler(max_tokens=1, ignore_eos=True), 0)[1] and len(done) == 1
    done, text = rounds(Model(favourites={0: EOS}), sampler(max_tokens=9), k)
    assert text == [] and end(done) == (FinishReason.STOP, EOS) and len(done) == 1


# ---------------------------------------------------------------------------- padded heads


@pytest.mark.parametrize("method", [COUPLED, STANDARD])
def test_f48_f50_padded_ids_are_refused_at_their_slot(method):
    """118 ids, a head of 128: the draft proposes 119, which the padded rows even favour."""
    logits = torch.randn(4, 128, generator=torch.Generator().manual_seed(2))
    logits[:, 118:] = 50.0
    params = {"temperature": 0.0}
    s = sampler(118, **params)
    best = logits[:, :118].argmax(1).tolist()
    for proposals, accepted in [([*best[:1], 119, best[2]], 1), ([], 0), ([best[0]], 1), ([127], 0)]:
        verdict = verify(logits[: len(proposals) + 1], proposals, (), s, [], method)
        assert verdict.tokens == tuple(best[: accepted + 1]) and verdict.num_accepted == accepted
    for seed in range(50):
        verdict = verify(logits[:2], [119], (), sampler(118, seed=seed), [], method)
        assert verdict.num_accepted == 0 and verdict.tokens[0] < 118


def test_f48_draft_head_larger_than_the_targets():
    """The draft's own padding is cut off before it proposes; a small target head with the same 118 ids judges it."""
    row = torch.randn(128, generator=torch.Generator().manual_seed(3))
    row[118:] = 50.0
    for seed in range(50):
        for method in DraftMethod:
            choice = draft_choice(sampler(118, seed=seed), row, 3, [], method)
            assert choice.token < 118
            if choice.distribution is not None:
                choice.distribution.check(118)


# ---------------------------------------------------------------------------- broken numbers


@pytest.mark.parametrize("method", [COUPLED, STANDARD])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("slot", [0, 2, 4])
def test_f92_a_used_row_that_is_not_finite_fails_when_it_is_the_first(slot, bad, method):
    """Inside a block the round ends in front of it, as it does without a block."""
    model, s = Model(), sampler(temperature=0.0)
    block = self_draft(model, s, [], 4)
    for whole in (False, True):
        rows = model.rows([], block)
        rows[slot, slice(None) if whole else 60] = bad
        if slot:
            verdict = verify(rows, block, (), s, [], method)
            assert (verdict.tokens, verdict.num_accepted, verdict.finish) == (tuple(block[:slot]), slot, None)
        with pytest.raises(NonFinite):
            verify(rows[slot:], block[slot:], (), s, block[:slot], method)


def test_f92_rows_behind_a_refusal_are_not_used():
    model, s = Model(), sampler()
    block = wrong_at(1)(model, s, [], 4)
    rows = model.rows([], block)
    good = verify(rows, block, (), s, [], COUPLED)
    rows[2:] = math.nan
    assert verify(rows, block, (), s, [], COUPLED) == good and good.num_accepted == 1


def test_f92_a_round_has_a_token_an_end_or_an_error():
    model = Model()
    for k in (0, 3):
        for favourites in ({}, {0: EOS}):
            done, _ = rounds(Model(favourites=favourites), sampler(max_tokens=7), k)
            assert all(v.tokens or v.finish for v, _ in done)
            assert all(0 <= v.num_accepted <= min(v.num_verified, len(v.tokens)) for v, _ in done)
    with pytest.raises(ValueError, match="need 3 rows"):
        verify(model.rows([], []), [1, 2], (), sampler(), [], COUPLED)


def test_temperature_zero_is_argmax_in_both_methods():
    model = Model()
    texts = []
    for method in (COUPLED, STANDARD):
        s, output = sampler(temperature=0.0, ignore_eos=True), []
        for turn in range(12):
            block = wrong_at(turn % 5)(model, s, output, 4)
            output += verify(model.rows(output, block), block, (), s, output, method).tokens
        texts.append(output)
    assert texts[0] == texts[1]
