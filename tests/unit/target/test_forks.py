"""A session that begins with a fork decides what it would have decided without: whatever becomes of the donor, and of the fork."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.engine import KvBudget
from specdec.sampling import Sampler
from specdec.terms import Close, Expired, NoRoom, PrefixNeeded, Result
from target_service.plan import Drop, Fork
from target_service.sessions import Session
from target_service.verifier import Verifier
from tests.fakes import hashed_script
from tests.tiny import tiny_engine
from tests.unit.target.harness import (
    SAMPLED,
    VOCAB,
    Bench,
    BlockPool,
    Caller,
    first_step,
    next_step,
    only,
    oracle,
    reference,
    run_all,
)

SCRIPT = hashed_script(VOCAB)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def child(tokens: Sequence[int] = PROMPT, donor: str = "donor", session: str = "child", seed: int = 8, **more: Any) -> Any:
    more.setdefault("sampling", SAMPLED)
    return first_step(tokens, session=session, seed=seed, fork_session_id=donor, **more)


def with_donor(bench: Bench, tokens: Sequence[int] = PROMPT, orchestrator_id: str = "orch") -> int:
    """A session that has its first token: prompt and no more are in KV."""
    stream = bench.hello(orchestrator_id)
    bench.send(stream, first_step(tokens, session="donor", sampling=SAMPLED))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, tokens, 1, sampling=SAMPLED))
    return stream


def starts(bench: Bench) -> list[int]:
    """Where the rows of the last forward began."""
    return [row.start for row in bench.engine.log[-1]]


def decided(bench: Bench, tokens: Sequence[int] = PROMPT, seed: int = 8) -> None:
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, tokens, 1, sampling=SAMPLED, seed=seed))


@pytest.mark.parametrize(
    ("tokens", "start"),
    [
        (PROMPT, 7),
        (PROMPT[:5], 4),
        ([*PROMPT[:5], 60, 61], 5),
        ([*PROMPT, 60, 61], 8),
        ([60, *PROMPT], 0),
        ([3], 0),
    ],
    ids=["same prompt", "shorter", "another end", "longer", "nothing in common", "one token"],
)
def test_what_agrees_with_the_donor_is_not_computed_again(tokens: list[int], start: int) -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(tokens))
    decided(bench, tokens)
    assert starts(bench) == [start]


def test_never_more_than_the_donor_holds() -> None:
    """It has decided a token that is not in KV; the child's prompt goes on with it."""
    bench = Bench()
    stream = with_donor(bench)
    tokens = [*PROMPT, *reference(SCRIPT, PROMPT, 1, sampling=SAMPLED), 60]
    bench.send(stream, child(tokens))
    decided(bench, tokens)
    assert starts(bench) == [8]


@pytest.mark.parametrize("donor", ["nobody", "", "child"])
def test_an_unknown_donor_is_none(donor: str) -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(donor=donor))
    decided(bench)
    assert starts(bench) == [0]


def test_another_orchestrators_session_is_no_donor() -> None:
    bench = Bench()
    with_donor(bench, orchestrator_id="other")
    stream = bench.hello()
    bench.send(stream, child())
    decided(bench)
    assert starts(bench) == [0]


def test_a_parked_donor_is_none() -> None:
    bench = Bench()
    stream = with_donor(bench)
    park(bench, stream)
    bench.now += 2000  # so that it is not in the way either
    bench.send(stream, child())
    decided(bench)
    assert starts(bench) == [0]


def test_who_asks_for_the_prompts_logprobs_computes_the_prompt() -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(sampling=replace(SAMPLED, prompt_logprobs=0)))
    plan = bench.plan()
    assert plan is not None and plan.changes == () and plan.rows[0].start == 0
    bench.finish(plan)
    assert len(only(bench.heard()).prompt_logprobs) == 7


def test_a_donor_in_the_middle_of_its_prefill() -> None:
    bench = Bench(max_step_rows=9)
    stream = bench.hello()
    long = [*range(30)]
    bench.send(stream, first_step(long, session="donor", sampling=SAMPLED))
    bench.turn()
    bench.send(stream, child(long))
    for expected in ([9], [18], [27, 9], [15], [24]):
        heard = bench.turn()
        assert starts(bench) == expected
    assert only(heard).tokens == tuple(reference(SCRIPT, long, 1, sampling=SAMPLED, seed=8))


