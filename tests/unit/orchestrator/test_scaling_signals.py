"""F174, F175: what replicas' beats say of their pool."""

from __future__ import annotations

import math
from typing import Any

import pytest

from orchestrator.scaling.activity import HOLD_S, Activity
from orchestrator.scaling.metadata import wish
from orchestrator.scaling.signals import SILENT_S, Key, Replica, Signals
from specdec.errors import InvalidRequest
from specdec.terms import DraftLoad, TargetBeat

pytestmark = pytest.mark.unit
TARGET, LARGE, DRAFT = Key("target", "default"), Key("target", "large"), Key("draft", "default")
POOLS = TARGET, LARGE, DRAFT


def target(backlog_ms: float = 0.0, kv: float = 0.0, sessions: int = 0, **more: Any) -> TargetBeat:
    return TargetBeat(sessions, 0, 0, 1000, 0, 20, backlog_ms=backlog_ms, kv_demand=kv, **more)


def draft(needed: float = 0.0, late: float = 0.0, sessions: int = 0) -> DraftLoad:
    return DraftLoad(1.0, 0.0, sessions, 0, 1000, needed_time_share=needed, late_demand=late)


def seen(*replicas: Replica) -> Signals:
    signals = Signals(POOLS, queue_ms=50.0)
    signals.look(replicas, 0.0)
    return signals


def test_loads_are_summed_over_a_pool_in_replicas_worth_each_pool_for_itself() -> None:
    signals = seen(
        Replica("a", TARGET, target(backlog_ms=100, kv=0.5, sessions=3)),
        Replica("b", TARGET, target(backlog_ms=25, kv=1.0, sessions=4, draining=True)),
        Replica("c", LARGE, target(backlog_ms=5, kv=0.1)),
        Replica("a", DRAFT, draft(needed=0.75, late=0.25, sessions=2)),
        Replica("d", DRAFT, draft(needed=1.0, late=0.5)),
    )
    assert signals.load(TARGET) == {"queue": 2.5, "kv": 1.5}, "one that drains counts: its load stays in the pool"
    assert signals.load(LARGE) == {"queue": 0.1, "kv": 0.1}
    assert signals.load(DRAFT) == {"needed": 1.75, "late": 0.75}
    assert [signals.sessions(key) for key in POOLS] == [7, 0, 2]


def test_without_replicas_the_load_is_0_and_without_word_it_is_unknown() -> None:
    assert seen().load(TARGET) == {"queue": 0.0, "kv": 0.0} and seen().load(DRAFT) == {"needed": 0.0, "late": 0.0}
    assert seen(Replica("a", TARGET, None)).load(TARGET) is None
    one = seen(Replica("a", TARGET, None), Replica("b", TARGET, target(kv=0.5)))
    assert one.load(TARGET) == {"queue": 0.0, "kv": 0.5}


def test_a_replica_whose_beats_stop_drops_out_though_it_stays_connected() -> None:
    signals, still = Signals(POOLS, 50.0), target(kv=0.5, sessions=1)
    now = 0.0
    while now <= 2 * SILENT_S:
        signals.look([Replica("a", TARGET, still), Replica("b", TARGET, target(kv=0.25, sessions=1))], now)
        want = 0.75 if now <= SILENT_S else 0.25
        assert signals.load(TARGET) == {"queue": 0.0, "kv": want} and signals.sessions(TARGET) == (2 if now <= SILENT_S else 1)
        now += 0.25
    signals.look([Replica("a", TARGET, still)], now)
    assert signals.load(TARGET) is None
    signals.look([Replica("a", TARGET, target(kv=0.5))], now)
    assert signals.load(TARGET) == {"queue": 0.0, "kv": 0.5}


