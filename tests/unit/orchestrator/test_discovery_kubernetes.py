"""Discovery by a Kubernetes API server over HTTP that does what servers do: it forgets, falls silent, cuts, refuses, comes back."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from orchestrator.discovery import Endpoint, Watch, sources
from orchestrator.discovery.backoff import Backoff
from orchestrator.discovery.cluster import Cluster, Refused
from orchestrator.discovery.kubernetes import DEFAULT_PACE, JITTER, Kubernetes, Pace
from orchestrator.discovery.names import Service
from orchestrator.discovery.source import Trouble
from tests import api_server
from tests.api_server import ApiServer, endpoint, slice_of
from tests.certificates import LOOPBACK, Authority
from tests.waiting import until

CONFIG = "kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
LONG = Pace(watch_s=600, connect_s=5, list_s=5, first_pause_s=0.01, last_pause_s=0.05, calm_s=60)
SHORT = Pace(watch_s=1, connect_s=5, list_s=5, first_pause_s=0.01, last_pause_s=0.05, calm_s=60)
DEAF = replace(SHORT, watch_s=0.1, margin_s=0.1)
A, B, C = "10.0.0.1", "10.0.0.2", "10.0.0.3"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ApiServer]:
    """With one replica, and a kubeconfig that leads there."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with ApiServer().serving() as made:
        monkeypatch.setattr(CONFIG, str(made.kubeconfig(tmp_path / "config")))
        made.second_s = 0.1
        made.put(slice_of("s", endpoint(A, "a")))
        yield made


class Follower:
    """What is told of one Service."""

    def __init__(self, service: Service, pace: Pace) -> None:
        self.told: list[set[str]] = []
        self.endpoints: frozenset[Endpoint] = frozenset()
        self.failed: list[str] = []
        self.source = Kubernetes(service, Trouble("target", service.service, self.failed.append), pace)
        self.watch = Watch("target", [self.source], self.changed, self.failed.append)

    def changed(self, endpoints: frozenset[Endpoint]) -> None:
        self.endpoints = endpoints
        self.told.append({e.address.partition(":")[0] for e in endpoints})

    async def sees(self, *addresses: str) -> None:
        await until(lambda: bool(self.told) and self.told[-1] == set(addresses))


@contextlib.asynccontextmanager
async def following(pace: Pace = LONG, service: Service | None = None) -> AsyncIterator[Follower]:
    made = Follower(service or Service("", "target", "grpc"), pace)
    made.watch.run()
    try:
        yield made
    finally:
        await made.watch.close()


