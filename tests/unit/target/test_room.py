"""KV room: admission, parking the youngest, coming back; nobody starves and nobody thrashes."""

from __future__ import annotations

import contextlib

import pytest

from specdec.terms import Close, NoRoom, PrefixNeeded, Result
from target_service.room import Donor, Room
from target_service.sessions import Session
from tests.fakes import ScriptedRow, hashed_script
from tests.unit.target.harness import VOCAB, Bench, Caller, first_step, next_step, only, oracle, reference, run_all

SCRIPT = hashed_script(VOCAB)


def prompt(i: int, length: int = 10) -> list[int]:
    return [i, *range(length - 1)]


def callers(bench: Bench, count: int, want: int = 40, k: int = 3) -> list[Caller]:
    stream = bench.hello()
    draft = oracle(SCRIPT, 10, k, lambda n: n % (k + 2))
    return [Caller(bench, stream, prompt(i), session=f"s{i}", want=want, draft=draft) for i in range(count)]


def test_a_new_session_must_fit_with_its_reserve() -> None:
    bench = Bench(pool=40, reserve_tokens=8)
    stream = bench.hello()
    bench.send(stream, first_step(prompt(0), session="a"), first_step(prompt(1), session="b"))
    assert only(bench.send(stream, first_step(prompt(2, 14), session="c"))) == NoRoom(50)
    assert bench.send(stream, first_step(prompt(2, 12), session="c")) == []
    assert len(bench.turn()) == 3


def test_who_is_refused_leaves_no_trace() -> None:
    bench = Bench(pool=40, reserve_tokens=8)
    stream = bench.hello()
    bench.send(stream, first_step(prompt(0, 30), session="a"))
    assert only(bench.send(stream, first_step(prompt(1, 30), session="b"))) == NoRoom(50)
    assert bench.verifier.num_sessions == 1
    bench.send(stream, Close("a", 1))
    assert bench.send(stream, first_step(prompt(1, 30), session="b")) == []
    assert len(bench.turn()) == 1


def test_the_number_of_sessions_is_bounded() -> None:
    bench = Bench(max_sessions=2)
    stream = bench.hello()
    bench.send(stream, first_step(prompt(0), session="a"), first_step(prompt(1), session="b"))
    assert only(bench.send(stream, first_step(prompt(2), session="c"))) == NoRoom(50)


def test_a_lone_session_may_use_the_whole_pool() -> None:
    bench = Bench(pool=50, window=50, reserve_tokens=100)
    [caller] = callers(bench, 1)
    run_all(bench, [caller])
    assert caller.output[:40] == reference(SCRIPT, prompt(0), 40)


def test_room_for_a_whole_block_before_every_step() -> None:
    """F69: capacity is there for prefix and block, also right below the end of the pool."""
    bench = Bench(pool=100, reserve_tokens=4)
    made = callers(bench, 3, want=60, k=8)

    def check(rows: list[ScriptedRow]) -> None:
        will_hold = sum(map(len, bench.engine.kv.slots.values())) + sum(row.rows for row in rows)
        assert will_hold <= bench.pool.used_tokens <= 100

    bench.engine.on_forward = check
    run_all(bench, made)
    assert [c.output[:60] for c in made] == [reference(SCRIPT, prompt(i), 60) for i in range(3)]


def test_the_youngest_is_parked_told_and_taken_back() -> None:
    bench = Bench(pool=42, reserve_tokens=4)
    stream = bench.hello()
    bench.send(stream, first_step(prompt(0), session="old"))
    bench.send(stream, first_step(prompt(1), session="young"))
    texts = {a.session_id: [*p, *a.outcome.tokens] for p, (_, a) in zip([prompt(0), prompt(1)], bench.turn(), strict=True)}
    for round_ in range(2, 12):
        for name, committed in texts.items():
            bench.send(stream, next_step(committed, round_=round_, session=name))
        for _, answer in bench.turn():
            texts[answer.session_id] += answer.outcome.tokens
    for name, committed in texts.items():
        bench.send(stream, next_step(committed, [7] * 8, round_=12, session=name))
    answers = {a.session_id: a.outcome for _, a in bench.turn()}
    assert answers["young"] == NoRoom(50)
    assert isinstance(answers["old"], Result)
    again = next_step(texts["young"], round_=12, session="young")
    assert only(bench.send(stream, again)) == NoRoom(50), "its turn has not come"
    assert only(bench.send(stream, first_step([1, 2], session="new"))) == NoRoom(50), "nobody overtakes it"
    bench.send(stream, Close("old", 1))
    assert only(bench.send(stream, again)) == PrefixNeeded(0)
    whole = next_step(texts["young"], round_=12, base=0, session="young")
    bench.send(stream, whole)
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, texts["young"], 1))
    assert bench.send(stream, first_step([1, 2], session="new")) == []


def test_who_stopped_asking_is_not_in_the_way() -> None:
    bench = Bench(pool=42, reserve_tokens=4, lease_ms=500.0)
    stream = bench.hello()
    bench.send(stream, first_step(prompt(0, 19), session="old"))
    bench.send(stream, first_step(prompt(1, 15), session="young"))
    bench.turn()
    old = [*prompt(0, 19), *reference(SCRIPT, prompt(0, 19), 1)]
    bench.send(stream, next_step(old, [7] * 8, round_=2, session="old"))
    bench.turn()
    bench.send(stream, Close("old", 1))
    assert only(bench.send(stream, first_step([1, 2], session="new"))) == NoRoom(50)
    bench.now += 501
    assert bench.send(stream, first_step([1, 2], session="new")) == []


