"""Epochs, rounds, stored results, prefixes: who gets which answer."""

from __future__ import annotations

import struct
from dataclasses import replace

import pytest

from specdec.sampling import Sampler
from specdec.terms import (
    DraftDistribution,
    DraftMethod,
    Expired,
    Failed,
    FinishReason,
    PrefixNeeded,
    RejectionMethod,
    Result,
    SamplingParams,
    StaleEpoch,
    StaleRound,
    UnknownSession,
)
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, SAMPLED, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

PROMPT = [3, 1, 4, 1, 5]
SCRIPT = hashed_script(VOCAB)
REF = reference(SCRIPT, PROMPT, 12)


def begun(bench: Bench, k: int = 0) -> tuple[int, list[int]]:
    """A session after its first round: (stream, committed tokens)."""
    stream = bench.hello()
    assert bench.send(stream, first_step(PROMPT, REF[:k])) == []
    result = only(bench.turn())
    return stream, [*PROMPT, *result.tokens]


def test_first_round_without_a_block_decides_one_token() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    assert only(bench.turn()) == Result(prefix_length=5, kv_length_after=5, num_verified=0, num_accepted=0, tokens=(REF[0],))


@pytest.mark.parametrize("wrong", [None, 0, 1, 2, 3])
def test_a_block_is_kept_up_to_the_first_difference(wrong: int | None) -> None:
    bench = Bench()
    stream = bench.hello()
    block = list(REF[:4])
    if wrong is not None:
        block[wrong] = (block[wrong] + 1) % VOCAB
    bench.send(stream, first_step(PROMPT, block))
    kept = 4 if wrong is None else wrong
    assert only(bench.turn()) == Result(5, 5 + kept, num_verified=4, num_accepted=kept, tokens=tuple(REF[: kept + 1]))
    [slot] = bench.engine.kv.slots.values()
    assert slot == [*PROMPT, *REF[:kept]], "refused proposals leave the KV"


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("k", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("wrong", ["never", "always first", "moving"])
def test_text_is_the_targets_own_whatever_the_block(sampling: SamplingParams, k: int, wrong: str) -> None:
    spoiled = {"never": lambda n: -1, "always first": lambda n: 0, "moving": lambda n: n % 5}[wrong]
    bench = Bench()
    caller = Caller(bench, bench.hello(), PROMPT, sampling=sampling, want=40, draft=oracle(SCRIPT, len(PROMPT), k, spoiled, sampling))
    run_all(bench, [caller])
    assert caller.output[:40] == reference(SCRIPT, PROMPT, 40, sampling=sampling)


def test_the_same_round_again_gets_the_stored_result() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, REF[:2]))
    [(_, first)] = bench.turn()
    assert bench.send(stream, first_step(PROMPT, [9, 9])) == [first]
    assert bench.plan() is None, "nothing is computed twice"


def test_an_older_round_is_stale_and_a_later_one_a_mistake() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, round_=2))
    committed += only(bench.turn()).tokens
    assert only(bench.send(stream, next_step(committed[:-1], round_=1))) == StaleRound(2)
    failed = only(bench.send(stream, next_step(committed, round_=4)))
    assert isinstance(failed, Failed) and failed.code == 3 and "step.round" in failed.message and not failed.drop
    bench.send(stream, next_step(committed, round_=3))
    assert isinstance(only(bench.turn()), Result), "the session is unharmed"


def test_a_waiting_step_is_replaced_by_one_that_continues_its_block() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, REF[1:2], round_=2))
    assert bench.send(stream, next_step(committed, REF[1:4], round_=2)) == []
    assert only(bench.turn()).num_verified == 3


def test_a_waiting_step_is_joined_by_one_with_another_block() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, REF[1:3], round_=2))
    assert bench.send(stream, next_step(committed, [60, 61, 62], round_=2)) == []
    assert only(bench.turn()) == Result(6, 8, 2, 2, tuple(REF[1:4]))


def test_a_running_step_is_joined_and_answered_once() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, REF[1:2], round_=2))
    plan = bench.plan()
    assert plan is not None
    assert bench.send(stream, next_step(committed, REF[1:4], round_=2)) == []
    bench.finish(plan)
    assert only(bench.heard()).num_verified == 1
    assert bench.turn() == []


