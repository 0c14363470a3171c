"""A session that begins with a fork decides what it would have decided without: whatever becomes of the donor, and of the fork."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from specdec.terms import Close, Expired, Result
from target_service.plan import Drop, Fork
from target_service.sessions import Session
from tests.fakes import hashed_script
from tests.unit.target.forking import PROMPT, child, decided, starts, with_donor
from tests.unit.target.harness import SAMPLED, VOCAB, Bench, first_step, next_step, only, reference

SCRIPT = hashed_script(VOCAB)


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
    for expected in ([9], [18], [27, 9]):
        bench.turn()
        assert starts(bench) == expected
    assert only(bench.until_answered(stream)).tokens == tuple(reference(SCRIPT, long, 1, sampling=SAMPLED, seed=8))


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
