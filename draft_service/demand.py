"""How much of this draft its sessions need, for who scales the pool. Pure; time comes in, seconds of one clock.

Theory. A draft is never idle while it has a session: what time is left goes into branches, so how busy it is says nothing. What says
something is how much of its time goes into passes that some session cannot do without (`needed`), and how many rounds ended before there
was anything to propose in the next one (`late`).

Rules
1. A pass is needed while one of its rows belongs to a chain whose session has no usable proposal (session.py: lacks). A step is batched:
   its time counts once, however many sessions need it, and branches that fill it up cost nothing.
2. A round was late when the commit found its session without a usable proposal. With n sessions here it weighs 1 - 1/n: that is the part
   that a replica more could take away. A session that is alone and still late needs a faster draft, not another one.
3. Over a period without sessions nothing is late; over one without a commit, what was so before still is.
4. Both are smoothed over time, so that an idle replica comes to rest at 0.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec.smoothing import Smoothed


@dataclass(slots=True)
class Rounds:
    """Counts since the start. `wanted` = those whose session was not paused; `late` is weighted as in rule 2."""

    committed: int = 0
    wanted: int = 0
    late: float = 0.0

    def round(self, wanted: bool, late: bool, sessions: int) -> None:
        self.committed += 1
        self.wanted += wanted
        self.late += (1 - 1 / max(1, sessions)) if wanted and late else 0.0


class Demand:
    def __init__(self, rounds: Rounds, constant_s: float) -> None:
        self._rounds = rounds
        self._seen = (0, 0, 0.0)
        self._lateness = 0.0  # over the last period
        self._running = False
        self._needed, self._late = Smoothed(constant_s), Smoothed(constant_s)

    @property
    def needed_time_share(self) -> float:
        """In [0, 1]."""
        return self._needed.value

    @property
    def late_demand(self) -> float:
        """In [0, 1)."""
        return self._late.value

    def began(self, now_s: float) -> None:
        """A plan goes to the engine; until then it did nothing that is needed."""
        self._needed.note(0.0, now_s)
        self._running = True

    def ended(self, needed_passes: int, passes: int, now_s: float) -> None:
        """The plan's passes are over; so many of them, the first ones, were needed."""
        self._running = False
        self._needed.note(min(1.0, needed_passes / passes) if passes else 0.0, now_s)

    def period(self, sessions: int, now_s: float) -> None:
        """A period ends, beats follow. `sessions` held now."""
        if not self._running:
            self._needed.note(0.0, now_s)
        counts = self._rounds.committed, self._rounds.wanted, self._rounds.late
        committed, wanted, late = (new - old for new, old in zip(counts, self._seen, strict=True))
        self._seen = counts
        if not sessions:
            self._lateness = 0.0
        elif committed:
            self._lateness = late / wanted if wanted else 0.0
        self._late.note(self._lateness, now_s)
