"""Which replica takes a session: balance, stickiness to what holds its work, prefixes while they are worth it; leaving and hunger."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator import prefixes
from orchestrator.hunger import PATIENCE, Hunger
from orchestrator.leaving import BEAT_MS, MARGIN_MS, leave
from orchestrator.placement import IDLE_HALF, LATE_WEIGHT, PREFIX_SESSIONS, PREFIX_WORTH, Candidate, Report, choose
from orchestrator.places import Places
from orchestrator.prefixes import MARKS, MAX_HOLDERS, PrefixIndex
from specdec.terms import DraftLoad, TargetBeat

UNIT = st.floats(0, 1, exclude_max=True)
CANDIDATES = st.lists(
    st.builds(
        Candidate,
        st.sampled_from("abcdef"),
        st.integers(0, 50),
        st.floats(0, 1e6),
        st.sampled_from(["", "x", "y"]),
        st.integers(0, 4096),
        st.floats(1, 100),
    ),
    max_size=6,
    unique_by=lambda c: c.name,
)


def beat(**other: object) -> TargetBeat:
    return replace(TargetBeat(0, 0, 0, 10_000, 0, 10), **other)  # type: ignore[arg-type]


# --- choose -----------------------------------------------------------------------------------------------------------


@given(
    CANDIDATES, st.sampled_from("abcdefg"), UNIT, UNIT, st.sampled_from(["", "x", "y"]), st.sampled_from("abcdefg"), st.integers(0, 5000)
)
def test_rules(candidates: list[Candidate], avoid: str, one: float, two: float, numerics: str, prefer: str, tokens: int) -> None:
    name = choose(candidates, avoid, (one, two), numerics, prefer, tokens)
    names = {c.name for c in candidates}
    assert (name is None) == (not candidates) and (name is None or name in names)
    if name is None:
        return
    chosen = next(c for c in candidates if c.name == name)
    assert name != avoid or names == {avoid}
    fit = [c for c in candidates if c.name != avoid] or candidates
    assert chosen.numerics == numerics or not any(c.numerics == numerics for c in fit)
    fit = [c for c in fit if c.numerics == numerics] or fit
    if prefer in {c.name for c in fit}:
        assert name == prefer, "where its work is"
        return
    first, others = int(one * len(fit)), max(1, len(fit) - 1)
    best = min((fit[first], fit[(first + 1 + int(two * others)) % len(fit)]), key=lambda c: (c.load, c.sessions))
    assert len(fit) < 3 or best.load < max(c.load for c in fit) or len({c.load for c in fit}) < len(fit), "never the busiest of several"
    limit = best.load + PREFIX_WORTH * (best.load + PREFIX_SESSIONS * best.step_ms)
    assert chosen.load <= limit, "no prefix is worth more than this"
    if name != best.name:
        assert chosen.prefix > 0


Placed = Callable[[Counter[str], Sequence[int], PrefixIndex], str]


def stream_of(
    prompts: Callable[[int], Sequence[int]], *, seed: int, sessions: int = 300, per_beat: int = 40, stay: float = 1.0
) -> Counter[str]:
    """`sessions` arrive at three targets, `per_beat` between two reports; each is placed as the orchestrator would."""
    draw, index = random.Random(seed), PrefixIndex()
    names = ["a", "b", "c"]
    held, taken, reports = Counter[str](), Counter[str](), dict.fromkeys(names, Report())
    for i in range(sessions):
        if i % per_beat == 0:
            for name in names:  # a report says what was there a moment ago, and what the prompts of that moment cost
                word = beat(sessions=held[name], kv_used_tokens=20 * held[name], predicted_step_ms=draw.randint(5, 60))
                reports[name] = reports[name].heard(word, held[name])
        tokens = prompts(i)
        found = index.holders(tokens)
        candidates = [Candidate(n, held[n], reports[n].load(held[n]), "", found.get(n, 0), reports[n].step_ms) for n in names]
        name = choose(candidates, "", (draw.random(), draw.random()), tokens=len(tokens))
        assert name is not None
        index.took(tokens, name)
        held[name] += 1
        taken[name] += 1
        if draw.random() > stay:
            held[draw.choice([n for n in names if held[n]])] -= 1
    return taken


PROMPTS: dict[str, Callable[[int], Sequence[int]]] = {
    "short": lambda i: (i,),
    "one system prompt": lambda i: (*range(200), i),
    "turns of a few talks": lambda i: tuple(range(i % 10, 400 + i)),
    "all different": lambda i: tuple(range(1000 * i, 1000 * i + 500)),
}


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("stay", [1.0, 0.2])
def test_F134_every_target_gets_its_share(kind: str, stay: float) -> None:
    for seed in range(3):
        taken = stream_of(PROMPTS[kind], seed=seed, stay=stay)
        assert all(60 <= taken[name] <= 141 for name in "abc"), taken


def test_F134_twin_who_reported_the_least_gets_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Report, "load", lambda self, ours: self.step_ms * (1 + self.others + self.held))
    assert any(max(stream_of(PROMPTS["short"], seed=seed, per_beat=100).values()) > 141 for seed in range(5))


def test_F134_twin_a_prefix_is_worth_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.placement.PREFIX_WORTH", 1e9)
    assert max(stream_of(PROMPTS["one system prompt"], seed=0).values()) > 141


def test_a_prefix_draws_its_sessions_to_where_it_is() -> None:
    """Ten conversations, turn after turn: each stays on one target while the targets are about equally busy."""
    draw, index, held = random.Random(1), PrefixIndex(), Counter[str]()
    homes: dict[int, list[str]] = {}
    for turn in range(1, 9):
        for talk in range(10):
            tokens = tuple(talk * 10_000 + i for i in range(300 * turn))
            found = index.holders(tokens)
            candidates = [Candidate(n, held[n], 1.0 + held[n], "", found.get(n, 0)) for n in "abc"]
            name = choose(candidates, "", (draw.random(), draw.random()), tokens=len(tokens)) or ""
            index.took(tokens, name)
            homes.setdefault(talk, []).append(name)
    assert all(len(set(seen)) == 1 for seen in homes.values())


@given(st.floats(1, 1e4), st.integers(64, 16_384), st.integers(0, 100_000), st.integers(1, 20))
def test_a_prefix_is_not_worth_any_load(load: float, prefix: int, more: int, times: int) -> None:
    tokens = prefix + more
    busy = Candidate("busy", 1, load * 1.6 + 2 * 1.0 + times, prefix=prefix)
    assert choose([busy, Candidate("idle", 1, load)], "", (0.9, 0.9), tokens=tokens) == "idle"
    alike = replace(busy, load=load)
    assert choose([alike, Candidate("idle", 1, load)], "", (0.9, 0.9), tokens=tokens) == "busy"


# --- load -------------------------------------------------------------------------------------------------------------


def test_load_counts_what_was_placed_since_the_report() -> None:
    report = Report().heard(beat(sessions=12), ours=10)
    assert report.others == 2
    assert report.load(10) < report.load(11) < report.load(60)
    assert report.load(3) < report.load(10)


@given(st.integers(0, 1000), st.integers(0, 1000), st.integers(0, 20_000), st.integers(1, 1000), st.integers(0, 1000))
def test_more_of_anything_is_more_load(sessions: int, queued: int, used: int, step_ms: int, ours: int) -> None:
    word = beat(sessions=sessions, queued=queued, kv_used_tokens=used, predicted_step_ms=step_ms)
    load = Report().heard(word, 0).load(ours)
    assert 0 < load < float("inf")
    for more in ({"queued": queued + 1}, {"predicted_step_ms": step_ms + 1}, {"kv_used_tokens": used + 1}):
        assert Report().heard(replace(word, **more), 0).load(ours) >= load


def test_a_faster_target_takes_more_and_one_prompt_does_not_make_a_slow_one() -> None:
    fast, slow = (Report().heard(beat(predicted_step_ms=ms, sessions=1), 1) for ms in (5, 20))
    assert fast.load(4) <= slow.load(1) / 2 + 5
    calm = Report().heard(beat(), 0)
    assert calm.heard(beat(predicted_step_ms=50), 0).step_ms == pytest.approx(15.0)


def test_a_draft_that_is_late_counts_as_a_full_one() -> None:
    good, late = (Report().heard(DraftLoad(1.0, share, 4, 0, 100), 4) for share in (0.0, 1.0))
    assert late.load(4) == 4 * good.load(4)
    assert Report().heard(DraftLoad(1.0, 0.0, 4, 90, 100), 4).load(4) > 5 * good.load(4)


@pytest.mark.parametrize("share", [float("nan"), -5.0, float("inf"), float("-inf")])
def test_F51_a_draft_cannot_talk_itself_into_sessions(share: float) -> None:
    honest, liar = (Report().heard(DraftLoad(0.0, told, 4, 0, 100), 4) for told in (0.0, share))
    assert honest.load(4) <= liar.load(4) <= 4 * honest.load(4)


def share_of_the_slow(targets: int, busy: int, turns: bool, *, seed: int = 0, sessions: int = 1000) -> float:
    """Share of the placements that come to a target ten times slower than its siblings, while `busy` sessions run. Who is served faster
    ends sooner. `turns`: they are turns of 50 talks, not texts of their own."""
    draw, index = random.Random(seed), PrefixIndex()
    names = [f"t{i}" for i in range(targets)]
    held, reports, slow = Counter[str](), dict.fromkeys(names, Report()), 0
    for i in range(sessions):
        step = {n: (10 if n == "t0" else 1) * (5 + 0.1 * held[n]) for n in names}
        if i % 5 == 0:
            for n in names:
                reports[n] = reports[n].heard(beat(sessions=held[n], predicted_step_ms=int(step[n])), held[n])
        talk = draw.randrange(sessions) if not turns else draw.randrange(50)
        tokens = range(1000 * talk, 1000 * talk + 100)
        found = index.holders(tokens)
        fit = [Candidate(n, held[n], reports[n].load(held[n]), "", found.get(n, 0), reports[n].step_ms) for n in names]
        name = choose(fit, "", (draw.random(), draw.random()), tokens=len(tokens)) or ""
        index.took(tokens, name)
        held[name] += 1
        slow += name == "t0"
        if held.total() > busy:
            ending = draw.choices(names, [held[n] / step[n] for n in names])[0]
            held[ending] -= 1
    return slow / sessions


@pytest.mark.parametrize("targets", [2, 3])
@pytest.mark.parametrize("turns", [False, True])
def test_a_target_ten_times_slower_gets_hardly_a_session(targets: int, turns: bool) -> None:
    """One now and then, to see whether it still is so slow. What it gets once all others are busy is less than its share of what the pool
    can do."""
    assert share_of_the_slow(targets, 2 * targets, turns) <= 0.003
    assert share_of_the_slow(targets, 30 * targets, turns) <= 1 / (10 * targets)


def test_twin_who_may_meet_itself_wins_however_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    def anybody(fit: list[Candidate], avoid: str, draws: tuple[float, float], **more: int) -> str:
        return min((fit[int(draw * len(fit))] for draw in draws), key=lambda c: c.load).name

    monkeypatch.setitem(globals(), "choose", anybody)
    assert share_of_the_slow(2, 4, turns=False) > 0.2 and share_of_the_slow(3, 6, turns=False) > 0.05


def placed_at_the_recovered(seconds: int) -> list[float]:
    """When, s, which of ten sessions a second come to a target that was a hundred times slower when it had its last one. Each lasts as
    long as two arrivals; four reports a second."""
    reports = {name: Report().heard(beat(sessions=1, predicted_step_ms=ms), 1) for name, ms in (("fast", 5), ("once slow", 500))}
    held: list[str] = []
    told = dict.fromkeys(reports, 0)
    came = []
    for tick in range(20 * seconds):
        if tick % 5 == 0:
            for name, report in reports.items():
                told[name] = 5 if name == "fast" or name in held else told[name] or 500
                reports[name] = report.heard(beat(sessions=held.count(name), predicted_step_ms=told[name]), held.count(name))
        if tick % 2 == 0:
            held = held[-1:]
            fit = [Candidate(name, held.count(name), report.load(held.count(name))) for name, report in reports.items()]
            held.append(choose(fit, "", (0.0, 0.0)) or "")
            came += [tick / 20] * (held[-1] == "once slow")
    return came


def test_a_target_that_has_recovered_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody goes to the slowest of all, and idle it cannot show that it no longer is."""
    came = placed_at_the_recovered(seconds=300)
    first = came[0]
    assert 30 < first < 240, "sooner or later one session is risked"
    later = [when for when in came if when > first + 30]
    assert len(later) > 0.4 * 10 * (300 - first - 30), "and then it is one of two"
    monkeypatch.setattr("orchestrator.placement.IDLE_HALF", 1e9)
    assert not placed_at_the_recovered(seconds=300), "the twin's memory does not fade"


