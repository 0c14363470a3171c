"""One target, and what shares its machine: its sessions, whether they speculate now, and from which gain on a slot is worth its row. Pure.

Rules
1. All sessions of a target speculate, or none does: what one of them costs the others is not seen from within it. Among those that
   speculate each has the length that its own chain is worth.
2. The way that decides more tokens per ms is taken, by what was measured at this load (regime.py) and what the sessions gain now. To begin
   speculating it must be better by HYSTERESIS: where both are alike, the way that needs less is.
3. Measurements age. The other way is tried now and then, for some rounds of every session; the more it would lose the more rarely, and
   ever more rarely while it goes on losing: in the long run trying costs at most about PROBE_SHARE of the tokens.
4. A round counts only if it began and ended under one way, and not as the first after a change.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from orchestrator.control.choice import NOTHING, Slot, choose, prefix
from orchestrator.control.regime import Regime
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
CHOOSE_EVERY_MS = 10.0
CURIOUS_EVERY_MS, MOST_TRIES = 200.0, 4
IDLE_MS = 500.0  # longer silence is no time spent


class Seat(Protocol):
    """A session at the target, as far as it counts here."""

    @property
    def adaptive(self) -> bool: ...

    @property
    def waits(self) -> bool:
        """Its rounds wait for its draft; else the target goes on with plain rows meanwhile."""

    @property
    def rows(self) -> int:
        """Rows of its rounds that it does not choose: 1 and a fixed block."""

    @property
    def looked(self) -> float:
        """Tokens that its rounds gain by lookups, on the average, where it speculates."""

    def outlook(self) -> Iterable[float]:
        """Gain of each slot that its draft could propose."""


class _Probe:
    """`left` = rounds that are still to be timed. It goes on where it was when the load comes back."""

    def __init__(self, began_ms: float, sessions: int) -> None:
        self.began_ms, self.left = began_ms, PROBE_ROUNDS * sessions


class _Load:
    """What is known and going on at one load. It begins without speculation: that is never a bad way."""

    def __init__(self, due_ms: float) -> None:
        self.regime = Regime()
        self.speculates = False
        self.due_ms = due_ms  # when the other way is tried next, in busy time
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
        self._bin = 0
        self._stale = self._pure = True
        self._blocks: float | None = None
        self._looked = False  # at both ways, since the newest step

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
        self._waiting += count * (seat.adaptive and seat.waits)
        before = self.speculates
        self._bin = max(0, len(self.seats) - 1).bit_length()
        if self.speculates != before:
            self.switched_ms = now_ms

    @property
    def _load(self) -> _Load:
        if self._bin not in self._loads:
            lower = self._loads.get(self._bin - 1)  # where it does not pay, more sessions hardly make it pay
            later = lower is not None and not lower.speculates and lower.regime.spec.seen > 0
            self._loads[self._bin] = _Load(self._busy_ms + FIRST_INTERVAL_MS * later)
        return self._loads[self._bin]

    @property
    def regime(self) -> Regime:
        return self._load.regime

    @property
    def speculates(self) -> bool:
        load = self._load
        return load.speculates if load.probe is None else not load.speculates

    @property
    def trying(self) -> bool:
        """Speculation is tried out: every session proposes something."""
        load = self._load
        return load.probe is not None and not load.speculates

    def would_speculate(self, sessions: int) -> bool:
        load = self._loads.get(max(0, sessions - 1).bit_length())
        return load is not None and load.speculates

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
        self._busy_ms += gap if gap < IDLE_MS else took_ms
        self.heard_ms = now_ms
        self._blocks, self._looked = None, False

    def learn_answer(self, wanted: int, after_ms: float | None) -> None:
        """A session's draft had something at its commit (None), or said something so long after it."""
        self.regime.learn_answer(wanted, after_ms, len(self.seats))

    def sent(self, wait_ms: float) -> None:
        """A Step left so long after its session's commit."""
        self._waited_ms = max(self._waited_ms, wait_ms)

    def learn_round(self, began_ms: float, spec: bool) -> None:
        """A round of one session ended with the step that was just heard of. `spec`: it was open to speculation."""
        load, choosing = self._load, self.choosing
        if not self._pure or began_ms <= self.switched_ms or (choosing and spec != self.speculates):
            return
        own = self.heard_ms - began_ms - self._wait_ms - self._blocks_ms()
        learn = load.regime.learn_spec if spec else load.regime.learn_plain
        learn(own, len(self.seats))
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
        """Looks again at both ways, if something was learned, once a step at most, and not if the last look is of this very moment: among
        a hundred sessions a look takes a millisecond."""
        if not self.choosing or self._looked:
            return
        every = CHOOSE_EVERY_MS if self.speculates else 5 * CHOOSE_EVERY_MS
        if self._stale and (now_ms - self._chosen_ms >= every or len(self.seats) == 1):
            self._stale, self._looked, self._chosen_ms = False, True, now_ms
            self._decide(now_ms)

    def _decide(self, now_ms: float) -> None:
        load = self._load
        if not load.regime.plain.seen and not load.regime.spec.seen:
            return
        spec_rate, plain_rate = self._rates(load)
        if load.probe is not None:
            over = load.probe.left <= 0 or self._busy_ms - load.probe.began_ms > MOST_PROBE_MS
            enough = load.probe.left <= (PROBE_ROUNDS - HOPELESS_ROUNDS) * len(self.seats)
            if over or (enough and not load.speculates and spec_rate < HOPELESS * plain_rate):
                self._end_probe(load, spec_rate, plain_rate, now_ms)
            return
        better = spec_rate > plain_rate * (1.0 if load.speculates else 1 + HYSTERESIS)
        if better != load.speculates and load.regime.plain.seen and load.regime.spec.seen:
            load.speculates, self.switched_ms = better, now_ms
            load.interval_ms = FIRST_INTERVAL_MS
            load.due_ms = self._busy_ms + FIRST_INTERVAL_MS
        elif self._busy_ms >= load.due_ms:
            known, other = (load.regime.spec, load.regime.plain) if load.speculates else (load.regime.plain, load.regime.spec)
            if known.seen >= PROBE_ROUNDS:
                other.doubt(HOPELESS_ROUNDS * len(self.seats))
                load.probe, self.switched_ms = _Probe(self._busy_ms, len(self.seats)), now_ms

    def _end_probe(self, load: _Load, spec_rate: float, plain_rate: float, now_ms: float) -> None:
        assert load.probe is not None
        took, load.probe, self.switched_ms = self._busy_ms - load.probe.began_ms, None, now_ms
        mine, other = (spec_rate, plain_rate) if load.speculates else (plain_rate, spec_rate)
        if other > mine * (1.0 if load.speculates else 1 + HYSTERESIS):
            load.speculates = not load.speculates
            load.interval_ms = FIRST_INTERVAL_MS
        else:
            loss = max(0.02, 1 - other / max(mine, 1e-9))
            due = min(GROWTH * load.interval_ms, took * loss / PROBE_SHARE)
            load.interval_ms = min(LAST_INTERVAL_MS, max(1.5 * load.interval_ms, due))
        load.due_ms = self._busy_ms + load.interval_ms

    def _rates(self, load: _Load) -> tuple[float, float]:
        """Tokens per ms with and without speculation; sets what sessions go by."""
        regime = load.regime
        base, n, curve = self._base_rows, len(self.seats), self.step_time
        plain_ms = regime.plain.value if regime.plain.seen else regime.spec.value
        spec_ms = regime.spec.value if regime.spec.seen else plain_ms
        slots = sorted(((g, depth) for seat in self.seats if seat.adaptive for depth, g in enumerate(seat.outlook(), 1)), reverse=True)
        deepest = max((depth for _, depth in slots), default=0)
        ready = max(MIN_READY, regime.ready.value) if regime.ready.seen >= FEW else FIRST_READY
        late = 1 - math.pow(ready, min(n, max(1.0, self._wave)))  # share of the steps that wait for somebody's draft
        steps = curve.upwards(base, len(slots) + 1)
        times = [spec_ms + step_ms - steps[0] for step_ms in steps]
        waits = [late * regime.answer_ms(depth) for depth in range(deepest + 1)]
        tokens = n + sum(seat.looked for seat in self.seats)
        if self._waiting:
            patient, hasty = choose(tokens, slots, times, waits), prefix(tokens, slots, times, deepest, ready)
        else:
            shares = [regime.share(depth) for depth in range(deepest + 1)]
            waits = [0.0] * len(waits)
            patient, hasty = NOTHING, choose(tokens, slots, times, waits, shares)
        self.patient = patient.rate >= hasty.rate
        best = patient if self.patient else hasty
        self.threshold, self.depth = best.threshold, best.depth
        usual = waits[best.depth] if self.patient else 0.0
        sunk = prefix(tokens, slots, [time + usual for time in times], deepest)
        self.row_threshold = min(best.threshold, sunk.threshold)
        if load.speculates and load.probe is None and self._busy_ms >= load.curious_ms:
            self._look_further(load, slots, spec_ms - steps[0], base, waits, best.rate)
        return best.rate, n / plain_ms if plain_ms else 0.0

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
