"""The only async loop of the orchestrator: events to generations, their commands to peers, timers and clients.

One turn: a message of a peer is decoded, every answer in it goes through its generation, and what the generations want sent leaves in
one message per peer. Nothing here decides; it carries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager

from orchestrator import events as ev
from orchestrator.admission import FOREVER_MS
from orchestrator.breaker import Trouble
from orchestrator.control import Desk
from orchestrator.door import Door
from orchestrator.generation import Generation
from orchestrator.handle import Handle, Undelivered, Wake
from orchestrator.handover import Handover
from orchestrator.hearing import Hearing
from orchestrator.live import Live
from orchestrator.moving import COME_BACK_MS, gone
from orchestrator.observe import Observer
from orchestrator.output import Ended
from orchestrator.pace import Pace
from orchestrator.peers import DRAFT, TARGET, Heard, Peer
from orchestrator.places import About
from orchestrator.pools import Pool, Pools
from orchestrator.settings import OrchestratorSettings
from orchestrator.speculation import Speculation
from specdec import terms
from specdec.errors import AlreadyExists, InternalFault, SpecdecError, Unavailable

DRAIN_POLL_S = 0.05
ASKED = frozenset({"hit", "late", "miss"})  # outcomes of rounds that wanted their draft's block
GOING_AWAY = "the orchestrator is shutting down"
log = logging.getLogger(__name__)


class Driver:
    """Owns all generations and both pools. Every method runs on the event loop. Implements pools.Home."""

    def __init__(self, settings: OrchestratorSettings, vocabulary_fingerprint: bytes, observer: Observer) -> None:
        self.settings, self.observer = settings, observer
        self.orchestrator_id = secrets.token_hex(8)
        self._live: dict[str, Live] = {}
        self._requests = Counter[str]()  # live sessions by request
        self._door = Door(settings, self._turn_away, self._begin)
        self._events: deque[tuple[str, ev.Event | None]] = deque()  # None = begin
        self._working = self._closing = self._draft_wanted = False
        self.pools = Pools(settings, self.orchestrator_id, vocabulary_fingerprint, self)
        self._targets, self._drafts = self.pools.targets, self.pools.drafts
        self._speculation = Speculation(bool(settings.drafts), lambda: self._drafts.serves)
        self._desk = Desk(settings.max_grace_ms, settings.ahead)
        self._handover = Handover(self.pools, self._live, self.feed, observer.handed_over)
        self._hearing = Hearing(self.pools, self._live, self._desk, observer, self.feed, self._told)
        observer.watch(self)

    # --- what a front sees --------------------------------------------------------------------------------------------

    @property
    def model(self) -> terms.ModelInfo | None:
        """The target's model; None until a target answered for the first time."""
        return self.pools.model

    @property
    def draft_available(self) -> bool:
        return self._drafts.serves

    @property
    def running(self) -> int:
        return self._door.admission.running

    @property
    def waiting(self) -> int:
        return self._door.admission.waiting

    def waiting_for(self, pool: Pool) -> int:
        """Calls that wait since no replica of the pool can take them; without a draft they run meanwhile."""
        queue = self.pools.model_wanted + self._door.waiting_for_targets(bool(pool.eligible())) if pool is self._targets else 0
        return pool.places.wanted + queue

    async def model_info(self) -> terms.ModelInfo:
        """Waits for a first target, at most `placement_wait_ms`. Raises Unavailable."""
        return await self.pools.model_info(self.settings.placement_wait_ms)

    def arriving(self, answers: int, size: int, priority: int, left_s: float | None) -> AbstractContextManager[float]:
        """See Door.arriving."""
        return self._door.arriving(answers, size, priority, left_s)

    def start(self, answers: Sequence[ev.Admitted], request_id: str, deadline_ms: float = FOREVER_MS) -> Handle:
        """Admits the answers of one request, answer 0 first; all or none. `deadline_ms` is what `arriving` gave. Raises Overloaded,
        AlreadyExists, DeadlineExceeded or Unavailable."""
        if self._closing:
            raise Unavailable(GOING_AWAY, COME_BACK_MS)
        if self._requests[request_id]:
            raise AlreadyExists(f"request_id: a live request is named {request_id!r} already; choose another or leave it unset")
        runs = self._door.ask(answers, deadline_ms, len(self._targets.connected))
        self._speculation.look()
        self._desk.keep(self._targets.peers)
        wake = Wake()
        for answer in answers:
            pace, trace = self._desk.pace(answer, len(self._live) + 1), self.observer.session(answer)
            generation = self._generation(trace.passed_on(answer), pace)
            undelivered = Undelivered(self, answer.session_id, generation.tally, wake, self.settings.max_unread_ms)
            self._live[answer.session_id] = Live(generation, pace, undelivered, request_id, trace=trace)
            self._requests[request_id] += 1
        self._live[answers[0].session_id].younger = tuple(answer.session_id for answer in answers[1:])
        handle = Handle([self._live[answer.session_id].undelivered for answer in answers], wake)
        if runs:
            for answer in answers:
                self.feed(answer.session_id, None)
        return handle

    def _generation(self, answer: ev.Admitted, pace: Pace) -> Generation:
        return Generation(
            answer,
            pace,
            step_deadline_ms=self.settings.step_deadline_ms,
            placement_wait_ms=self.settings.placement_wait_ms,
            prompt_lookup_min=self.settings.prompt_lookup_min,
            max_run_ahead=self.settings.max_run_ahead,
            ahead=self.settings.ahead,
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Starts dialling. Needs a running loop."""
        self.pools.run()

    async def drained(self) -> None:
        """Returns when no generation is left."""
        while self._live:
            await asyncio.sleep(DRAIN_POLL_S)

    def give_up(self) -> None:
        """Fails what still runs, in a way that says how to go on. Nothing new is taken."""
        self._closing = True
        self._end_all(lambda live: gone(GOING_AWAY, live.generation.decided))

    def forsaken(self, reason: str) -> None:
        log.warning("answers end: %s", reason, extra={"answers": len(self._live)})
        self._end_all(lambda live: Unavailable(reason, COME_BACK_MS))

    def _end_all(self, why: Callable[[Live], SpecdecError]) -> None:
        for live in reversed(list(self._live.values())):  # who waits goes before the places become free
            live.undelivered.end(why(live))
            live.undelivered.cancel()

    async def close(self) -> None:
        """Fails what still runs and hangs up, once the pools have been told."""
        self.give_up()
        await self.pools.close()
        self.observer.flush()

    # --- events in ----------------------------------------------------------------------------------------------------

    def feed(self, session_id: str, event: ev.Event | None) -> None:
        """Applies an event (None: the admission) and all that follows from it, one event after the other: an event that a command
        causes waits until the command's siblings are carried out. Unknown sessions are over: nothing happens."""
        if self._working:
            self._events.append((session_id, event))
            return
        self._working, self._desk.now_ms = True, time.perf_counter() * 1000
        try:
            if (live := self._live.get(session_id)) is not None:
                self._apply(session_id, live, event)
            while self._events or self._draft_wanted:
                if not self._events:  # drafts come behind targets: a session goes where others of its target are
                    self._draft_wanted = False
                    self._place_drafts()
                    continue
                session_id, event = self._events.popleft()
                live = self._live.get(session_id)
                if live is not None:
                    self._apply(session_id, live, event)
        finally:
            self._working = False

    def _apply(self, session_id: str, live: Live, event: ev.Event | None) -> None:
        """A defect costs its session, not the others, nor the connection or timer that brought the event."""
        try:
            commands = live.generation.begin() if event is None else live.generation.handle(event)
            if live.target != live.generation.at.name or live.draft != live.generation.drafting.name:
                self._count_placement(live)
            self._carry_out(session_id, live, commands)
            if event is None and (elder := live.generation.request.fork_session_id) and elder not in self._live:
                self.feed(session_id, ev.PrefixReady(""))  # it went while both waited for admission
        except Exception as error:
            log.exception("a generation failed", extra={"session": session_id, "traceparent": live.generation.request.traceparent})
            live.undelivered.end(error if isinstance(error, SpecdecError) else InternalFault(f"{type(error).__name__}: {error}"))
            with contextlib.suppress(Exception):
                self._carry_out(session_id, live, live.generation.handle(ev.Cancelled()))
            if session_id in self._live:
                self._forget(session_id, live)

    def _count_placement(self, live: Live) -> None:
        generation = live.generation
        before = live.draft, live.target
        if live.target != generation.target:
            self._targets.places.moved(live.target, generation.target)
            live.target = generation.target
            live.trace.placed(TARGET.pool, live.target)
            live.pace.moved(live.target)
            if live.target:
                self._on_target(live)
        if live.draft != generation.drafting.name:
            self._drafts.places.moved(live.draft, generation.drafting.name)
            live.draft = generation.drafting.name
            live.trace.placed(DRAFT.pool, live.draft)
        self._drafts.places.paired(before, (live.draft, live.target))

    def _on_target(self, live: Live) -> None:
        """Whether the text of a session that moved is still sure to be the same."""
        info = self._targets.peers[live.target].info
        numerics = info.numerics_fingerprint if info is not None else ""
        if live.numerics:
            self.observer.replaced(equal=numerics == live.numerics, reason=live.generation.moving.reason)
        live.numerics = live.numerics or numerics

    # --- commands out -------------------------------------------------------------------------------------------------

    def _carry_out(self, session_id: str, live: Live, commands: Iterable[ev.Command]) -> None:
        forked = False  # the others of the request start now, from this session's keys and values
        for command in commands:  # those of every round first: to match a class costs as much as to carry most of them out
            if isinstance(command, ev.ToDraft):
                self._drafts.send(command.draft, command.command)
            elif isinstance(command, ev.ToTarget):
                self._to_target(live, command.target, command.item, forked)
            elif isinstance(command, ev.StartTimer):
                live.timers.start(command.timer, command.after_ms, self.feed, session_id)
            elif isinstance(command, ev.StopTimer):
                live.timers.stop(command.timer)
            elif isinstance(command, ev.Deliver):
                live.undelivered.deliver(command)
                forked |= bool(live.younger) and self._prefix_ready(live, live.generation.target)
            elif isinstance(command, ev.Observe):
                self.observer.later_round(command, live.trace)
                self._handover.round(session_id, live, command.outcome)
                if command.outcome in ASKED and live.generation.drafting.owes:
                    self._drafts.round(live.draft, command.outcome == "miss")
            else:
                forked |= self._carry_out_rare(session_id, live, command)

    def _to_target(self, live: Live, name: str, item: terms.VerifyItem, forked: bool) -> None:
        if isinstance(item, terms.Step):
            self._targets.send(name, self._door.bounded(item))
            live.step_sent = time.perf_counter()
            if live.answered:
                self.observer.later(self.observer.waited, live.step_sent - live.answered)
            live.answered = 0.0
        elif forked and isinstance(item, terms.Close):  # behind their first Steps, which leave in this turn
            asyncio.get_running_loop().call_soon(self._targets.send, name, item)
        else:
            self._targets.send(name, item)

    def _carry_out_rare(self, session_id: str, live: Live, command: ev.Command) -> bool:
        """True: the others of the request start now."""
        match command:
            case ev.Count(what, amount):
                self.observer.count(what, amount)
                if what == "grace_expired" and live.generation.drafting.owes:
                    self._drafts.stalled(live.draft)
            case ev.Overdue(name):
                self._targets.ejection.bad(name, Trouble.STALL)
            case ev.Misled(name, what):
                log.warning("a target said what cannot be", extra={"peer": name, "reason": what})
                self.observer.count("broken", 1)
                self._targets.ejection.bad(name, Trouble.FAILED)
            case ev.PlaceTarget(avoid, prefer):
                self._targets.places.want(session_id, avoid, prefer)
                self._place_targets()
            case ev.SeekRoom(full):
                self._seek_room(session_id, live, full)
            case ev.PlaceDraft(avoid):
                self._drafts.places.want(session_id, avoid)
                self._draft_wanted = True
            case ev.Finish(reason, stop_token_id, stats):
                live.undelivered.end(Ended(reason, stop_token_id, stats))
                return self._prefix_ready(live, live.generation.target)
            case ev.Fail(error):
                live.undelivered.end(error)
                self._prefix_ready(live, "")
            case ev.Forget():
                self._forget(session_id, live)
        return False

    def _forget(self, session_id: str, live: Live) -> None:
        self.observer.later(live.trace.end, live.generation.tally.stats(), live.undelivered.ending)
        live.timers.clear()
        live.pace.moved("")
        self._targets.places.forget(session_id, live.target)
        self._drafts.places.forget(session_id, live.draft)
        self._drafts.places.paired((live.draft, live.target), ("", ""))
        del self._live[session_id]
        self._requests[live.request_id] -= 1
        if not self._requests[live.request_id]:
            del self._requests[live.request_id]
        self._prefix_ready(live, "")
        self._begin(self._door.leave(session_id))

    def _begin(self, sessions: Iterable[str]) -> None:
        for session_id in sessions:
            self.feed(session_id, None)

    def _turn_away(self, session_id: str, error: SpecdecError) -> None:
        if (live := self._live.get(session_id)) is not None:
            live.undelivered.end(error)
            live.undelivered.cancel()

    def _prefix_ready(self, live: Live, target: str) -> bool:
        """Lets the others of the request start, once; those that wait for admission hear of it when they begin. False: there is none."""
        younger, live.younger = live.younger, ()
        for session_id in younger:
            if not self._door.admission.waits(session_id):
                self.feed(session_id, ev.PrefixReady(target))
        return bool(younger)

    def _place_targets(self) -> None:
        for session_id, name, why in self._targets.places.place(self._about):
            self.observer.placed(self._targets.name, why)
            self.feed(session_id, ev.TargetPlaced(name))

    def _about(self, session_id: str) -> About:
        return self._live[session_id].about()

    def _seek_room(self, session_id: str, live: Live, full: tuple[str, ...]) -> None:
        """What was decided may go on where it is sure to be the same text; the wait for room ends some time."""
        generation = live.generation
        if name := self._targets.places.elsewhere(full, live.about(), generation.decided > 0):
            self.feed(session_id, ev.TargetPlaced(name))

    def _place_drafts(self) -> None:
        for session_id, name, why in self._drafts.places.place(lambda session_id: About(target=self._live[session_id].target)):
            self.observer.placed(self._drafts.name, why)
            info = self._drafts.peers[name].info
            assert info is not None  # it is connected
            self.feed(session_id, ev.DraftPlaced(name, info.max_num_speculative_tokens))

    # --- the pools speak ----------------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        return bool(self._live)

    def up(self, pool: Pool) -> None:
        if pool is self._targets:
            self._place_targets()
        else:
            self._speculation.look()
            self._place_drafts()

    def lost(self, pool: Pool, name: str, reason: str) -> None:
        for session_id, live in list(self._live.items()):
            if pool is self._targets and live.generation.target == name:
                self.feed(session_id, ev.TargetLost(reason))
            elif pool is self._drafts and live.generation.drafting.name == name:
                self.feed(session_id, ev.DraftLost(reason))
        self._speculation.look()

    def ejected(self, pool: str, name: str, trouble: Trouble) -> None:
        """Sessions leave a draft for a better one; a target they leave when it fails them, since moving costs a prefill."""
        self.observer.ejected(pool, trouble.label)
        if pool == self._targets.name:
            return
        self._drafts.ejected(name)
        self._speculation.look()
        if self._drafts.eligible():
            for session_id, live in list(self._live.items()):
                if live.draft == name:
                    self.feed(session_id, ev.DraftLost(trouble.label, alive=True))

    def drains(self, pool: Pool, name: str) -> None:
        self._speculation.look()
        self._handover.drains(pool, name)

    def again(self, pool: str) -> None:
        self.up(self._targets if pool == self._targets.name else self._drafts)

    def discovery_failed(self, pool: str, kind: str) -> None:
        self.observer.discovery_failed(pool, kind)

    def heard(self, peer: Peer, heard: Heard) -> None:
        self._hearing.heard(peer, heard)

    def _told(self, session_id: str, has_room: bool) -> None:
        if not has_room or self._door.admission.asks(session_id):
            self._begin(self._door.told(session_id, has_room=has_room))
