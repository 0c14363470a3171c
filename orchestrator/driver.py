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
from dataclasses import dataclass, field, replace

from orchestrator import events as ev
from orchestrator.admission import Admission
from orchestrator.checks import is_sound, without_foreign_ids
from orchestrator.control import Desk
from orchestrator.generation import Generation
from orchestrator.handle import Handle, Undelivered
from orchestrator.observe import Observer
from orchestrator.output import Ended
from orchestrator.pace import Pace
from orchestrator.peers import DRAFT, TARGET, Heard, Peer
from orchestrator.places import Places
from orchestrator.settings import OrchestratorSettings
from specdec import terms
from specdec.errors import AlreadyExists, InternalFault, Mismatch, SpecdecError, Unavailable

DRAIN_POLL_S = 0.05
RECORD_AFTER_S = 0.002
FLUSH_S = 0.5  # for the last Close items to leave
GOING_AWAY = "the orchestrator is shutting down; resume with output_token_ids"
log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Live:
    """A session as the driver knows it."""

    generation: Generation
    pace: Pace
    undelivered: Undelivered
    request_id: str
    younger: tuple[str, ...] = ()  # sessions that wait until this one has computed their common prompt
    target: str = ""  # as counted in Driver._placed
    draft: str = ""
    numerics: str = ""  # of its first target
    timers: dict[ev.Timer, asyncio.TimerHandle] = field(default_factory=dict)
    step_sent: float = 0.0  # when the Step left that no answer has come for; 0: none waits, the target goes on by itself
    answered: float = 0.0  # when the last answer came; 0 once a Step has followed it


