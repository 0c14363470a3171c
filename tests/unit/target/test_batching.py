"""Which rows make a step, and when to wait for more."""

from __future__ import annotations

import pytest

from target_service.batching import StepCost, Wave
from tests.fakes import hashed_script
from tests.unit.target.harness import VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)


def long_prompt(i: int, length: int) -> list[int]:
    return [(i * 31 + j * 7) % VOCAB for j in range(length)]


def rows_of(bench: Bench) -> list[list[tuple[int, int]]]:
    """(start, rows) of every segment of every step."""
    return [[(row.start, row.rows) for row in call] for call in bench.engine.log]


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 24, 25])
def test_a_prefill_is_cut_into_pieces(length: int) -> None:
    """F123: a last piece of one token is as good as any other."""
    bench = Bench(max_step_rows=8, max_num_speculative_tokens=3)
    stream = bench.hello()
    tokens = long_prompt(1, length)
    expected = reference(SCRIPT, tokens, 4)
    bench.send(stream, first_step(tokens, expected[:3]))
    assert only(bench.until_answered(stream)).tokens == tuple(expected)
    assert all(sum(rows for _, rows in call) <= 8 for call in rows_of(bench))
    *pieces, last = [row for call in bench.engine.log for row in call]
    assert all(row.logits_from == row.rows for row in pieces), "no proposals and no logits before the prompt is complete"
    assert last.rows - last.logits_from == 4, "the last committed token and its block are scored in one step"


def test_decode_rows_go_first_and_the_prefill_takes_the_rest() -> None:
    """F69, F125"""
    bench = Bench(max_step_rows=64)
    stream = bench.hello()
    draft = oracle(SCRIPT, 5, 4)
    talkers = [Caller(bench, stream, long_prompt(i, 5), session=f"s{i}", want=40, draft=draft) for i in range(12)]
    for caller in talkers:
        caller.act()
    for _, answer in bench.turn():
        next(c for c in talkers if c.session == answer.session_id).hear(answer)
    newcomer = Caller(bench, stream, long_prompt(50, 200), session="new", want=10, draft=oracle(SCRIPT, 200, 4))
    bench.engine.log.clear()
    run_all(bench, [*talkers, newcomer])
    assert rows_of(bench)[0][-1] == (0, 9), "an eighth is kept for the prefill: 11 sessions with 5 rows each go first"
    assert all(sum(rows for _, rows in call) <= 64 for call in rows_of(bench))
    for caller in [*talkers, newcomer]:
        assert caller.output[: caller.want] == reference(SCRIPT, caller.prompt, caller.want)


def test_decoding_does_not_starve_a_prefill() -> None:
    bench = Bench(max_step_rows=16)
    stream = bench.hello()
    draft = oracle(SCRIPT, 5, 7)
    talkers = [Caller(bench, stream, long_prompt(i, 5), session=f"s{i}", want=300, draft=draft) for i in range(8)]
    newcomer = Caller(bench, stream, long_prompt(50, 40), session="new", want=1)
    turns = 0
    while not newcomer.done:
        for caller in [*talkers, newcomer]:
            caller.act()
        for _, answer in bench.turn():
            next(c for c in [*talkers, newcomer] if c.session == answer.session_id).hear(answer)
        turns += 1
    assert turns < 40


def test_a_full_queue_is_served_in_order_of_arrival_and_nobody_is_left_out() -> None:
    bench = Bench(max_step_rows=10, max_num_speculative_tokens=4)
    stream = bench.hello()
    for i in range(6):
        bench.send(stream, first_step([i], [1, 2, 3, 4], session=f"s{i}"))
    served = [[a.session_id for _, a in bench.turn()] for _ in range(3)]
    assert served == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]


def test_priority_goes_before_arrival() -> None:
    bench = Bench(max_step_rows=2, max_num_speculative_tokens=1)
    stream = bench.hello()
    for name, priority in [("late", 5), ("normal", 0), ("first", -1)]:
        bench.send(stream, first_step([1], [2], session=name, priority=priority))
    assert [bench.turn()[0][1].session_id for _ in range(3)] == ["first", "normal", "late"]


def test_a_block_larger_than_a_step_is_trimmed() -> None:
    bench = Bench(max_step_rows=4, max_num_speculative_tokens=8)
    stream = bench.hello()
    expected = reference(SCRIPT, [5], 4)
    bench.send(stream, first_step([5], [*expected, 1, 2, 3]))
    result = only(bench.turn())
    assert (result.num_verified, result.tokens) == (3, tuple(expected))


