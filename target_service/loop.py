"""The engine's turn, over and over: plan → run on the engine thread → commit → hand the answers out. All state lives on this event loop."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from specdec.errors import EngineFault, InvalidRequest, SpecdecError, Unavailable, Unsupported
from specdec.sampling import Constraint
from specdec.smoothing import Smoothed
from specdec.terms import Answer, Failed, Result, TargetBeat, VerifyItem
from target_service.outlet import Batch, Outlet, packed
from target_service.plan import Compile, StepOutcome, StepPlan
from target_service.verifier import Verifier

TICK_S = 0.05  # how late a waiting Step may expire and a lease may end while the engine is idle or busy
LOAD_TICKS = 4  # ticks from one look at the load to the next
FAREWELL_S = 1.0  # longest wait for the streams to tell their callers that the engine is gone
INVALID_ARGUMENT, UNIMPLEMENTED, INTERNAL = 3, 12, 13  # gRPC status code numbers
log = logging.getLogger(__name__)


class Thread(Protocol):
    """specdec.engine.EngineThread"""

    @property
    def running_since(self) -> float | None: ...
    async def run(self, fn: Callable[..., Any], /, *args: Any) -> Any: ...


class Observer(Protocol):
    """Hears of every engine step; see observer.py."""

    def stepped(self, rows: int, engine_us: int, sample_us: int, answers: Sequence[Answer]) -> None: ...


class EngineLoop:
    """`execute` runs on the engine's thread; `compile_grammar` makes the state of a grammar for it elsewhere. Raises InvalidRequest,
    Unsupported."""

    def __init__(
        self,
        verifier: Verifier,
        execute: Callable[[StepPlan], StepOutcome],
        thread: Thread,
        observer: Observer,
        compile_grammar: Callable[[Compile], Awaitable[Constraint]],
        max_unread_results: int,
        clock: Callable[[], float] = time.monotonic,
        smoothing_s: float = 10.0,
    ) -> None:
        self.verifier = verifier
        self._compile_grammar = compile_grammar
        self._compiling: dict[asyncio.Task[None], Compile] = {}
        self._execute, self._thread, self._observer, self._clock = execute, thread, observer, clock
        self._max_unread = max_unread_results
        self._outlets: dict[int, Outlet] = {}
        self._links: dict[tuple[str, str], int] = {}  # (orchestrator, link) -> its newest stream, one of the outlets'
        self._backlog, self._kv_demand = Smoothed(smoothing_s), Smoothed(smoothing_s)
        self._wake = asyncio.Event()
        self._unobserved: list[tuple[int, int, int, list[Answer]]] = []  # steps that the metrics do not know yet
        self._fault: SpecdecError | None = None
        self._drained_by: float | None = None  # by the clock

    # ------------------------------------------------------------ streams

    @property
    def num_streams(self) -> int:
        return len(self._outlets)

    def attach(self, orchestrator_id: str, link: str = "") -> tuple[int, Outlet]:
        """A fresh stream of a link ends the older one: its caller dialled again, so whatever the older one still seems, nobody is there."""
        if self._fault is not None:
            raise self._fault
        stream, outlet = self.verifier.attach(orchestrator_id), Outlet(self._max_unread, self._wake.set)
        self._outlets[stream] = outlet
        if link:
            older, self._links[orchestrator_id, link] = self._links.get((orchestrator_id, link)), stream
            if older is not None:
                self._outlets[older].fail(Unavailable("the caller opened this link again"))
        return stream, outlet

    def silence(self, stream: int) -> None:
        """Nothing more is taken from the stream or given to it; the leases of its sessions begin."""
        self.verifier.detach(stream, self._now_ms())
        self._wake.set()  # KV may be free, a wave may be complete

    def detach(self, stream: int) -> None:
        """The call ended."""
        self._outlets.pop(stream, None)
        for name in [name for name, newest in self._links.items() if newest == stream]:
            del self._links[name]
        self.silence(stream)

    def submit(self, stream: int, items: Sequence[VerifyItem], answers: Sequence[Answer] = ()) -> None:
        """`answers`: to items that could not even be read."""
        now_ms = self._now_ms()
        if answers:
            self._outlets[stream].offer(Batch(answers))
        for item in items:
            self.verifier.submit(stream, item, now_ms)
        for order in self.verifier.take_grammars():
            self._begin_compiling(order)
        self._hand_out()
        self._wake.set()

    def _begin_compiling(self, order: Compile) -> None:
        """What nobody waits for any more makes way, so that no more are under way than there are sessions."""
        for task, other in self._compiling.items():
            if not self.verifier.awaits(other):
                task.cancel()
        task = asyncio.create_task(self._compile(order), name=f"compile for {order.key}")
        self._compiling[task] = order
        task.add_done_callback(self._compiling.pop)

    async def _compile(self, order: Compile) -> None:
        outcome: Constraint | Failed
        try:
            outcome = await self._compile_grammar(order)
        except InvalidRequest as error:
            outcome = Failed(INVALID_ARGUMENT, str(error), drop=True)
        except Unsupported as error:
            outcome = Failed(UNIMPLEMENTED, str(error), drop=True)
        except Exception as error:
            log.exception("a grammar cannot be compiled", extra={"session": order.key[1], "traceparent": order.traceparent})
            outcome = Failed(INTERNAL, f"{type(error).__name__}: {error}", drop=True)
        self.verifier.compiled(order, outcome)
        self._hand_out()
        self._wake.set()

    def beat(self) -> TargetBeat:
        verifier, since = self.verifier, self._thread.running_since
        return TargetBeat(
            sessions=verifier.num_sessions,
            queued=len(verifier.queued),
            kv_used_tokens=verifier.room.live_tokens,
            kv_total_tokens=verifier.budget.total_tokens,
            running_step_ms=0 if since is None else max(1, int(1000 * (self._clock() - since))),
            predicted_step_ms=max(1, int(verifier.predicted_ms())),
            draining=verifier.draining,
            drain_remaining_ms=0 if self._drained_by is None else max(0, int(1000 * (self._drained_by - self._clock()))),
            backlog_ms=self._backlog.value,
            kv_demand=self._kv_demand.value,
        )

    def alive(self) -> bool:
        """Whether the engine can go on, as far as is known. How old a running step may become is the thread's affair."""
        return self._fault is None

    def draining(self, drain_ms: float) -> None:
        """No new sessions from here on. The beats say so: orchestrators place none here, and move in time those that will not finish."""
        self.verifier.draining = True
        self._drained_by = self._clock() + drain_ms / 1000

    async def drain(self) -> None:
        """No new sessions. Returns when none is left; then the streams end in an orderly way."""
        self.verifier.draining = True
        while self.verifier.num_sessions:
            await asyncio.sleep(TICK_S)
        for outlet in list(self._outlets.values()):
            outlet.end()

    # ------------------------------------------------------------ the loop

    async def run(self) -> None:
        """Until cancelled. Raises EngineFault, after the open streams were told, when the engine cannot go on."""
        tasks = [asyncio.create_task(self._turns(), name="engine turns"), asyncio.create_task(self._ticks(), name="ticks")]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for task in done:
                task.result()
        except Exception as error:
            await self._say_farewell(error)
            raise
        finally:
            tasks += self._compiling
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _turns(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._hold()
            while (plan := self._plan()) is not None:
                await self._step(plan)
                await self._hold()
            self._hand_out()
            self._observe()

    def _plan(self) -> StepPlan | None:
        behind = {stream for stream, outlet in self._outlets.items() if outlet.behind}
        return self.verifier.plan(self._now_ms(), behind)

    async def _hold(self) -> None:
        """Wait for the rest of a wave, as long as the verifier thinks it pays."""
        while (hold_ms := self.verifier.hold_ms(self._now_ms())) > 0:
            self._wake.clear()
            try:
                async with asyncio.timeout(hold_ms / 1000):
                    await self._wake.wait()
            except TimeoutError:
                return

    async def _step(self, plan: StepPlan) -> None:
        """What the step before gave is counted while this one runs: the engine need not wait for a metric."""
        self._hand_out()
        asyncio.get_running_loop().call_soon(self._observe)
        outcome: StepOutcome = await self._thread.run(self._execute, plan)
        self.verifier.commit(plan, outcome, self._now_ms())
        answers = self._hand_out(plan.size, outcome.engine_us)
        if plan.rows:
            self._unobserved.append((plan.size, outcome.engine_us, outcome.sample_us, answers))

    def _observe(self) -> None:
        for step in self._unobserved:
            self._observer.stepped(*step)
        self._unobserved.clear()

    def _hand_out(self, rows: int = 0, engine_us: int = 0) -> list[Answer]:
        """Everything decided since the last call, to each stream its own."""
        answers = self.verifier.take_answers()
        for stream, group in itertools.groupby(sorted(answers, key=_stream), key=_stream):
            outlet = self._outlets.get(stream)
            if outlet is not None:
                for batch in packed([answer for _, answer in group], rows, engine_us):
                    outlet.offer(batch)
        return [answer for _, answer in answers if isinstance(answer.outcome, Result)]

    async def _ticks(self) -> None:
        for tick in itertools.count():
            await asyncio.sleep(TICK_S)
            held = self.verifier.num_sessions
            if tick % LOAD_TICKS == 0:
                self._note_load()
            self.verifier.tick(self._now_ms())
            self._hand_out()
            if self.verifier.num_sessions < held:
                self._wake.set()  # their KV can go

    def _note_load(self) -> None:
        now_s = self._clock()
        self._backlog.note(self.verifier.backlog_ms(), now_s)
        self._kv_demand.note(self.verifier.kv_demand(1000 * now_s), now_s)

    async def _say_farewell(self, error: Exception) -> None:
        self._fault = error if isinstance(error, SpecdecError) else EngineFault(f"{type(error).__name__}: {error}")
        log.critical("the engine cannot go on: %s", self._fault, exc_info=error)
        for outlet in list(self._outlets.values()):
            outlet.fail(self._fault)
        deadline = self._clock() + FAREWELL_S
        while self._outlets and self._clock() < deadline:
            await asyncio.sleep(0.01)

    def _now_ms(self) -> float:
        return 1000 * self._clock()


def _stream(entry: tuple[int, Answer]) -> int:
    return entry[0]
