"""The only async loop of the orchestrator: events to generations, their commands to peers, timers and clients.

One turn: a message of a peer is decoded, every answer in it goes through its generation, and what the generations want sent leaves in
one message per peer. Nothing here decides; it carries out.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass, field

from orchestrator import events as ev
from orchestrator.admission import Admission
from orchestrator.generation import Generation
from orchestrator.observe import Observer
from orchestrator.output import Ended, GenerationStats, TokensDecided
from orchestrator.peers import DRAFT, TARGET, Heard, Peer
from orchestrator.placement import Candidate, choose
from orchestrator.settings import OrchestratorSettings
from specdec import terms
from specdec.errors import AlreadyExists, InternalFault, InvalidRequest, Mismatch, SpecdecError, Unavailable

MAX_UNDELIVERED = 512  # decided tokens that may wait for a client before its generation is held
DRAIN_POLL_S = 0.05
log = logging.getLogger(__name__)


class Handle:
    """One answer on its way to a front: iterate over it, or cancel it. Events that wait together come out as one."""

    def __init__(self, driver: Driver, session_id: str) -> None:
        self.session_id = session_id
        self._driver = driver
        self._tokens: list[int] = []
        self._logprobs: list[terms.TokenLogprobs] = []
        self._origins: list[terms.Origin] = []
        self._end: Ended | SpecdecError | None = None
        self._wake = asyncio.Event()
        self._behind = False

    def cancel(self) -> None:
        """Frees both pools. Harmless after the end."""
        self._driver.feed(self.session_id, ev.Cancelled())

    def stop_here(self) -> GenerationStats:
        """The client has all it wants (a stop string was completed): frees both pools and returns the counts. Undelivered tokens are
        among the decided ones."""
        stats = self._end.stats if isinstance(self._end, Ended) else self._driver.stats(self.session_id)
        self.cancel()
        return stats

    async def __aiter__(self) -> AsyncIterator[TokensDecided | Ended]:
        """Ends after `Ended`; raises SpecdecError when the answer cannot go on."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._tokens:
                yield self._take()
            if isinstance(self._end, SpecdecError):
                raise self._end
            if self._end is not None and not self._tokens:
                yield self._end
                return

    def _take(self) -> TokensDecided:
        taken = TokensDecided(tuple(self._tokens), tuple(self._logprobs), tuple(self._origins))
        self._tokens, self._logprobs, self._origins = [], [], []
        if self._behind:
            self._behind = False
            self._driver.feed(self.session_id, ev.ReaderCaughtUp())
        return taken

    def deliver(self, decided: ev.Deliver) -> None:
        self._tokens += decided.tokens
        self._logprobs += decided.logprobs
        self._origins += decided.origins
        self._wake.set()
        if len(self._tokens) > MAX_UNDELIVERED and not self._behind:
            self._behind = True
            self._driver.feed(self.session_id, ev.ReaderBehind())

    def end(self, how: Ended | SpecdecError) -> None:
        self._end = how
        self._wake.set()


@dataclass(slots=True)
class _Live:
    """A session as the driver knows it."""

    generation: Generation
    handle: Handle
    request_id: str
    timers: dict[ev.Timer, asyncio.TimerHandle] = field(default_factory=dict)
    step_sent: float = 0.0


