"""Short sessions when long ones fill the pool: they do not wait for them, and the long ones come to their end. Broken twin beside it."""

from __future__ import annotations

import pytest

from specdec.terms import SamplingParams
from target_service.room import SHORT_PART, Room
from tests.fakes import hashed_script
from tests.unit.target.harness import VOCAB, Bench, Caller, oracle, reference

pytestmark = pytest.mark.unit
SCRIPT = hashed_script(VOCAB)
POOL, LONG, SHORT = 2048, 400, 8


def caller(bench: Bench, stream: int, name: str, number: int, want: int) -> Caller:
    prompt = [(number * 31 + j * 7) % VOCAB for j in range(20)]
    sampling = SamplingParams(temperature=0.0, max_tokens=want)
    return Caller(bench, stream, prompt, session=name, sampling=sampling, want=want, draft=oracle(SCRIPT, 5, 3))


def serve(most_turns: int = 6000) -> tuple[int, int]:
    """16 long sessions whose room the pool has for 4 or 5, and one short one after the other until they are done. Returns the longest time
    of a short one, in turns, and how often a long one had to be computed anew."""
    bench = Bench(pool=POOL, window=1024, max_sessions=64, max_step_rows=64, reserve_tokens=32, prefix_block_tokens=0)
    bench.step_ms = 20.0
    stream = bench.hello()
    longs = [caller(bench, stream, f"long{i}", i, LONG) for i in range(16)]
    shorts: list[Caller] = []
    worst = since = 0
    for turn in range(most_turns):
        if all(c.done for c in longs):
            break
        if turn > 100 and (not shorts or shorts[-1].done):
            worst, since = max(worst, turn - since) if shorts else 0, turn
            shorts.append(caller(bench, stream, f"short{len(shorts)}", 100 + len(shorts), SHORT))
        all_ = [*longs, *shorts[-1:]]
        for each in all_:
            each.act()
        heard = bench.turn()
        for _, answer in heard:
            for each in all_:
                if each.session == answer.session_id and not each.done:
                    each.hear(answer)
                    if each.done:
                        each.close()
        if not heard:
            bench.now += 5.0
    assert all(c.done and c.failure is None for c in longs), "the long ones come to their end"
    for each in [c for c in (*longs, *shorts) if c.done]:
        assert each.output == reference(SCRIPT, each.prompt, len(each.output)), "who is parked says the same"
    return max(worst, turn - since), sum(c.prefills for c in longs)


def test_short_sessions_do_not_wait_behind_long_ones() -> None:
    worst, prefills = serve()
    assert worst <= 40, "a few retries"
    assert prefills < 16 * 12, "parking for them is bounded"


def test_twin_short_ones_wait_in_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Room, "_may_pass", lambda self, session, parked: False)
    assert serve()[0] > 80


def test_who_declares_more_than_its_part_is_not_short() -> None:
    bench = Bench(pool=POOL, window=1024, max_sessions=64, reserve_tokens=32)
    stream = bench.hello()
    room = bench.verifier.room
    for want, short in [(POOL // SHORT_PART - 20, True), (POOL // SHORT_PART - 19, False)]:
        one = caller(bench, stream, f"w{want}", 1, want)
        one.act()
        assert room._is_short(bench.verifier._sessions["orch", f"w{want}"]) is short
