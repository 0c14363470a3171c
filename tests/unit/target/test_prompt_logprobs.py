"""Log-probabilities of the prompt: one entry per token from the second on, under the raw row before it, however the prompt was fed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from specdec.logprobs import token_logprobs
from specdec.terms import Close, Closed, Expired, Failed, FinishReason, NoRoom, PrefixNeeded, Result, SamplingParams, TokenLogprobs
from target_service import executor
from target_service.plan import PromptScore, Row
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, SAMPLED, VOCAB, Bench, first_step, next_step, only, reference

SCRIPT = hashed_script(VOCAB)
LONG = [(7 * i) % 60 for i in range(40)]


def asking(count: int = 2, **more: Any) -> SamplingParams:
    return replace(GREEDY, prompt_logprobs=count, **more)


def expected(prompt: Sequence[int], count: int = 2) -> tuple[TokenLogprobs, ...]:
    """From prefix to prefix, without any engine."""
    return tuple(token_logprobs(SCRIPT(prompt[:at]).numpy(), prompt[at], count) for at in range(1, len(prompt)))


def scored_rows(bench: Bench) -> list[tuple[int, int]]:
    """(slot, position) of every row whose logits were computed."""
    return [
        (row.slot, row.start + offset) for call in bench.engine.log for row in call for offset in range(row.logits_from, len(row.tokens))
    ]


@pytest.mark.parametrize("rows", [9, 10, 16, 64])
@pytest.mark.parametrize("count", [0, 1, 20, VOCAB])
def test_one_entry_per_token_whatever_the_pieces(rows: int, count: int) -> None:
    count = min(count, 20)
    for length in (1, 2, 3, 8, 9, 10, 11, 40):
        bench = Bench(max_step_rows=rows)
        stream = bench.hello()
        prompt, block = LONG[:length], reference(SCRIPT, LONG[:length], 3)
        bench.send(stream, first_step(prompt, block, sampling=asking(count)))
        result = only(bench.until_answered(stream))
        assert result.prompt_logprobs == expected(prompt, count)
        assert result.tokens[:3] == tuple(block), "the block is judged as ever"
        bench.send(stream, next_step([*prompt, *result.tokens], round_=2))
        assert only(bench.turn()).prompt_logprobs == (), "in the epoch's first result alone"


def test_the_sampling_of_the_output_does_not_reach_them() -> None:
    params = replace(SAMPLED, prompt_logprobs=3, temperature=0.3, top_k=2, repetition_penalty=2.0, logit_bias={5: 50.0}, min_tokens=4)
    bench = Bench(eos_ids=(7,))
    bench.send(bench.hello(), first_step(LONG, sampling=params))
    assert only(bench.turn()).prompt_logprobs == expected(LONG, 3)


def test_a_session_that_resumes_gets_those_of_its_prompt_alone() -> None:
    bench = Bench(max_step_rows=9)
    stream = bench.hello()
    bench.send(stream, first_step(LONG, prompt_length=12, sampling=asking()))
    result = only(bench.until_answered(stream))
    assert result.prompt_logprobs == expected(LONG[:12])


def test_without_the_field_a_prefill_costs_what_it_did() -> None:
    bench = Bench(max_step_rows=16)
    stream = bench.hello()
    bench.send(stream, first_step(LONG))
    bench.until_answered(stream)
    assert scored_rows(bench) == [(1, 39)]


def test_no_row_is_scored_that_nobody_asked_for() -> None:
    bench = Bench(max_step_rows=16)
    stream = bench.hello()
    bench.send(stream, first_step(LONG, sampling=asking()))
    bench.until_answered(stream)
    assert scored_rows(bench) == [(1, at) for at in range(40)]


# ------------------------------------------------------------ what comes between


def begun(bench: Bench, pieces: int, **more: Any) -> int:
    stream = bench.hello()
    bench.send(stream, first_step(LONG, sampling=asking(), **more))
    for _ in range(pieces):
        assert bench.turn() == []
    return stream


@pytest.mark.parametrize("rows_then", [9, 10, 14, 64])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_parked_between_two_pieces_keeps_what_it_has(pieces: int, rows_then: int) -> None:
    bench = Bench(max_step_rows=9)
    stream = begun(bench, pieces)
    session = bench.verifier._sessions["orch", "s"]
    bench.verifier._room.free(session)
    session.pending = None
    bench.verifier.limits = replace(bench.limits, max_step_rows=rows_then)
    bench.send(stream, first_step(LONG, sampling=asking()))
    assert only(bench.until_answered(stream)).prompt_logprobs == expected(LONG)
    assert sorted(at for _, at in scored_rows(bench)) == [*range(40)], "the rows are fed again, not scored again"


@pytest.mark.parametrize("while_it_runs", [False, True])
@pytest.mark.parametrize("same", [0, 1, 5, 8, 9, 10, 17, 18, 19, 30, 40])
def test_expired_and_asked_again_with_other_tokens(same: int, while_it_runs: bool) -> None:
    """What agrees stays; the token behind a piece in the engine may be another."""
    bench = Bench(max_step_rows=9)
    stream = begun(bench, 1, remaining_ms=12)
    plan = bench.plan()
    assert plan is not None
    if not while_it_runs:
        bench.finish(plan)
    bench.now += 20
    bench.verifier.tick(bench.now)
    assert only(bench.heard()) == Expired()
    other = [*LONG[:same], *[61] * (40 - same)]
    bench.send(stream, first_step(other, sampling=asking()))
    if while_it_runs:
        bench.finish(plan)
    result = only(bench.until_answered(stream))
    assert result.prompt_logprobs == expected(other)
    assert result.tokens == tuple(reference(SCRIPT, other, 1))
    kept = min(same, 18) if same >= 18 or not while_it_runs else 9 if same >= 9 else same
    assert len(scored_rows(bench)) <= 18 + 40 - max(0, kept - 1)


def test_a_stored_result_is_told_whole_and_a_higher_epoch_begins_anew() -> None:
    bench = Bench(max_step_rows=9)
    stream = bench.hello()
    step = first_step(LONG, sampling=asking())
    bench.send(stream, step)
    [answer] = bench.until_answered(stream)
    assert bench.send(stream, step) == [answer]
    bench.send(stream, first_step(LONG, sampling=asking(), epoch=2))
    assert only(bench.until_answered(stream)).prompt_logprobs == expected(LONG)


# ------------------------------------------------------------ rounds that may decide nothing


@pytest.mark.parametrize("rows", [9, 64])
@pytest.mark.parametrize("why", ["max_tokens", "window"])
@pytest.mark.parametrize("length", [1, 2, 10, 37])
def test_a_round_that_decides_nothing_still_scores_the_prompt(why: str, rows: int, length: int) -> None:
    bench = Bench(max_step_rows=rows, window=40 if why == "window" else 512)
    stream = bench.hello()
    params = asking(max_tokens=40 - length if why == "max_tokens" else 1000)
    bench.send(stream, first_step(LONG, [1, 2], prompt_length=length, sampling=params))
    result = (
        only(bench.until_answered(stream)) if length > 1 else only(bench.send(stream, first_step(LONG, prompt_length=1, sampling=params)))
    )
    assert result == Result(40, length - 1, 0, 0, (), finish=FinishReason.LENGTH, prompt_logprobs=expected(LONG[:length]))
    assert [at for _, at in scored_rows(bench)] == [*range(length - 1)], "no row but those that score"
    bench.send(stream, Close("s", 1))
    bench.settle()
    assert bench.pool.held == {} and bench.engine.kv.slots == {}


def test_such_a_round_expires_is_parked_and_is_closed_like_any_other() -> None:
    bench = Bench(max_step_rows=9)
    stream = bench.hello()
    step = first_step(LONG, prompt_length=30, sampling=asking(max_tokens=10), remaining_ms=12)
    bench.send(stream, step)
    bench.turn()
    bench.now += 20
    assert only(bench.turn()) == Expired()
    session = bench.verifier._sessions["orch", "s"]
    bench.verifier._room.free(session)
    bench.send(stream, replace(step, remaining_ms=60_000))
    for _ in range(3):
        assert bench.turn() == []
    plan = bench.plan()
    assert plan is not None
    bench.verifier.tick(bench.now)
    bench.finish(plan)
    assert only(bench.heard()).prompt_logprobs == expected(LONG[:30])
    bench.send(stream, replace(step, session_id="t"))
    bench.turn()
    assert only(bench.send(stream, Close("t", 1))) == Closed()


def test_all_entries_are_there_when_it_comes_back_so_the_engine_is_not_asked() -> None:
    """It expired while its last piece was in the engine."""
    bench = Bench()
    stream = bench.hello()
    step = first_step(LONG, prompt_length=30, sampling=asking(max_tokens=10), remaining_ms=12)
    bench.send(stream, step)
    plan = bench.plan()
    assert plan is not None
    bench.now += 20
    bench.verifier.tick(bench.now)
    assert only(bench.heard()) == Expired()
    bench.finish(plan)
    assert only(bench.send(stream, step)).prompt_logprobs == expected(LONG[:30])
    assert bench.plan() is None


def test_an_outgrown_pool_parks_it_and_it_comes_back() -> None:
    bench = Bench(pool=66, max_step_rows=9, reserve_tokens=0)
    stream = bench.hello()
    bench.send(stream, first_step([1, 2, 3, 4], session="old", prompt_length=2))
    old = [1, 2, 3, 4, *only(bench.turn()).tokens]
    step = first_step(LONG, sampling=asking())
    bench.send(stream, step)
    bench.turn()
    bench.send(stream, next_step([*old, *[1] * 20], [7] * 8, round_=2, base=4, session="old"))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert answers["s"] == NoRoom(50)
    bench.send(stream, Close("old", 1))
    bench.settle()
    assert not isinstance(bench.send(stream, step), PrefixNeeded)
    assert only(bench.until_answered(stream)).prompt_logprobs == expected(LONG)


# ------------------------------------------------------------ faults and bounds


@pytest.mark.parametrize("position", [0, 8, 9, 20, 38])
def test_a_prompt_row_that_is_not_finite_fails_its_session_alone(position: int) -> None:
    """F91, F94"""
    bench = Bench(max_step_rows=18)
    stream = bench.hello()
    bench.engine.nan_when = lambda prefix: list(prefix) == LONG[: position + 1]
    bench.send(stream, first_step(LONG, sampling=asking()), first_step([60, *LONG[1:]], session="t", sampling=asking()))
    answers = {a.session_id: a.outcome for _, a in bench.settle()}
    failed = answers["s"]
    assert isinstance(failed, Failed) and failed.code == 13 and failed.drop
    assert answers["t"].prompt_logprobs == expected([60, *LONG[1:]])
    assert len(bench.engine.kv.slots) == 1 and bench.verifier.num_sessions == 1


def test_a_broken_row_of_tokens_that_are_no_longer_the_sessions_is_nobodys() -> None:
    bench = Bench(max_step_rows=9)
    stream = begun(bench, 1, remaining_ms=12)
    plan = bench.plan()
    assert plan is not None
    bench.now += 20
    bench.verifier.tick(bench.now)
    assert only(bench.heard()) == Expired()
    other = [*LONG[:12], *[61] * 28]
    bench.send(stream, first_step(other, sampling=asking()))
    bench.engine.nan_when = lambda prefix: list(prefix) == LONG[:15]
    bench.finish(plan)
    assert only(bench.until_answered(stream)).prompt_logprobs == expected(other)


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
def test_a_log_probability_that_is_no_number_is_an_error(field: str) -> None:
    """F94: finite logits that lie too far apart for a float32."""
    bench = Bench(lambda prefix: 1e300 * SCRIPT(prefix))
    bench.send(bench.hello(), first_step([1, 2], sampling=replace(GREEDY, **{field: 3})))
    failed = only(bench.turn())
    assert isinstance(failed, Failed) and failed.code == 13 and failed.drop


def test_f94_nan_is_never_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "token_logprobs", lambda row, token, count: TokenLogprobs(float("nan")))
    bench = Bench()
    bench.send(bench.hello(), first_step([1, 2], sampling=asking()))
    failed = only(bench.turn())
    assert isinstance(failed, Failed) and failed.code == 13 and "log-probability" in failed.message


def test_the_bound_counts_alternatives() -> None:
    bench = Bench(window=20_000, pool=40_000)
    stream = bench.hello()
    assert bench.send(stream, first_step([1] * 10_000, sampling=asking(19))) == []
    failed = only(bench.send(stream, first_step([1] * 10_001, session="t", sampling=asking(19))))
    assert isinstance(failed, Failed) and failed.code == 3 and failed.message.startswith("sampling.prompt_logprobs")


# ------------------------------------------------------------ a broken twin


def test_entries_of_the_row_behind_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin: a token is looked up in the row that it made, not in the row before it."""
    right = executor.Executor._prompt_logprobs

    def shifted(self: Any, row: Row, prompt: PromptScore, logits: Any) -> Any:
        return right(self, row, prompt, logits.roll(-1, 0))

    monkeypatch.setattr(executor.Executor, "_prompt_logprobs", shifted)
    bench = Bench()
    bench.send(bench.hello(), first_step(LONG, sampling=asking()))
    entries = only(bench.turn()).prompt_logprobs
    assert len(entries) == 39 and not set(entries) & set(expected(LONG))
