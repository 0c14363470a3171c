"""Which rows make a step, and when to wait for more."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from target_service import batching
from target_service.batching import StepCost
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


# ------------------------------------------------------------ long prompts beside streams


class Beside:
    """A stream at a steady pace, and prompts that come once it has its pace. A step takes 20 ms and one more for each row. `late`: after
    its result the stream is back only when the next step has begun."""

    def __init__(self, lengths: list[int], late: bool = False, **limits: int) -> None:
        self.bench = Bench(window=4096, pool=20_000, prefix_block_tokens=0, **{"max_step_rows": 512, **limits})
        self.bench.engine.on_forward = self.cost
        stream = self.bench.hello()
        self.victim = Caller(self.bench, stream, long_prompt(1, 5), session="victim", want=10_000, draft=oracle(SCRIPT, 5, 3))
        self.prompts = [Caller(self.bench, stream, long_prompt(2 + i, n), session=f"p{i}", want=1) for i, n in enumerate(lengths)]
        self.late, self.heard, self.ends = late, [0.0], dict.fromkeys(range(len(lengths)), 0.0)
        for _ in range(30):
            self.turn([self.victim])
        self.steady = self.bench.now - self.heard[-2]
        self.heard = self.heard[-1:]
        self.bench.engine.log.clear()

    def cost(self, rows: list[Any]) -> None:
        self.bench.step_ms = 20.0 + sum(row.rows for row in rows)

    def turn(self, callers: list[Caller]) -> None:
        if not self.late:
            self.victim.act()
        for caller in callers:
            if caller is not self.victim:
                caller.act()
        plan = self.bench.plan()
        if self.late:
            self.victim.act()
        if plan is None:
            return
        self.bench.finish(plan)
        for _, answer in self.bench.verifier.take_answers():
            caller = next(c for c in [self.victim, *self.prompts] if c.session == answer.session_id)
            caller.hear(answer)
            if caller is self.victim:
                self.heard.append(self.bench.now)
            else:
                self.ends[self.prompts.index(caller)] = self.bench.now

    def gaps(self) -> list[float]:
        """Until all prompts are computed: between two results of the stream, in steps of its own."""
        while not all(caller.done for caller in self.prompts):
            self.turn([self.victim, *self.prompts])
        return [(b - a) / self.steady for a, b in itertools.pairwise(self.heard)]

    @property
    def rows(self) -> list[int]:
        return [sum(row.rows for row in call) for call in self.bench.engine.log]


@pytest.mark.parametrize("late", [False, True], ids=["back at once", "back late"])
def test_f103_long_prompts_do_not_freeze_a_stream(late: bool) -> None:
    """Also while it is between two rounds when a step begins: then it waits for one such step before its own."""
    beside = Beside([3000, 3000], late)
    gaps = beside.gaps()
    assert len(gaps) > 100 and max(gaps) <= (4.5 if late else 2.3)
    assert 24 <= sorted(beside.rows)[len(beside.rows) // 2] <= 40, "what fits into twice the time of a step, not a constant"
    for caller in beside.prompts:
        assert caller.output == reference(SCRIPT, caller.prompt, 1)


def test_f103_without_a_bound_the_stream_waits_for_whole_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin."""
    monkeypatch.setattr(batching, "STRETCH", math.inf)
    assert max(Beside([3000, 3000]).gaps()) > 20


def test_a_prompt_alone_is_computed_in_whole_steps() -> None:
    beside = Beside([])
    beside.victim.want = 0
    beside.bench.now += 10_000
    alone = Caller(beside.bench, beside.bench.hello(), long_prompt(9, 1500), session="alone", want=1)
    beside.prompts, beside.ends = [alone], {0: 0.0}
    while not alone.done:
        beside.turn([alone])
    assert beside.rows == [512, 512, 476]


def test_a_short_prompt_passes_a_long_one_and_the_long_one_gets_on() -> None:
    beside = Beside([3000, 60, 3000])
    beside.gaps()
    long, short, later = (beside.ends[i] for i in range(3))
    assert short < long / 4 < later
    first, second = ([row.rows for row in call if row.start == 0 or row.rows > 4] for call in beside.bench.engine.log[:2])
    assert first[0] * 2 >= sum(first[:2]), "the first in order has half of the rows"


