"""One session's trouble, or its company, changes nothing for another."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from specdec.errors import EngineFault
from specdec.terms import Close, Failed, RejectionMethod, Result
from tests.fakes import hashed_script, table_script
from tests.unit.target.harness import GREEDY, SAMPLED, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)
NOT_FINITE = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("value", NOT_FINITE)
@pytest.mark.parametrize("slot", [0, 2, 4])
def test_a_row_that_is_not_finite_fails_its_session_alone(slot: int, value: float) -> None:
    """F91, F92: at the first slot, inside the block, at the bonus slot. What was decided in front of it is told first."""
    bench = Bench()
    stream = bench.hello()
    prompts = [[i, 1, 2] for i in range(4)]
    expected = [reference(SCRIPT, p, 5) for p in prompts]
    poisoned = [*prompts[2], *expected[2][:slot]]
    bench.engine.nan_when, bench.engine.nan_value = lambda prefix: list(prefix) == poisoned, value
    for i, p in enumerate(prompts):
        bench.send(stream, first_step(p, expected[i][:4], session=f"s{i}"))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    failed = answers.pop("s2")
    if slot:
        assert isinstance(failed, Result) and failed.kv_length_after == len(poisoned) - 1, "the row that is not finite is not kept"
        assert (failed.tokens, failed.num_accepted, failed.finish) == (tuple(expected[2][:slot]), slot, None)
        bench.send(stream, next_step(poisoned, expected[2][slot:], round_=2, session="s2"))
        failed = only(bench.turn())
    assert isinstance(failed, Failed) and failed.code == 13 and failed.drop
    assert [answers[f"s{i}"].tokens for i in (0, 1, 3)] == [tuple(expected[i]) for i in (0, 1, 3)]
    bench.settle()
    assert bench.verifier.num_sessions == 3 and len(bench.engine.kv.slots) == 3 and len(bench.pool.held) == 3
    bench.engine.nan_when = None
    bench.send(stream, first_step(prompts[2], session="s2", epoch=2))
    assert only(bench.turn()).tokens == (expected[2][0],), "nothing of the poisoned KV is used again"


@pytest.mark.parametrize("method", RejectionMethod)
@pytest.mark.parametrize("place", [1, 4, 5, 9])
def test_where_an_answer_breaks_off_hangs_on_no_block(place: int, method: RejectionMethod) -> None:
    """F92: the same tokens with the same log-probabilities, then the same error, without a block and with blocks right and wrong."""
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)

    def answer(k: int, wrong_at: int) -> tuple[object, ...]:
        bench = Bench()
        bench.engine.nan_when = lambda prefix: len(prefix) == 3 + place
        draft = oracle(SCRIPT, 3, k, lambda n: wrong_at)
        caller = Caller(bench, bench.hello(), [1, 2, 3], sampling=params, draft=draft, method=method)
        run_all(bench, [caller])
        told = [entry for result in caller.results for entry in result.logprobs]
        assert bench.verifier.num_sessions == 0 and caller.round == len(caller.results) + 1
        return caller.output, told, [e for result in caller.results for e in result.prompt_logprobs], caller.failure

    plain = answer(0, -1)
    assert len(plain[0]) == place and isinstance(plain[-1], Failed)  # type: ignore[arg-type]
    assert [answer(k, wrong_at) for k, wrong_at in ((4, -1), (4, 2), (8, -1))] == [plain] * 3


def test_a_row_behind_the_first_refusal_may_be_anything() -> None:
    bench = Bench()
    stream = bench.hello()
    block = [(reference(SCRIPT, [5], 1)[0] + 1) % VOCAB, 2, 3]
    bench.engine.nan_when = lambda prefix: len(prefix) > 1
    bench.send(stream, first_step([5], block))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, [5], 1))


def test_an_exception_of_the_engine_is_nobodys_token() -> None:
    """F170: it leaves the executor as one kind of fault; the process ends with it."""
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step([5]))
    plan = bench.plan()
    assert plan is not None
    bench.engine.raises = RuntimeError("device lost")
    with pytest.raises(EngineFault, match="1 rows failed: RuntimeError: device lost"):
        bench.executor.execute(plan)


def letters(prefix: Sequence[int]) -> int:
    """A session speaks the alphabet of its first token: eight letters, none of them another session's."""
    alphabet = prefix[0] // 8
    return 8 * alphabet + (sum(prefix) * 7 + len(prefix)) % 8