def test_unknown_session_and_epochs() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    assert only(bench.send(stream, next_step(committed, round_=1, session="other"))) == UnknownSession()
    assert only(bench.send(stream, next_step(committed, round_=1, epoch=2))) == UnknownSession(), "a new epoch begins with its Begin"
    bench.send(stream, first_step(committed, prompt_length=5, epoch=3))
    assert only(bench.turn()).tokens == (REF[1],)
    assert only(bench.send(stream, next_step(committed, round_=2))) == StaleEpoch(3)
    assert len(bench.engine.kv.slots) == 1, "the older placement's KV is gone"


def test_a_result_of_an_older_epoch_is_never_applied() -> None:
    """F66, F85: the session was restarted while its step ran."""
    bench = Bench()
    stream, committed = begun(bench)
    for epoch in (2, 4):
        old = first_step(committed, REF[1:3], prompt_length=5, epoch=epoch)
        bench.send(stream, old)
        plan = bench.plan()
        assert plan is not None
        stale = bench.send(stream, first_step(committed, prompt_length=5, epoch=epoch + 1))
        assert [(a.epoch, a.outcome) for a in stale] == [(epoch, StaleEpoch(epoch + 1))]
        bench.finish(plan)
        assert bench.heard() == [], "the old step had its one answer"
        assert only(bench.turn()) == Result(6, 6, 0, 0, (REF[1],))
        committed = [*PROMPT, REF[0]]
    bench.verifier.submit(stream, next_step([*committed, REF[1]], REF[2:4], round_=2, epoch=5), bench.now)
    assert only(bench.turn()).tokens == tuple(REF[2:5])


def test_prefix_needed_says_what_is_there() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    wrong = replace(next_step(committed, round_=2), base_hash=1)
    assert only(bench.send(stream, wrong)) == PrefixNeeded(0)
    assert only(bench.send(stream, next_step([*committed, 9, 9], round_=2, base=7))) == PrefixNeeded(0)
    longer = next_step([*committed, 9], round_=2, base=6)
    assert only(bench.send(stream, longer)) == PrefixNeeded(5), "the newest token is known and not in KV"
    whole = replace(next_step(committed, REF[1:3], round_=2, base=0), base_hash=1)
    bench.send(stream, whole)  # nothing has no hash
    assert only(bench.turn()).tokens == tuple(REF[1:4])
    assert bench.engine.log[-1][0].start == 5, "what agrees is not computed again"


def test_a_lower_base_rolls_back() -> None:
    """F90: an edited history equals a fresh session."""
    bench = Bench()
    stream, committed = begun(bench, k=4)
    edited = [*committed[:7], 50, 51]
    bench.send(stream, next_step(edited, round_=2, base=6))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, edited, 1))
    assert bench.engine.log[-1][0].start == 7


def test_a_shorter_history_and_what_follows_it() -> None:
    bench = Bench()
    stream, committed = begun(bench, k=4)
    bench.send(stream, next_step(committed, round_=2))
    committed += only(bench.turn()).tokens
    shorter = committed[:8]
    bench.send(stream, next_step(shorter, round_=3, base=4))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, shorter, 1)), "all of it was in KV: its last token is fed again"
    assert bench.engine.log[-1][0].start == 7
    edited = [*shorter[:6], 50]
    bench.send(stream, next_step(edited, round_=4, base=6))
    edited += only(bench.turn()).tokens
    bench.send(stream, next_step(edited, round_=5))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, edited, 1))


def test_an_edited_prompt_counts_in_the_penalties() -> None:
    params = replace(GREEDY, repetition_penalty=10.0)
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, sampling=params))
    only(bench.turn())
    candidates = [[*PROMPT[:2], token, 9, 9, 8] for token in range(VOCAB)]
    edited = next(text for text in candidates if penalised(text, text[:5], params) != penalised(text, PROMPT, params))
    bench.send(stream, next_step(edited, round_=2, base=2))
    assert only(bench.turn()).tokens == (penalised(edited, edited[:5], params),)