def test_priority_goes_before_what_is_short() -> None:
    bench = Bench(max_step_rows=64, pool=4000)
    stream = bench.hello()
    for name, priority, length in [("first", 0, 200), ("short", 1, 40), ("long", 0, 100)]:
        bench.send(stream, first_step(long_prompt(3, length), session=name, priority=priority))
    ends = [a.session_id for _, a in bench.settle()]
    assert ends == ["long", "first", "short"]


def test_a_prefill_gets_its_share_whatever_a_step_costs() -> None:
    """A step that hardly grows, or one of which every row costs: at least an eighth of the rows."""
    for per_row in (0.0, 50.0):
        cost = StepCost()
        for rows in (4, 4, 64, 64):
            cost.seen(rows, 20 + per_row * rows)
        bench = Bench(max_step_rows=64, pool=4000)
        bench.verifier.cost = cost
        stream = bench.hello()
        bench.send(stream, first_step([1], [2, 3, 4], session="talks"), first_step(long_prompt(1, 300), session="long"))
        bench.turn()
        assert [row.rows for row in bench.engine.log[0]] == ([4, 60] if per_row == 0 else [4, 8])


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
    assert bench.verifier.hold_ms(bench.now) == pytest.approx(1.0), "half of what may be worth it, for who never came back before"
    assert bench.verifier.hold_ms(bench.now + 0.75) == pytest.approx(0.25)
    assert bench.verifier.hold_ms(bench.now + 1.5) == 0, "bounded"
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


def test_step_cost_learns_by_size() -> None:
    cost = StepCost()
    assert cost.predicted_ms(4) == StepCost.FIRST_GUESS_MS
    for _ in range(50):
        cost.seen(4, 20.0)
        cost.seen(64, 100.0)
    assert cost.predicted_ms(5) == pytest.approx(20.0) and cost.predicted_ms(70) == pytest.approx(100.0)


@settings(max_examples=40, deadline=None)
@given(seen=st.lists(st.tuples(st.integers(1, 600), st.floats(0.1, 500)), max_size=30), ms=st.floats(0, 2000))
@example(seen=[(1, 1.0), (52, 60.0), (64, 1.0)], ms=60.0)
def test_more_rows_never_cost_less(seen: list[tuple[int, float]], ms: float) -> None:
    """So that the most rows within a time are what a search finds."""
    cost = StepCost()
    for rows, took_ms in seen:
        cost.seen(rows, took_ms)
    times = [cost.at(rows) for rows in range(1, 1025)]
    assert all(a <= b + 1e-9 for a, b in itertools.pairwise(times)) and times[0] > 0
    assert cost.rows_within(ms, 1024) == sum(time <= ms for time in times)


def test_a_step_in_which_the_process_was_stopped_is_soon_forgotten() -> None:
    """It would pass for slow until somebody sends it sessions, which nobody does. What really has become slow is soon told."""
    cost = StepCost()
    for _ in range(20):
        cost.seen(4, 2.0)
    cost.seen(4, 30_000.0)
    assert cost.predicted_ms(4) <= 4.0
    for _ in range(10):
        cost.seen(4, 2.0)
    assert cost.predicted_ms(4) < 2.2
    for _ in range(25):
        cost.seen(4, 200.0)
    assert cost.predicted_ms(4) > 150.0


def test_what_a_step_costs_lies_on_lines_between_what_was_seen() -> None:
    cost = StepCost()
    cost.seen(4, 24.0)
    assert (cost.at(1), cost.at(2), cost.at(8)) == (6.0, 12.0, 48.0), "one size tells little"
    cost.seen(64, 84.0)
    assert (cost.at(1), cost.at(34), cost.at(84)) == (21.0, 54.0, 104.0)
    assert cost.rows_within(48.0, 512) == 28 and cost.rows_within(1000.0, 512) == 512 and cost.rows_within(1.0, 512) == 0
