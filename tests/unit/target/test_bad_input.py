"""F51, F52, F60: bad input is answered with the field's name, never reaches the engine, and the neighbours do not notice."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import pytest

from specdec.terms import MAX_AHEAD_TOKENS, Ahead, DraftDistribution, DraftMethod, Failed, RejectionMethod, SamplingParams
from tests.fakes import hashed_script
from tests.unit.target.harness import GREEDY, VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)
PROMPT = [3, 1, 4]
STANDARD: dict[str, Any] = {"rejection_method": RejectionMethod.STANDARD, "draft_method": DraftMethod.PROBABILISTIC}
HALVES = DraftDistribution((1, 2), struct.pack("<2f", 0.5, 0.5))


def sampling(**fields: Any) -> SamplingParams:
    return replace(GREEDY, **fields)


FIRST_STEPS = {
    "token above the vocabulary": (first_step([*PROMPT, VOCAB]), "step.tokens"),
    "proposal above the vocabulary": (first_step(PROMPT, [VOCAB + 7]), "step.tokens"),
    "largest uint32": (first_step([2**32 - 1]), "step.tokens"),
    "no committed token": (replace(first_step(PROMPT), num_proposed=3), "step.tokens"),
    "more proposals than tokens": (replace(first_step(PROMPT), num_proposed=4), "step.tokens"),
    "longer than the window": (first_step([1] * 513), "step.tokens"),
    "too many proposals": (first_step(PROMPT, [1] * 9), "step.num_proposed"),
    "prompt longer than sent": (first_step(PROMPT, prompt_length=4), "begin.prompt_length"),
    "empty prompt": (first_step(PROMPT, prompt_length=0), "begin.prompt_length"),
    "base in a first step": (replace(first_step(PROMPT), base_length=2), "step.base_length"),
    "round 2 first": (replace(first_step(PROMPT), round=2), "step.round"),
    "epoch 0": (first_step(PROMPT, epoch=0), "step.epoch"),
    "max_tokens left open": (first_step(PROMPT, sampling=sampling(max_tokens=None)), "sampling.max_tokens"),
    "temperature": (first_step(PROMPT, sampling=sampling(temperature=float("nan"))), "sampling.temperature"),
    "banned id": (first_step(PROMPT, sampling=sampling(banned_token_ids=(VOCAB,))), "sampling.banned_token_ids"),
    "min over max": (first_step(PROMPT, sampling=sampling(min_tokens=2000)), "sampling.min_tokens"),
    "methods that do not go together": (first_step(PROMPT, draft_method=DraftMethod.PROBABILISTIC), "begin.draft_sample_method"),
    "too many log-probabilities": (first_step([1] * 10_001, sampling=sampling(prompt_logprobs=19)), "sampling.prompt_logprobs"),
    "endless traceparent": (first_step(PROMPT, traceparent="x" * 1000), "begin.traceparent"),
    "distributions under coupled": (replace(first_step(PROMPT, [1]), distributions=(HALVES,)), "step.distributions"),
    "one distribution too few": (replace(first_step(PROMPT, [1, 2], **STANDARD), distributions=(HALVES,)), "step.distributions"),
    "id outside in q": (
        replace(first_step(PROMPT, [1], **STANDARD), distributions=(DraftDistribution((VOCAB,), struct.pack("<f", 1.0)),)),
        "step.distributions[0]",
    ),
    "q that is not finite": (
        replace(first_step(PROMPT, [1], **STANDARD), distributions=(DraftDistribution((1,), struct.pack("<f", float("nan"))),)),
        "step.distributions[0]",
    ),
    "q with too few numbers": (
        replace(first_step(PROMPT, [1], **STANDARD), distributions=(DraftDistribution((1, 2), b"\0\0\0\0"),)),
        "step.distributions[0]",
    ),
}


@pytest.mark.parametrize("name", FIRST_STEPS)
def test_a_bad_first_step_names_the_field_and_leaves_nothing(name: str) -> None:
    step, field = FIRST_STEPS[name]
    bench = Bench(window=512 if len(step.tokens) < 1000 else 20_000)
    failed = only(bench.send(bench.hello(), step))
    assert isinstance(failed, Failed) and failed.code == 3 and failed.message.startswith(field), failed
    assert bench.verifier.num_sessions == 0 and bench.pool.held == {} and bench.plan() is None


@pytest.mark.parametrize(
    "name", ["token above the vocabulary", "proposal above the vocabulary", "too many proposals", "distributions under coupled"]
)
def test_neighbours_do_not_notice(name: str) -> None:
    bad, _ = FIRST_STEPS[name]
    bench = Bench()
    stream = bench.hello()
    others = [Caller(bench, stream, [i, *PROMPT], session=f"s{i}", draft=oracle(SCRIPT, 4, 3)) for i in range(4)]
    vandal = bench.hello("vandal")
    run_all(bench, others, each_turn=lambda turn: bench.verifier.submit(vandal, replace(bad, session_id=f"bad{turn}"), bench.now))
    assert all(c.output[:20] == reference(SCRIPT, c.prompt, 20) for c in others)


def test_a_bad_round_leaves_the_session_and_its_kv_alone() -> None:
    """F76"""
    bench = Bench()
    stream = bench.hello()
    bench.send(stream, first_step(PROMPT))
    committed = [*PROMPT, *only(bench.turn()).tokens]
    for bad in (
        next_step([*committed[:-1], VOCAB], round_=2),
        next_step(committed, [1] * 9, round_=2),
        next_step([*committed, *[1] * 600], round_=2, base=3),
        next_step(committed[:2], round_=2, base=0),
        replace(next_step(committed, [1], round_=2), distributions=(HALVES,)),
        replace(first_step(PROMPT, seed=8), round=2),
    ):
        failed = only(bench.send(stream, bad))
        assert isinstance(failed, Failed) and failed.code == 3 and not failed.drop
    bench.send(stream, next_step(committed, round_=2))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, committed, 1))
    assert bench.engine.log[-1][0].start == 3


BAD_AHEADS = {
    "ahead.epoch": Ahead("s", 0, 5, 0, (1,)),
    "ahead.prefix_length": Ahead("s", 1, 0, 0, (1,)),
    "ahead.tokens": Ahead("s", 1, 5, 0, ()),
    "ahead.tokens: must": Ahead("s", 1, 5, 0, (1,) * (MAX_AHEAD_TOKENS + 1)),
    "ahead.tokens: token id": Ahead("s", 1, 5, 0, (1, VOCAB)),
}


@pytest.mark.parametrize("known", [True, False], ids=["known", "unknown"])
@pytest.mark.parametrize("says", BAD_AHEADS)
def test_a_malformed_ahead_is_answered_alone_and_harms_nothing(says: str, known: bool) -> None:
    bench = Bench()
    stream = bench.hello()
    if known:
        bench.send(stream, first_step(PROMPT))
    [answer] = bench.send(stream, BAD_AHEADS[says])
    assert isinstance(answer.outcome, Failed) and answer.outcome.message.startswith(says)
    assert (answer.round, answer.outcome.code, answer.outcome.drop) == (0, 3, False)
    if known:
        assert only(bench.turn()).tokens == tuple(reference(SCRIPT, PROMPT, 1))


def test_parameters_that_leave_no_token_fail_that_session_alone() -> None:
    bench = Bench()
    stream = bench.hello()
    impossible = sampling(allowed_token_ids=(1,), banned_token_ids=(1,))
    bench.send(stream, first_step(PROMPT, session="bad", sampling=impossible), first_step(PROMPT, session="good"))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert answers["bad"].code == 3 and "allowed" in answers["bad"].message
    assert answers["good"].tokens == tuple(reference(SCRIPT, PROMPT, 1))
