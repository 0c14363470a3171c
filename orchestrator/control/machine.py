"""One target, and what shares its machine: its sessions, whether they speculate now, and from which gain on a slot is worth its row. Pure.

Rules
1. All sessions of a target go one way: none speculates; or all do, and the target goes on with plain rows where a draft has nothing yet;
   or all do and wait for their drafts, which pays where a step takes long. What one of them costs the others is not seen from within
   it. Among those that speculate each has the length that its own chain is worth.
2. The way that decides most tokens per ms is taken, by what was measured at this load (regime.py) and what the sessions gain now. To begin
   speculating, or to wait or no longer, it must be better by HYSTERESIS: where two are alike, the one that needs less is taken.
3. Measurements age. The other ways are tried now and then, in turn, for some rounds of every session; the more one would lose the more
   rarely, and ever more rarely while it goes on losing: in the long run trying costs at most about PROBE_SHARE of the tokens.
4. A round counts only if it began and ended under one way, and not as the first after a change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Protocol

from orchestrator.control.choice import Choice, Slot, choose, prefix
from orchestrator.control.regime import Regime, Way
from orchestrator.control.step_time import StepTime

MAX_DEPTH = 64
HYSTERESIS = 0.04
PROBE_SHARE = 0.01
PROBE_ROUNDS = 10  # of every session
HOPELESS, HOPELESS_ROUNDS = 0.8, 2  # a try that is worse than this share of the usual way ends after so many rounds of every session
MOST_PROBE_MS = 2000.0
FIRST_INTERVAL_MS, LAST_INTERVAL_MS = 2000.0, 120_000.0
GROWTH = 4.0  # of the interval, from one try to the next: a single bad one may have met a system that was just starting
MIN_READY, FIRST_READY, FEW = 0.05, 0.5, 8  # share of commits that find proposals: at least, and before so many were seen
CHOOSE_EVERY_MS, AT_REST_MS = 10.0, 50.0  # from one look to the next, at least; the latter while nobody speculates
EACH_MS = 1.0  # … for every session of this process: a look takes some 10 us for each of one target's, so all looks take a hundredth
CURIOUS_EVERY_MS, MOST_TRIES = 200.0, 4
IDLE_MS = 500.0  # longer silence is no time spent


class Seat(Protocol):
    """A session at the target, as far as it counts here."""

    @property
    def adaptive(self) -> bool: ...

    @property
    def must_wait(self) -> bool:
        """Where it speculates its rounds wait for its draft: the target may not go on by itself."""

    @property
    def rows(self) -> int:
        """Rows of its rounds that it does not choose: 1 and a fixed block."""

    @property
    def looked(self) -> float:
        """Tokens that its rounds gain by lookups, on the average, where it speculates."""

    def outlook(self) -> Iterable[float]:
        """Gain of each slot that its draft could propose."""


class _Probe:
    """`left` = rounds that are still to be timed; `took_ms` = busy time with sessions that go this way. It goes on where it was when the
    load comes back, or such sessions do."""

    def __init__(self, way: Way, sessions: int) -> None:
        self.way, self.took_ms, self.left = way, 0.0, PROBE_ROUNDS * sessions


class _Load:
    """What is known and going on at one load. It begins without speculation: that is never a bad way."""

    def __init__(self, due_ms: float) -> None:
        self.regime = Regime()
        self.way = Way.PLAIN
        self.last_tried = Way.PLAIN
        self.due_ms = due_ms  # when another way is tried next, in busy time
        self.interval_ms = FIRST_INTERVAL_MS
        self.probe: _Probe | None = None
        self.curious_ms = 0.0  # not curious until then, in busy time
        self.tried = Counter[int]()  # rows that curiosity asked for


class Machine:
    def __init__(self) -> None:
        self.step_time = StepTime()
        self.seats: set[Seat] = set()
        self.threshold = self.row_threshold = 0.0  # least gain worth drafting, and least gain worth a row once it is drafted
        self.depth = MAX_DEPTH  # of a chain that is worth waiting for
        self.elsewhere = 0  # sessions of this process at other targets
        self.switched_ms = 0.0
        self.rows = 0  # of the newest step
        self.step_ms = 0.0
        self.heard_ms = self._chosen_ms = -1e9
        self._busy_ms = 0.0
        self._rows = self._adaptive = self._waiting = 0  # rows that sessions do not choose, sessions that choose, those of them that wait
        self._foreign = 0.0  # rows of other orchestrators, running mean
        self._told = 0  # sessions that the newest step answered
        self._wave = 1.0  # the same, running mean
        self._wait_ms = self._waited_ms = 0.0  # longest wait for a draft among those of the newest step, and of the next one
        self.patient = True  # a round without a proposal waits for one
        self._loads: dict[int, _Load] = {}
        self._load = self._load_of(0)  # the present one
        self._stale = self._pure = True
        self._blocks: float | None = None  # ms that the chosen rows cost the newest step, once asked

    # --- who is there -------------------------------------------------------------------------------------------------

    def join(self, seat: Seat, now_ms: float) -> None:
        self.seats.add(seat)
        self._moved(now_ms, seat, 1)

    def leave(self, seat: Seat, now_ms: float) -> None:
        self.seats.discard(seat)
        self._moved(now_ms, seat, -1)

    def _moved(self, now_ms: float, seat: Seat, count: int) -> None:
        self._stale, self._blocks = True, None
        self._rows += count * seat.rows
        self._adaptive += count * seat.adaptive
        self._waiting += count * (seat.adaptive and seat.must_wait)
        before = self.way
        self._load = self._load_of(max(0, len(self.seats) - 1).bit_length())
        if self.way is not before:
            self.switched_ms = now_ms

    def _load_of(self, bin_: int) -> _Load:
        """Of so many sessions, as a power of two."""
        if bin_ not in self._loads:
            lower = self._loads.get(bin_ - 1)  # where it does not pay, more sessions hardly make it pay
            later = lower is not None and lower.way is Way.PLAIN and any(lower.regime.turns[way].seen for way in (Way.GOING, Way.WAITING))
            self._loads[bin_] = _Load(self._busy_ms + FIRST_INTERVAL_MS * later)
        return self._loads[bin_]

    @property
    def regime(self) -> Regime:
        return self._load.regime

    @property
    def way(self) -> Way:
        load = self._load
        return load.way if load.probe is None else load.probe.way

    @property
    def speculates(self) -> bool:
        return self.way is not Way.PLAIN

    @property
    def waits(self) -> bool:
        """Sessions wait for their drafts that need not."""
        return self.way is Way.WAITING and not self._waiting

    @property
    def trying(self) -> bool:
        """Speculation is tried out: every session proposes something."""
        load = self._load
        return load.probe is not None and load.way is Way.PLAIN

    def would_speculate(self, sessions: int) -> bool:
        load = self._loads.get(max(0, sessions - 1).bit_length())
        return load is not None and load.way is not Way.PLAIN

    def boundary_ms(self, now_ms: float) -> float:
        """Until the target could begin the next step: it is busy with sessions that the newest step did not answer."""
        return max(0.0, self.heard_ms + self.step_ms - now_ms) if self._told < len(self.seats) else 0.0

    # --- what is learned ----------------------------------------------------------------------------------------------

    def heard(self, rows: int, took_ms: float, own_rows: int, answers: int, now_ms: float) -> None:
        """One engine step of the target; `own_rows` = rows of it that belong to the answers told with it."""
        self._told = answers
        self._wave += 0.1 * (answers - self._wave)
        self._wait_ms, self._waited_ms = self._waited_ms, 0.0
        self._pure = rows <= own_rows + 2 * self._foreign + 1  # else it computed somebody's prompt
        if self._pure:
            self.step_time.learn(rows, took_ms)
        self.rows, self.step_ms = rows, took_ms
        others = max(0, rows - own_rows)
        self._foreign += (0.3 if others < self._foreign else 0.02) * (others - self._foreign)
        gap = now_ms - self.heard_ms
        busy_ms = gap if gap < IDLE_MS else took_ms
        self._busy_ms += busy_ms
        if (probe := self._load.probe) is not None and self.choosing:
            probe.took_ms += busy_ms
        self.heard_ms = now_ms
        self._blocks = None

    def learn_answer(self, wanted: int, after_ms: float | None) -> None:
        """A session's draft had something at its commit (None), or said something so long after it."""
        self.regime.learn_answer(wanted, after_ms, len(self.seats))

    def sent(self, wait_ms: float) -> None:
        """A Step left so long after its session's commit."""
        self._waited_ms = max(self._waited_ms, wait_ms)

    def learn_round(self, began_ms: float, way: Way) -> None:
        """A round of one session ended with the step that was just heard of."""
        load, choosing = self._load, self.choosing
        if not self._pure or began_ms <= self.switched_ms or (choosing and way is not self.way):
            return
        own = self.heard_ms - began_ms - self._wait_ms - self._blocks_ms()
        load.regime.learn(way, own, len(self.seats))
        if load.probe is not None and choosing:
            load.probe.left -= 1
        self._stale = True

    def _blocks_ms(self) -> float:
        """What the rows that were chosen cost the newest step; all its rounds ask for it."""
        if self._blocks is None:
            self._blocks = self.step_time.at(self.rows) - self.step_time.at(self._base_rows)
        return self._blocks

    @property
    def choosing(self) -> bool:
        """There is a session that leaves its block length to us."""
        return self._adaptive > 0

    @property
    def _base_rows(self) -> float:
        return self._rows + self._foreign

    # --- what is decided ----------------------------------------------------------------------------------------------

    def decide(self, now_ms: float) -> None:
        """Looks again at all ways, if something was learned and the last look is not of this very moment."""
        if not self.choosing:
            return
        at_least = CHOOSE_EVERY_MS if self.speculates else AT_REST_MS
        every = max(at_least, EACH_MS * (len(self.seats) + self.elsewhere))
        if self._stale and (now_ms - self._chosen_ms >= every or len(self.seats) == 1):
            self._stale, self._chosen_ms = False, now_ms
            self._decide(now_ms)

    def _decide(self, now_ms: float) -> None:
        load = self._load
        if not any(turn.seen for turn in load.regime.turns.values()):
            return
        rates, seen = self._rates(load), {way for way, turn in load.regime.turns.items() if turn.seen}
        if (probe := load.probe) is not None:
            over = probe.left <= 0 or probe.took_ms > MOST_PROBE_MS
            enough = probe.left <= (PROBE_ROUNDS - HOPELESS_ROUNDS) * len(self.seats)
            hopeless = probe.way is not Way.PLAIN and rates.get(probe.way, 0.0) < HOPELESS * rates.get(load.way, 0.0)
            if over or (enough and hopeless):
                self._end_probe(load, probe, rates, now_ms)
            return
        better = [way for way in rates if way in seen and self._is_better(way, load.way, rates)]
        if better and load.way in seen:
            load.way, self.switched_ms = max(better, key=lambda way: rates[way]), now_ms
            load.interval_ms = FIRST_INTERVAL_MS
            load.due_ms = self._busy_ms + FIRST_INTERVAL_MS
        elif self._busy_ms >= load.due_ms and load.regime.turns[load.way].seen >= PROBE_ROUNDS:
            # A wait is tried only where it is hoped to pay: behind it the target rests.
            others = [
                way for way in rates if way is not load.way and (way is not Way.WAITING or self._waiting or rates[way] > rates[load.way])
            ]
            way = next((way for way in others if way not in seen), None) or next(
                (way for way in others if way is not load.last_tried), others[0]
            )
            load.regime.turns[way].doubt(HOPELESS_ROUNDS * len(self.seats))
            load.probe, load.last_tried, self.switched_ms = _Probe(way, len(self.seats)), way, now_ms

    def _is_better(self, way: Way, than: Way, rates: Mapping[Way, float]) -> bool:
        return way is not than and rates[way] > rates.get(than, 0.0) * (1.0 if way is Way.PLAIN else 1 + HYSTERESIS)

    def _end_probe(self, load: _Load, probe: _Probe, rates: Mapping[Way, float], now_ms: float) -> None:
        load.probe, self.switched_ms = None, now_ms
        mine, other = rates.get(load.way, 0.0), rates.get(probe.way, 0.0)
        if probe.way in rates and self._is_better(probe.way, load.way, rates):
            load.way = probe.way
            load.interval_ms = FIRST_INTERVAL_MS
        else:
            loss = max(0.02, 1 - other / max(mine, 1e-9))
            due = min(GROWTH * load.interval_ms, probe.took_ms * loss / PROBE_SHARE)
            load.interval_ms = min(LAST_INTERVAL_MS, max(1.5 * load.interval_ms, due))
        load.due_ms = self._busy_ms + load.interval_ms

    def _rates(self, load: _Load) -> dict[Way, float]:
        """Tokens per ms of each way that there is here; sets what sessions go by."""
        regime = load.regime
        base, n = self._base_rows, len(self.seats)
        slots = sorted(((g, depth) for seat in self.seats if seat.adaptive for depth, g in enumerate(seat.outlook(), 1)), reverse=True)
        deepest = max((depth for _, depth in slots), default=0)
        ready = max(MIN_READY, regime.ready.value) if regime.ready.seen >= FEW else FIRST_READY
        late = 1 - math.pow(ready, min(n, max(1.0, self._wave)))  # share of the steps that wait for somebody's draft
        steps = self.step_time.upwards(base, len(slots) + 1)
        waits = [late * regime.answer_ms(depth) for depth in range(deepest + 1)]
        tokens = n + sum(seat.looked for seat in self.seats)

        def times(way: Way) -> list[float]:
            own_ms = regime.turn_ms(way) - steps[0]
            return [own_ms + step_ms for step_ms in steps]

        def shares(way: Way) -> list[float]:
            return [regime.share(way, depth) for depth in range(deepest + 1)]

        self.patient = True
        if self._waiting:  # some have to
            patient, hasty = choose(tokens, slots, times(Way.WAITING), waits), prefix(tokens, slots, times(Way.WAITING), deepest, ready)
            self.patient = patient.rate >= hasty.rate
            found = {Way.WAITING: patient if self.patient else hasty}
        else:
            found = {Way.GOING: choose(tokens, slots, times(Way.GOING), [0.0] * len(waits), shares(Way.GOING))}
            if regime.ready.seen >= FEW:
                found[Way.WAITING] = choose(tokens, slots, times(Way.WAITING), waits, shares(Way.WAITING))
        way = self.way if self.way in found else max(found, key=lambda way: found[way].rate)
        usual = waits[found[way].depth] if way is Way.WAITING and self.patient else 0.0
        self._go_by(found[way], prefix(tokens, slots, [time + usual for time in times(way)], deepest))
        if load.way is way and load.probe is None and self._busy_ms >= load.curious_ms:
            outside_ms = regime.turn_ms(way) - steps[0]
            self._look_further(load, slots, outside_ms, base, waits if way is Way.WAITING else [0.0] * len(waits), found[way].rate)
        plain_ms = regime.turn_ms(Way.PLAIN)
        return {Way.PLAIN: n / plain_ms if plain_ms else 0.0, **{way: choice.rate for way, choice in found.items()}}

    def _go_by(self, best: Choice, sunk: Choice) -> None:
        """`sunk`: the same where the wait and the drafting are paid already."""
        self.threshold, self.depth = best.threshold, best.depth
        self.row_threshold = min(best.threshold, sunk.threshold)

    def _look_further(self, load: _Load, slots: list[Slot], outside_ms: float, base: float, waits: list[float], rate: float) -> None:
        """Where one depth for all would be best if its rows, which no step had yet, were as cheap as the nearest fewer ones, it is tried
        for one round: else an edge of the staircase between what was seen stays unknown for ever."""
        for depth in range(1, len(waits)):
            gains = [gain for gain, at in slots if at <= depth]
            rows = round(base + len(gains))
            if load.tried[rows] >= MOST_TRIES or self.step_time.saw(rows):
                continue
            hoped = outside_ms + self.step_time.below(rows) + waits[depth]
            if len(self.seats) + sum(gains) > hoped * rate * (1 + HYSTERESIS):
                load.tried[rows] += 1
                load.curious_ms = self._busy_ms + CURIOUS_EVERY_MS
                self.depth, self.threshold, self.row_threshold = depth, 0.0, 0.0
                return
