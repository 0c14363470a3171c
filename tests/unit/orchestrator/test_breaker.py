"""Who is shut out, for how long, and how it comes back. F51, F82, F83, F84: every lie of a draft costs its proposals and no more."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import ejection as ejection_module
from orchestrator.breaker import CALM_S, FIRST_PAUSE_S, HALF_LIFE_S, LIMIT, PROBE_S, PROBES, Breaker, State, Trouble
from orchestrator.observe import Observer, _endpoints
from orchestrator.peers import Heard
from specdec import terms
from specdec.hashing import prefix_hash
from tests.unit.orchestrator.scripted_pools import VOCAB, Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.timeout(30)
MAX_S = 30.0


# --- the breaker alone ------------------------------------------------------------------------------------------------


def shut(breaker: Breaker, now_s: float) -> None:
    while not breaker.bad(Trouble.LOST, now_s):
        pass


@pytest.mark.parametrize("trouble", list(Trouble))
def test_each_kind_of_trouble_opens_by_its_weight_and_is_forgotten_with_time(trouble: Trouble) -> None:
    needed = -(-LIMIT // trouble.weight)
    quick, slow = Breaker(MAX_S, 0.0), Breaker(MAX_S, 0.0)
    assert [quick.bad(trouble, 0.0) for _ in range(int(needed))] == [False] * int(needed - 1) + [True]
    assert not any(slow.bad(trouble, i * 2 * HALF_LIFE_S) for i in range(200))
    assert slow.forgotten(1e6) and not quick.forgotten(1e6)


def test_much_good_outweighs_trouble_but_not_lost_connections() -> None:
    liar, flapping = Breaker(MAX_S, 0.0), Breaker(MAX_S, 0.0)
    for i in range(200):
        for _ in range(3):
            liar.good(i / 10)
            flapping.good(i / 10)
        assert not liar.bad(Trouble.STALL, i / 10)
    assert [flapping.bad(Trouble.LOST, 20.0), flapping.bad(Trouble.LOST, 20.5)] == [False, True]


def test_open_half_open_and_closed() -> None:
    breaker = Breaker(MAX_S, 0.0)
    shut(breaker, 10.0)
    assert breaker.state(10.0) is State.OPEN and not breaker.allows(10.0 + FIRST_PAUSE_S - 0.01)
    at = 10.0 + FIRST_PAUSE_S
    assert breaker.state(at) is State.HALF_OPEN and breaker.allows(at)
    assert breaker.took(at) and not breaker.allows(at)  # one at a time
    assert breaker.allows(at + PROBE_S)  # the probe said nothing
    assert [breaker.good(at + 0.1) for _ in range(PROBES)] == [False] * (PROBES - 1) + [True]
    assert breaker.state(at + 0.1) is State.CLOSED and breaker.allows(at + 0.1) and not breaker.took(at + 0.1)


def test_each_pause_is_longer_until_it_was_calm() -> None:
    breaker, now, pauses = Breaker(6.0, 0.0), 0.0, []
    shut(breaker, now)
    for _ in range(4):
        pauses.append(breaker.pause_s)
        now += breaker.pause_s
        assert not any(breaker.good(now) for _ in range(PROBES - 1)) and breaker.bad(Trouble.LATE, now)
    assert pauses == [1.0, 2.0, 4.0, 6.0]
    now += breaker.pause_s
    for _ in range(PROBES):
        breaker.good(now)
    shut(breaker, now + 1)
    assert breaker.pause_s == 6.0  # it was closed for a moment only
    now += 1 + breaker.pause_s
    for _ in range(PROBES):
        breaker.good(now)
    shut(breaker, now + CALM_S)
    assert breaker.pause_s == FIRST_PAUSE_S


def test_a_breaker_that_is_switched_off_never_opens() -> None:
    breaker = Breaker(0.0, 0.0)
    assert not any(breaker.bad(Trouble.LOST, 0.0) for _ in range(100)) and breaker.allows(0.0)


steps = st.lists(st.tuples(st.floats(0, 3), st.sampled_from(["good", "took", *Trouble])), max_size=150)


@given(steps)
def test_whatever_happens_it_comes_back_and_probes_are_few(steps: list[tuple[float, Any]]) -> None:
    breaker, now, taken = Breaker(4.0, 0.0), 0.0, []
    for after, what in steps:
        now += after
        if what == "good":
            breaker.good(now)
        elif what == "took":
            if breaker.allows(now) and breaker.took(now):
                taken.append(now)
        elif breaker.bad(what, now):
            taken.clear()
        assert breaker.pause_s <= 4.0
    assert all(later - earlier >= PROBE_S for earlier, later in zip(taken, taken[1:], strict=False))
    now += 4.0 + PROBE_S
    assert breaker.allows(now)
    for _ in range(PROBES):
        breaker.good(now)
    assert breaker.state(now) is State.CLOSED


# --- lies of a draft, one at a time -----------------------------------------------------------------------------------

Lie = Callable[[terms.Proposal, list[int]], Heard]


def said(*items: Any, faults: int = 0) -> Heard:
    return Heard(items, faults=faults)


def drawn(*pairs: tuple[list[int], list[float]]) -> tuple[terms.DraftDistribution, ...]:
    return tuple(terms.DraftDistribution(tuple(ids), struct.pack(f"<{len(probs)}f", *probs)) for ids, probs in pairs)


def with_q(p: terms.Proposal, ids: list[int], probs: list[float]) -> Heard:
    return said(replace(p, tokens=p.tokens[:1], distributions=drawn((ids, probs))))


LIES: dict[str, tuple[Lie, str]] = {  # what is said in place of a right proposal, and the counter that shows it; empty = harmless
    "one past the vocabulary": (lambda p, held: said(replace(p, tokens=(VOCAB, 1))), "broken"),
    "-1": (lambda p, held: said(replace(p, tokens=(2**32 - 1,))), "broken"),
    "2^31-1": (lambda p, held: said(replace(p, tokens=(2**31 - 1,))), "broken"),
    "0 ids": (lambda p, held: said(replace(p, tokens=())), "broken"),
    "K+5 ids": (lambda p, held: said(replace(p, tokens=tuple(answer_of(held, 3)) + (1,) * 5)), ""),
    "3000 ids": (lambda p, held: said(replace(p, tokens=(1,) * 3000)), ""),
    "wrong tokens": (lambda p, held: said(replace(p, tokens=tuple((t + 1) % VOCAB for t in p.tokens))), ""),
    "q is NaN": (lambda p, held: with_q(p, [p.tokens[0]], [float("nan")]), "broken"),
    "q is infinite": (lambda p, held: with_q(p, [p.tokens[0]], [float("inf")]), "broken"),
    "q is negative": (lambda p, held: with_q(p, [p.tokens[0], (p.tokens[0] + 1) % VOCAB], [2.0, -1.0]), "broken"),
    "q of half a token": (lambda p, held: with_q(p, [p.tokens[0]], [0.5]), "broken"),
    "q of a foreign id": (lambda p, held: with_q(p, [p.tokens[0], VOCAB], [0.5, 0.5]), "broken"),
    "q of the wrong length": (lambda p, held: said(replace(p, distributions=(terms.DraftDistribution((1,), b"\0\0\x80"),))), "broken"),
    "broken on the wire": (lambda p, held: said(faults=3), "broken"),
    "another session": (lambda p, held: said(replace(p, session_id="nobody")), ""),
    "another epoch": (lambda p, held: said(replace(p, epoch=p.epoch + 1)), "stale"),
    "another length": (lambda p, held: said(replace(p, prefix_length=p.prefix_length + 1)), "stale"),
    "another hash": (lambda p, held: said(replace(p, prefix_hash=p.prefix_hash ^ 1)), "stale"),
    "a past that was not": (
        lambda p, held: said(replace(p, prefix_length=len(held) - 1, prefix_hash=prefix_hash(held[:-1]), tokens=(held[-1] ^ 1,) * 3)),
        "stale",
    ),
    "the same again and again": (lambda p, held: said(*[p] * 50), "stale"),
    "resync": (lambda p, held: said(terms.Resync(p.session_id, p.epoch, 1)), "resync"),
    "refused for good": (lambda p, held: said(terms.Refused(p.session_id, p.epoch, "no", 0)), ""),
    "refused for a moment": (lambda p, held: said(terms.Refused(p.session_id, p.epoch, "no", 1)), ""),
    "silence": (lambda p, held: said(), ""),
}
SHUT_OUT = {name for name, (_, counted) in LIES.items() if counted == "broken"} | {"resync"}


def lie(peer: ScriptedPeer, tell: Lie) -> None:
    honest = peer._draft

    def draft(item: Any) -> list[Any]:
        for proposal in honest(item):
            heard = tell(proposal, peer.held[item.session_id])
            if any(isinstance(said, terms.Refused) for said in heard.items):
                del peer.held[item.session_id]
            peer._listener.heard(peer, heard)  # type: ignore[arg-type]
        return []

    peer._draft = draft  # type: ignore[method-assign]


@pytest.mark.parametrize("name", LIES)
async def test_F51_every_lie_costs_its_proposals_and_no_more(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """All sessions have the target's text, with the liar alone and beside an honest draft, and nothing is left of them."""
    tell, counted = LIES[name]
    counts: dict[str, int] = {}
    monkeypatch.setattr(Observer, "count", lambda self, what, amount: counts.update({what: counts.get(what, 0) + amount}))
    for drafts in (1, 2):
        counts.clear()
        pools = Pools(monkeypatch, drafts=drafts, max_grace_ms=2)
        lie(pools.drafts[0], tell)
        got = await asyncio.wait_for(asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(12))), 20)
        assert got == [answer_of(prompt_of(f"s{i}"), 20) for i in range(12)]
        assert not counted or counts.get(counted)
        assert pools.driver.pools.drafts.ejection.closed("d0:1") == (name not in SHUT_OUT)
        await settle()
        pools.check_empty()


