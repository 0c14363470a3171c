"""Terms that are made in every round: as frozen ones but for what it costs to make them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace

import pytest

from specdec import terms
from specdec.terms.record import record


@dataclass(frozen=True, slots=True)
class Frozen:
    length: int
    tokens: tuple[int, ...] = ()


@record(frozen=True, slots=True)
class Recorded:
    length: int
    tokens: tuple[int, ...] = ()


def test_they_compare_hash_and_print_by_value() -> None:
    one, same, other = Recorded(1, (2,)), Recorded(1, (2,)), Recorded(1, (3,))
    assert one == same and hash(one) == hash(same) == hash(Frozen(1, (2,))) and one != other
    assert len({one, same, other}) == 2 and replace(one, tokens=(3,)) == other
    assert repr(one).replace("Recorded", "Frozen") == repr(Frozen(1, (2,)))


def test_they_have_no_room_for_more() -> None:
    with pytest.raises(AttributeError):
        Recorded(1).more = 2  # type: ignore[attr-defined]


def test_what_is_made_once_is_frozen_at_run_time_as_well() -> None:
    """Whoever would change what a round makes is stopped by the type checker alone."""
    for often in (Recorded, terms.Step, terms.Result, terms.Answer, terms.Ahead):
        assert not often.__dataclass_params__.frozen  # type: ignore[attr-defined]
    with pytest.raises(FrozenInstanceError):
        terms.Close("s", 1).epoch = 2  # type: ignore[misc]
