"""Who holds what, and what is known of replicas that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from orchestrator.places import About, Places
from tests.unit.orchestrator.test_placement import beat


def places_of(*names: str, told: Sequence[int] = ()) -> Places:
    """`told` = tokens in use of 10,000, as each reports."""
    words = [beat(kv_used_tokens=used) for used in told] or [None] * len(names)
    peers = [SimpleNamespace(name=name, info=None, beat=word) for name, word in zip(names, words, strict=True)]
    return Places(lambda: peers, lambda name: None, lambda name: None)  # type: ignore[arg-type, return-value]


def test_what_a_replica_said_goes_with_its_connection() -> None:
    """The process that answers there next has nothing to do with it."""
    places = places_of("a", "b")
    for name, step_ms in (("a", 500), ("b", 5)):
        places.moved("", name)
        places.heard(name, beat(sessions=1, predicted_step_ms=step_ms))
    assert places.lighter("a") and not places.lighter("b")
    places.gone("a")
    assert not places.lighter("a")


def test_no_room_is_sought_where_there_is_none() -> None:
    places = places_of("full", "fits", told=[9_990, 9_900])
    about = About(tokens=range(100))
    assert places.elsewhere([], about, equal=False) == "fits"
    assert places.elsewhere(["fits"], about, equal=False) is None
    assert places.elsewhere([], About(tokens=range(101)), equal=False) is None


def test_a_session_that_ends_while_others_are_placed_gets_no_place() -> None:
    places = places_of("a")
    for session in ("one", "two", "three"):
        places.want(session, "")
    placed = []
    for session, _, _ in places.place():
        placed.append(session)
        places.forget("two", "")
    assert placed == ["one", "three"]