# ------------------------------------------------------------ between admission and plan


def close(bench: Bench, stream: int) -> None:
    bench.send(stream, Close("donor", 1))


def supersede(bench: Bench, stream: int) -> None:
    bench.send(stream, first_step([60, 61], session="donor", epoch=2))


def park(bench: Bench, stream: int) -> None:
    bench.verifier._room.free(bench.verifier._sessions["orch", "donor"])


def edit(bench: Bench, stream: int) -> None:
    bench.send(stream, next_step([3, 60, 61], [1, 2], round_=2, base=0, session="donor"))


def go_on(bench: Bench, stream: int) -> None:
    donor = [*PROMPT, *reference(SCRIPT, PROMPT, 1, sampling=SAMPLED)]
    bench.send(stream, next_step(donor, [1, 2], round_=2, session="donor"))


@pytest.mark.parametrize("happening", [close, supersede, park, edit, go_on])
def test_what_becomes_of_the_donor_before_the_fork_ran(happening: Callable[[Bench, int], None]) -> None:
    bench = Bench(max_num_speculative_tokens=2) if happening is edit else Bench()
    if happening is edit:  # its prompt is edited with it
        stream = bench.hello()
        bench.send(stream, first_step(PROMPT, session="donor", sampling=SAMPLED, prompt_length=2))
        bench.turn()
    else:
        stream = with_donor(bench)
    bench.send(stream, child())
    happening(bench, stream)
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert answers["child"].tokens == tuple(reference(SCRIPT, PROMPT, 1, sampling=SAMPLED, seed=8))
    assert 7 in starts(bench)
    bench.send(stream, Close("child", 1), Close("donor", 1), Close("donor", 2))
    bench.settle()
    assert bench.pool.held == {} and bench.engine.kv.slots == {} and bench.executor._slots == {}


def test_the_donor_is_in_the_engine_while_the_child_comes() -> None:
    bench = Bench()
    stream = with_donor(bench)
    donor = [*PROMPT, *reference(SCRIPT, PROMPT, 1, sampling=SAMPLED)]
    bench.send(stream, next_step(donor, [1, 2, 3], round_=2, session="donor"))
    plan = bench.plan()
    assert plan is not None
    bench.send(stream, child())
    bench.finish(plan)
    bench.heard()
    decided(bench)
    assert starts(bench) == [7]


@pytest.mark.parametrize("last", ["child", "grandchild"])
def test_a_fork_of_a_fork_before_either_ran(last: str) -> None:
    """The chain holds although its middle is closed."""
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(), child([*PROMPT[:5], 60], donor="child", session="grandchild", seed=9))
    bench.send(stream, Close("donor", 1))
    if last == "grandchild":
        bench.send(stream, Close("child", 1))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert answers["grandchild"].tokens == tuple(reference(SCRIPT, [*PROMPT[:5], 60], 1, sampling=SAMPLED, seed=9))
    assert starts(bench) == ([7, 5] if last == "child" else [5])
    bench.send(stream, Close("child", 1), Close("grandchild", 1))
    bench.settle()
    assert bench.pool.held == {} and bench.engine.kv.slots == {}


def test_forks_and_drops_reach_the_engine_in_the_order_of_their_accounts() -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, first_step([60], session="other"))
    bench.turn()
    bench.send(stream, Close("other", 1), child(), Close("donor", 1))
    plan = bench.plan()
    assert plan is not None
    assert plan.changes == (Drop(2), Fork(3, 1, 7), Drop(1))
    bench.finish(plan)


def test_the_child_is_gone_before_its_fork_ran() -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(), Close("child", 1))
    bench.turn()
    assert len(bench.engine.kv.slots) == 1 and len(bench.pool.held) == 1
    bench.send(stream, child(epoch=2))
    decided(bench)


@pytest.mark.parametrize(("tokens", "start"), [(PROMPT, 7), ([3, 1, 60, 61, 9, 2, 6, 6], 2)], ids=["the same", "other tokens"])
def test_the_child_expires_before_its_fork_ran(tokens: list[int], start: int) -> None:
    bench = Bench()
    stream = with_donor(bench)
    bench.send(stream, child(remaining_ms=5))
    bench.now += 10
    assert only(bench.turn()) == Expired()
    bench.send(stream, child(tokens))
    decided(bench, tokens)
    assert starts(bench) == [start]


