"""What a round takes at one load, with and without speculation. Pure.

Speculation slows a machine in ways that no count of rows shows: the draft may share a core with this process, or a cache or the memory's
bus with the target. So a round is timed both ways, as it was, from one commit to the next. What is kept is what does not depend on the
block: the wait for the draft and the rows' share of the step are taken off, and added again for the block that is being considered.
"""

from __future__ import annotations

MEMORY_ROUNDS = 24  # rounds of every session that a mean remembers
OUTLIER = 2.0  # of the mean: what is above counts as this
WARM_UP_ANSWER = 0.7  # tokens' worth of time that an answer of the draft takes beside its tokens


class Mean:
    """A running mean that one slow round does not move far."""

    __slots__ = ("seen", "value")

    def __init__(self) -> None:
        self.seen, self.value = 0.0, 0.0

    def learn(self, value: float, memory: float) -> None:
        self.seen = min(self.seen + 1, memory)
        bounded = min(value, OUTLIER * self.value) if self.seen > 4 and self.value > 0 else value
        self.value += (bounded - self.value) / self.seen


class Regime:
    """At one load: a range of numbers of sessions."""

    def __init__(self) -> None:
        self.plain, self.spec = Mean(), Mean()  # ms of a round without its rows' share, and without the wait
        self._waits: dict[int, Mean] = {}  # by tokens wanted
        self.share = Mean()  # of the rounds that wanted a block: had one

    def learn_plain(self, turn_ms: float, sessions: int) -> None:
        self.plain.learn(turn_ms, MEMORY_ROUNDS * sessions)

    def learn_spec(self, turn_ms: float, sessions: int) -> None:
        self.spec.learn(turn_ms, MEMORY_ROUNDS * sessions)

    def learn_wait(self, wanted: int, wait_ms: float, block: bool, sessions: int) -> None:
        self._waits.setdefault(wanted, Mean()).learn(wait_ms, MEMORY_ROUNDS * sessions)
        self.share.learn(float(block), MEMORY_ROUNDS * sessions)

    @property
    def block_share(self) -> float:
        return max(0.05, self.share.value) if self.share.seen >= 8 else 1.0

    def wait_ms(self, wanted: int) -> float:
        """Mean wait for the draft when so many tokens are wanted; in proportion where that was not tried."""
        tried = [k for k, mean in self._waits.items() if mean.seen >= 4]
        if not tried or wanted <= 0:
            return 0.0
        nearest = min(tried, key=lambda k: (abs(k - wanted), k))
        return self._waits[nearest].value * (wanted + WARM_UP_ANSWER) / (nearest + WARM_UP_ANSWER)