class Driver:
    """Owns all generations and all peers. Every method runs on the event loop."""

    def __init__(self, settings: OrchestratorSettings, vocabulary_fingerprint: bytes, observer: Observer) -> None:
        self.settings, self.observer = settings, observer
        self.orchestrator_id = secrets.token_hex(8)
        self._fingerprint = vocabulary_fingerprint
        self._live: dict[str, _Live] = {}
        self._requests = Counter[str]()  # live sessions by request
        self._admission = Admission(settings.max_running, settings.max_waiting)
        self._events: deque[tuple[str, ev.Event | None]] = deque()  # None = begin
        self._working = self._closing = False
        self._pools = {
            dialect.pool: {name: Peer(name, dialect, self.orchestrator_id, self) for name in names}
            for dialect, names in ((TARGET, settings.targets), (DRAFT, settings.drafts))
        }
        self._targets, self._drafts = Places(self._pools["target"]), Places(self._pools["draft"])
        self._desk = Desk(settings.max_grace_ms, settings.ahead)
        self._tasks: list[asyncio.Task[None]] = []
        self._unrecorded: list[tuple[Callable[..., None], tuple[object, ...]]] = []  # metrics of the last RECORD_AFTER_S
        self._model: terms.ModelInfo | None = None
        self._model_known = asyncio.Event()
        observer.watch(self)

    # --- what a front sees --------------------------------------------------------------------------------------------

    @property
    def model(self) -> terms.ModelInfo | None:
        """The target's model; None until a target answered for the first time."""
        return self._model

    @property
    def draft_available(self) -> bool:
        return any(peer.connected for peer in self._pools["draft"].values())

    @property
    def running(self) -> int:
        return self._admission.running

    @property
    def waiting(self) -> int:
        return self._admission.waiting

    def pool(self, name: str) -> Iterable[Peer]:
        return self._pools[name].values()

    async def model_info(self) -> terms.ModelInfo:
        """Waits for a first target, at most `placement_wait_ms`. Raises Unavailable."""
        try:
            await asyncio.wait_for(self._model_known.wait(), self.settings.placement_wait_ms / 1000)
        except TimeoutError:
            raise Unavailable("no target is connected") from None
        assert self._model is not None
        return self._model

    def start(self, answers: Sequence[ev.Admitted], request_id: str) -> Handle:
        """Admits the answers of one request, answer 0 first; all or none. Raises Overloaded, AlreadyExists or Unavailable."""
        if self._closing:
            raise Unavailable(GOING_AWAY)
        if self._requests[request_id]:
            raise AlreadyExists(f"request_id: a live request is named {request_id!r} already; choose another or leave it unset")
        runs = self._admission.ask([answer.session_id for answer in answers], answers[0].priority)
        wake = asyncio.Event()
        for answer in answers:
            pace = self._desk.pace(answer, len(self._live) + 1)
            generation = self._generation(answer, pace)
            undelivered = Undelivered(self, answer.session_id, generation.tally, wake)
            self._live[answer.session_id] = _Live(generation, pace, undelivered, request_id)
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
        peers = [peer for pool in self._pools.values() for peer in pool.values()]
        self._tasks = [asyncio.create_task(peer.run(), name=f"peer {peer.name}") for peer in peers]

    async def drained(self) -> None:
        """Returns when no generation is left."""
        while self._live:
            await asyncio.sleep(DRAIN_POLL_S)

    def give_up(self) -> None:
        """Fails what still runs, in a way that says how to go on. Nothing new is taken."""
        self._closing = True
        for live in reversed(list(self._live.values())):  # who waits goes before the places become free
            live.undelivered.end(Unavailable(GOING_AWAY))
            live.undelivered.cancel()

    async def close(self) -> None:
        """Fails what still runs and hangs up, once the pools have been told."""
        self.give_up()
        peers = [peer for pool in self._pools.values() for peer in pool.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(peer.flushed() for peer in peers)), FLUSH_S)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # --- events in ----------------------------------------------------------------------------------------------------

    def feed(self, session_id: str, event: ev.Event | None) -> None:
        """Applies an event (None: the admission) and all that follows from it, one event after the other: an event that a command
        causes waits until the command's siblings are carried out. Unknown sessions are over: nothing happens."""
        self._events.append((session_id, event))
        if self._working:
            return
        self._working, self._desk.now_ms = True, time.perf_counter() * 1000
        try:
            while self._events:
                session_id, event = self._events.popleft()
                live = self._live.get(session_id)
                if live is not None:
                    self._apply(session_id, live, event)
        finally:
            self._working = False

    def _apply(self, session_id: str, live: _Live, event: ev.Event | None) -> None:
        """A defect costs its session, not the others, nor the connection or timer that brought the event."""
        try:
            commands = live.generation.begin() if event is None else live.generation.handle(event)
            self._count_placement(live)
            self._carry_out(session_id, live, commands)
            if event is None and (elder := live.generation.request.fork_session_id) and elder not in self._live:
                self.feed(session_id, ev.PrefixReady(""))  # it went while both waited for admission
        except Exception as error:
            log.exception("a generation failed", extra={"session_id": session_id})
            live.undelivered.end(error if isinstance(error, SpecdecError) else InternalFault(f"{type(error).__name__}: {error}"))
            with contextlib.suppress(Exception):
                self._carry_out(session_id, live, live.generation.handle(ev.Cancelled()))
            if session_id in self._live:
                self._forget(session_id, live)

    def _count_placement(self, live: _Live) -> None:
        generation = live.generation
        if live.target != generation.target:
            self._targets.moved(live.target, generation.target)
            live.target = generation.target
            live.pace.moved(live.target)
            if live.target:
                self._on_target(live)
        if live.draft != generation.drafting.name:
            self._drafts.moved(live.draft, generation.drafting.name)
            live.draft = generation.drafting.name

    def _on_target(self, live: _Live) -> None:
        """Whether the text of a session that moved is still sure to be the same."""
        info = self._pools["target"][live.target].info
        numerics = info.numerics_fingerprint if info is not None else ""
        if live.numerics:
            self.observer.replaced(equal=numerics == live.numerics)
        live.numerics = live.numerics or numerics

    # --- commands out -------------------------------------------------------------------------------------------------

    def _carry_out(self, session_id: str, live: _Live, commands: Iterable[ev.Command]) -> None:
        forked = False  # the others of the request start now, from this session's keys and values
        for command in commands:
            match command:
                case ev.ToTarget(name, terms.Close() as item) if forked:  # behind their first Steps, which leave in this turn
                    asyncio.get_running_loop().call_soon(self._pools["target"][name].send, item)
                case ev.ToTarget(name, item):
                    self._pools["target"][name].send(item)
                    if isinstance(item, terms.Step):
                        live.step_sent = time.perf_counter()
                        if live.answered:
                            self._observe(self.observer.waited, live.step_sent - live.answered)
                        live.answered = 0.0
                case ev.ToDraft(name, item):
                    self._pools["draft"][name].send(item)
                case ev.Deliver():
                    live.undelivered.deliver(command)
                    forked |= self._prefix_ready(live, live.generation.target)
                case ev.StartTimer(timer, after_ms):
                    self._stop_timer(live, timer)
                    loop = asyncio.get_running_loop()
                    live.timers[timer] = loop.call_later(after_ms / 1000, self.feed, session_id, ev.TimerFired(timer))
                case ev.StopTimer(timer):
                    self._stop_timer(live, timer)
                case ev.Observe():
                    self._observe(self.observer.round, command)
                case ev.Count(what, amount):
                    self.observer.count(what, amount)
                case ev.PlaceTarget(avoid, prefer):
                    self._targets.want(session_id, avoid, prefer)
                    self._place_targets()
                case ev.PlaceDraft(avoid):
                    self._drafts.want(session_id, avoid)
                    self._place_drafts()
                case ev.Finish(reason, stop_token_id, stats):
                    live.undelivered.end(Ended(reason, stop_token_id, stats))
                    forked |= self._prefix_ready(live, live.generation.target)
                case ev.Fail(error):
                    live.undelivered.end(error)
                    self._prefix_ready(live, "")
                case ev.Forget():
                    self._forget(session_id, live)

    @staticmethod
    def _stop_timer(live: _Live, timer: ev.Timer) -> None:
        if (running := live.timers.pop(timer, None)) is not None:
            running.cancel()

    def _forget(self, session_id: str, live: _Live) -> None:
        for timer in list(live.timers):
            self._stop_timer(live, timer)
        live.pace.moved("")
        self._targets.forget(session_id, live.target)
        self._drafts.forget(session_id, live.draft)
        del self._live[session_id]
        self._requests[live.request_id] -= 1
        if not self._requests[live.request_id]:
            del self._requests[live.request_id]
        self._prefix_ready(live, "")
        for next_id in self._admission.leave(session_id):
            self.feed(next_id, None)

    def _prefix_ready(self, live: _Live, target: str) -> bool:
        """Lets the others of the request start, once; those that wait for admission hear of it when they begin. False: there is none."""
        younger, live.younger = live.younger, ()
        for session_id in younger:
            if not self._admission.waits(session_id):
                self.feed(session_id, ev.PrefixReady(target))
        return bool(younger)

    def _place_targets(self) -> None:
        for session_id, peer in self._targets.place(lambda session_id: self._live[session_id].numerics):
            self.feed(session_id, ev.TargetPlaced(peer.name))

    def _place_drafts(self) -> None:
        for session_id, peer in self._drafts.place():
            assert peer.info is not None  # it is connected
            self.feed(session_id, ev.DraftPlaced(peer.name, peer.info.max_num_speculative_tokens))

    # --- peers speak --------------------------------------------------------------------------------------------------

    def accept(self, peer: Peer, info: terms.ModelInfo) -> None:
        if info.vocabulary_fingerprint != self._fingerprint:
            raise Mismatch(f"{peer.dialect.pool} {peer.name} serves {info.model!r}, whose vocabulary is not the tokenizer's")
        known = self._model
        in_use = self._live or any(other.connected for other in self._pools["target"].values())
        if peer.dialect is TARGET and known is not None and in_use and _identity(info) != _identity(known):
            raise Mismatch(f"target {peer.name} serves {info.model!r}; answers of {known.model!r} cannot go on there")

    def up(self, peer: Peer) -> None:
        log.info("peer up", extra={"pool": peer.dialect.pool, "peer": peer.name})
        if peer.dialect is TARGET:
            self._target_up()
            self._place_targets()
        else:
            self._place_drafts()

    def _target_up(self) -> None:
        """What is admitted must fit every target it may come to."""
        infos = [peer.info for peer in self._pools["target"].values() if peer.connected and peer.info is not None]
        window, most = min(i.max_model_len for i in infos), min(i.max_num_speculative_tokens for i in infos)
        self._model = replace(infos[0], max_model_len=window, max_num_speculative_tokens=most)
        self._model_known.set()
        if len({i.numerics_fingerprint for i in infos}) > 1:
            log.warning("the targets compute differently: an answer that moves between them may differ within rounding")

    def down(self, peer: Peer, reason: str) -> None:
        log.warning("peer down", extra={"pool": peer.dialect.pool, "peer": peer.name, "reason": reason})
        for session_id, live in list(self._live.items()):
            if peer.dialect is TARGET and live.generation.target == peer.name:
                self.feed(session_id, ev.TargetLost(reason))
            elif peer.dialect is DRAFT and live.generation.drafting.name == peer.name:
                self.feed(session_id, ev.DraftLost(reason))

    def trouble(self, peer: Peer, reason: str) -> None:
        log.warning("peer cannot be reached", extra={"pool": peer.dialect.pool, "peer": peer.name, "reason": reason})

    def heard(self, peer: Peer, heard: Heard) -> None:
        if heard.faults:
            self.observer.count("broken", heard.faults)
        if peer.dialect is TARGET:
            self._desk.now_ms = time.perf_counter() * 1000
            self._desk.heard(peer.name, heard.rows, heard.engine_us, heard.items)
        for item in heard.items:
            live = self._live.get(item.session_id)
            if live is None:
                continue
            if peer.dialect is TARGET:
                if live.generation.target == peer.name:
                    live.answered = time.perf_counter()
                    took_s = live.answered - live.step_sent if live.step_sent else None
                    live.step_sent = 0.0
                    self._observe(self.observer.answered, item, took_s, heard)
                    self.feed(item.session_id, ev.Answered(self._believed(item)))
            elif live.generation.drafting.name == peer.name:
                if not isinstance(item, terms.Proposal) or is_sound(item, self._vocab_size):
                    self.feed(item.session_id, ev.Drafted(item))
                else:
                    self.observer.count("broken", 1)

    @property
    def _vocab_size(self) -> int:
        return self._model.vocab_size if self._model is not None else 0

    def _believed(self, answer: terms.Answer) -> terms.Answer:
        """An answer without what only looks like a proposal."""
        if not isinstance(answer.outcome, terms.Result) or not answer.outcome.forced:
            return answer
        believed = without_foreign_ids(answer.outcome, self._vocab_size)
        if believed is not answer.outcome:
            self.observer.count("broken", 1)
        return replace(answer, outcome=believed)

    def _observe(self, record: Callable[..., None], *what: object) -> None:
        """Records once this turn's messages have left: a metric must not stand between a result and the next block."""
        if not self._unrecorded:
            asyncio.get_running_loop().call_later(RECORD_AFTER_S, self._record)
        self._unrecorded.append((record, what))

    def _record(self) -> None:
        waiting, self._unrecorded = self._unrecorded, []
        for record, what in waiting:
            record(*what)


def _identity(info: terms.ModelInfo) -> tuple[object, ...]:
    """What must be equal for an answer to go on elsewhere; numerics may differ, they only cost the bit-for-bit promise."""
    return info.model, info.vocab_size, info.eos_token_ids
