"""Where one generation goes when its target is gone, of no use, or full. Pure.

Rules
1. Who held the session last is avoided, unless it is the last one there is.
2. Placements that decide nothing are few and ever further apart (patience.py). A result forgives all earlier ones, so a long answer may
   move as often as it has to. How long it waits for any target is bounded too.
3. A target without room costs none of that patience. While another has room the session goes there; each is asked once between two
   retries, so that a session of which nobody has room for wanders no faster than it would ask.
4. Where nothing is left to try, the client hears how much there is of its answer and how to go on with it.
"""

from __future__ import annotations

from orchestrator.events import Command, PlaceTarget, SeekRoom, StartTimer, StopTimer, Timer
from orchestrator.patience import Patience
from specdec.errors import InternalFault, InvalidRequest, SpecdecError, Unavailable, Unsupported, fault
from specdec.terms import Failed, NoRoom

MAX_RETRY_MS = 10_000  # longest a target's word keeps a session from asking again
MAX_IN_VAIN = 2  # epochs in a row that decided nothing; then another target should have a try
MAX_LEAP = 1 << 16  # epochs that a target may know beyond the session's own
MAX_EXPIRED, MAX_OVERDUE = 3, 2  # times one round may expire in a target's queue, and targets in a row in whose queues it does
COME_BACK_MS = 1000  # when a client may ask again: a restarted target needs longer, another orchestrator no time


class Moving:
    def __init__(self, placement_wait_ms: float) -> None:
        self._wait_ms = placement_wait_ms
        self._patience = Patience()
        self._avoid = ""  # who held the session last
        self._full: list[str] = []  # who had no room since the last retry
        self._doubted = False  # a target said that it found a defect, and no other has said so
        self._overdue = 0  # targets that did not get to the round
        self.reason = "target_lost"  # of the newest move

    # Each method returns the commands it causes, unless it says otherwise.

    def want(self, avoid: str, prefer: str = "") -> list[Command]:
        """Any target, after a pause where the last ones decided nothing."""
        self._avoid, self._full, self.reason = avoid, [], "target_lost"
        pause_ms = self._patience.pause_ms
        ask = StartTimer(Timer.RETRY, pause_ms) if pause_ms else PlaceTarget(avoid, prefer)
        return [ask, StartTimer(Timer.PLACEMENT, self._wait_ms)]

    def ask(self) -> list[Command]:
        """The pause is over."""
        return [PlaceTarget(self._avoid)]

    def no_room(self, target: str, word: NoRoom) -> list[Command]:
        """It is asked again later; meanwhile another may have room."""
        self._full.append(target)
        retry_ms = float(min(max(1, word.retry_after_ms), MAX_RETRY_MS))
        return [StopTimer(Timer.STEP), StartTimer(Timer.RETRY, retry_ms), SeekRoom(tuple(self._full))]

    def retry(self) -> None:
        """The target is asked once more."""
        self._full = []

    def for_room(self) -> list[Command]:
        """Another target has room: the epoch that begins there is nobody's fault."""
        self.reason = "no_room"
        self._patience.excused()
        return [StopTimer(Timer.RETRY)]

    def decided(self) -> None:
        """A result came."""
        self._full, self._doubted, self._overdue = [], False, 0
        self._patience.decided()

    # What ends a session; None: it may go on.

    def in_vain(self, leap: int) -> bool:
        """Whether a target is left that wants another epoch, so many ahead. Those of a session are numbers of 32 bits, also elsewhere."""
        return self._patience.fruitless >= MAX_IN_VAIN or leap > MAX_LEAP

    def epoch(self) -> SpecdecError | None:
        """One more begins."""
        if self._patience.epoch():
            return None
        return InternalFault(f"the session had to be started {self._patience.fruitless} times without a result")

    def lost(self, output_tokens: int) -> SpecdecError | None:
        """The target went."""
        if not self._patience.used_up:
            return None
        return gone(f"{self._patience.fruitless} targets in a row were lost before they decided anything", output_tokens)

    def failed(self, word: Failed, output_tokens: int) -> SpecdecError | None:
        """The target failed the session. What it says of the request is believed, a defect when another target says the same; whatever
        else it says is its own trouble."""
        error = fault(word.code, word.message)
        if isinstance(error, InvalidRequest | Unsupported) or (error.code == word.code == InternalFault.code and self._doubted):
            return error
        self._doubted = error.code == word.code == InternalFault.code
        return None if self._patience.refused() else gone(str(error), output_tokens)

    def overdue(self, output_tokens: int) -> SpecdecError | None:
        """The target did not get to the round MAX_EXPIRED times: another one may, but where two have not it is time to say so."""
        self._overdue += 1
        if self._overdue < MAX_OVERDUE:
            return None
        return gone(f"{MAX_OVERDUE} targets did not get to the session in time", output_tokens)

    def nobody(self, output_tokens: int) -> SpecdecError:
        """The wait for a target is over."""
        return gone(f"no target took the session in {self._wait_ms:.0f} ms", output_tokens)


def gone(why: str, output_tokens: int) -> Unavailable:
    """What a client hears whose answer cannot go on here. `output_tokens` = what there is of it, resumed tokens included."""
    how = "resume with output_token_ids and the seed of the first message"
    return Unavailable(f"{why}; {output_tokens} tokens were decided: {how}", COME_BACK_MS, output_tokens)