# ------------------------------------------------------------ room


def test_what_is_shared_is_booked_once() -> None:
    """A prompt of 150 tokens and sixteen answers on room for 310, all of them at once."""
    bench = Bench(pool=310, reserve_tokens=4, max_num_speculative_tokens=3)
    stream = bench.hello()
    prompt = [i % 60 for i in range(150)]
    draft = oracle(SCRIPT, 150, 3, lambda n: n % 4, SAMPLED)
    first = Caller(bench, stream, prompt, session="c0", sampling=SAMPLED, seed=100, want=6, draft=draft)
    while not first.results:
        first.act()
        for _, answer in bench.turn():
            first.hear(answer)
    made = [
        Caller(bench, stream, prompt, session=f"c{i}", sampling=SAMPLED, seed=100 + i, want=6, draft=draft, fork="c0") for i in range(1, 16)
    ]
    for caller in made:
        caller.act()
    assert bench.heard() == [] and bench.verifier.num_sessions == 16
    run_all(bench, [first, *made])
    for i, caller in enumerate([first, *made]):
        assert caller.output[:6] == reference(SCRIPT, prompt, 6, sampling=SAMPLED, seed=100 + i)
    assert sum(row.start < 149 for call in bench.engine.log for row in call) == 3, "one prefill for all"


def test_a_donor_that_nobody_speaks_for_makes_room_all_the_same() -> None:
    bench = Bench(pool=40, reserve_tokens=8)
    leaver = bench.hello()
    bench.send(leaver, first_step([*range(25)], session="donor", sampling=SAMPLED))
    bench.turn()
    bench.verifier.detach(leaver, bench.now)
    stream = bench.hello()
    tokens = [0, 1, *range(30, 55)]
    assert bench.send(stream, child(tokens)) == []
    decided(bench, tokens)
    assert starts(bench) == [0] and len(bench.pool.held) == 1


def test_what_went_with_the_donor_is_not_shared() -> None:
    """The reserve has to be found for the whole prompt."""
    bench = Bench(pool=40, reserve_tokens=8)
    leaver, stream = bench.hello("leaver"), bench.hello()
    bench.send(stream, first_step([60] * 9, session="other"))
    bench.turn()
    leaver = bench.hello()
    bench.send(leaver, first_step([*range(22)], session="donor", sampling=SAMPLED))
    bench.turn()
    bench.verifier.detach(leaver, bench.now)
    bench.verifier._sessions["orch", "other"].stream = stream
    assert only(bench.send(stream, child([*range(20), 50, 51, 52, 53]))) == NoRoom(50)
    assert list(bench.pool.held.values()) == [9]


def test_who_finds_no_room_beside_its_donor_leaves_no_trace() -> None:
    bench = Bench(pool=30, reserve_tokens=2)
    stream = with_donor(bench)
    before = dict(bench.pool.held)
    assert only(bench.send(stream, child([*PROMPT, *range(30, 55)]))) == NoRoom(50)
    assert bench.pool.held == before and bench.plan() is None


@pytest.mark.parametrize("who", ["donor", "child"])
def test_a_history_edited_below_the_shared_part_costs_room(who: str) -> None:
    """The accounts are the engine's: what is no longer shared is booked before it is written."""
    bench = Bench(pool=BlockPool(36), reserve_tokens=0, max_step_rows=40, max_num_speculative_tokens=0)
    stream = bench.hello()
    bench.send(stream, first_step([*range(20)], session="donor", sampling=SAMPLED, prompt_length=2))
    bench.turn()
    bench.send(stream, child([*range(20)], prompt_length=2))
    bench.turn()
    assert bench.pool.used_tokens == 24, "four blocks once, and one for each of both"
    bench.send(stream, next_step([0, 1, *[60] * 21], round_=2, base=2, session=who))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    if who == "child":  # it is the youngest, so it costs itself
        assert answers == {"child": NoRoom(50)}
    else:
        assert isinstance(answers["donor"], Result)
    assert bench.pool.used_tokens == bench.engine.kv.room.used_tokens == (24 if who == "donor" else 20)


