"""What forks share is booked once, what they no longer share before it is written; the engine never finds less than was booked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.engine import KvBudget
from specdec.sampling import Sampler
from specdec.terms import NoRoom, PrefixNeeded, Result
from target_service.verifier import Verifier
from tests.fakes import hashed_script
from tests.tiny import tiny_engine
from tests.unit.target.forking import PROMPT, child, decided, starts, with_donor
from tests.unit.target.harness import SAMPLED, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all
from tests.unit.target.pools import BlockPool

SCRIPT = hashed_script(VOCAB)


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


def test_on_the_real_engine_and_its_accounts() -> None:
    """Eight answers that come and go, blocks and all, with room for little more than they need: texts and log-probabilities are bit-equal
    to unforked ones, and the engine never finds less room than was booked."""
    prompt = [(7 * i) % 120 for i in range(100)]
    params = replace(SAMPLED, logprobs=2, temperature=0.7)
    texts = {}
    for fork in (True, False):
        engine = tiny_engine(kv_tokens=8 * 64 if fork else 4096)
        bench = Bench(vocab=128, max_num_speculative_tokens=3, reserve_tokens=8, max_step_rows=40, prefix_block_tokens=0)
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
