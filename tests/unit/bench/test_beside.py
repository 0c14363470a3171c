"""The bound that caches set."""

from dataclasses import fields

import pytest

from draft_service.settings import Settings
from specdec.bench.beside import most
from specdec.bench.system import DRAFT_DTYPE

FOUND = {"target_1": 5.0, "target_block": 5.5, "target_block_beside": 6.0, "draft": 0.5, "draft_beside": 1.0}


def test_a_draft_that_is_always_ready_costs_nothing_but_the_step() -> None:
    assert most(FOUND, length=1.8, hit_rate=1.0, k=2) == pytest.approx(1.8 * 5.0 / 6.0)


def test_every_miss_waits_for_all_passes_of_a_block() -> None:
    assert most(FOUND, length=1.8, hit_rate=0.5, k=2) == pytest.approx(1.8 * 5.0 / 7.0)
    assert most(FOUND, length=1.8, hit_rate=0.0, k=4) == pytest.approx(1.8 * 5.0 / 10.0)


def test_drafts_are_measured_as_they_are_served() -> None:
    assert {entry.name: entry.default for entry in fields(Settings)}["dtype"] == DRAFT_DTYPE
