"""The pace of one session: as many tokens as pay now, none when none do. Pure.

What its target can afford is decided for all sessions together (machine.py): whether anybody speculates, and the least gain that is worth
drafting, and worth a row. A session asks what its own chains gain (survival.py). One whose chains are never worth a row rests, so that its
draft works for others, and tries again after a while.

Under the standard method whether slot i is verified may rest on confidences up to i and on finished rounds, and it rests on nothing else
here, with either method. A source is chosen before its tokens, or confidences, are looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.control.choice import worth
from orchestrator.control.regime import Mean, Way
from orchestrator.control.seat import Clock, Seat
from orchestrator.control.survival import SessionSurvival, Survival
from orchestrator.lookahead import Block
from orchestrator.pace import FixedPace
from specdec.terms import Result

WORTHLESS_ROUNDS = 4  # in a row, until a session rests
FIRST_REST, LAST_REST = 16, 256  # rounds
TRIAL_ROUNDS = 6
LOOKED_OWN, LOOKED_COMMON, LOOKED_PRIOR = 64.0, 256.0, 16.0  # rounds that means of lookups remember, and that the common one is worth
CATCH_UP_ROUNDS = 8  # that a draft which goes on has before it is waited for: a target faster than it would never be caught up with


class WatchedPace(FixedPace):
    """Exactly K; its rounds are timed like all others."""

    def __init__(self, num_speculative_tokens: int, max_grace_ms: float, clock: Clock) -> None:
        super().__init__(num_speculative_tokens, max_grace_ms)
        self._seat = Seat(clock, 1 + num_speculative_tokens)

    def moved(self, target: str) -> None:
        self._seat.moved(target)

    def opened(self) -> None:
        self._seat.sent()

    def committed(self, ready: bool) -> None:
        machine, began_ms = self._seat.machine, self._seat.turned()
        if machine is not None and began_ms is not None:
            machine.learn_round(began_ms, Way.WAITING if self.most else Way.PLAIN)


class AdaptivePace(Seat):
    adaptive = True

    def __init__(
        self, most: int, max_grace_ms: float, clock: Clock, draft: Survival, lookup: Survival, begins: bool, must_wait: bool = True
    ) -> None:
        """`draft`, `lookup`: what is known of these sources over all sessions; `begins`: the draft is asked from the first token on;
        `must_wait`: rounds wait for it, whether or not that pays."""
        super().__init__(clock, 1, must_wait)
        self.most, self._max_grace_ms = most, max_grace_ms
        self._draft, self._lookup = SessionSurvival(draft), SessionSurvival(lookup)
        self.speculates = self.drafts = begins and most > 0
        self.waits = must_wait
        self._way = Way.PLAIN if not self.speculates else Way.WAITING if must_wait else Way.GOING  # of the round that is open
        self.wanted = most  # tokens the draft is asked for
        self._warm = self._awoken = False  # the draft has spoken since it was asked to go on; it had rested before
        self._drafted, self._looked_up = 0.0, 0  # tokens that this round's block of the draft's had to gain; those of a lookup that stood
        self._mean_looked = Mean()
        self._asked_ms: float | None = None  # commit at which the draft had nothing, while it is silent
        self._outlook: list[float] = []
        self._worthless = self._rest_left = self._trial_left = self._cold_rounds = 0
        self._rest = FIRST_REST

    @property
    def looked(self) -> float:  # type: ignore[override]
        own, common = self._mean_looked, 0.0 if self.machine is None else self.machine.regime.looked.value
        return (own.value * own.seen + common * LOOKED_PRIOR) / (own.seen + LOOKED_PRIOR)

    # --- asked before a round -----------------------------------------------------------------------------------------

    def outlook(self) -> list[float]:
        if not self._outlook:
            self._outlook = self._draft.expected(self.most)
        return self._outlook

    def length(self, source: str, confidences: Sequence[float]) -> int:
        chain = self._lookup if source == "ngram" else self._draft
        machine = self.machine
        if machine is None:
            return min(self.most, len(confidences))
        n = chain.worth(confidences[: self.most], machine.row_threshold)
        return max(n, min(1, len(confidences), self.most)) if machine.trying or self._trial_left else n

    def lookup_first(self, guess: int, ready: bool) -> bool:
        """Whether `guess` looked-up tokens are taken before the draft's chain, which is there (`ready`) or has to be waited for."""
        machine = self.machine
        if machine is None:
            return not ready
        looked, drafted = sum(self._lookup.expected(min(guess, self.most))), sum(self.outlook()[: self.wanted])
        if ready or not self.drafts:
            return looked > drafted or not self.drafts
        round_ms, wait_ms = machine.regime.turn_ms(machine.way), machine.regime.answer_ms(self.wanted)
        return (1 + looked) * (round_ms + wait_ms) >= (1 + drafted) * round_ms

    def grace_ms(self) -> float:
        if self._awoken and not self._warm and self._cold_rounds < CATCH_UP_ROUNDS:
            return 0.0
        machine = self.machine
        patience_ms = None if machine is None else machine.regime.patience_ms(self.wanted)
        if machine is None or patience_ms is None:
            return self._max_grace_ms
        free = machine.boundary_ms(self._clock.now_ms)
        return min(self._max_grace_ms, free + (patience_ms if machine.patient else 0.0))

    # --- told ---------------------------------------------------------------------------------------------------------

    def moved(self, target: str) -> None:
        super().moved(target)
        self._asked_ms = None  # the draft's silence belongs to what was known of the other target

    def opened(self) -> None:
        self.sent()

    def proposed(self) -> None:
        """The draft said something that can be used."""
        if self._asked_ms is not None and self.machine is not None:
            self.machine.learn_answer(self.wanted, self._clock.now_ms - self._asked_ms)
        self._asked_ms, self._warm = None, True

    def learn(self, source: str, block: Block, result: Result) -> None:
        if source == "draft":
            self._drafted = sum(self._draft.gains(block.confidences[: result.num_verified]))
            self._draft.learn(block.confidences, result.num_verified, result.num_accepted)
            self._outlook = []
        elif source == "ngram":
            self._looked_up = result.num_accepted
            self._lookup.learn((0.0,) * len(block.tokens), result.num_verified, result.num_accepted)

    def committed(self, ready: bool) -> None:
        machine, began_ms = self.machine, self.turned()
        if machine is None:
            return
        if began_ms is not None and (self._warm or not self.speculates):  # like neither while the draft has yet to catch up
            machine.learn_round(began_ms, self._way)
            if self.speculates:
                machine.regime.looked.learn(self._looked_up, LOOKED_COMMON * len(machine.seats))
                self._mean_looked.learn(self._looked_up, LOOKED_OWN)
            if self.speculates:
                machine.regime.learn_share(self._way, self.wanted, self._share(), len(machine.seats))
        self._drafted, self._looked_up = 0.0, 0
        if self._asked_ms is not None:  # silent for the whole round: it takes at least as long
            machine.learn_answer(self.wanted, self._clock.now_ms - self._asked_ms)
        machine.decide(self._clock.now_ms)
        self._way, self.waits = machine.way, self.must_wait or machine.waits
        self._choose(machine.speculates)
        asked = self.drafts and self._warm
        if asked and ready:
            machine.learn_answer(self.wanted, None)
        self._asked_ms = self._clock.now_ms if asked and not ready else None

    def _share(self) -> float:
        """What this round's block had to gain, of what as many tokens as were wanted usually have: 0 where there was none, less than 1
        where it was short."""
        return min(1.0, self._drafted / max(sum(self.outlook()[: self.wanted]), 1e-9))

    def _choose(self, open_: bool) -> None:
        """What the next round may do. `open_`: sessions of this target speculate now."""
        assert self.machine is not None
        if not open_ or not self.most:
            return self._sleep()
        if self._rest_left:
            self._rest_left -= 1
            if self._rest_left:
                return self._sleep()
            self._trial_left = TRIAL_ROUNDS
        n = min(self.machine.depth, worth(self.outlook(), self.machine.threshold))
        if self._trial_left:
            self._trial_left -= self._warm
        elif n or self.machine.trying:
            self._worthless, self._rest = 0, FIRST_REST
        else:
            self._worthless += 1
            if self._worthless >= WORTHLESS_ROUNDS:
                self._worthless, self._rest_left, self._rest = 0, self._rest, min(2 * self._rest, LAST_REST)
                return self._sleep()
        self.wanted = max(1, n)
        if not self.drafts:
            self.speculates = self.drafts = self._awoken = True
            self._warm, self._cold_rounds = False, 0
            self._draft.doubt()
        self._cold_rounds += not self._warm

    def _sleep(self) -> None:
        self.speculates = self.drafts = False
