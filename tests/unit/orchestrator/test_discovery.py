"""Discovery against a resolver that is a script: records that come and go, errors, silence, names without an address."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.discovery import Endpoint, Lookups, Source, Watch, pool_names, sources
from orchestrator.discovery.dns import Dns
from orchestrator.discovery.memory import MISSES, Memory
from orchestrator.discovery.names import MAX_NAMES, Address, Name, Service, entries, parse, problems
from orchestrator.discovery.source import Trouble
from orchestrator.settings import OrchestratorSettings
from tests.unit.orchestrator.scripted_pools import Pools
from tests.waiting import until

POLL_S = 0.002
NONE = socket.gaierror(socket.EAI_NONAME, "no such name")
BROKEN = socket.gaierror(socket.EAI_AGAIN, "try again")


class Zone:
    """Answers like socket.getaddrinfo; `records` of a name may be an error."""

    def __init__(self, **records: list[str] | Exception) -> None:
        self.records: dict[str, list[str] | Exception] = dict(records)
        self.asked = 0
        self.stuck = threading.Event()
        self.stuck.set()

    def __call__(self, host: str, port: int, **kinds: Any) -> list[tuple[Any, ...]]:
        assert threading.current_thread() is not threading.main_thread()
        self.asked += 1
        self.stuck.wait(20)
        found = self.records.get(host, NONE)
        if isinstance(found, Exception):
            raise found
        return [(socket.AF_INET6 if ":" in a else socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in found for _ in (0, 1)]

    async def polls(self, count: int = 3) -> None:
        goal = self.asked + count
        await until(lambda: self.asked >= goal)


@contextlib.asynccontextmanager
async def watching(zone: Zone, *entries: str, keep_s: float = 60.0) -> AsyncIterator[tuple[list[set[str]], list[str]]]:
    """Sets as they are told, and failures."""
    told: list[set[str]] = []
    failed: list[str] = []
    found = sources("target", entries, Lookups(zone), failed.append, poll_s=POLL_S, keep_s=keep_s)
    watch = Watch("target", found, lambda endpoints: told.append({endpoint.address for endpoint in endpoints}), failed.append)
    watch.run()
    try:
        yield told, failed
    finally:
        zone.stuck.set()
        await watch.close()


# --- entries ----------------------------------------------------------------------------------------------------------


def test_entries() -> None:
    texts = (
        "a:1",
        "dns:///pool:50051",
        "dns:other.svc:2",
        "[::1]:3",
        "a:1",
        "dns:pool:50051",
        "kubernetes:///s:grpc",
        "kubernetes://n/s:7",
    )
    found = [Address("a:1"), Name("pool", 50051), Name("other.svc", 2), Address("[::1]:3"), Service("", "s", "grpc"), Service("n", "s", 7)]
    assert entries(texts) == found and not problems(texts)
    pooled = [parse(f"large-1={text}") for text in texts]
    assert list(dict.fromkeys(pooled)) == [replace(entry, pool_name="large-1") for entry in found]
    assert pool_names((*texts, "small=b:1", "large=dns:c:2")) == ("default", "large", "small")
    assert pool_names(()) == ()


NO_ENTRY = [
    "",
    "a",
    "a:0",
    "a:65536",
    "dns:///a",
    "dns://8.8.8.8/a:1",
    "k8s:///a:1",
    "a b:1",
    "::1:3",
    "dns:a",
    "large=",
    "kubernetes:///a",
]


@pytest.mark.parametrize("entry", NO_ENTRY)
def test_what_is_no_entry_says_what_one_looks_like(entry: str) -> None:
    (problem,) = problems([entry])
    assert repr(entry) in problem and "dns:///name:port" in problem and "kubernetes:///service:port" in problem


LONG = "a" * 63


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("Large=a:1", "pool's name"),
        ("=a:1", "pool's name"),
        (f"{LONG}a=a:1", "pool's name"),
        ("a=b=c:1", "pool's name"),
        ("kubernetes:///Target:1", "'Target'"),
        ("kubernetes:///-a:1", "'-a'"),
        (f"kubernetes:///{LONG}a:1", "Service's name"),
        ("kubernetes://N/a:1", "namespace 'N'"),
        ("kubernetes:///a:0", "port '0'"),
        ("kubernetes:///a:65536", "port '65536'"),
        ("kubernetes:///a:Grpc", "port 'Grpc'"),
    ],
)
def test_names_are_limited_as_kubernetes_limits_them(entry: str, named: str) -> None:
    (problem,) = problems([entry])
    assert repr(entry) in problem and named in problem and "must be" in problem


def test_the_longest_names() -> None:
    assert not problems([f"{LONG}=kubernetes://{LONG}/{LONG}:{LONG}", "0=kubernetes://0/0:65535"])


def test_names_are_bounded() -> None:
    assert "MAX_NAMES" in problems([*(f"dns:n{i}:1" for i in range(MAX_NAMES)), "kubernetes:///n:1"])[0]
    assert not problems([*(f"dns:n{i}:1" for i in range(MAX_NAMES)), *(f"a{i}:1" for i in range(99))])


@pytest.mark.parametrize("what", ["a:1", "dns:///n:1", "kubernetes:///s:1", "kubernetes://n/s:grpc"])
def test_a_replica_is_in_one_pool(what: str) -> None:
    (problem,) = problems([f"large={what}", f"small={what}"])
    assert problem.startswith(what) and "'large'" in problem and "'small'" in problem
    (problem,) = OrchestratorSettings(tokenizer=Path(), targets=("a:1",), drafts=(what, f"x={what}")).problems()
    assert problem.startswith("SPECDEC_DRAFTS: ")


async def test_replicas_carry_the_name_of_their_pool() -> None:
    found = sources("draft", ["a:1", "small=b:1", "large=dns:pool:5"], Lookups(Zone(pool=["::1"])), print, poll_s=POLL_S, keep_s=60)
    known = frozenset[Endpoint]().union(*(source.known for source in found))
    assert known == {Endpoint("a:1"), Endpoint("b:1", pool_name="small")}
    assert await anext(found[1].changes()) == {Endpoint("[::1]:5", pool_name="large")}


# --- memory -----------------------------------------------------------------------------------------------------------


def test_F136_an_empty_answer_keeps_the_last_set_for_a_while() -> None:
    memory = Memory(keep_s=60)
    memory.answered(frozenset("ab"), 0)
    for now in (10, 40, 69.9):
        memory.answered(frozenset(), now)
        assert memory.known == set("ab")
    memory.answered(frozenset(), 70)
    assert not memory.known
    memory.answered(frozenset("c"), 71)
    assert memory.known == {"c"}


def test_the_while_begins_anew_with_every_answer() -> None:
    memory = Memory(keep_s=60)
    memory.answered(frozenset("a"), 0)
    memory.answered(frozenset(), 50)
    memory.answered(frozenset("a"), 100)
    memory.answered(frozenset(), 120)
    memory.answered(frozenset(), 179)
    assert memory.known == {"a"}


def test_a_record_goes_once_it_was_missing_from_some_answers_in_a_row() -> None:
    memory = Memory(keep_s=60)
    memory.answered(frozenset("abc"), 0)
    for i in range(50):  # a server that tells two of three at a time
        memory.answered(frozenset("abc"[j] for j in (i % 3, (i + 1) % 3)), i)
        assert memory.known == set("abc")
    for _ in range(MISSES):
        assert "c" in memory.known
        memory.answered(frozenset("ab"), 100)
    assert memory.known == set("ab")


# --- names ------------------------------------------------------------------------------------------------------------


async def test_every_record_is_an_endpoint() -> None:
    zone = Zone(pool=["10.0.0.1", "10.0.0.2", "fd00::3"])
    async with watching(zone, "h:9", "dns:///pool:5") as (told, failed):
        await until(lambda: bool(told))
    assert told[-1] == {"h:9", "10.0.0.1:5", "10.0.0.2:5", "[fd00::3]:5"} and not failed


async def test_several_names_are_one_pool_and_fail_by_themselves() -> None:
    zone = Zone(one=["10.0.0.1"], two=["10.0.0.2"])
    async with watching(zone, "dns:one:5", "dns:two:5") as (told, failed):
        await until(lambda: {"10.0.0.1:5", "10.0.0.2:5"} in told)
        zone.records["one"] = BROKEN
        zone.records["two"] = ["10.0.0.2", "10.0.0.3"]
        await until(lambda: told[-1] == {"10.0.0.1:5", "10.0.0.2:5", "10.0.0.3:5"})
    assert set(failed) <= {"error"}


@pytest.mark.parametrize(("answer", "kind"), [(BROKEN, "error"), (NONE, "empty"), ([], "empty"), (OSError("no network"), "error")])
async def test_failures_keep_what_was_known_and_are_told_once(
    answer: list[str] | Exception, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    zone = Zone(pool=["10.0.0.1"])
    async with watching(zone, "dns:pool:5") as (told, failed):
        await until(lambda: bool(told))
        zone.records["pool"] = answer
        await zone.polls(5)
        assert told == [{"10.0.0.1:5"}]
        assert set(failed) == {kind} and len(failed) >= 4
        zone.records["pool"] = ["10.0.0.2", "10.0.0.1"]
        await until(lambda: len(told) == 2)
    lines = [record.message for record in caplog.records if record.name == "orchestrator.discovery.source"]
    assert lines == ["discovery fails: what was known stands", "discovery answers again"]


async def test_F136_records_that_vanish_are_forgotten_after_a_while_and_found_again() -> None:
    zone = Zone(pool=["10.0.0.1"])
    async with watching(zone, "dns:pool:5", keep_s=0.01) as (told, _):
        await until(lambda: bool(told))
        zone.records["pool"] = NONE
        await until(lambda: told[-1] == set())
        zone.records["pool"] = ["10.0.0.7"]
        await until(lambda: told[-1] == {"10.0.0.7:5"})


async def test_a_resolver_that_hangs_stops_neither_the_loop_nor_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.discovery.dns.TIMEOUT_S", 0.01)
    zone, quick = Zone(pool=["10.0.0.1"]), Zone(other=["10.0.0.2"])
    zone.stuck.clear()
    failed: list[str] = []
    hung = Dns(Name("pool", 5), Lookups(zone), Trouble("target", "pool", failed.append), poll_s=POLL_S, keep_s=60)
    task = asyncio.ensure_future(anext(hung.changes()))
    async with watching(quick, "dns:other:5") as (told, _):
        await until(lambda: {"10.0.0.2:5"} in told and len(failed) > 1)
    assert failed[:2] == ["timeout"] * 2
    zone.stuck.set()
    assert await task == {Endpoint("10.0.0.1:5")}


async def test_lookups_that_hang_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.discovery.lookup.MAX_RUNNING", 2)
    monkeypatch.setattr("orchestrator.discovery.dns.TIMEOUT_S", 0.01)
    zone = Zone(pool=["10.0.0.1"])
    zone.stuck.clear()
    async with watching(zone, "dns:pool:5") as (told, failed):
        await until(lambda: failed.count("error") > 3)
        assert failed[:2] == ["timeout"] * 2 and zone.asked == 2
        zone.stuck.set()
        await until(lambda: bool(told))


async def test_a_defect_of_a_source_is_not_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.discovery.watch.DEFECT_PAUSE_S", 0.001)

    class Broken:
        known = frozenset[Endpoint]()
        tries = 0

        async def changes(self) -> AsyncIterator[frozenset[Endpoint]]:
            self.tries += 1
            if self.tries < 3:
                raise KeyError("a defect")
            self.known = frozenset({Endpoint("a:1")})
            yield self.known

    failed: list[str] = []
    told: list[frozenset[Endpoint]] = []
    found: list[Source] = [Broken()]
    watch = Watch("draft", found, told.append, failed.append)
    watch.run()
    await until(lambda: bool(told))
    await watch.close()
    assert failed == ["defect"] * 2 and told == [{Endpoint("a:1")}]


# --- membership follows -----------------------------------------------------------------------------------------------


async def test_the_pool_follows_full_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pools(monkeypatch, targets=0).driver.pools.targets
    one, two, three = (Endpoint(f"t{i}:1", uid=str(i)) for i in range(3))
    pool.follow({one, two})
    assert set(pool.peers) == {"t0:1", "t1:1"}
    pool.follow({two, Endpoint("t2:1", "2", terminating=True)})
    assert set(pool.peers) == {"t1:1"}, "one that is about to end is not dialled"
    before = pool.peers["t1:1"]
    pool.follow({Endpoint("t1:1", "another"), three})
    assert set(pool.peers) == {"t1:1", "t2:1"} and pool.peers["t1:1"] is not before
    pool.follow(())
    assert not pool.peers


async def test_replicas_are_in_pools_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pools(monkeypatch, targets=0).driver.pools.targets
    pool.follow({Endpoint("t0:1", pool_name="large"), Endpoint("t1:1", "old"), Endpoint("t1:1", "new", pool_name="large")})
    assert {peer.name: peer.pool_name for peer in pool} == {"t0:1": "large", "t1:1": "large"}
    before = pool.peers.copy()
    pool.follow(
        {Endpoint("t0:1", pool_name="small"), Endpoint("t1:1", "new", pool_name="large"), Endpoint("t1:1", "old", terminating=True)}
    )
    assert {peer.name: peer.pool_name for peer in pool} == {"t0:1": "small", "t1:1": "large"} and pool.peers == before


async def test_replicas_are_bounded(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("orchestrator.pools.MAX_REPLICAS", 3)
    pool = Pools(monkeypatch, targets=0).driver.pools.targets
    pool.follow(Endpoint(f"t{i}:1") for i in range(5, 7))
    for _ in range(3):
        pool.follow(Endpoint(f"t{i}:1") for i in range(9))
    assert set(pool.peers) == {"t5:1", "t6:1", "t0:1"}, "who is here stays"
    assert [record.message for record in caplog.records].count("more replicas than are used (MAX_REPLICAS)") == 1