def test_one_that_drained_before_it_fell_silent_is_gone_though_discovery_still_names_it() -> None:
    signals = Signals(POOLS, 50.0)
    signals.look([Replica("a", TARGET, target(kv=0.5, draining=True))], 0.0)
    assert signals.load(TARGET) == {"queue": 0.0, "kv": 0.5}
    for now in (0.25, 30.0):
        signals.look([Replica("a", TARGET, None)], now)
        assert signals.load(TARGET) == {"queue": 0.0, "kv": 0.0}, "a pool that went to zero is not one that cannot be reached"
    signals.look([Replica("a", TARGET, target(kv=0.5))], 31.0)
    signals.look([Replica("a", TARGET, None)], 31.25)
    assert signals.load(TARGET) is None, "another process of that name did not drain"


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e-9])
def test_what_is_no_load_is_none(value: float) -> None:
    signals = seen(Replica("a", TARGET, target(value, value)), Replica("a", DRAFT, draft(value, value)))
    assert signals.load(TARGET) == {"queue": 0.0, "kv": 0.0} and signals.load(DRAFT) == {"needed": 0.0, "late": 0.0}


def test_one_replica_is_believed_within_bounds() -> None:
    signals = seen(Replica("a", TARGET, target(1e12, 1e12)), Replica("a", DRAFT, draft(50.0, 50.0)))
    assert signals.load(TARGET) == {"queue": 1000.0, "kv": 100.0} and signals.load(DRAFT) == {"needed": 1.0, "late": 1.0}


def test_a_pool_is_active_while_calls_wait_or_sessions_are_held_and_a_while_longer() -> None:
    activity = Activity()
    transcript = [  # now, waiting, sessions, elsewhere → active
        (0.0, 0, 0, 0, False),
        (0.0, 0, 0, 1, True),
        (1.0, 2, 0, 0, True),
        (2.0, 0, 0, 0, True),
        (1.0 + HOLD_S, 0, 0, 0, True),
        (1.5 + HOLD_S, 0, 0, 0, False),
        (70.0, 0, 3, 0, True),
        (71.0, 0, 0, 0, True),
        (71.0 + HOLD_S, 0, 0, 0, False),
    ]
    got = []
    for now, waiting, sessions, elsewhere, _ in transcript:
        activity.note(waiting, sessions, now)
        got.append(activity.active(elsewhere, now))
    assert got == [active for *_, active in transcript]


def test_what_waited_is_the_most_at_once_within_the_time() -> None:
    activity = Activity()
    for now, waiting in enumerate([3, 5, 1, 2, 2, 0]):
        activity.note(waiting, 0, float(now))
    assert activity.waiting(5.0) == 5
    assert activity.waiting(1.5 + HOLD_S) == 2
    assert activity.waiting(4.5 + HOLD_S) == 0


GOOD = {"scalerAddress": "o:50054", "pool": "target", "queue": "1.0", "kv": "0.8"}


def test_thresholds_become_metrics_in_thousandths() -> None:
    asked = wish(GOOD, POOLS)
    assert asked.key == TARGET and asked.thresholds == {"queue": 1000, "kv": 800}
    assert asked.signal(asked.metric("kv")) == "kv"
    assert wish({"pool": "target", "poolName": "large", "kv": "2"}, POOLS).metric("kv") == "specdec-target-large-kv"
    assert wish({"pool": "draft", "late": "0.001"}, POOLS).thresholds == {"late": 1}


@pytest.mark.parametrize(
    ("field", "metadata"),
    [
        ("pool", {"queue": "1"}),
        ("pool", GOOD | {"pool": "targets"}),
        ("poolName", GOOD | {"poolName": "small"}),
        ("queue", {"pool": "target"}),
        ("queue", GOOD | {"queue": "many"}),
        ("queue", GOOD | {"queue": "0"}),
        ("kv", GOOD | {"kv": "nan"}),
        ("kv", GOOD | {"kv": "-0.5"}),
        ("kv", GOOD | {"kv": "1e9"}),
        ("needed", GOOD | {"needed": "0.7"}),
        ("quue", GOOD | {"quue": "1"}),
    ],
)
def test_bad_metadata_is_named(field: str, metadata: dict[str, str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        wish(metadata, POOLS)
    assert caught.value.field == f"scalerMetadata.{field}"


def test_a_metric_of_another_trigger_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="metricName.*specdec-target-default-queue"):
        wish(GOOD, POOLS).signal("specdec-draft-default-needed")
