"""Membership of the pools at run time: replicas that are added, removed and come back while sessions run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from orchestrator.breaker import Trouble
from orchestrator.discovery import Endpoint
from specdec.errors import Mismatch, Unavailable
from tests.fakes_driver import model_info
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle


def held(pools: Pools, *names: str) -> set[str]:
    return {pools.driver._live[name].target for name in names}


def newest(pools: Pools, name: str) -> ScriptedPeer:
    return pools.driver.pools.targets.peers[name]  # type: ignore[return-value]


async def test_a_target_that_is_added_takes_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=1, drafts=0)
    pools.driver.pools.targets.add("t9:1")
    newest(pools, "t9:1").rise()
    pools.driver.pools.targets.remove("t0:1")
    assert await fetch(pools.start("s")) == answer_of(prompt_of("s"), 20)
    await settle()
    assert newest(pools, "t9:1").released["s"] == 1


async def test_a_removed_target_finishes_what_it_holds_and_takes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=1, drafts=0)
    pools.driver.run()
    members = pools.driver.pools.targets
    old = pools.targets[0]
    handle = pools.start("s", count=40)
    members.remove("t0:1")
    assert members.peers["t0:1"] is old
    waits = pools.start("waits", k=0)
    await settle()
    assert held(pools, "waits") == {""}
    members.add("t1:1")
    newest(pools, "t1:1").rise()
    assert await fetch(handle) == answer_of(prompt_of("s"), 40)
    assert await fetch(waits) == answer_of(prompt_of("waits"), 20)
    assert old.seen["waits"] == 0 and old.released["s"] == 1
    assert "t0:1" not in members.peers and not members._leaving
    while members._ending:
        await asyncio.sleep(0)
    assert set(members._tasks) == {"t1:1"}
    await pools.driver.close()


async def test_one_that_is_added_again_while_it_leaves_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=1, drafts=0)
    old, members = pools.targets[0], pools.driver.pools.targets
    handle = pools.start("s", count=40)
    members.remove("t0:1")
    members.add("t0:1")
    other = pools.start("other")
    assert held(pools, "s", "other") == {"t0:1"}
    assert [len(tokens) for tokens in await asyncio.gather(fetch(handle), fetch(other))] == [40, 20]
    assert members.peers["t0:1"] is old


async def test_one_that_comes_back_later_is_dialled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=1, drafts=0)
    old, members = pools.targets[0], pools.driver.pools.targets
    members.remove("t0:1")
    members.add("t0:1")
    assert members.peers["t0:1"] is not old
    handle = pools.start("s")
    await settle()
    assert held(pools, "s") == {""}
    newest(pools, "t0:1").rise()
    old.fall()  # what becomes of the old connection is nobody's loss
    assert held(pools, "s") == {"t0:1"} and pools.driver._live["s"].generation.at.epoch == 1
    assert await fetch(handle) == answer_of(prompt_of("s"), 20)


async def test_another_process_under_the_address_takes_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=0, drafts=0)
    members = pools.driver.pools.targets
    members.add("t0:1", uid="a")
    newest(pools, "t0:1").rise()
    handle = pools.start("s", count=40)
    await settle(6)
    old = newest(pools, "t0:1")
    members.add("t0:1", uid="b")
    assert newest(pools, "t0:1") is not old and held(pools, "s") == {""}
    newest(pools, "t0:1").rise()
    assert held(pools, "s") == {"t0:1"}
    old.say()
    assert await fetch(handle) == answer_of(prompt_of("s"), 40)
    await settle()
    assert newest(pools, "t0:1").seen["s"] > 1


async def test_a_removed_draft_goes_once_its_sessions_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, drafts=2)
    handles = [pools.start(f"s{i}", count=40) for i in range(6)]
    pools.driver.pools.drafts.remove("d0:1")
    assert "d0:1" in pools.driver.pools.drafts.peers
    assert await asyncio.gather(*map(fetch, handles)) == [answer_of(prompt_of(f"s{i}"), 40) for i in range(6)]
    await settle()
    assert set(pools.driver.pools.drafts.peers) == {"d1:1"}


async def test_F160_a_terminating_target_finishes_what_it_holds_and_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=0, drafts=0)
    members = pools.driver.pools.targets
    one, two = Endpoint("t0:1", "a"), Endpoint("t1:1", "b")
    members.follow({one})
    newest(pools, "t0:1").rise()
    handle = pools.start("s", count=40)
    await settle(3)
    members.follow({replace(one, terminating=True)})
    waits = pools.start("waits")
    await settle(3)
    assert held(pools, "s") == {"t0:1"} and held(pools, "waits") == {""}, "rather none than one that ends"
    old = newest(pools, "t0:1")
    members.follow({replace(one, terminating=True), two})
    newest(pools, "t1:1").rise()
    assert await fetch(handle) == answer_of(prompt_of("s"), 40) and await fetch(waits) == answer_of(prompt_of("waits"), 20)
    await settle()
    assert old.released["s"] == 1 and not old.seen["waits"] and set(members.peers) == {"t1:1"}
    members.follow({replace(one, terminating=True), two})
    assert set(members.peers) == {"t1:1"}, "it is not dialled again"


async def test_F161_another_pod_at_the_address_of_one_that_ends_is_another_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=0, drafts=0)
    members = pools.driver.pools.targets
    members.follow({Endpoint("t0:1", "a")})
    old = newest(pools, "t0:1")
    old.rise()
    handle = pools.start("s", count=40)
    await settle(3)
    members.follow({Endpoint("t0:1", "a", terminating=True), Endpoint("t0:1", "z")})
    assert newest(pools, "t0:1") is not old and held(pools, "s") == {""}, "what it held is gone"
    newest(pools, "t0:1").rise()
    assert await fetch(handle) == answer_of(prompt_of("s"), 40)


async def test_another_model_of_the_same_name_takes_over_when_the_first_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """While anybody serves the first it is refused, whatever it is called. Calls that never cease must not shut it out for ever, nor may an
    answer of the first go on with it."""
    pools = Pools(monkeypatch, targets=2, drafts=0, placement_wait_ms=1000)
    old, new = pools.targets
    clock = [100.0]
    monkeypatch.setattr("orchestrator.pools.time", SimpleNamespace(monotonic=lambda: clock[0]))
    old.fall()
    for target, weights in ((old, "a"), (new, "b")):
        assert target.info is not None
        target.info = replace(target.info, model_fingerprint=weights)
    new.connected = False
    old.rise()
    accept = partial(pools.driver.pools.accept, new, new.info)  # type: ignore[arg-type]
    with pytest.raises(Mismatch, match="another model of that name"):
        accept()
    handle = pools.start("s", count=40)
    old.fall()
    clock[0] += 0.9
    with pytest.raises(Mismatch):
        accept()  # the first may come back
    clock[0] += 0.2
    accept()
    assert pools.driver.model is None
    with pytest.raises(Unavailable, match="another model") as told:
        await fetch(handle)
    assert told.value.output_tokens is None  # it cannot be resumed
    new.rise()
    assert pools.driver.model is not None and pools.driver.model.model_fingerprint == "b"
    assert await fetch(pools.start("t")) == answer_of(prompt_of("t"), 20)
    await settle()
    pools.check_empty()


async def test_clients_are_told_of_a_draft_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection alone is no use to them."""
    pools = Pools(monkeypatch, targets=1, drafts=2)
    driver, (shut_out, leaver) = pools.driver, pools.drafts
    assert driver.draft_available
    for _ in range(2):
        driver.pools.drafts.ejection.bad(shut_out.name, Trouble.LOST)
    assert shut_out.connected and driver.draft_available, "the other one serves"
    driver.pools.drafts.remove(leaver.name)
    assert not driver.draft_available
    driver.pools.drafts.add("d9:1")
    assert not driver.draft_available, "it is not connected yet"
    driver.pools.drafts.peers["d9:1"].rise()  # type: ignore[attr-defined]
    assert driver.draft_available
    driver.pools.drafts.draining.add("d9:1")
    assert not driver.draft_available
    await driver.close()


def test_who_does_not_tell_its_model_is_known_by_its_name() -> None:
    told, silent = (model_info(model_fingerprint=text) for text in ("a", ""))
    assert told.goes_on_at(silent) and silent.goes_on_at(told) and silent.goes_on_at(silent)
    assert told.goes_on_at(replace(told, numerics_fingerprint="else", boot_id="else", max_model_len=9, dtype="else"))
    for changed in (
        {"model_fingerprint": "b"},
        {"eos_token_ids": (9,)},
        {"vocabulary_fingerprint": b"b"},
        {"vocab_size": 9},
        {"model": "b"},
    ):
        other = replace(told, **changed)  # type: ignore[arg-type]
        assert not told.goes_on_at(other) and not other.goes_on_at(told), changed


async def test_what_is_admitted_fits_every_target(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=0)
    for target, window, most in zip(pools.targets, (500, 400), (3, 5), strict=True):
        assert target.info is not None
        target.info = replace(target.info, max_model_len=window, max_num_speculative_tokens=most)
    pools.driver.pools.up(pools.targets[0])  # type: ignore[arg-type]
    model = pools.driver.model
    assert model is not None and (model.max_model_len, model.max_num_speculative_tokens) == (400, 3)