async def test_F82_sessions_leave_a_liar_for_a_draft_that_helps(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    pools = Pools(monkeypatch, drafts=2)
    lie(pools.drafts[0], LIES["-1"][0])
    handles = [pools.start(f"s{i}", count=200) for i in range(12)]
    got = await asyncio.wait_for(asyncio.gather(*map(fetch, handles)), 20)
    assert got == [answer_of(prompt_of(f"s{i}"), 200) for i in range(12)]
    assert len(pools.drafts[1].seen) == 12 and pools.drafts[0].not_found == 0
    await settle()
    pools.check_empty()
    lines = [record for record in caplog.records if record.message == "replica is shut out for a while"]
    assert len(lines) == 1 and (lines[0].peer, lines[0].reason) == ("d0:1", "malformed")  # type: ignore[attr-defined]


async def test_F82_twin_a_breaker_that_never_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Breaker, "bad", lambda self, trouble, now_s: False)
    pools = Pools(monkeypatch, drafts=2)
    lie(pools.drafts[0], LIES["-1"][0])
    await asyncio.gather(*(fetch(pools.start(f"s{i}", count=200)) for i in range(12)))
    assert len(pools.drafts[1].seen) < 12


async def test_F82_one_probe_then_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that tells the truth again serves again; meanwhile nobody drafts, and that shows."""
    now = [0.0]
    monkeypatch.setattr(ejection_module, "_now", lambda: now[0])
    pools = Pools(monkeypatch)
    draft, driver = pools.drafts[0], pools.driver
    honest = draft._draft
    lie(draft, LIES["-1"][0])
    await asyncio.gather(*(fetch(pools.start(f"a{i}")) for i in range(4)))
    assert not driver.pools.drafts.serves and not driver.pools.drafts.ejection.allows("d0:1")
    before = sum(draft.seen.values())
    assert await fetch(pools.start("meanwhile")) == answer_of(prompt_of("meanwhile"), 20)
    assert sum(draft.seen.values()) == before
    draft._draft = honest  # type: ignore[method-assign]
    handles = [pools.start(f"b{i}", count=400) for i in range(6)]
    await settle(5)
    now[0] += FIRST_PAUSE_S
    driver.again("draft")
    assert driver.pools.drafts.places.sessions["d0:1"] == 1  # the probe
    got = await asyncio.gather(*map(fetch, handles))
    assert got == [answer_of(prompt_of(f"b{i}"), 400) for i in range(6)]
    assert driver.pools.drafts.serves and sum(name.startswith("b") for name in draft.seen) == 6
    await settle()
    pools.check_empty()


async def test_a_target_that_keeps_failing_is_left_alone_unless_it_is_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2, drafts=0)
    bad, good = pools.targets
    for _ in range(2):
        bad.fall()
        bad.rise()
    for i in range(10):
        await fetch(pools.start(f"s{i}"))
    assert not bad.seen and len(good.seen) == 10
    good.fall()
    assert await fetch(pools.start("last")) == answer_of(prompt_of("last"), 20)
    assert bad.seen


async def test_an_idle_replica_is_probing_when_its_pause_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.breaker.FIRST_PAUSE_S", 0.02)
    pools = Pools(monkeypatch, targets=2, drafts=0)
    bad, _ = pools.targets

    def shown() -> dict[str, float]:
        return {labels["state"]: count for count, labels in _endpoints(pools.driver) if labels["pool"] == "target" and count}

    for _ in range(2):
        bad.fall()
        assert shown() == {"up": 1, "down": 1}
        bad.rise()
    assert shown() == {"up": 1, "ejected": 1}
    async with asyncio.timeout(20):
        while "ejected" in shown():
            await asyncio.sleep(0.005)
    assert shown() == {"up": 1, "probing": 1}
    pools.driver.pools.targets.ejection.bad("t0:1", Trouble.FAILED)
    assert shown() == {"up": 1, "ejected": 1}, "one more trouble, and it is out again"
    async with asyncio.timeout(20):
        while "ejected" in shown():
            await asyncio.sleep(0.005)
    for _ in range(PROBES):
        pools.driver.pools.targets.ejection.good("t0:1")
    assert shown() == {"up": 2}


@pytest.mark.parametrize("drafts", [1, 2])
async def test_a_draft_that_is_late_is_shut_out_only_where_there_is_another(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Its proposals never come in time, which on a slow machine may be so for the first second."""
    pools = Pools(monkeypatch, drafts=drafts, max_grace_ms=0)
    lie(pools.drafts[0], LIES["silence"][0])
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}", count=200)) for i in range(12)))
    assert got == [answer_of(prompt_of(f"s{i}"), 200) for i in range(12)]
    assert pools.driver.pools.drafts.ejection.closed("d0:1") == (drafts == 1)
    assert pools.driver.pools.drafts.serves
    if drafts == 2:
        pools.drafts[1].fall()
        assert not pools.driver.pools.drafts.serves, "what was held against it stays"


