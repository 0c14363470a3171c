"""What a target tells beside the tokens, and what becomes of it when it is a lie. F51."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from orchestrator.handle import Handle
from orchestrator.output import Ended
from specdec import terms
from specdec.errors import SpecdecError
from tests.unit.orchestrator.scripted_pools import VOCAB, Pools, answer_of, fetch, prompt_of, settle

pytestmark = pytest.mark.timeout(30)


async def prompt_entries(handle: Handle) -> list[tuple[int, tuple[float, ...]]]:
    told = []
    async for index, event in handle:
        if not isinstance(event, Ended) and event.prompt_logprobs:
            told.append((index, tuple(entry.logprob for entry in event.prompt_logprobs)))
    return told


async def test_log_probabilities_of_the_prompt_come_once(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2)
    entries = tuple(-float(i) for i in range(1, len(prompt_of("session"))))
    assert await prompt_entries(pools.start("session", n=3, prompt_logprobs=0)) == [(0, entries)]
    handle = pools.start("session", n=2, prompt_logprobs=0)
    reading = asyncio.create_task(prompt_entries(handle))
    await settle(6)
    for target in pools.targets:  # both lose it in turn, after the first result
        target.fall()
        target.rise()
    assert await reading == [(0, entries)]
    assert not any(isinstance(b, terms.Begin) and b.sampling.prompt_logprobs is not None and b.fork_session_id for t in pools.targets
                   for b in t.begun.values())  # fmt: skip


@pytest.mark.parametrize("forced", [(VOCAB,), (3, 2**32 - 1), tuple(range(VOCAB)) * 100, (1, 2, 3)])
async def test_F51_what_a_hostile_target_forces_is_harmless(monkeypatch: pytest.MonkeyPatch, forced: tuple[int, ...]) -> None:
    """Ids nobody has are dropped and counted, thousands are cut to what a Step takes, wrong ones are refused by the next round."""
    pools = Pools(monkeypatch, targets=2)
    counted: list[str] = []
    monkeypatch.setattr(pools.driver.observer, "count", lambda what, amount: counted.append(what))
    longest = 0
    send = type(pools.targets[0]).send

    def watch(self: Any, item: Any) -> None:
        nonlocal longest
        if isinstance(item, terms.Step):
            longest = max(longest, item.num_proposed)
            assert max(item.tokens) < VOCAB
        send(self, item)

    monkeypatch.setattr(type(pools.targets[0]), "send", watch)
    pools.targets[0].forced = pools.targets[1].forced = forced
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}")) for i in range(4)))
    assert got == [answer_of(prompt_of(f"s{i}"), 20) for i in range(4)]
    assert longest <= 8 and ("broken" in counted) == (max(forced) >= VOCAB)


async def test_F51_twin_forced_ids_are_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.hearing.without_foreign_ids", lambda result, vocab_size: result)
    with pytest.raises((AssertionError, SpecdecError)):
        await test_F51_what_a_hostile_target_forces_is_harmless(monkeypatch, (VOCAB,))