def test_five_hundred_rounds_of_coming_and_going() -> None:
    """F97, F98: blocks of 0 to 4 that are right, half right and wrong; sessions join, leave and are evicted; no foreign letter."""
    vocab = 64
    script = table_script(vocab, letters)
    bench = Bench(script, vocab=vocab, pool=230, reserve_tokens=8, max_step_rows=24)
    rng = random.Random(5)
    stream = bench.hello()
    live: dict[str, Caller] = {}
    gone: set[str] = set()
    finished = 0

    def spoiled(committed: Sequence[int]) -> list[int]:
        good = oracle(script, 3, rng.choice([0, 4, 1, 2]))(committed)
        if good and rng.random() < 0.6:
            good[rng.randrange(len(good))] = rng.randrange(vocab)
        return good

    for turn in range(500):
        if len(live) < 8 and rng.random() < 0.5:
            name, first = f"s{turn}", 8 * rng.randrange(8)
            live[name] = Caller(bench, stream, [first, first + 1, first + 2], session=name, want=rng.randrange(5, 60), draft=spoiled)
        for caller in live.values():
            caller.act()
        if live and rng.random() < 0.05:
            victim = live.pop(rng.choice(list(live)))
            gone.add(victim.session)
            victim.close()
        heard = bench.turn()
        bench.now += 5
        for _, answer in heard:
            if answer.session_id not in gone:
                live[answer.session_id].hear(answer)
        for caller in [c for c in live.values() if c.done]:
            assert caller.output[: caller.want] == reference(script, caller.prompt, caller.want, vocab=vocab)
            assert {token // 8 for token in caller.output} == {caller.prompt[0] // 8}
            finished += 1
            gone.add(caller.session)
            live.pop(caller.session).close()
    assert finished > 60


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_evicted_and_prefilled_again_at_every_round(sampling: object) -> None:
    """F67: a new placement each round changes nothing."""
    bench = Bench(max_step_rows=9)
    params = SAMPLED if sampling is SAMPLED else GREEDY
    params = replace(params, max_tokens=30, frequency_penalty=0.5, min_tokens=3)
    caller = Caller(bench, bench.hello(), [1, 2, 3], sampling=params, want=30, draft=oracle(SCRIPT, 3, 4, lambda n: n % 6, params))

    def evict(turn: int) -> None:
        if caller.waiting is None:
            caller.place()

    run_all(bench, [caller], each_turn=evict)
    assert caller.output == reference(SCRIPT, [1, 2, 3], 30, sampling=params)
    assert caller.epoch > 5


def test_mixed_acceptance_in_one_batch_equals_solo_runs() -> None:
    """F98: acceptance 0, 2 and 4 side by side; the next rows are those of each session's own text."""
    bench = Bench()
    stream = bench.hello()
    made = []
    for i, wrong in enumerate([0, 2, -1]):
        made.append(Caller(bench, stream, [i, 9], session=f"s{i}", want=30, draft=oracle(SCRIPT, 2, 4, lambda n, w=wrong: w)))
    run_all(bench, made)
    assert [c.output[:30] for c in made] == [reference(SCRIPT, c.prompt, 30) for c in made]
    assert [max(r.num_accepted for r in c.results if r.num_verified == 4) for c in made] == [0, 2, 4]
    for call in bench.engine.log:
        for row in call:
            assert row.start == len(row.prefix)


def test_a_failing_session_that_is_being_closed_is_told_both() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.engine.nan_when = lambda prefix: True
    bench.send(stream, first_step([5]))
    plan = bench.plan()
    assert plan is not None
    bench.send(stream, Close("s", 1))
    bench.finish(plan)
    assert [type(a.outcome).__name__ for a in bench.heard(stream)] == ["Failed", "Closed"]


def test_results_do_not_depend_on_who_else_is_there() -> None:
    alone = Bench()
    one = Caller(alone, alone.hello(), [7, 7], sampling=SAMPLED, want=25, draft=oracle(SCRIPT, 2, 3, sampling=SAMPLED))
    run_all(alone, [one])
    crowd = Bench(max_step_rows=11)
    stream = crowd.hello()
    made = [
        Caller(crowd, stream, [i, 7], session=f"s{i}", sampling=SAMPLED, want=25, draft=oracle(SCRIPT, 2, i % 4, sampling=SAMPLED))
        for i in range(8)
    ]
    run_all(crowd, made)
    assert made[7].output[:25] == one.output[:25]
    assert all(isinstance(result, Result) for c in made for result in c.results)