def test_what_an_idle_replica_said_counts_in_full_once_somebody_is_there() -> None:
    report = Report().heard(beat(sessions=1, predicted_step_ms=80), 1)
    late = Report().heard(DraftLoad(1.0, 1.0, 1, 0, 100), 1)
    for _ in range(2 * IDLE_HALF):
        report, late = report.heard(beat(predicted_step_ms=80), 0), late.heard(DraftLoad(1.0, 1.0, 0, 0, 100), 0)
    assert report.load(0) == pytest.approx(80 / 4) and report.load(1) == 2 * 80
    assert late.load(0) == 1 + LATE_WEIGHT / 4 and late.load(1) == 2 * (1 + LATE_WEIGHT)
    assert report.heard(beat(predicted_step_ms=80), 1).load(0) == 80, "one is on its way"


def test_a_target_that_has_had_no_session_is_taken_for_as_fast_as_the_fastest() -> None:
    """What it says is a guess. A pool that grows would else wait for its slowest member to be ten times as busy."""
    peers = [SimpleNamespace(name=name, info=None, beat=None) for name in ("old", "fresh")]
    places = Places(lambda: peers, lambda name: None, lambda name: None)  # type: ignore[arg-type, return-value]
    places.moved("", "old")
    for name, word in (("old", beat(sessions=1, predicted_step_ms=5)), ("fresh", beat(predicted_step_ms=50))):
        places.heard(name, word)
    places.want("s", "")
    assert [name for _, name, _ in places.place()] == ["fresh"]