@pytest.mark.parametrize("late", [True, False], ids=["late", "stalled"])
async def test_drafts_that_are_all_late_are_all_kept(monkeypatch: pytest.MonkeyPatch, late: bool) -> None:
    """No other would serve the sessions better, and each that moves costs a prompt's work. The twin is told that another is far better."""
    for twin in (False, True):
        pools = Pools(monkeypatch, drafts=2, max_grace_ms=0 if late else 1)
        if twin:
            monkeypatch.setattr("orchestrator.lateness.Lateness.far_better", lambda self, name: ["d0:1", "d1:1"])
        for draft in pools.drafts:
            lie(draft, LIES["silence"][0])
        got = await asyncio.gather(*(fetch(pools.start(f"s{i}", count=200)) for i in range(24)))
        assert got == [answer_of(prompt_of(f"s{i}"), 200) for i in range(24)]
        ejection = pools.driver.pools.drafts.ejection
        assert all(map(ejection.closed, ("d0:1", "d1:1"))) is not twin


@pytest.mark.parametrize(
    ("drafts", "mine", "other", "counts"),
    [
        (1, None, None, True),
        (2, None, None, True),  # all sessions of a target may share one draft: what the other is worth nobody knows yet
        (2, 0.0, None, True),
        (2, 0.0, 0.0, False),  # all are slow
        (2, 0.0, 1.0, True),
        (2, 0.9, 1.0, False),
    ],
)
async def test_whose_stalls_count(
    monkeypatch: pytest.MonkeyPatch, drafts: int, mine: float | None, other: float | None, counts: bool
) -> None:
    pool = Pools(monkeypatch, drafts=drafts).driver.pools.drafts
    for name, in_time in (("d0:1", mine), ("d1:1", other)):
        for number in range(0 if in_time is None else 100):
            pool._lateness.round(name, number >= 100 * (in_time or 0.0))
    for _ in range(int(LIMIT) + 1):
        pool.stalled("d0:1")
    assert pool.ejection.closed("d0:1") is not counts