def test_sessions_nobody_speaks_for_go_first() -> None:
    bench = Bench(pool=40, reserve_tokens=8)
    gone, stream = bench.hello("gone"), bench.hello()
    bench.send(gone, first_step(prompt(0, 25)))
    bench.turn()
    bench.verifier.detach(gone, bench.now)
    assert bench.send(stream, first_step(prompt(1, 25))) == []
    assert len(bench.turn()) == 1
    back = bench.hello("gone")
    committed = [*prompt(0, 25), *reference(SCRIPT, prompt(0, 25), 1)]
    assert only(bench.send(back, next_step(committed, round_=2))) == NoRoom(50)


def test_what_runs_for_nobody_is_not_taken_from_under_the_engine() -> None:
    bench = Bench(pool=40, reserve_tokens=8)
    gone, stream = bench.hello("gone"), bench.hello()
    bench.send(gone, first_step(prompt(0, 25)))
    plan = bench.plan()
    assert plan is not None
    bench.verifier.detach(gone, bench.now)
    assert only(bench.send(stream, first_step(prompt(1, 25)))) == NoRoom(50)
    bench.finish(plan)
    back = bench.hello("gone")
    assert only(bench.send(back, first_step(prompt(0, 25)))).tokens == tuple(reference(SCRIPT, prompt(0, 25), 1)), "it was stored"


def test_a_session_nobody_speaks_for_is_parked_before_a_younger_one() -> None:
    bench = Bench(pool=50, reserve_tokens=4)
    stream, leaver = bench.hello(), bench.hello("leaver")
    bench.send(stream, first_step(prompt(0), session="old"))
    bench.send(leaver, first_step(prompt(1), session="left"))
    bench.send(stream, first_step(prompt(2), session="young"))
    bench.turn()
    bench.verifier.detach(leaver, bench.now)
    old = [*prompt(0), *reference(SCRIPT, prompt(0), 1)]
    bench.send(stream, next_step([*old, *[1] * 15], [7] * 8, round_=2, session="old", base=10))
    assert [a.session_id for a in bench.until_answered(stream)] == ["old"]
    young = [*prompt(2), *reference(SCRIPT, prompt(2), 1)]
    bench.send(stream, next_step(young, round_=2, session="young"))
    assert only(bench.turn()).tokens == tuple(reference(SCRIPT, young, 1)), "it kept its KV"


@pytest.mark.parametrize("k", [0, 3, 8])
def test_eight_sessions_on_room_for_seven(k: int) -> None:
    """All finish equal to the reference, with at most 8 prefills more than sessions."""
    bench = Bench(pool=7 * 50 + k, reserve_tokens=16)
    made = callers(bench, 8, want=40, k=k)
    run_all(bench, made)
    assert [c.output[:40] for c in made] == [reference(SCRIPT, prompt(i), 40) for i in range(8)]
    assert prefilled(bench) <= 16


@pytest.mark.parametrize("seed", range(10))
def test_eight_sessions_with_different_ends(seed: int) -> None:
    bench = Bench(pool=7 * 50, reserve_tokens=4)
    made = callers(bench, 8)
    for i, caller in enumerate(made):
        caller.want = 10 + (seed * 7 + i * 13) % 35
    run_all(bench, made)
    assert all(c.output[: c.want] == reference(SCRIPT, prompt(i), c.want) for i, c in enumerate(made))
    assert prefilled(bench) <= 16


def test_evicting_the_least_recently_used_thrashes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broken twin of the two tests above: whoever needs room takes it from whoever asked longest ago."""

    def take(self: Room, session: Session, tokens: int) -> None:
        while session.resident is not None and not self._budget.grow(session.resident, tokens):
            victim = min((s for s in self._evictable() if s is not session), key=lambda s: (s.asked_ms, s.age))
            if victim.pending is not None:
                bench.verifier._answers.tell(victim, victim.pending.round, NoRoom(0))
                victim.pending = None
            self.free(victim)

    def extend(self: Room, session: Session) -> list[Session]:
        assert session.pending is not None
        take(self, session, len(session.tokens) + len(session.pending.block))
        return []

    def house(self: Room, session: Session, tokens: int, now_ms: float, donor: Donor | None = None) -> bool:
        session.resident = next(self._names)
        take(self, session, tokens)
        return True

    monkeypatch.setattr(Room, "house", house)
    monkeypatch.setattr(Room, "extend", extend)
    bench = Bench(pool=7 * 50, reserve_tokens=16)
    made = callers(bench, 8, want=40, k=0)
    with contextlib.suppress(AssertionError):  # of not getting anywhere
        run_all(bench, made, limit=400)
    assert prefilled(bench) > 16


def prefilled(bench: Bench) -> int:
    """How often a KV was filled from nothing."""
    return sum(row.start == 0 for call in bench.engine.log for row in call)
