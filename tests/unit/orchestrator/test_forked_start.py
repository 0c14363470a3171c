"""When the other answers of a request start, and what their target hears first."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator import events as ev
from specdec import terms
from specdec.errors import InternalFault
from tests.unit.orchestrator.scripted_pools import Pools, ScriptedPeer, settle

DECIDED = ev.Deliver((7,), (), (terms.Origin.PLAIN,))
FINISH = ev.Finish(terms.FinishReason.STOP, None, None)  # type: ignore[arg-type]
FAIL = ev.Fail(InternalFault("made up"))


@pytest.mark.parametrize(
    ("said", "forks"),
    [([DECIDED, FINISH], True), ([FINISH], True), ([FAIL], False)],
    ids=["with its first tokens", "an answer without a token", "a failure"],
)
async def test_the_first_answer_ends_at_once(monkeypatch: pytest.MonkeyPatch, said: list[ev.Command], forks: bool) -> None:
    """Its keys and values are closed behind the first Steps of those that fork from them; of a failure nothing is to be had."""
    sent: list[Any] = []
    monkeypatch.setattr(ScriptedPeer, "send", lambda self, item: sent.append(item))
    pools = Pools(monkeypatch, drafts=0)
    handle = pools.start("s", n=3)
    await settle()
    assert [item.session_id for item in sent] == ["s"], "the others wait for its prompt"
    sent.clear()
    close = ev.ToTarget("t0:1", terms.Close("s", 1))
    monkeypatch.setattr(pools.driver._live["s"].generation, "handle", lambda event: [*said, close, ev.Forget()])
    pools.driver.feed("s", ev.ReaderBehind())
    await settle()
    told = [(type(item), item.session_id) for item in sent]
    assert sorted(name for kind, name in told if kind is terms.Step) == ["s.1", "s.2"]
    assert told.index((terms.Close, "s")) == (2 if forks else 0)
    begun = [item.begin.fork_session_id for item in sent if isinstance(item, terms.Step) and item.begin]
    assert begun == ["s" if forks else "", "s" if forks else ""]
    handle.cancel()