async def test_a_draft_that_drains_is_none_that_serves(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody is placed there any more: the gauge and the log are to say that the targets are alone."""
    caplog.set_level(logging.INFO)
    pools = Pools(monkeypatch)
    draft, drafts = pools.drafts[0], pools.driver.pools.drafts
    assert drafts.serves
    for _ in range(2):
        pools.driver.pools.heard(draft, Heard((), beat=terms.DraftLoad(1.0, 0.0, 0, 0, 100, draining=True)))  # type: ignore[arg-type]
    assert not drafts.serves and not drafts.eligible()
    lines = [record.message.split(":")[0] for record in caplog.records if record.message.startswith("speculation is")]
    assert lines == ["speculation is on", "speculation is off"]


async def test_F83_no_draft_ever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Targets alone, one log line however many requests, and the gauge says 0; with the draft there it says 1."""
    caplog.set_level(logging.INFO)
    pools = Pools(monkeypatch)
    draft = pools.drafts[0]
    draft.fall()
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(5)))
    assert got == [answer_of(prompt_of(f"s{i}"), 20) for i in range(5)] and not draft.seen
    assert not pools.driver.pools.drafts.serves
    draft.rise()
    assert await fetch(pools.start("with")) == answer_of(prompt_of("with"), 20) and draft.seen
    lines = [record.message for record in caplog.records if record.message.startswith("speculation is")]
    assert [line.split(":")[0] for line in lines] == ["speculation is on", "speculation is off", "speculation is on"]


@pytest.mark.parametrize("twin", [False, True], ids=["", "twin"])
async def test_F82_a_lost_draft_costs_no_timer(monkeypatch: pytest.MonkeyPatch, twin: bool) -> None:
    """Rounds that wait for the draft go on in the turn in which it is lost, not when their grace is over."""
    if twin:
        monkeypatch.setattr("orchestrator.generation.Generation._give_up_waiting", lambda self: None)
    pools = Pools(monkeypatch, max_grace_ms=10_000)
    handle = pools.start("s", count=60)
    await settle(10)
    pools.drafts[0].silent = True
    await settle(10)
    pools.drafts[0].fall()
    if twin:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(fetch(handle), 0.3)
    else:
        assert await asyncio.wait_for(fetch(handle), 2) == answer_of(prompt_of("s"), 60)