def test_a_prefix_keeps_nobody_at_a_target_that_became_slow() -> None:
    slow = Candidate("slow", 0, 50.0, prefix=300, step_ms=50.0)
    assert choose([slow, Candidate("fast", 1, 10.0, step_ms=5.0)], "", (0.0, 0.0), tokens=300) == "fast"
    assert choose([replace(slow, load=15.0), Candidate("fast", 1, 10.0, step_ms=5.0)], "", (0.0, 0.0), tokens=300) == "slow"


# --- prefixes ---------------------------------------------------------------------------------------------------------


@given(st.integers(0, 900), st.integers(0, 500), st.integers(0, 500))
def test_a_match_is_never_too_long(shared: int, mine: int, theirs: int) -> None:
    index = PrefixIndex()
    head = tuple(range(shared))
    index.took((*head, *range(10_000, 10_000 + mine)), "p")
    found = index.holders((*head, *range(20_000, 20_000 + theirs))).get("p", 0)
    assert found <= shared
    assert found == max((mark for mark in MARKS if mark <= shared), default=0)


def test_the_index_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefixes, "MAX_PREFIXES", 20)
    index = PrefixIndex()
    for i in range(100):
        index.took(tuple(range(1000 * i, 1000 * i + 500)), f"p{i}")
        index.took(tuple(range(64)), f"p{i}")
    assert len(index) == 20
    assert set(index.holders(tuple(range(64)))) == {f"p{i}" for i in range(100 - MAX_HOLDERS, 100)}


