"""The loop between the decider and the engine's thread: decide → do → tell.

Commands are applied the moment they are read, also while a step runs; they end a run of several forward passes at the next boundary,
and what a session can use already goes out at once. Without commands one hop to the engine's thread drafts as many tokens as are
wanted, since a hop costs a good part of a small model's forward pass.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from typing import ParamSpec, Protocol, TypeVar

from draft_service.demand import Demand
from draft_service.drafter import RETRY_MS, Addressed, Drafter
from draft_service.outbox import Outbox
from draft_service.plan import DraftPlan, PlanOutcome
from draft_service.rhythm import Rhythm
from draft_service.stepper import Stepper
from specdec.errors import Overloaded, Unavailable
from specdec.terms import Commit, DraftCommand, DraftLoad

MAX_STREAMS = 256
HANGS = "the engine of this draft hangs in a step"
LEAVE_S, LEAVE_POLL_S = 1.0, 0.02  # for the orchestrators to move their sessions: four of our beats
P = ParamSpec("P")
R = TypeVar("R")


class Runner(Protocol):
    """The engine's thread."""

    def run(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Awaitable[R]: ...


class Observer(Protocol):
    """Hears of finished plans; see metrics.py."""

    def stepped(self, plan: DraftPlan, outcome: PlanOutcome, seconds: float) -> None: ...


class Worker:
    def __init__(
        self,
        drafter: Drafter,
        stepper: Stepper,
        thread: Runner,
        observer: Observer,
        smoothing_s: float = 10.0,
        hangs: Callable[[], bool] = lambda: False,
    ) -> None:
        """`smoothing_s`: the time constant of the demand that is told. `hangs`: whether a step has run for longer than any may."""
        self.drafter, self._hangs = drafter, hangs
        self._demand = Demand(drafter.rounds, smoothing_s)
        self._stepper, self._thread, self._observer = stepper, thread, observer
        self._outboxes: dict[int, Outbox] = {}
        self._links: dict[tuple[str, str], int] = {}  # (orchestrator, link) -> its newest stream, one of the outboxes'
        self._streams = 0
        self._work = asyncio.Event()
        self._interrupted = self._draining = False
        self._rhythm = Rhythm()

    def attach(self) -> tuple[int, Outbox]:
        """A stream began: its number and where its events will be. Raises Overloaded, and Unavailable while the engine hangs."""
        if self._hangs():
            raise Unavailable(HANGS)
        if len(self._outboxes) >= MAX_STREAMS:
            raise Overloaded(f"{MAX_STREAMS} streams are open", RETRY_MS)
        self._streams += 1
        outbox = self._outboxes[self._streams] = Outbox()
        outbox.put_load(self._load())
        return self._streams, outbox

    def named(self, stream: int, orchestrator_id: str, link: str) -> None:
        """Whose a stream is. A fresh one of a link ends the older one: its caller dialled again, so whatever the older one still seems,
        nobody is there, and its writer may be stuck for long."""
        older, self._links[orchestrator_id, link] = self._links.get((orchestrator_id, link)), stream
        if older is not None:
            self._outboxes[older].end(Unavailable("the caller opened this link again"))
            self.detach(older)

    def detach(self, stream: int) -> None:
        """A stream ended: its sessions go, their K/V with the next plan. Twice is once."""
        self._outboxes.pop(stream, None)
        for name in [name for name, newest in self._links.items() if newest == stream]:
            del self._links[name]
        self.drafter.close_stream(stream)
        self.wake()

    def apply(self, stream: int, command: DraftCommand) -> None:
        """Never raises for what a peer sent. `wake` follows the last of a message."""
        if isinstance(command, Commit):
            if self.drafter.num_sessions == 1:
                self._rhythm.committed(1000 * time.monotonic())
            else:
                self._rhythm.mixed()
        self.deliver(self.drafter.apply(stream, command))

    def reject(self, stream: int, session_id: str, epoch: int, reason: str) -> None:
        """A command that could not even be read."""
        self.deliver(self.drafter.reject(stream, session_id, epoch, reason))

    def deliver(self, events: Iterable[Addressed]) -> None:
        for stream, event in events:
            outbox = self._outboxes.get(stream)
            if outbox is not None:
                outbox.put(event)

    def beat(self) -> None:
        """A load report for every stream. Where the engine hangs each is ended instead: nobody need wait for what will not come, and those
        who dial again are told why."""
        if self._hangs():
            return self._end_all(HANGS)
        self._demand.period(self.drafter.num_sessions, time.monotonic())
        load = self._load()
        for outbox in self._outboxes.values():
            outbox.put_load(load)

    def _load(self) -> DraftLoad:
        demand = self._demand
        return replace(
            self.drafter.load(),
            draining=self._draining,
            needed_time_share=demand.needed_time_share,
            late_demand=demand.late_demand,
        )

    def draining(self) -> None:
        """The load reports say from here on that the process is about to end."""
        self._draining = True
        self.beat()

    async def drain(self) -> None:
        """Ends every stream, once its sessions have moved or had the time to: a session loses nothing by going to another draft, and
        everything by waiting for this one."""
        give_up_at = time.monotonic() + LEAVE_S
        while self.drafter.num_sessions and time.monotonic() < give_up_at:
            await asyncio.sleep(LEAVE_POLL_S)
        self._end_all("this draft is stopping")

    def _end_all(self, why: str) -> None:
        for outbox in self._outboxes.values():
            outbox.end(Unavailable(why))

    async def run(self) -> None:
        """Until cancelled. At most one plan is with the engine."""
        clock = asyncio.get_running_loop().time
        while True:
            if self.drafter.may_rest and (rest_ms := self._rhythm.rest_ms(1000 * time.monotonic())) > 0:
                await self._rest(rest_ms)
                continue
            plan = self.drafter.plan()
            if plan is None:
                self._work.clear()
                await self._work.wait()
                continue
            self._interrupted = False
            began = clock()
            self._demand.began(time.monotonic())
            outcome = await self._thread.run(self._stepper.run, plan, self._is_interrupted)
            self._demand.ended(plan.needed, outcome.steps, time.monotonic())
            self._observer.stepped(plan, outcome, clock() - began)
            self.deliver(self.drafter.commit_step(plan, outcome))
            await asyncio.sleep(0)  # lets commands in that arrived meanwhile

    async def _rest(self, rest_ms: float) -> None:
        self._work.clear()
        try:
            async with asyncio.timeout(rest_ms / 1000):
                await self._work.wait()
        except TimeoutError:
            return

    def wake(self) -> None:
        """Commands were applied: a running plan ends at its next boundary."""
        self._interrupted = True
        self._work.set()

    def _is_interrupted(self) -> bool:
        """Called from the engine's thread between forward passes."""
        return self._interrupted
