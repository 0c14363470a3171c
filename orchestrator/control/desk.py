"""All that an orchestrator knows about what speculation is worth. Pure; the driver sets `now_ms` before it hands on an event."""

from __future__ import annotations

from collections.abc import Collection

from orchestrator.control.adaptive import AdaptivePace, WatchedPace
from orchestrator.control.machine import Machine
from orchestrator.control.survival import Survival
from orchestrator.events import Admitted
from orchestrator.pace import Pace
from specdec.terms import Answer, RejectionMethod, Result

LOOKUP_PRIOR = 0.5  # that a looked-up token stands, before any was seen


class Desk:
    """Implements seat.Clock."""

    def __init__(self, max_grace_ms: float, ahead: bool = False) -> None:
        """`ahead`: targets go on while the draft works, where the method lets them."""
        self.now_ms, self._ahead = 0.0, ahead
        self._max_grace_ms = max_grace_ms
        self._machines: dict[str, Machine] = {}
        self._draft = {greedy: Survival() for greedy in (True, False)}
        self._lookup = {greedy: Survival(LOOKUP_PRIOR) for greedy in (True, False)}

    def machine(self, target: str) -> Machine:
        return self._machines.setdefault(target, Machine())

    def keep(self, targets: Collection[str]) -> None:
        """There are these. What is known of one that is gone goes with its last session: addresses come and go."""
        if len(self._machines) > len(targets):
            self._machines = {name: machine for name, machine in self._machines.items() if name in targets or machine.seats}

    def pace(self, request: Admitted, live: int) -> Pace:
        """Of a session that is let in. `live` = sessions there are, this one included."""
        most = request.num_speculative_tokens
        if not request.adaptive or not most:
            return WatchedPace(most, self._max_grace_ms, self)
        greedy = request.sampling.greedy
        must_wait = not self._ahead or request.rejection_method is not RejectionMethod.COUPLED
        return AdaptivePace(most, self._max_grace_ms, self, self._draft[greedy], self._lookup[greedy], self._begins(live), must_wait)

    def _begins(self, live: int) -> bool:
        """Whether a session should have a draft from its first token on: it will speculate, as far as is known."""
        each = -(-live // max(1, len(self._machines)))
        return not self._machines or any(machine.would_speculate(each) for machine in self._machines.values())

    def heard(self, target: str, rows: int, engine_us: int, answers: tuple[Answer, ...]) -> None:
        """One engine step of a target, before its answers are handed on."""
        results = [answer.outcome for answer in answers if isinstance(answer.outcome, Result)]
        if rows and engine_us and results:
            own = sum(1 + result.num_verified for result in results)
            machine = self.machine(target)
            machine.elsewhere = sum([len(other.seats) for other in self._machines.values() if other is not machine])
            machine.heard(rows, engine_us / 1000, own, len(results), self.now_ms)