def penalised(committed: list[int], prompt: list[int], params: SamplingParams) -> int:
    """The next token, were `prompt` the prompt."""
    return Sampler(params, 7, VOCAB, (), prompt).choose(SCRIPT(committed), len(committed), committed[5:])


def test_time_runs_out_in_the_queue_and_the_round_stays_open() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, round_=2, remaining_ms=50))
    bench.now += 50
    assert bench.plan() is None
    assert only(bench.heard(stream)) == Expired()
    bench.send(stream, next_step(committed, round_=2))
    assert only(bench.turn()).tokens == (REF[1],)


def test_a_step_that_runs_does_not_expire() -> None:
    bench = Bench()
    stream, committed = begun(bench)
    bench.send(stream, next_step(committed, round_=2, remaining_ms=5))
    plan = bench.plan()
    assert plan is not None
    bench.now += 100
    bench.verifier.tick(bench.now)
    assert bench.heard() == []
    bench.finish(plan)
    assert only(bench.heard()).tokens == (REF[1],)


@pytest.mark.parametrize("change", ["other tokens", "only what the piece held", "the same"])
def test_a_step_may_expire_and_come_again_while_a_piece_of_its_prefill_runs(change: str) -> None:
    bench = Bench(max_step_rows=9)
    stream = bench.hello()
    tokens = list(range(20))
    bench.send(stream, first_step(tokens, prompt_length=4, remaining_ms=5))
    plan = bench.plan()
    assert plan is not None and plan.size == 9
    bench.now += 10
    bench.verifier.tick(bench.now)
    assert only(bench.heard()) == Expired()
    again = {"other tokens": [*tokens[:5], *[60] * 15], "only what the piece held": tokens[:9], "the same": tokens}[change]
    bench.send(stream, first_step(again, prompt_length=4))
    bench.finish(plan)
    assert only(bench.until_answered(stream)).tokens == tuple(reference(SCRIPT, again, 1))
    assert bench.engine.log[1][0].start == (0 if change == "other tokens" else 8 if len(again) == 9 else 9)


def test_max_tokens_ends_inside_the_block_and_rows_that_cannot_count_are_not_scored() -> None:
    for max_tokens in range(1, 7):
        bench = Bench()
        stream = bench.hello()
        bench.send(stream, first_step(PROMPT, REF[:5], sampling=replace(GREEDY, max_tokens=max_tokens)))
        result = only(bench.turn())
        assert result.tokens == tuple(REF[:max_tokens])
        assert result.finish is (FinishReason.LENGTH if max_tokens <= 6 else None)
        assert result.num_verified == min(5, max_tokens - 1)


def test_resumed_output_counts_against_the_limits() -> None:
    """F87: 20 in all, not 20 more."""
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step([*PROMPT, *REF[:7]], REF[7:11], prompt_length=5, sampling=replace(GREEDY, max_tokens=9)))
    assert only(bench.turn()) == Result(12, 13, 1, 1, tuple(REF[7:9]), finish=FinishReason.LENGTH)
    full = first_step([*PROMPT, *REF[:9]], prompt_length=5, session="t", sampling=replace(GREEDY, max_tokens=9))
    assert only(bench.send(stream, full)) == Result(14, 0, 0, 0, (), finish=FinishReason.LENGTH)


def test_the_window_trims_the_block_and_ends_the_session() -> None:
    bench = Bench(window=8)
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, REF[:5]))
    result = only(bench.turn())
    assert (result.num_verified, result.tokens, result.finish) == (2, tuple(REF[:3]), FinishReason.LENGTH)
    assert max(row.start + row.rows for call in bench.engine.log for row in call) < 8
    assert only(bench.send(stream, next_step([*PROMPT, *REF[:3]], round_=2, base=7))) == Result(8, 7, 0, 0, (), finish=FinishReason.LENGTH)


