"""Which rounds speak against a draft, and what the others of its pool have to do with it."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator import ejection as ejection_module
from orchestrator import events as ev
from orchestrator.breaker import FIRST_PAUSE_S, PROBES, State, Trouble
from orchestrator.ejection import Ejection
from orchestrator.lateness import FEW_ROUNDS
from orchestrator.pools import Pool
from orchestrator.tally import WANTED
from tests.unit.orchestrator.scripted_pools import Pools, answer_of, fetch, prompt_of, settle

ENOUGH = int(FEW_ROUNDS)


@pytest.fixture
def held_against(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Trouble]]:
    said: list[tuple[str, Trouble]] = []
    monkeypatch.setattr(Ejection, "bad", lambda self, name, trouble: said.append((name, trouble)))
    return said


def rounds(drafts: Pool, name: str, late: bool, count: int = ENOUGH) -> None:
    for _ in range(count):
        drafts.round(name, late)


async def test_only_a_late_round_speaks_against_a_draft_that_others_do_better_than(
    monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]
) -> None:
    drafts = Pools(monkeypatch, drafts=3).driver.pools.drafts
    rounds(drafts, "d0:1", late=True)
    rounds(drafts, "d1:1", late=True)
    assert held_against == [], "nobody does better"
    rounds(drafts, "d2:1", late=False)
    drafts.round("d0:1", False)
    assert held_against == []
    drafts.round("d0:1", True)
    drafts.round("d2:1", True)
    assert held_against == [("d0:1", Trouble.LATE)]


async def test_a_better_one_that_takes_no_session_is_no_better_place(
    monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]
) -> None:
    """It may have been the best while it was connected: whoever left the late one would find one that is as late."""
    pools = Pools(monkeypatch, drafts=3)
    drafts = pools.driver.pools.drafts
    for name in ("d0:1", "d1:1", "d2:1"):
        rounds(drafts, name, late=name != "d2:1")
    pools.drafts[2].fall()
    held_against.clear()  # the connection that fell
    drafts.round("d0:1", True)
    drafts.stalled("d0:1")
    assert held_against == []
    pools.drafts[2].rise()
    drafts.round("d0:1", True)
    drafts.stalled("d0:1")
    assert held_against == [("d0:1", Trouble.LATE), ("d0:1", Trouble.STALL)]


async def test_a_wait_in_vain_speaks_against_a_draft_unless_all_others_are_known_to_be_as_slow(
    monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]
) -> None:
    """Sessions do better without a draft than waiting for it, and somebody has to try the others."""
    pools = Pools(monkeypatch, drafts=3)
    drafts = pools.driver.pools.drafts
    rounds(drafts, "d0:1", late=True)
    rounds(drafts, "d1:1", late=True)
    drafts.stalled("d0:1")
    assert held_against == [("d0:1", Trouble.STALL)], "nobody knows the third"
    rounds(drafts, "d2:1", late=True)
    held_against.clear()
    drafts.stalled("d0:1")
    assert held_against == []
    for draft in pools.drafts[1:]:
        draft.fall()
    held_against.clear()
    drafts.stalled("d0:1")
    assert held_against == [("d0:1", Trouble.STALL)], "it is alone"


async def test_sessions_of_a_crowd_are_late_together(monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]) -> None:
    """One slow step of their target is not a hundred bad rounds of the draft."""
    for sessions, found in ((125, False), (1, True)):
        drafts = Pools(monkeypatch, drafts=2).driver.pools.drafts
        drafts.places.sessions["d0:1"] = drafts.places.sessions["d1:1"] = 125
        for name in ("d0:1", "d1:1"):
            rounds(drafts, name, late=False, count=2000)
        drafts.places.sessions["d0:1"] = sessions
        rounds(drafts, "d0:1", late=True, count=60)
        assert bool(held_against) is found


async def test_the_next_replica_of_a_name_is_not_held_to_what_the_last_one_did(
    monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]
) -> None:
    drafts = Pools(monkeypatch, drafts=2).driver.pools.drafts
    rounds(drafts, "d0:1", late=True)
    drafts.remove("d0:1")
    drafts.add("d0:1")
    rounds(drafts, "d1:1", late=False)
    drafts.round("d0:1", True)
    assert held_against == []


async def test_rounds_that_wanted_a_block_are_told_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that came late and stood by was there; a round without speculation says nothing of the draft."""
    told: list[tuple[str, bool]] = []
    monkeypatch.setattr(Pool, "round", lambda self, name, late: told.append((name, late)))
    pools = Pools(monkeypatch)
    handle = pools.start("s", count=200)
    await settle(8)
    live = pools.driver._live["s"]
    assert live.generation.drafting.owes
    outcomes = sorted(WANTED | {"off", "tail", "prefill", "forced", "ngram"})
    for owes in (True, False):
        told.clear()
        monkeypatch.setattr(type(live.generation.drafting), "owes", owes)
        for outcome in outcomes:
            pools.driver._carry_out("s", live, [ev.Observe(outcome, 0, 0, 1)])
        wanted = {"hit": False, "late": False, "miss": True}
        assert told == ([("d0:1", wanted[outcome]) for outcome in outcomes if outcome in wanted] if owes else [])
    assert await asyncio.wait_for(fetch(handle), 20) == answer_of(prompt_of("s"), 200)


