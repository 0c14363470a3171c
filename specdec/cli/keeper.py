"""Keeps the processes of a system running: one that ends is started again where it was, so that its peers find it."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.cli import restarts
from specdec.cli.restarts import WINDOW_S, GiveUp, Restarts
from specdec.cli.supervisor import START_TIMEOUT_S, Child, Ended, Plan, Ready, Signalled, Supervisor, how_it_ended, tail
from specdec.errors import Unavailable


class Keeper:
    """`changed` hears of the processes there are, in their first order, whenever they are others. `restart` False: an end is told and the
    others go on, as long as the orchestrator, the last of `children`, lives."""

    def __init__(
        self,
        supervisor: Supervisor,
        children: Sequence[Child],
        tell: Callable[[str], None],
        changed: Callable[[Sequence[Child]], None],
        restart: bool = True,
    ) -> None:
        self._supervisor, self._tell, self._changed, self._restart = supervisor, tell, changed, restart
        self._plans = {child.plan.name: _where_it_is(child) for child in children}
        self._front = children[-1].plan.name
        self._present = {child.plan.name: child for child in children}
        self._due: dict[str, float] = {}  # when to start again
        self._late: dict[str, float] = {}  # when one that starts should have been ready
        self._restarts = Restarts()

    def run(self) -> int:
        """The exit code: 0 after a signal. Raises Unavailable when something cannot be kept running."""
        while True:
            at = min((*self._due.values(), *self._late.values()), default=None)
            event = self._supervisor.next(None if at is None else at - time.monotonic())
            if isinstance(event, Signalled):
                self._tell("stopping")
                return 0
            if isinstance(event, Ready):
                self._ready(event.child)
            elif isinstance(event, Ended):
                self._ended(event)
                if not self._restart and event.child.plan.name == self._front:
                    return 1
            self._do_what_is_due(time.monotonic())

    def _ready(self, child: Child) -> None:
        self._late.pop(child.plan.name, None)
        self._tell(f"{child.plan.name} is back on {child.endpoint}, pid {child.process.pid}")
        self._report()

    def _ended(self, event: Ended) -> None:
        name, how = event.child.plan.name, how_it_ended(event)
        del self._present[name]
        self._late.pop(name, None)
        self._report()
        said = f"{name} (pid {event.child.process.pid}) ended: {how}"
        if not self._restart:
            self._tell(f"{said}; it is not started again (--no-restart); its last lines:\n{tail(event.child.log)}")
            return
        decision = self._restarts.ended(name, time.monotonic(), random.random())
        if isinstance(decision, GiveUp):
            times = f"{name} ended {decision.ends} times within {WINDOW_S:g} s, the last time: {how}"
            raise Unavailable(f"{times}; nothing is left running; its last lines:\n{tail(event.child.log)}")
        self._due[name] = time.monotonic() + decision.after_s
        self._tell(f"{said}; starting it again in {decision.after_s:.1f} s ({decision.ends} of {restarts.MOST_ENDS} in {WINDOW_S:g} s)")

    def _do_what_is_due(self, now: float) -> None:
        for name in [name for name, at in self._due.items() if at <= now]:
            del self._due[name]
            self._present[name] = self._supervisor.spawn_again(self._plans[name])
            self._late[name] = now + START_TIMEOUT_S
            self._report()
        for name in [name for name, at in self._late.items() if at <= now]:
            del self._late[name]
            self._tell(f"{name} is not ready after {START_TIMEOUT_S:g} s")
            self._present[name].identity.send(signal.SIGKILL)

    def _report(self) -> None:
        self._changed([self._present[name] for name in self._plans if name in self._present])


def _where_it_is(child: Child) -> Plan:
    """The same process, on the ports that its peers know."""
    ports = {"PORT": str(child.port), "METRICS_PORT": str(child.metrics_port)}
    return replace(child.plan, settings={**child.plan.settings, **ports})