# --- leaving ----------------------------------------------------------------------------------------------------------


def drain(to_come: dict[str, int], step_ms: float, drain_ms: float, *, equal: bool = True) -> list[tuple[float, str]]:
    """(when, who) of those that leave, with rounds of one token each."""
    left, gone = dict(to_come), []
    for beat_at in range(0, int(drain_ms), int(BEAT_MS)):
        for session in leave(left, step_ms, drain_ms - beat_at, equal=equal):
            del left[session]
            gone.append((float(beat_at), session))
        left = {s: n - int(BEAT_MS / step_ms) for s, n in left.items() if n > BEAT_MS / step_ms}
    return gone


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=200), st.integers(5, 100), st.integers(0, 30_000))
def test_all_leave_in_time_who_do_not_finish(to_come: list[int], step_ms: int, drain_ms: int) -> None:
    sessions = {str(i): tokens for i, tokens in enumerate(to_come)}
    gone = drain(sessions, step_ms, drain_ms)
    for session in sessions.keys() - {session for _, session in gone}:
        assert sessions[session] * step_ms <= drain_ms + BEAT_MS or drain_ms < BEAT_MS
    assert all(when <= max(0, drain_ms - MARGIN_MS) + BEAT_MS for when, _ in gone)


def test_they_leave_one_after_the_other_the_longest_first() -> None:
    gone = drain({str(i): 2000 + i for i in range(100)}, 20, 10_000)
    assert len(gone) == 100 and [session for _, session in gone[:3]] == ["99", "98", "97"]
    per_beat = Counter(when for when, _ in gone)
    assert max(per_beat.values()) <= 25 and len(per_beat) > 10
    assert drain({"short": 50, "long": 5000}, 20, 10_000) == [(0.0, "long")], "who ends in time stays"