class Driver:
    """Owns all generations and all peers. Every method runs on the event loop."""

    def __init__(self, settings: OrchestratorSettings, vocabulary_fingerprint: bytes, observer: Observer) -> None:
        self.settings, self.observer = settings, observer
        self.orchestrator_id = secrets.token_hex(8)
        self._fingerprint = vocabulary_fingerprint
        self._live: dict[str, _Live] = {}
        self._requests: set[str] = set()
        self._admission = Admission(settings.max_running, settings.max_waiting)
        self._events: deque[tuple[str, ev.Event | None]] = deque()  # None = begin
        self._working = False
        self._wants_target: dict[str, str] = {}  # session -> target to avoid
        self._wants_draft: dict[str, str] = {}
        self._pools = {
            dialect.pool: {name: Peer(name, dialect, self.orchestrator_id, self) for name in names}
            for dialect, names in ((TARGET, settings.targets), (DRAFT, settings.drafts))
        }
        self._tasks: list[asyncio.Task[None]] = []
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

    def start(self, request: ev.Admitted, request_id: str) -> Handle:
        """Admits a generation. Raises Overloaded or AlreadyExists."""
        if request_id in self._requests:
            raise AlreadyExists(f"request_id: a live request is named {request_id!r} already; choose another or leave it unset")
        generation = Generation(
            request,
            max_grace_ms=self.settings.max_grace_ms,
            step_deadline_ms=self.settings.step_deadline_ms,
            placement_wait_ms=self.settings.placement_wait_ms,
        )
        runs = self._admission.ask(request.session_id, request.priority)
        handle = Handle(self, request.session_id)
        self._requests.add(request_id)
        self._live[request.session_id] = _Live(generation, handle, request_id)
        if runs:
            self.feed(request.session_id, None)
        return handle

    def stats(self, session_id: str) -> GenerationStats:
        """Counts of a live generation; all zero for one that is over."""
        live = self._live.get(session_id)
        return live.generation.tally.stats() if live is not None else GenerationStats()

    # --- life ---------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Starts dialling. Needs a running loop."""
        peers = [peer for pool in self._pools.values() for peer in pool.values()]
        self._tasks = [asyncio.create_task(peer.run(), name=f"peer {peer.name}") for peer in peers]

    async def drained(self) -> None:
        """Returns when no generation is left."""
        while self._live:
            await asyncio.sleep(DRAIN_POLL_S)

    async def close(self) -> None:
        """Fails what still runs and hangs up."""
        for live in list(self._live.values()):
            live.handle.end(Unavailable("the orchestrator is shutting down; resume with output_token_ids"))
            self.feed(live.handle.session_id, ev.Cancelled())
        await asyncio.sleep(0)  # lets the writers send the Close items
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
        self._working = True
        try:
            while self._events:
                session_id, event = self._events.popleft()
                live = self._live.get(session_id)
                if live is not None:
                    self._carry_out(session_id, live, self._decide(live, event))
        finally:
            self._working = False

    def _decide(self, live: _Live, event: ev.Event | None) -> list[ev.Command]:
        try:
            return live.generation.begin() if event is None else live.generation.handle(event)
        except Exception as error:  # a defect must cost one session, not the process
            log.exception("a generation failed", extra={"session_id": live.handle.session_id})
            fault = error if isinstance(error, SpecdecError) else InternalFault(f"{type(error).__name__}: {error}")
            return [ev.Fail(fault), *live.generation.handle(ev.Cancelled())]

    # --- commands out -------------------------------------------------------------------------------------------------

    def _carry_out(self, session_id: str, live: _Live, commands: Iterable[ev.Command]) -> None:
        for command in commands:
            match command:
                case ev.ToTarget(name, item):
                    live.step_sent = time.perf_counter()
                    self._pools["target"][name].send(item)
                case ev.ToDraft(name, item):
                    self._pools["draft"][name].send(item)
                case ev.Deliver():
                    live.handle.deliver(command)
                case ev.StartTimer(timer, after_ms):
                    self._stop_timer(live, timer)
                    loop = asyncio.get_running_loop()
                    live.timers[timer] = loop.call_later(after_ms / 1000, self.feed, session_id, ev.TimerFired(timer))
                case ev.StopTimer(timer):
                    self._stop_timer(live, timer)
                case ev.Observe():
                    self.observer.round(command)
                case ev.Count(what, amount):
                    self.observer.count(what, amount)
                case ev.PlaceTarget(avoid):
                    self._wants_target[session_id] = avoid
                    self._place("target", self._wants_target)
                case ev.PlaceDraft(avoid):
                    self._wants_draft[session_id] = avoid
                    self._place("draft", self._wants_draft)
                case ev.Finish(reason, stop_token_id, stats):
                    live.handle.end(Ended(reason, stop_token_id, stats))
                case ev.Fail(error):
                    live.handle.end(error)
                case ev.Forget():
                    self._forget(session_id, live)

    @staticmethod
    def _stop_timer(live: _Live, timer: ev.Timer) -> None:
        if (running := live.timers.pop(timer, None)) is not None:
            running.cancel()

    def _forget(self, session_id: str, live: _Live) -> None:
        for timer in list(live.timers):
            self._stop_timer(live, timer)
        self._wants_target.pop(session_id, None)
        self._wants_draft.pop(session_id, None)
        del self._live[session_id]
        self._requests.discard(live.request_id)
        for next_id in self._admission.leave(session_id):
            self.feed(next_id, None)

    def _place(self, pool: str, wants: dict[str, str]) -> None:
        """Gives every session that wants a replica of this pool one, if there is any."""
        if not any(peer.connected for peer in self._pools[pool].values()):
            return
        placed = ev.TargetPlaced if pool == "target" else ev.DraftPlaced
        for session_id, avoid in list(wants.items()):
            name = choose(self._candidates(pool), avoid, (random.random(), random.random()))
            if name is not None:
                del wants[session_id]
                self.feed(session_id, placed(name))

    def _candidates(self, pool: str) -> list[Candidate]:
        placed: dict[str, int] = {}
        for live in self._live.values():
            name = live.generation.target if pool == "target" else live.generation.drafting.name
            placed[name] = placed.get(name, 0) + 1
        return [Candidate(peer.name, placed.get(peer.name, 0), _load(peer)) for peer in self._pools[pool].values() if peer.connected]

    # --- peers speak --------------------------------------------------------------------------------------------------

    def accept(self, peer: Peer, info: terms.ModelInfo) -> None:
        if info.vocabulary_fingerprint != self._fingerprint:
            raise Mismatch(f"{peer.dialect.pool} {peer.name} serves {info.model!r}, whose vocabulary is not the tokenizer's")

    def up(self, peer: Peer) -> None:
        log.info("peer up", extra={"pool": peer.dialect.pool, "peer": peer.name})
        if peer.dialect is TARGET:
            self._model = peer.info
            self._model_known.set()
            self._place("target", self._wants_target)
        else:
            self._place("draft", self._wants_draft)

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
        for item in heard.items:
            live = self._live.get(item.session_id)
            if live is None:
                continue
            if peer.dialect is TARGET:
                if live.generation.target == peer.name:
                    self.observer.answered(item, time.perf_counter() - live.step_sent, heard)
                    self.feed(item.session_id, ev.Answered(item))
            elif live.generation.drafting.name == peer.name and self._sound(item):
                self.feed(item.session_id, ev.Drafted(item))

    def _sound(self, said: terms.DraftEvent) -> bool:
        """Whether a draft's words may be used at all: it is trusted with nothing."""
        if not isinstance(said, terms.Proposal):
            return True
        size = self._model.vocab_size if self._model is not None else 0
        try:
            for q in said.distributions:
                if q is not None:
                    q.check(size)  # the target checks it too, and would fail the session for it
            if said.tokens and max(said.tokens) < size:
                return True
        except InvalidRequest as error:
            log.debug("unusable proposal: %s", error)
        self.observer.count("broken", 1)
        return False


def _load(peer: Peer) -> float:
    """What the peer last reported, 0 = idle, 1 = full."""
    beat = peer.beat
    return beat.kv_used_tokens / beat.kv_total_tokens if beat is not None and beat.kv_total_tokens else 0.0
