"""What a target tells beside the tokens, and what becomes of it when it is a lie. F51."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.checks import check_result
from orchestrator.events import Admitted
from orchestrator.handle import Handle
from orchestrator.output import Ended
from specdec import terms, wire
from specdec.errors import ProtocolFault, SpecdecError
from tests.unit.orchestrator.scripted_pools import SEED, VOCAB, Pools, ScriptedPeer, answer_of, fetch, prompt_of, settle

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


# ---------------------------------------------------------------- answers that cannot be


def told(**changes: Any) -> Callable[[terms.Answer], terms.Answer]:
    """A result with other fields; a function makes one of the result."""

    def lie(answer: terms.Answer) -> terms.Answer:
        result = answer.outcome
        assert isinstance(result, terms.Result)
        return replace(answer, outcome=replace(result, **{name: c(result) if callable(c) else c for name, c in changes.items()}))

    return lie


def instead(outcome: terms.Outcome) -> Callable[[terms.Answer], terms.Answer]:
    return lambda answer: replace(answer, outcome=outcome)


def entries(*logprobs: float, id_: int = 0) -> Callable[[terms.Result], tuple[terms.TokenLogprobs, ...]]:
    return lambda result: tuple(terms.TokenLogprobs(logprobs[0], (id_,), logprobs[-1:]) for _ in result.tokens)


STOP, LENGTH = terms.FinishReason.STOP, terms.FinishReason.LENGTH
LIES: dict[str, Callable[[terms.Answer], terms.Answer]] = {
    "an id past the vocabulary": told(tokens=lambda r: (*r.tokens[:-1], VOCAB)),
    "id 2^32-1": told(tokens=lambda r: (*r.tokens[:-1], 2**32 - 1)),
    "one token too many": told(tokens=lambda r: (*r.tokens, 1)),
    "10,000 tokens": told(tokens=lambda r: r.tokens + (1,) * 10_000),
    "behind another prefix": told(prefix_length=lambda r: r.prefix_length + 1),
    "more verified than proposed": told(num_verified=99),
    "more accepted than there is": told(num_accepted=9, num_verified=9),
    "nothing": told(tokens=(), num_accepted=0),
    "an end for its length": told(finish=LENGTH),
    "an end without a stop token": told(finish=STOP),
    "an end with a token of nobody": told(finish=STOP, stop_token_id=VOCAB),
    "an end with an ordinary token": told(finish=STOP, stop_token_id=7),
    "an end before min_tokens": told(finish=STOP, stop_token_id=2),
    "more keys and values than tokens": told(kv_length_after=10_000),
    "no log-probabilities": told(logprobs=()),
    "NaN": told(logprobs=entries(float("nan"))),
    "NaN among the alternatives": told(logprobs=entries(-1.0, float("nan"))),
    "-infinity": told(logprobs=entries(float("-inf"))),
    "an alternative past the vocabulary": told(logprobs=entries(-1.0, id_=VOCAB)),
    "the last epoch there is": instead(terms.StaleEpoch(2**32 - 1)),
    "an epoch far ahead": instead(terms.StaleEpoch(1 << 20)),
    "another round": instead(terms.StaleRound(2**32 - 1)),
    "nobody by that name": instead(terms.UnknownSession()),
    "no time for it, at once": instead(terms.Expired()),
    "closed": instead(terms.Closed()),
    "nothing of it is there": instead(terms.PrefixNeeded(0)),
    "more of it is there": instead(terms.PrefixNeeded(2**32 - 1)),
    **{f"status {code}": instead(terms.Failed(code, "no")) for code in (0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 13, 14, 15, 16, 99)},
}


@pytest.mark.parametrize("name, every", [*((name, 1) for name in LIES), *((name, 3) for name in list(LIES)[:9])])
async def test_F51_a_target_that_says_what_cannot_be_is_left(monkeypatch: pytest.MonkeyPatch, name: str, every: int) -> None:
    """Nothing of it is believed: answers go on at the other target, as exact as ever, and no other target hears a number that it cannot
    read, which would cost it its connection."""
    pools, asked = Pools(monkeypatch, targets=2, eos_ids=(2,)), 0
    liar, verify = pools.targets[0], ScriptedPeer._verify

    def answer(self: ScriptedPeer, step: terms.Step) -> terms.Answer:
        nonlocal asked
        said = told(logprobs=entries(-1.0))(verify(self, step))
        asked += self is liar
        return LIES[name](said) if self is liar and asked % every == 0 else said

    def send(self: ScriptedPeer, item: Any) -> None:
        if self in pools.targets:
            wire.verify_item_to_wire(item)
        put(self, item)

    put = ScriptedPeer.send
    monkeypatch.setattr(ScriptedPeer, "_verify", answer)
    monkeypatch.setattr(ScriptedPeer, "send", send)
    got = await asyncio.gather(*(fetch(pools.start(f"s{i}", count=12, logprobs=1, min_tokens=12)) for i in range(6)))
    assert got == [answer_of(prompt_of(f"s{i}"), 12) for i in range(6)]
    assert asked >= every
    await settle()
    pools.check_empty()


ASKED = Admitted(
    "s", (1, 2, 3), 3, terms.SamplingParams(max_tokens=4, min_tokens=3, logprobs=0), SEED, 100, 3, 8, vocab_size=VOCAB, eos_ids=(2,)
)
SAID = terms.Result(4, 6, 3, 1, (7, 9), (terms.TokenLogprobs(-1.0),) * 2)  # behind one output token, to the block 7, 8, 8


@pytest.mark.parametrize(
    ("lie", "told"),
    [
        ({"prefix_length": 5}, "after 5 tokens came for a session of 4"),
        ({"tokens": (7, 9, 8), "num_accepted": 1}, "accepts 1 of 3 proposals in 3 tokens"),
        ({"num_accepted": 3}, "accepts 3 of 3 proposals in 2 tokens"),
        ({"num_verified": 0}, "accepts 1 of 0 proposals"),
        ({"num_verified": 4}, "accepts 1 of 4 proposals in 2 tokens came for a block of 3"),
        ({"num_accepted": 2}, "2 proposals that are not those of the block"),
        ({"tokens": (7, 8, 8, 9), "num_accepted": 3, "logprobs": SAID.logprobs * 2}, "decided 5 tokens of an answer of at most 4"),
        ({"finish": LENGTH}, "for its length after 3 of 4"),
        ({"finish": STOP}, "no grammar that ended it"),
        ({"tokens": (7,), "logprobs": SAID.logprobs[:1], "finish": STOP, "stop_token_id": 2}, "after 2 tokens with token id 2"),
        ({"logprobs": ()}, "0 log-probabilities came where 2 were asked for"),
        ({"logprobs": SAID.logprobs[:1]}, "1 log-probabilities came where 2"),
        ({"prompt_logprobs": SAID.logprobs}, "2 log-probabilities of prompt tokens came where 0"),
    ],
)
def test_F51_what_cannot_be_is_found_and_named(lie: dict[str, Any], told: str) -> None:
    check_result(SAID, ASKED, 4, (7, 8, 8), 0)
    check_result(replace(SAID, finish=STOP, stop_token_id=2), ASKED, 4, (7, 8, 8), 0)
    with pytest.raises(ProtocolFault, match=told):
        check_result(replace(SAID, **lie), ASKED, 4, (7, 8, 8), 0)


@pytest.mark.parametrize(
    ("lie", "entries", "told"),
    [
        ({"logprobs": SAID.logprobs}, 0, "2 log-probabilities came where 0 were asked for"),
        ({"prompt_logprobs": SAID.logprobs}, 0, "2 log-probabilities of prompt tokens came where 0"),
        ({}, 2, "0 log-probabilities of prompt tokens came where 2"),
    ],
)
def test_F51_entries_that_nobody_asked_for_and_those_that_are_missing(lie: dict[str, Any], entries: int, told: str) -> None:
    """Also of a request that wants none for its own tokens."""
    request, said = replace(ASKED, sampling=replace(ASKED.sampling, logprobs=None)), replace(SAID, logprobs=())
    check_result(said, request, 4, (7, 8, 8), 0)
    check_result(replace(said, prompt_logprobs=SAID.logprobs), request, 4, (7, 8, 8), 2)
    with pytest.raises(ProtocolFault, match=told):
        check_result(replace(said, **lie), request, 4, (7, 8, 8), entries)


def test_F51_an_end_of_sequence_that_is_ignored_ends_nothing() -> None:
    request, end = replace(ASKED, sampling=replace(ASKED.sampling, ignore_eos=True)), replace(SAID, finish=STOP, stop_token_id=2)
    with pytest.raises(ProtocolFault, match="cannot end it there"):
        check_result(end, request, 4, (7, 8, 8), 0)
    check_result(end, replace(request, sampling=replace(request.sampling, stop_token_ids=(2,))), 4, (7, 8, 8), 0)


async def test_a_defect_is_believed_when_another_target_finds_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    pools = Pools(monkeypatch, targets=2)
    monkeypatch.setattr(
        ScriptedPeer, "_verify", lambda self, step: terms.Answer(step.session_id, step.epoch, step.round, terms.Failed(13, "NaN"))
    )
    with pytest.raises(SpecdecError, match="NaN"):
        await fetch(pools.start("s"))
    await settle()
    assert [target.seen["s"] for target in pools.targets] == [2, 2]  # a Step, and to forget it
    pools.check_empty()
