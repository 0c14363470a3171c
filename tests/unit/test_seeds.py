"""Seeds of further answers: derived from the request's seed, shared with nobody."""

from __future__ import annotations

import pytest

from specdec.seeds import MASK64, answer_seed, mix64

pytestmark = pytest.mark.unit
SEEDS = [*range(300), *(MASK64 - i for i in range(300))]


def test_answer_zero_has_the_request_s_seed() -> None:
    assert [answer_seed(seed, 0) for seed in SEEDS] == SEEDS


def test_neighbouring_requests_share_no_answer() -> None:
    assert len({answer_seed(seed, i) for seed in SEEDS for i in range(16)}) == 16 * len(SEEDS)


def test_a_seed_that_meets_the_index_unmixed_would_share_them() -> None:
    """The broken twin."""
    assert len({mix64(seed ^ i) for seed in SEEDS for i in range(1, 16)}) < 15 * len(SEEDS) / 2