@pytest.mark.parametrize("who", ["donor", "child"])
def test_a_history_edited_below_the_shared_part_changes_nothing_for_the_other(who: str) -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, session="donor", sampling=SAMPLED, prompt_length=2))
    committed = {"donor": [*PROMPT, *only(bench.turn()).tokens]}
    bench.send(stream, child(prompt_length=2))
    committed["child"] = [*PROMPT, *only(bench.turn()).tokens]
    other = "child" if who == "donor" else "donor"
    edited = [*PROMPT[:3], 60, 61]
    bench.send(stream, next_step(edited, [1], round_=2, base=3, session=who))
    bench.send(stream, next_step(committed[other], round_=2, session=other))
    seeds = {"donor": 7, "child": 8}
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    for name, tokens in ((who, edited), (other, committed[other])):
        sampler = Sampler(SAMPLED, seeds[name], VOCAB, (), tokens[:2])
        assert answers[name].tokens[0] == sampler.choose(SCRIPT(tokens), len(tokens), tokens[2:])


def test_a_parked_fork_comes_back_on_its_own() -> None:
    bench = Bench(pool=40, reserve_tokens=2)
    stream = with_donor(bench)
    bench.send(stream, child())
    committed = [*PROMPT, *only(bench.turn()).tokens]
    bench.verifier._room.free(bench.verifier._sessions["orch", "child"])
    assert only(bench.send(stream, next_step(committed, round_=2, session="child"))) == PrefixNeeded(0)
    bench.send(stream, next_step(committed, round_=2, base=0, session="child"))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, PROMPT, 2, sampling=SAMPLED, seed=8)[1:])


# ------------------------------------------------------------ the real engine


def test_on_the_real_engine_and_its_accounts() -> None:
    """Eight answers that come and go, blocks and all, with room for little more than they need: texts and log-probabilities are bit-equal
    to unforked ones, and the engine never finds less room than was booked."""
    prompt = [(7 * i) % 120 for i in range(100)]
    params = replace(SAMPLED, logprobs=2, temperature=0.7)
    texts = {}
    for fork in (True, False):
        engine = tiny_engine(kv_tokens=8 * 64 if fork else 4096)
        bench = Bench(vocab=128, max_num_speculative_tokens=3, reserve_tokens=8, max_step_rows=40)
        bench.engine = bench.executor._engine = engine
        bench.pool = bench.verifier.budget = KvBudget(engine.info.kv_total_tokens)
        bench.verifier = Verifier(bench.limits, bench.pool)
        stream = bench.hello()

        def block(committed: Sequence[int]) -> list[int]:
            return [sum(committed[-4:]) % 128, 5, 9][: len(committed) % 4]

        first = Caller(bench, stream, prompt, session="c0", sampling=params, seed=50, want=28, draft=block)
        while not first.results:
            first.act()
            for _, answer in bench.turn():
                first.hear(answer)
        made = [
            Caller(
                bench,
                stream,
                prompt,
                session=f"c{i}",
                sampling=params,
                seed=50 + i,
                want=12 + 7 * (i % 3),
                draft=block,
                fork="c0" if fork else "",
            )
            for i in range(1, 8)
        ]
        run_all(bench, [first, *made])
        texts[fork] = [(c.output[: c.want], [p for r in c.results for p in r.logprobs][: c.want]) for c in [first, *made]]
        bench.settle()
        assert bench.pool.used_tokens == 0 and engine.kv.used_tokens == 0
    assert texts[True] == texts[False]


# ------------------------------------------------------------ a broken twin


def test_a_fork_of_a_token_too_many_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: the length is not compared with what agrees."""

    def shareable(self: Session, committed: Sequence[int]) -> int:
        return min(self.kv_length, len(committed) - 1)

    def rebase(self: Session, base_length: int, committed: tuple[int, ...]) -> None:
        del self.tokens[base_length:]
        self.tokens.extend(committed)

    monkeypatch.setattr(Session, "shareable", shareable)
    monkeypatch.setattr(Session, "rebase", rebase)
    bench = Bench()
    stream = with_donor(bench)
    tokens = [*PROMPT[:6], 60, 61]
    bench.send(stream, child(tokens))
    result = only(bench.turn())
    assert isinstance(result, Result)
    assert result.tokens != tuple(reference(SCRIPT, tokens, 1, sampling=SAMPLED, seed=8))
