"""What speaks against a target, what an operator hears of it, and whose word counts."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import Any

import pytest

from orchestrator import events as ev
from orchestrator.breaker import Trouble
from orchestrator.ejection import Ejection
from orchestrator.observe import Observer
from specdec import terms
from tests.unit.orchestrator.scripted_pools import VOCAB, Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle


@pytest.fixture
def held_against(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Trouble]]:
    said: list[tuple[str, Trouble]] = []
    monkeypatch.setattr(Ejection, "bad", lambda self, name, trouble: said.append((name, trouble)))
    return said


async def test_an_answer_that_is_overdue(monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]]) -> None:
    pools = Pools(monkeypatch, drafts=0)
    handle = pools.start("s", count=40)
    await settle(5)
    pools.driver._carry_out("s", pools.driver._live["s"], [ev.Overdue("t0:1")])
    assert held_against == [("t0:1", Trouble.STALL)]
    assert await asyncio.wait_for(fetch(handle), 20) == answer_of(prompt_of("s"), 40)


async def test_an_answer_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch, held_against: list[tuple[str, Trouble]], caplog: pytest.LogCaptureFixture
) -> None:
    counts: list[tuple[str, int]] = []
    monkeypatch.setattr(Observer, "count", lambda self, what, amount: counts.append((what, amount)))
    verify, liars = ScriptedPeer._verify, list[str]()

    def lie(self: ScriptedPeer, step: terms.Step) -> terms.Answer:
        told: Any = verify(self, step)
        if liars:
            return told
        liars.append(self.name)
        return replace(told, outcome=replace(told.outcome, num_accepted=9))

    monkeypatch.setattr(ScriptedPeer, "_verify", lie)
    pools = Pools(monkeypatch, targets=2, drafts=0)
    assert await asyncio.wait_for(fetch(pools.start("s", count=40)), 20) == answer_of(prompt_of("s"), 40)
    (liar,) = liars
    assert (liar, Trouble.FAILED) in held_against and {trouble for _, trouble in held_against} == {Trouble.FAILED}
    assert ("broken", 1) in counts
    (line,) = [record for record in caplog.records if record.message == "a target said what cannot be"]
    assert line.levelno == logging.WARNING and line.peer == liar and "accepts 9" in line.reason  # type: ignore[attr-defined]


@pytest.mark.parametrize("stranger", [True, False], ids=["a stranger", "its own target"])
async def test_only_a_sessions_own_target_decides(monkeypatch: pytest.MonkeyPatch, stranger: bool) -> None:
    """Whatever another says of it, right epoch and round or not, is none of its tokens; the twin is believed."""
    pools = Pools(monkeypatch, targets=2, drafts=0)
    for target in pools.targets:
        target.silent = True
    handle = pools.start("s", count=8)
    await settle()
    own, other = sorted(pools.targets, key=lambda peer: not peer.kept)
    (answer,) = own.kept
    wrong = (answer.outcome.tokens[0] + 1) % VOCAB
    said = replace(answer, outcome=replace(answer.outcome, tokens=(wrong,), num_accepted=0))
    (other if stranger else own).say(said)
    assert (pools.driver._live["s"].generation.committed[-1] == wrong) is not stranger
    if stranger:
        own.silent = False
        own.say(answer)
        assert await asyncio.wait_for(fetch(handle), 20) == answer_of(prompt_of("s"), 8)
    handle.cancel()


async def test_only_a_sessions_own_draft_proposes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What another says is neither used nor held against anybody, whatever it is."""
    fed: list[ev.Event | None] = []
    pools = Pools(monkeypatch, drafts=2)
    for draft in pools.drafts:
        draft.silent = True
    handle = pools.start("s", count=100)
    await settle(5)
    own, other = sorted(pools.drafts, key=lambda peer: not peer.kept)
    assert pools.driver._live["s"].generation.drafting.name == own.name
    feed = pools.driver.feed
    monkeypatch.setattr(pools.driver._hearing, "_feed", lambda session, event: (fed.append(event), feed(session, event)))
    other.say(own.kept[0], terms.Refused("s", own.kept[0].epoch, "no", 0))
    assert fed == []
    own.say(own.kept[0])
    assert fed == [ev.Drafted(own.kept[0])]
    handle.cancel()