def test_long_cached_prefixes_are_batched_by_their_new_tokens() -> None:
    """F71"""
    bench = Bench(max_step_rows=48, pool=4000)
    stream = bench.hello()
    texts = [long_prompt(i, 300) for i in range(8)]
    for i, text in enumerate(texts):
        bench.send(stream, first_step(text, session=f"s{i}"))
    for _, answer in bench.settle():
        texts[int(answer.session_id[1:])] += answer.outcome.tokens
    bench.engine.log.clear()
    for i, text in enumerate(texts):
        bench.send(stream, next_step(text, [1, 2, 3, 4], round_=2, session=f"s{i}"))
    assert len(bench.turn()) == 8
    assert len(bench.engine.log) == 1


# ------------------------------------------------------------ waves


def wave(bench: Bench, count: int) -> tuple[int, list[list[int]]]:
    stream = bench.hello()
    texts = [[i, 1, 2] for i in range(count)]
    for i, text in enumerate(texts):
        bench.send(stream, first_step(text, session=f"s{i}"))
    for _, answer in bench.turn():
        texts[int(answer.session_id[1:])] += answer.outcome.tokens
    return stream, texts


def test_the_first_to_return_waits_for_the_others_a_fraction_of_a_step() -> None:
    bench = Bench(wave_fraction=0.2)
    stream, texts = wave(bench, 3)
    assert bench.verifier.hold_ms(bench.now) == 0, "nobody is back, there is nothing to hold"
    bench.send(stream, next_step(texts[0], round_=2, session="s0"))
    assert bench.verifier.hold_ms(bench.now) == pytest.approx(2.0)
    assert bench.verifier.hold_ms(bench.now + 1.5) == pytest.approx(0.5)
    assert bench.verifier.hold_ms(bench.now + 2.5) == 0, "bounded"
    bench.send(stream, next_step(texts[1], round_=2, session="s1"))
    assert bench.verifier.hold_ms(bench.now) > 0
    bench.send(stream, next_step(texts[2], round_=2, session="s2"))
    assert bench.verifier.hold_ms(bench.now) == 0, "all are back"


def test_a_lone_session_is_never_delayed() -> None:
    bench = Bench()
    stream, texts = wave(bench, 1)
    bench.send(stream, next_step(texts[0], round_=2, session="s0"))
    assert bench.verifier.hold_ms(bench.now) == 0


def test_two_sessions_that_run_in_turns_fall_into_step() -> None:
    bench = Bench()
    stream, texts = wave(bench, 1)
    bench.send(stream, first_step([9], session="other"))
    assert bench.verifier.hold_ms(bench.now) > 0, "s0 is a moment behind"
    bench.send(stream, next_step(texts[0], round_=2, session="s0"))
    assert bench.verifier.hold_ms(bench.now) == 0
    assert len(bench.turn()) == 2


def test_who_ends_is_not_waited_for() -> None:
    bench = Bench()
    stream, texts = wave(bench, 2)
    bench.send(stream, next_step(texts[0], round_=2, session="s0"))
    bench.send(stream, first_step([1], session="s1", epoch=2))
    assert bench.verifier.hold_ms(bench.now) == 0


def test_nobody_waits_where_the_others_never_return_in_time() -> None:
    wave_ = Wave()
    for turn in range(20):
        wave_.begin([("o", "a"), ("o", "b")], until_ms=100.0 * turn + 5)
        wave_.returned(("o", "a"), 100.0 * turn + 30)
        held = wave_.hold_ms(1, 100.0 * turn + 1)
    assert held == 0.0
    for turn in range(20):
        wave_.begin([("o", "a"), ("o", "b")], until_ms=100.0 * turn + 5)
        held = wave_.hold_ms(1, 100.0 * turn + 1)
        wave_.returned(("o", "a"), 100.0 * turn + 2)
        wave_.returned(("o", "b"), 100.0 * turn + 3)
    assert held == 4.0, "and it notices when they do again"


def test_step_cost_learns_by_size() -> None:
    cost = StepCost()
    assert cost.predicted_ms(4) == StepCost.FIRST_GUESS_MS
    for _ in range(50):
        cost.seen(4, 20.0)
        cost.seen(64, 100.0)
    assert cost.predicted_ms(5) == pytest.approx(20.0) and cost.predicted_ms(70) == pytest.approx(100.0)