def test_to_other_numerics_they_go_last_of_all() -> None:
    gone = drain({"a": 5000, "b": 5000}, 20, 10_000, equal=False)
    assert [when for when, _ in gone] == [8000.0, 8000.0]


# --- hunger -----------------------------------------------------------------------------------------------------------


def test_hunger() -> None:
    fed, late, starved = Hunger(), Hunger(), Hunger()
    assert not any(fed.round("miss" if i % 3 else "hit") for i in range(1000))
    assert not any(late.round("late") for _ in range(1000)), "in time for the next row"
    told = [i for i in range(3 * PATIENCE) if starved.round("miss")]
    assert told == [PATIENCE - 1, 2 * PATIENCE - 1, 3 * PATIENCE - 1]
    assert not any(starved.round(other) for other in ("off", "ngram", "forced", "no_draft", "prefill") for _ in range(100))


def test_a_draft_that_serves_the_same_target_is_preferred_while_it_has_little_more_to_do() -> None:
    def drafts(load: float) -> list[Candidate]:
        return [Candidate("a", 4, 5.0), Candidate("b", 5, load, company=3), Candidate("c", 4, 5.0, company=1)]

    assert choose(drafts(6.0), "", (0.0, 0.0)) == "b"
    assert choose(drafts(7.25), "", (0.0, 0.0)) == "b"
    assert choose(drafts(7.5), "", (0.0, 0.0)) == "c"
    assert choose(drafts(6.0), "b", (0.0, 0.0)) == "c"


def test_sessions_of_a_target_gather_at_a_draft_and_no_draft_is_left_out() -> None:
    """They come and go, as sessions do; each goes where its target's others are unless that draft is busy."""
    draw = random.Random(3)
    held: list[tuple[str, str]] = []
    for turn in range(2000):
        target = f"t{turn % 4}"
        loads = Counter(draft for draft, _ in held)
        company = Counter(draft for draft, its in held if its == target)
        fit = [Candidate(d, loads[d], 1.0 + loads[d], company=company[d]) for d in ("a", "b", "c", "d")]
        chosen = choose(fit, "", (draw.random(), draw.random()))
        assert chosen is not None
        held.append((chosen, target))
        if len(held) > 80:
            held.pop(draw.randrange(len(held)))
    together = sum(Counter(draft for draft, its in held if its == f"t{i}").most_common(1)[0][1] for i in range(4))
    loads = Counter(draft for draft, _ in held)
    assert together > 0.7 * len(held) and min(loads.values()) > 10
