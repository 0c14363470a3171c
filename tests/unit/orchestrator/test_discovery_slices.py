"""EndpointSlices as replicas: lists, events, what may be missing from both."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.discovery import Endpoint
from orchestrator.discovery.backoff import Backoff
from orchestrator.discovery.names import Service
from orchestrator.discovery.slices import Slices
from tests.api_server import BOOKMARK, endpoint, slice_of

A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


def versioned(what: dict[str, Any], version: int) -> dict[str, Any]:
    return {**what, "metadata": {**what["metadata"], "resourceVersion": str(version)}}


def listed(*slices: dict[str, Any], port: int | str = "grpc", version: str = "10") -> Slices:
    made = Slices(Service("", "target", port))
    assert not made.listed(slices, version)
    return made


def addresses(slices: Slices) -> set[str]:
    return {e.address for e in slices.endpoints}


def test_replicas_of_several_slices_are_one_pool() -> None:
    slices = listed(slice_of("s1", endpoint(A, "a"), endpoint(B, "b")), slice_of("s2", endpoint(C), grpc=7), slice_of("s3"))
    assert slices.endpoints == {Endpoint(f"{A}:50052", "a"), Endpoint(f"{B}:50052", "b"), Endpoint(f"{C}:7")}
    slices.event("DELETED", versioned(slice_of("s1"), 11))
    slices.event("ADDED", versioned(slice_of("s4", endpoint("fd00::1", "d")), 12))
    slices.event("MODIFIED", versioned(slice_of("s2", endpoint(C), grpc=8), 13))
    assert addresses(slices) == {"[fd00::1]:50052", f"{C}:8"} and slices.problem == ("", "")
    assert not slices.listed([slice_of("s1", endpoint(A, "a"))], "20")
    assert addresses(slices) == {f"{A}:50052"}, "a list replaces all"


@pytest.mark.parametrize(
    ("conditions", "is_there", "terminating"),
    [
        ({}, True, False),
        ({"ready": None}, True, False),
        ({"ready": True, "serving": True, "terminating": None}, True, False),
        ({"ready": False, "serving": False, "terminating": False}, False, False),
        ({"ready": False}, False, False),
        ({"ready": False, "serving": True, "terminating": True}, True, True),
        ({"ready": False, "serving": False, "terminating": True}, True, True),
        ({"ready": True, "serving": True, "terminating": True}, True, True),
    ],
)
def test_F160_conditions(conditions: dict[str, bool | None], is_there: bool, terminating: bool) -> None:
    """The last one is a pod that is deleted and still called ready."""
    slices = listed(slice_of("s", endpoint(A, "a") | {"conditions": conditions}))
    assert slices.endpoints == ({Endpoint(f"{A}:50052", "a", terminating)} if is_there else set())


def test_F161_a_pod_without_an_address_is_gone_and_an_address_of_another_pod_is_another_replica() -> None:
    slices = listed(slice_of("s", endpoint(A, "a"), endpoint(B, "b")))
    slices.event("MODIFIED", versioned(slice_of("s", endpoint("", "a"), endpoint(B, "c")), 11))
    assert slices.endpoints == {Endpoint(f"{B}:50052", "c")}
    for nothing in (None, [], [None], [""]):
        assert not listed(slice_of("s", endpoint(A, "a") | {"addresses": nothing})).endpoints


def test_a_pod_has_one_address_whatever_families_and_slices_it_stands_in() -> None:
    four, six = slice_of("v4", endpoint(A, "a")), slice_of("v6", endpoint("fd00::1", "a"))
    assert addresses(listed(six, four)) == {f"{A}:50052"}
    slices = listed(six)
    slices.event("ADDED", versioned(four, 11))
    assert addresses(slices) == {"[fd00::1]:50052"}, "it stays at the one it has"
    slices.event("DELETED", versioned(six, 12))
    assert addresses(slices) == {f"{A}:50052"}
    moving = listed(slice_of("s1", endpoint(A, "a")), slice_of("s2", endpoint(A, "a", ready=False, terminating=True)))
    assert moving.endpoints == {Endpoint(f"{A}:50052", "a", True)}, "what ends does not come back"


PORTS = {"metrics": 9464, "grpc": 50052}


@pytest.mark.parametrize(
    ("wanted", "ports", "found"),
    [
        ("grpc", PORTS, 50052),
        (50052, PORTS, 50052),
        (80, PORTS, 0),
        ("http", PORTS, 0),
        (50052, None, 50052),
        (50052, [], 50052),
        ("grpc", None, 0),
        (50052, [{"name": "", "port": 50052}], 50052),
        (50052, [{"name": "grpc", "port": None}], 50052),
        ("grpc", [{"name": "grpc", "port": None}], 0),
        ("grpc", [{"name": "grpc", "protocol": "UDP", "port": 1}, {"name": "grpc", "protocol": "TCP", "port": 2}], 2),
    ],
)
def test_ports(wanted: int | str, ports: Any, found: int) -> None:
    made = slice_of("s", endpoint(A, "a"), **PORTS)
    slices = listed(made if ports is PORTS else made | {"ports": ports}, port=wanted)
    assert addresses(slices) == ({f"{A}:{found}"} if found else set())
    kind, what = slices.problem
    assert kind == ("" if found else "port")
    assert found or (str(wanted) in what and ("grpc 50052" in what or ports is not PORTS))


def test_what_is_wrong_when_there_is_nothing() -> None:
    kind, what = listed().problem
    assert kind == "empty" and "kubernetes.io/service-name=target" in what
    assert listed(slice_of("s")).problem == ("", ""), "scaled to nothing"
    assert listed(slice_of("s", endpoint(A, "a", ready=False), http=80)).problem == ("", ""), "nobody is ready, whatever the port"


def test_F157_a_replay_does_not_bring_back_what_the_list_has_not() -> None:
    slices = listed(slice_of("now", endpoint(B, "b")))
    slices.event("ADDED", versioned(slice_of("then", endpoint(A, "a")), 5))
    slices.event("MODIFIED", versioned(slice_of("now", endpoint(A, "a")), 10))
    slices.event("DELETED", versioned(slice_of("now"), 9))
    assert addresses(slices) == {f"{B}:50052"}
    slices.event("MODIFIED", versioned(slice_of("now", endpoint(C, "c")), 11))
    assert addresses(slices) == {f"{C}:50052"}
    opaque = listed(version="x7")
    opaque.event("ADDED", versioned(slice_of("s", endpoint(A, "a")), 5))
    assert addresses(opaque) == {f"{A}:50052"}, "versions that are no numbers have no order"


def test_what_is_no_slice_changes_nothing_and_is_told() -> None:
    slices = listed(slice_of("s", endpoint(A, "a")))
    for event in ({}, {"metadata": {}}, versioned(slice_of("s"), 11) | {"endpoints": 7}, versioned(slice_of("s"), 12) | {"ports": ["x"]}):
        with pytest.raises((KeyError, TypeError, AttributeError)):
            slices.event("MODIFIED", event)
        assert addresses(slices) == {f"{A}:50052"}
    slices.event("BOOKMARK", BOOKMARK["object"])
    slices.event("NEW", versioned(slice_of("s"), 13))
    assert addresses(slices) == {f"{A}:50052"}
    wrong = slices.listed([slice_of("s") | {"endpoints": [7]}, slice_of("s2", endpoint(B, "b")), 7], "20")  # type: ignore[list-item]
    assert len(wrong) == 2 and addresses(slices) == {f"{A}:50052", f"{B}:50052"}, "what cannot be read is as it was"


def test_the_pool_and_its_name() -> None:
    slices = Slices(Service("", "target", 1, "large"))
    slices.listed([slice_of("s", endpoint(A, "a"), p=1)], "")
    assert slices.endpoints == {Endpoint(f"{A}:1", "a", pool_name="large")}


def test_backing_off() -> None:
    backoff = Backoff(0.2, 10.0, calm_s=5.0)
    waits = [backoff.pause(0.1, failed=i % 2 == 0, draw=1.0) for i in range(8)]
    assert waits == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 10.0, 10.0]), "failed or not: what ends at once is no reason to hurry"
    assert backoff.pause(5.0, failed=False, draw=0.5) == 0.0
    assert backoff.pause(5.0, failed=True, draw=0.0) == pytest.approx(0.1)
    assert backoff.pause(0.0, failed=True, draw=0.0) == pytest.approx(0.2)
