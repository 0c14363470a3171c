"""Whole blocks with fixed K on Markov models of eight ids: the first three tokens are distributed as the target's alone."""

from __future__ import annotations

import pytest

from specdec.seeds import DRAFT
from tests.unit.statistics.harness import P_LEAST, markov, p_value, seeds_from

LENGTH = 3
SHORT, LONG = 100_000, 2_000_000


@pytest.mark.parametrize("method", ["coupled", "standard"])
@pytest.mark.parametrize("num_proposed", [1, 2, 3, 4])
def test_first_three_tokens_are_the_targets(method, num_proposed):
    chain = markov(seeds_from(3_000_000 * num_proposed, SHORT), wire_top_k=5)
    assert p_value(chain.run(num_proposed, LENGTH, method), chain.truth(LENGTH)) > P_LEAST


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["coupled", "standard"])
@pytest.mark.parametrize("num_proposed", [1, 2, 3, 4])
def test_first_three_tokens_are_the_targets_long(method, num_proposed):
    chain = markov(seeds_from(70_000_000 * num_proposed, LONG), wire_top_k=5)
    assert p_value(chain.run(num_proposed, LENGTH, method), chain.truth(LENGTH)) > P_LEAST


def test_coupled_text_does_not_depend_on_the_draft_or_on_k():
    seeds = seeds_from(9, 5_000)
    texts = [markov(seeds, closeness=c).run(k, LENGTH, "coupled") for c in (0.0, 0.5, 1.0) for k in (0, 1, 2, 4)]
    assert all((text == texts[0]).all() for text in texts)


def test_twin_peeking_k():
    chain = markov(seeds_from(1, 50_000), closeness=1.0)
    assert p_value(chain.run(2, LENGTH, "standard"), chain.truth(LENGTH)) > P_LEAST
    assert p_value(chain.run(2, LENGTH, "standard", peek=0.25), chain.truth(LENGTH)) < P_LEAST


def test_twin_corrections_from_the_drafts_stream():
    chain = markov(seeds_from(1, 50_000))
    assert p_value(chain.run(2, LENGTH, "standard", residual_tag=DRAFT), chain.truth(LENGTH)) < P_LEAST


def test_twin_raw_q_sent():
    chain = markov(seeds_from(1, 50_000), closeness=0.0, wire_top_k=3)
    lying = markov(chain.seeds, closeness=0.0)
    sampled = chain._block
    lying._block = sampled  # draws from the truncated q, judged by the raw one
    assert p_value(lying.run(2, LENGTH, "standard"), lying.truth(LENGTH)) < P_LEAST