@pytest.mark.parametrize("slot", range(6))
def test_end_of_sequence_at_every_slot(slot: int) -> None:
    """F21: nothing after it, and it is not among the tokens."""
    eos = REF[slot]
    first = REF.index(eos)
    bench = Bench(eos_ids=(eos,))
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT, REF[:5]))
    result = only(bench.turn())
    assert (result.tokens, result.finish, result.stop_token_id) == (tuple(REF[:first]), FinishReason.STOP, eos)
    assert result.num_accepted == first and result.kv_length_after == len(PROMPT) + first - 1, "the newest token is never in KV"


def test_a_step_that_is_asked_again_may_wait_anew() -> None:
    bench = Bench()
    stream, step = bench.hello(), first_step((1, 2, 3), remaining_ms=50)
    assert bench.send(stream, step) == []
    bench.now += 40
    assert bench.send(stream, step) == []
    bench.now += 40
    (answer,) = bench.until_answered(stream)
    assert isinstance(answer.outcome, Result)


def test_a_step_lives_as_long_as_any_of_its_askers_has_time() -> None:
    """The last moment is not in time: whoever asked has given up by then."""
    bench = Bench()
    stream, committed = begun(bench)
    for remaining_ms in (50, 5):
        assert bench.send(stream, next_step(committed, round_=2, remaining_ms=remaining_ms)) == []
    bench.now += 49
    bench.verifier.tick(bench.now)
    assert bench.heard() == []
    bench.now += 1
    bench.verifier.tick(bench.now)
    assert only(bench.heard()) == Expired()


def test_a_round_that_is_none_is_answered_though_no_result_is_there_yet() -> None:
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    assert only(bench.send(stream, replace(next_step(PROMPT, round_=1), round=0))) == StaleRound(0)
    assert only(bench.turn()).tokens == (REF[0],)


def test_how_long_a_step_waited_for_the_engine_is_told_with_its_answer() -> None:
    """To its first row; of a Step that never had one, nothing."""
    bench = Bench(max_step_rows=9, window=24)
    stream = bench.hello()
    for name, more in {"decides": {}, "scores the prompt": {"sampling": replace(GREEDY, prompt_logprobs=0, max_tokens=1)}}.items():
        tokens = [*PROMPT] * 4
        bench.send(stream, first_step(tokens, prompt_length=len(tokens) - bool(more), session=name, **more))
        bench.now += 3
        [answer] = bench.until_answered(stream)
        assert isinstance(answer.outcome, Result) and answer.queue_us == 3000
    bench.send(stream, first_step([7] * 20, session="late", remaining_ms=10), first_step([8] * 20, session="later", remaining_ms=10))
    bench.now += 4
    plan = bench.plan()
    assert plan is not None and [len(row.tokens) for row in plan.rows] == [9]
    bench.finish(plan)
    assert [(a.outcome, a.queue_us) for _, a in bench.turn()] == [(Expired(), 4000), (Expired(), 0)]


def test_steps_that_came_in_one_moment_are_served_in_the_order_in_which_they_came() -> None:
    """Not in that in which their sessions began."""
    bench = Bench(max_step_rows=2, max_num_speculative_tokens=1)
    stream = bench.hello()
    for name in "ab":
        bench.send(stream, first_step(PROMPT[:1], session=name))
    first = only(bench.turn()[:1]).tokens
    for name in "ba":
        bench.send(stream, next_step([*PROMPT[:1], *first], [9], round_=2, session=name))
    assert [a.session_id for _ in range(2) for _, a in bench.turn()] == ["b", "a"]


def test_the_distributions_of_proposals_that_cannot_count_go_with_them() -> None:
    bench = Bench()
    methods = {"rejection_method": RejectionMethod.STANDARD, "draft_method": DraftMethod.PROBABILISTIC}
    qs = tuple(DraftDistribution((token,), struct.pack("<f", 1.0)) for token in REF[:5])
    step = first_step(PROMPT, REF[:5], sampling=replace(SAMPLED, max_tokens=3), **methods)
    bench.send(bench.hello(), replace(step, distributions=qs))
    plan = bench.plan()
    assert plan is not None and plan.rows[0].score is not None
    assert (plan.rows[0].score.block, plan.rows[0].score.distributions) == (tuple(REF[:2]), qs[:2])