def write(file: Path, text: str) -> None:
    """In one moment, as Kubernetes swaps a token."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    fresh.replace(file)


def unseen(server: ApiServer, *slices: dict[str, Any]) -> None:
    """The state becomes this, and no event tells it."""
    with server.changed:
        server.version += 1
        stamped = [{**one, "metadata": {**one["metadata"], "resourceVersion": str(server.version)}} for one in slices]
        server.slices = {one["metadata"]["name"]: one for one in stamped}


async def test_replicas_come_and_go_with_one_list(server: ApiServer) -> None:
    async with following() as seen:
        await seen.sees(A)
        assert seen.endpoints == {Endpoint(f"{A}:50052", "a")}
        server.put(slice_of("s2", endpoint(B, "b")))
        await seen.sees(A, B)
        server.put(slice_of("other", endpoint(C, "c"), service="other"))
        server.put(slice_of("s", endpoint(C, "c")))
        await seen.sees(B, C)
        server.delete("s2")
        await seen.sees(C)
    assert (server.count(watch=False), server.count(watch=True)) == (1, 1) and not seen.failed
    assert server.asked[1].version == "2", "it goes on from the list's version"


@pytest.mark.parametrize("again", [1, 2, 4])
@pytest.mark.parametrize("how", [api_server.gone, api_server.gone_as_event])
async def test_F154_a_version_that_is_too_old_means_a_new_list(server: ApiServer, how: Any, again: int) -> None:
    server.watches.extend([how] * again)
    async with following() as seen:
        await until(lambda: server.count(watch=True) == again + 1)
        unseen(server, slice_of("s", endpoint(B, "b")))
        server.put(slice_of("s2", endpoint(C, "c")))
        await until(lambda: C in seen.told[-1])
    assert server.count(watch=False) == again + 1 and seen.failed == ["gone"] * again


@pytest.mark.parametrize("how", [api_server.gone, api_server.gone_as_event, api_server.Handler.end])
async def test_F154_whatever_ends_at_once_makes_no_hot_loop(server: ApiServer, how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    plain = Backoff.pause

    def pause(self: Backoff, *about: Any) -> float:
        pauses.append(plain(self, *about))
        return pauses[-1]

    monkeypatch.setattr(Backoff, "pause", pause)

    def end(handler: api_server.Handler) -> None:
        if how is api_server.Handler.end:
            handler.begin()
        how(handler)

    server.watches.extend([end] * 1000)
    async with following(replace(LONG, first_pause_s=0.03, last_pause_s=0.12)) as seen:
        await until(lambda: server.count(watch=False) >= 7)
        lists = [asked.at_s for asked in server.asked if not asked.watch]
        assert min(pauses[2:]) >= 0.06, f"half of the longest pause at least: {pauses}"
        assert all(after - before >= pause for (before, after), pause in zip(pairwise(lists), pauses, strict=False))
        server.watches.clear()
        server.put(slice_of("s2", endpoint(B, "b")))
        await seen.sees(A, B)


@pytest.mark.parametrize("silence", [api_server.half_open, api_server.mute])
async def test_F156_a_watch_that_is_silent_for_ever_is_given_up(server: ApiServer, silence: Any) -> None:
    server.watches.append(silence)
    async with following(DEAF) as seen:
        await seen.sees(A)
        await until(lambda: server.count(watch=True) >= 1)
        server.put(slice_of("s", endpoint(B, "b")))
        await seen.sees(B)
        assert seen.failed[:1] == ["timeout"]
    pace = DEFAULT_PACE
    assert pace.watch_s * (1 + JITTER) + pace.margin_s + pace.first_pause_s + pace.connect_s + pace.list_s < 60 + pace.list_s / 2


async def test_F157_old_events_bring_nobody_back(server: ApiServer) -> None:
    server.put(slice_of("old", endpoint(B, "b")))
    server.delete("old")
    server.watches.append(api_server.saying(since=0))
    async with following() as seen:
        await seen.sees(A)
        server.put(slice_of("s2", endpoint(C, "c")))
        await seen.sees(A, C)
    assert seen.told == [{A}, {A, C}] and not seen.failed


async def test_F158_a_token_that_is_exchanged(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    monkeypatch.setattr(CONFIG, str(server.kubeconfig(tmp_path / "config", tokenFile=str(file))))
    server.token = "first"
    file.write_text("first")
    async with following(SHORT) as seen:
        await seen.sees(A)
        write(file, "second")
        server.token = "second"
        server.put(slice_of("s", endpoint(B, "b")))
        await seen.sees(B)
        await until(lambda: server.asked[-1].token == "Bearer second" and server.asked[-1].watch)
        assert not seen.failed, "it is nobody's fault"
        server.token = "third"
        await until(lambda: seen.failed.count("denied") > 3)
        assert seen.told[-1] == {B}
        assert len([record for record in caplog.records if "401" in record.__dict__.get("reason", "")]) == 1, "said once"
        write(file, "third")
        server.put(slice_of("s", endpoint(C, "c")))
        await seen.sees(C)


async def test_F158_the_service_account_of_a_pod(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.issue("api", *LOOPBACK)
    token, namespace = tmp_path / "token", tmp_path / "namespace"
    token.write_text("first")
    namespace.write_text(f"{api_server.NAMESPACE}\n")
    with ApiServer((files.cert, files.key)).serving() as server:
        server.second_s = 0.1
        for name, value in (("HOST", "127.0.0.1"), ("PORT", str(server.port))):
            monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_TOKEN_FILENAME", str(token))
        monkeypatch.setattr("kubernetes.config.incluster_config.SERVICE_CERT_FILENAME", str(authority.ca))
        monkeypatch.setattr("orchestrator.discovery.cluster.NAMESPACE_FILE", namespace)
        monkeypatch.setattr(CONFIG, str(tmp_path / "nothing"))
        server.token = "first"
        server.put(slice_of("s", endpoint(A, "a")))
        async with following(SHORT) as seen:
            await seen.sees(A)
            write(token, "second")
            server.token = "second"
            server.put(slice_of("s", endpoint(B, "b")))
            await seen.sees(B)
            assert not seen.failed


async def test_F159_what_is_deleted_while_a_watch_is_down(server: ApiServer) -> None:
    server.put(slice_of("s2", endpoint(B, "b")))
    server.watches.append(api_server.reset)
    server.lists.extend([api_server.Handler.list, lambda handler: (unseen(server, slice_of("s2", endpoint(B, "b"))), handler.list())[1]])
    async with following() as seen:
        await seen.sees(B)
    assert seen.told == [{A, B}, {B}] and seen.failed == ["error"]


async def test_F159_what_no_event_told_is_found_by_the_next_list(server: ApiServer) -> None:
    async with following(SHORT) as seen:
        await seen.sees(A)
        unseen(server, slice_of("s", endpoint(B, "b")))
        await seen.sees(B)
        assert not seen.failed


async def test_F161_evicted_and_replaced(server: ApiServer) -> None:
    server.put(slice_of("s", endpoint(A, "a"), endpoint(B, "b")))
    async with following() as seen:
        await seen.sees(A, B)
        server.put(slice_of("s", endpoint("", "a"), endpoint(B, "b")))
        await seen.sees(B)
        server.put(slice_of("s", endpoint(B, "c")))
        await until(lambda: seen.endpoints == {Endpoint(f"{B}:50052", "c")})


async def test_F162_a_handler_that_fails_loses_no_event(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    applied: list[set[str]] = []
    async with following() as seen:
        plain = seen.changed

        def fails_once(endpoints: frozenset[Endpoint]) -> None:
            plain(endpoints)
            if len(seen.told) == 2:
                raise RuntimeError("of the handler")
            applied.append(seen.told[-1])

        seen.watch._changed = fails_once
        await seen.sees(A)
        server.put(slice_of("s", endpoint(B, "b")))
        await until(lambda: len(seen.told) == 2)
        server.put(slice_of("s", endpoint(C, "c")))
        await until(lambda: applied == [{A}, {C}])
        assert seen.failed == ["defect"] and server.count(watch=True) == 1
        monkeypatch.setattr("orchestrator.discovery.watch.DEFECT_PAUSE_S", 0.01)
        del seen.told[1:]
        server.put(slice_of("s", endpoint(B, "b")))
        await until(lambda: applied[2:] == [{B}])  # the last one is not lost either
        assert seen.failed == ["defect"] * 2
    assert "a change of the pool failed" in caplog.text


async def test_F162_what_is_no_event_is_skipped(server: ApiServer) -> None:
    broken = {"type": "MODIFIED", "object": {"metadata": {"name": "s", "resourceVersion": "99"}, "endpoints": 7}}
    server.watches.append(api_server.saying(api_server.BOOKMARK, b"{not json\n", b"7\n", {"type": "NEW"}, broken, {"object": {}}))
    async with following() as seen:
        await seen.sees(A)
        server.put(slice_of("s", endpoint(B, "b")))
        await seen.sees(B)
    assert seen.failed == ["malformed"] * 5 and server.count(watch=True) == 1


@pytest.mark.parametrize(("how", "kind"), [(api_server.unwell, "error"), (api_server.dribble, "timeout"), (api_server.mute, "timeout")])
async def test_what_was_known_stands_while_no_list_is_to_be_had(
    server: ApiServer, how: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with following(replace(SHORT, list_s=0.2) if kind == "timeout" else SHORT) as seen:
        await seen.sees(A)
        server.lists.extend([how] * 1000)
        await until(lambda: seen.failed.count(kind) >= 2)
        assert seen.told == [{A}] and seen.watch.known == seen.endpoints and set(seen.failed) == {kind}
        assert (age := seen.watch.age_s()) is not None and age > 0.02
        server.put(slice_of("s", endpoint(B, "b")))
        server.lists.clear()
        await seen.sees(B)
        await until(lambda: "discovery answers again" in caplog.messages)
    assert caplog.messages.count("discovery fails: what was known stands") == 1


async def test_what_was_known_stands_while_nobody_is_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    file = tmp_path / "config"
    monkeypatch.setattr(CONFIG, str(file))
    async with following(SHORT) as seen:
        await until(lambda: seen.failed.count("error") > 1)  # no kubeconfig either
        with ApiServer().serving() as server:
            server.put(slice_of("s", endpoint(A, "a")))
            server.kubeconfig(file)
            await seen.sees(A)
        seen.failed.clear()
        await until(lambda: seen.failed.count("error") > 1)
        assert seen.told == [{A}]


@pytest.mark.parametrize(
    ("service", "kind", "said"),
    [
        (Service("elsewhere", "target", "grpc"), "denied", "403"),
        (Service("", "nobody", "grpc"), "empty", "kubernetes.io/service-name=nobody"),
        (Service("", "target", "http"), "port", "grpc 50052"),
    ],
)
async def test_an_entry_that_leads_nowhere_says_why(
    server: ApiServer, caplog: pytest.LogCaptureFixture, service: Service, kind: str, said: str
) -> None:
    async with following(SHORT, service) as seen:
        await until(lambda: seen.failed.count(kind) > 1)
    assert not seen.told and set(seen.failed) == {kind}
    (line,) = caplog.records
    assert said in line.__dict__["reason"] and line.__dict__["entry"] == service.service


async def test_without_credentials_it_says_what_to_give(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    for content in (None, "", "{}", "7"):
        file = tmp_path / f"config{content}"
        if content is not None:
            file.write_text(content)
        monkeypatch.setattr(CONFIG, str(file))
        caplog.clear()
        async with following() as seen:
            await until(lambda: seen.failed[:1] == ["error"])  # noqa: B023
        assert "KUBECONFIG" in caplog.records[0].__dict__["reason"]


async def test_entries_of_all_kinds_are_one_pool(server: ApiServer) -> None:
    told: list[frozenset[Endpoint]] = []
    entries = ("h:9", "small=kubernetes:///target:grpc", f"large=kubernetes://{api_server.NAMESPACE}/other:7")
    server.put(slice_of("o", endpoint(B, "b"), endpoint(C, "c", ready=False, terminating=True), service="other", p=7))
    watch = Watch("draft", sources("draft", entries, None, print, poll_s=1, keep_s=1), told.append, print)  # type: ignore[arg-type]
    watch.run()
    await until(lambda: bool(told) and len(told[-1]) == 4)
    await watch.close()
    small, large = Endpoint(f"{A}:50052", "a", pool_name="small"), Endpoint(f"{B}:7", "b", pool_name="large")
    assert told[-1] == {Endpoint("h:9"), small, large, Endpoint(f"{C}:7", "c", True, "large")}


async def test_the_end_waits_for_no_watch(server: ApiServer) -> None:
    before = threading.active_count()
    async with following() as seen:
        await seen.sees(A)
        await until(lambda: server.count(watch=True) == 1)
        began = time.monotonic()
    assert time.monotonic() - began < 2
    await until(lambda: not any(thread.name.startswith(("watch target", "hang up")) for thread in threading.enumerate()))
    assert threading.active_count() <= before + 2, "the server's own"


def test_who_hangs_up_while_the_answer_is_on_its_way_is_heard(server: ApiServer) -> None:
    """A watch would else keep its thread and connection until its time-out."""
    cluster = Cluster(Service("", "target", "grpc"), 5.0)
    cluster.listing(5.0)
    ask = cluster._ask

    def hung_up_meanwhile(*asked: Any, **about: Any) -> Any:
        response = ask(*asked, **about)
        cluster.hang_up()
        return response

    cluster._ask = hung_up_meanwhile
    with pytest.raises(Refused, match="hung up"):
        cluster.event(3.0, 3.0)


def test_the_client_is_imported_only_for_a_service() -> None:
    import subprocess
    import sys

    program = "import sys, orchestrator.driver; print(sorted(m for m in sys.modules if m.split('.')[0] in ('kubernetes', 'urllib3')))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(ran.stdout.replace("'", '"')) == []
