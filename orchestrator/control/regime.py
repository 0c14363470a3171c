"""What a round takes at one load, with and without speculation. Pure.

Speculation slows a machine in ways that no count of rows shows: the draft may share a core with this process, or a cache or the memory's
bus with the target. So a round is timed each way, as it was, from one commit to the next. What is kept is what does not depend on the
block: the wait for the draft and the rows' share of the step are taken off, and added again for the block that is being considered.

The draft is timed by itself: how often it had something when a commit came, and else how long it took to say something. Both are known
whether or not anybody waited, so that not waiting does not teach that waiting is of no use.
"""

from __future__ import annotations

import enum

MEMORY_ROUNDS = 24  # rounds of every session that a mean remembers
OUTLIER = 5.0  # of the mean: what is above counts as this; results that a busy core reads in bursts are nothing unusual
PATIENCE, SPREADS = 1.5, 3.0  # how many times the usual answer, and its spread, a wait may take
FEW_ANSWERS, FIRST_SHARE, LEAST_SHARE = 4, 0.5, 0.02
ANSWER_BESIDE = 1.0  # what an answer of the draft takes beside its tokens, in tokens


class Way(enum.Enum):
    """How the sessions of a target go on where their draft has nothing yet."""

    __hash__ = object.__hash__  # a key in every round; that of enum.Enum is Python
    PLAIN = "plain"  # nobody speculates
    GOING = "going"  # with plain rows, until it has
    WAITING = "waiting"  # once it has


class Mean:
    """A running mean."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.seen, self.value = 0.0, 0.0

    def learn(self, value: float, memory: float) -> None:
        seen = self.seen + 1
        self.seen = seen = seen if seen < memory else memory
        self.value += (value - self.value) / seen

    def doubt(self, worth: float) -> None:
        """What was seen was long ago: it counts as so many values."""
        self.seen = min(self.seen, worth)


class CalmMean(Mean):
    """One that a single slow round does not move far."""

    __slots__ = ()

    def learn(self, value: float, memory: float) -> None:
        most = OUTLIER * self.value
        super().learn(most if 0 < most < value and self.seen >= 4 else value, memory)


class Answer:
    """ms from a commit to the draft's first word, where it had nothing; for one number of tokens wanted."""

    def __init__(self) -> None:
        self.mean, self.spread = CalmMean(), CalmMean()

    def learn(self, after_ms: float, memory: float) -> None:
        if self.mean.seen:
            self.spread.learn(abs(after_ms - self.mean.value), memory)
        self.mean.learn(after_ms, memory)


class Regime:
    """At one load: a range of numbers of sessions."""

    def __init__(self) -> None:
        self.turns = {way: CalmMean() for way in Way}  # ms of a round without its rows' share, and without the wait
        self.ready = Mean()  # share of the commits at which the draft had something
        self.looked = Mean()  # tokens that a round gains by lookups while sessions speculate
        self._answers: dict[int, Answer] = {}  # by tokens wanted
        self._shares: dict[Way, dict[int, Mean]] = {way: {} for way in Way}  # of blocks, by tokens wanted

    def learn(self, way: Way, turn_ms: float, sessions: int) -> None:
        self.turns[way].learn(turn_ms, MEMORY_ROUNDS * sessions)

    def turn_ms(self, way: Way) -> float:
        """Of a way that was not seen yet: of one that was, and is most like it. 0 when nothing was."""
        like = (way, *(other for other in (Way.GOING, Way.WAITING, Way.PLAIN) if other is not way))
        return next((self.turns[one].value for one in like if self.turns[one].seen), 0.0)

    def learn_answer(self, wanted: int, after_ms: float | None, sessions: int) -> None:
        """The draft was asked for `wanted` tokens; None: it had some already."""
        memory = MEMORY_ROUNDS * sessions
        self.ready.learn(float(after_ms is None), memory)
        if after_ms is not None:
            self._answers.setdefault(wanted, Answer()).learn(after_ms, memory)

    def learn_share(self, way: Way, wanted: int, share: float, sessions: int) -> None:
        """A session that speculates committed, with so much of the block that `wanted` tokens would have been."""
        self._shares[way].setdefault(wanted, Mean()).learn(share, MEMORY_ROUNDS * sessions)

    def share(self, way: Way, wanted: int) -> float:
        """How much of its block a round has on the average: what was ready is often the beginning of a chain only. Who goes on meanwhile
        has none at all where the draft was late, the more tokens are wanted the more often."""
        tried = [k for k, mean in self._shares[way].items() if mean.seen >= FEW_ANSWERS]
        if not tried:
            return FIRST_SHARE if way is Way.GOING else 1.0
        nearest = min(tried, key=lambda k: (abs(k - wanted), k))
        share = self._shares[way][nearest].value
        if way is Way.GOING:
            share *= (nearest + ANSWER_BESIDE) / (wanted + ANSWER_BESIDE)
        return max(LEAST_SHARE, min(1.0, share))

    def answer_ms(self, wanted: int) -> float:
        """How long the draft takes for so many tokens when it has nothing ready; 0 when nothing is known."""
        answer, share = self._answer(wanted)
        return answer.mean.value * share if answer is not None else 0.0

    def patience_ms(self, wanted: int) -> float | None:
        """Longest wait that an answer on its way is worth: one that takes longer is not on its way. None when nothing is known."""
        answer, share = self._answer(wanted)
        return None if answer is None else (PATIENCE * answer.mean.value + SPREADS * answer.spread.value) * max(1.0, share)

    def _answer(self, wanted: int) -> tuple[Answer | None, float]:
        """Of the nearest number of tokens that was asked for often enough, and what to multiply it by."""
        tried = [k for k, answer in self._answers.items() if answer.mean.seen >= FEW_ANSWERS]
        if not tried:
            return None, 1.0
        nearest = min(tried, key=lambda k: (abs(k - wanted), k))
        return self._answers[nearest], (wanted + ANSWER_BESIDE) / (nearest + ANSWER_BESIDE)