@pytest.mark.parametrize("owes", [True, False])
async def test_a_wait_in_vain_is_told_of_a_draft_that_owes_something(monkeypatch: pytest.MonkeyPatch, owes: bool) -> None:
    told: list[str] = []
    monkeypatch.setattr(Pool, "stalled", lambda self, name: told.append(name))
    pools = Pools(monkeypatch)
    handle = pools.start("s", count=200)
    await settle(8)
    live = pools.driver._live["s"]
    monkeypatch.setattr(type(live.generation.drafting), "owes", owes)
    for what in ("stale", "grace_expired", "resync"):
        pools.driver._carry_out("s", live, [ev.Count(what)])
    assert told == (["d0:1"] if owes else [])
    handle.cancel()


# --- after it was shut out --------------------------------------------------------------------------------------------


def hang(drafts: Pool, name: str) -> None:
    for _ in range(200):
        if drafts.ejection.closed(name):
            drafts.round(name, True)
    assert not drafts.ejection.closed(name)


@pytest.mark.parametrize("twin", [False, True])
async def test_a_draft_that_was_shut_out_is_judged_by_its_probe_alone(monkeypatch: pytest.MonkeyPatch, twin: bool) -> None:
    """A draft's first rounds are late however good it is. The twin holds them to what it was worth before."""
    now = [0.0]
    monkeypatch.setattr(ejection_module, "_now", lambda: now[0])
    if twin:
        monkeypatch.setattr(Pool, "ejected", lambda self, name: None)
    drafts = Pools(monkeypatch, drafts=2).driver.pools.drafts
    rounds(drafts, "d1:1", late=False)
    hang(drafts, "d0:1")
    now[0] += FIRST_PAUSE_S
    drafts.ejection.took("d0:1")
    for _ in range(PROBES):
        drafts.round("d0:1", True)
        drafts.ejection.good("d0:1")
    assert drafts.ejection.closed("d0:1") is not twin


async def test_a_probe_that_finds_the_same_shuts_it_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(ejection_module, "_now", lambda: now[0])
    drafts = Pools(monkeypatch, drafts=2).driver.pools.drafts
    rounds(drafts, "d1:1", late=False)
    hang(drafts, "d0:1")
    now[0] += FIRST_PAUSE_S
    drafts.ejection.took("d0:1")
    rounds(drafts, "d0:1", late=True)
    assert drafts.ejection.state("d0:1") is State.OPEN
    now[0] += FIRST_PAUSE_S
    assert not drafts.ejection.allows("d0:1"), "for longer than the first time"


@pytest.mark.parametrize("twin", [False, True])
async def test_a_draft_that_hung_and_works_again_serves_again(monkeypatch: pytest.MonkeyPatch, twin: bool) -> None:
    """Nobody waits for drafts here, so rounds go without their blocks now and then, of good ones too."""
    now = [0.0]
    monkeypatch.setattr(ejection_module, "_now", lambda: now[0])
    if twin:
        monkeypatch.setattr(Pool, "ejected", lambda self, name: None)
    pools = Pools(monkeypatch, drafts=2, max_grace_ms=0)
    ejection, draft = pools.driver.pools.drafts.ejection, pools.drafts[0]

    async def serve(wave: str, sessions: int) -> None:
        await asyncio.gather(*(fetch(pools.start(f"{wave}.{i}", count=200)) for i in range(sessions)))

    draft.silent = True
    await serve("hung", 12)
    assert not ejection.closed("d0:1")
    draft.silent = False
    for probe in range(3):
        now[0] += 2.0 ** (probe + 1)
        await serve(f"probe {probe}", 3)
    assert ejection.closed("d0:1") is not twin
