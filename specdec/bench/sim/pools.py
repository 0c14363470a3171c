"""All targets and drafts of a simulated system in one process: real gRPC on loopback ports, timers instead of engines.

A target takes what waits into a step, as many sessions as there are; the step takes what the simulation says, and its answers leave in one
message per orchestrator, like those of a real engine. A draft drafts an id for every session that wants some in each step, and tells the
sessions that have all they want. `rtt_ms` is added half on the way in and half on the way out.
"""

from __future__ import annotations

import abc
import asyncio
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from specdec import wire
from specdec.bench.sim import draft as sim_draft
from specdec.bench.sim import target as sim_target
from specdec.bench.sim.path import Paths
from specdec.runtime.channels import server_options
from specdec.terms import ModelInfo
from specdec.v1 import draft_pb2, target_pb2

BEAT_S = 0.25
TICK_MS = 1.0
KV_TOKENS = 1 << 24
Context = grpc.aio.ServicerContext[Any, Any]
clock = time.perf_counter


@dataclass(slots=True)
class Counts:
    """Since the last reset. `added_s`: of each Step that followed a result, the time from the result, or from the draft's word where that
    came later, until it was here, without the network that is simulated."""

    rounds: int = 0
    decided: int = 0
    accepted: int = 0
    spec_rounds: int = 0
    own_rounds: int = 0
    steps: int = 0
    broken: int = 0
    messages_in: int = 0
    messages_out: int = 0
    added_s: list[float] = field(default_factory=list)


class Wheel:
    """Timers by the millisecond: those of one slot cost one timer of the loop."""

    def __init__(self) -> None:
        self._slots: dict[int, list[tuple[Callable[..., None], tuple[Any, ...]]]] = defaultdict(list)
        self._loop = asyncio.get_running_loop()

    def after(self, ms: float, call: Callable[..., None], *what: Any) -> None:
        due = int((self._loop.time() * 1000 + ms) / TICK_MS) + 1
        if due not in self._slots:
            self._loop.call_at(due * TICK_MS / 1000, self._fire, due)
        self._slots[due].append((call, what))

    def _fire(self, due: int) -> None:
        for call, what in self._slots.pop(due):
            call(*what)


class Outlet:
    """What waits to be written to one stream; one task writes."""

    def __init__(self) -> None:
        self._waiting: list[bytes] = []
        self._wake = asyncio.Event()

    def put(self, message: bytes) -> None:
        self._waiting.append(message)
        self._wake.set()

    async def write(self, context: Context) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._waiting:
                messages, self._waiting = self._waiting, []
                for message in messages:
                    await context.write(message)


class _Server(abc.ABC):
    """One replica. `name` for humans; `endpoint` once it listens."""

    service = method = ""

    def __init__(self, info: ModelInfo, paths: Paths, counts: Counts, wheel: Wheel, rtt_ms: float) -> None:
        self.info, self.paths, self.counts, self.wheel, self.rtt_ms = info, paths, counts, wheel, rtt_ms
        self.endpoint = ""
        self._server = grpc.aio.server(options=server_options())
        self._outlets: list[Outlet] = []

    async def start(self) -> None:
        info: bytes = self._info_message().SerializeToString()

        async def tell_info(request: bytes, context: Context) -> bytes:
            return info

        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            self.method: grpc.stream_stream_rpc_method_handler(self._stream),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(tell_info),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.service, handlers),))
        self.endpoint = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()

    async def stop(self) -> None:
        await self._server.stop(0)

    def beat(self) -> None:
        beat = self._beat_message().SerializeToString()
        for outlet in self._outlets:
            outlet.put(beat)

    async def _stream(self, requests: Any, context: Context) -> None:
        outlet = Outlet()
        self._outlets.append(outlet)
        outlet.put(self._beat_message().SerializeToString())
        writer = asyncio.create_task(outlet.write(context))
        try:
            while (raw := await context.read()) is not grpc.aio.EOF:
                self.counts.messages_in += 1
                if self.rtt_ms:
                    self.wheel.after(self.rtt_ms / 2, self.heard, outlet, raw, clock())
                else:
                    self.heard(outlet, raw, clock())
        finally:
            self._outlets.remove(outlet)
            self.lost(outlet)
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)

    def say(self, outlet: Outlet, message: bytes) -> None:
        self.counts.messages_out += 1
        outlet.put(message)

    @abc.abstractmethod
    def _info_message(self) -> Any: ...

    @abc.abstractmethod
    def _beat_message(self) -> Any: ...

    @abc.abstractmethod
    def heard(self, outlet: Outlet, raw: bytes, at: float) -> None: ...

    @abc.abstractmethod
    def lost(self, outlet: Outlet) -> None: ...


class Target(_Server):
    service, method = "specdec.v1.TargetService", "Verify"

    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self._sessions: dict[str, tuple[sim_target.Session, Outlet]] = {}
        self._waiting: dict[str, None] = {}
        self._busy = False

    def _info_message(self) -> Any:
        return target_pb2.TargetServiceGetModelInfoResponse(info=wire.model_info_to_wire(self.info))

    def _beat_message(self) -> Any:
        beat = target_pb2.Beat(sessions=len(self._sessions), kv_total_tokens=KV_TOKENS, predicted_step_ms=1)
        return target_pb2.VerifyResponse(beat=beat)

    def heard(self, outlet: Outlet, raw: bytes, at: float) -> None:
        closed = []
        for item in target_pb2.VerifyRequest.FromString(raw).items:
            if item.HasField("step"):
                self._step(outlet, item.step, at)
            elif item.HasField("ahead"):
                held = self._sessions.get(item.ahead.session_id)
                if held is not None:
                    held[0].offer(item.ahead)
                    if held[0].pending and not held[0].running:
                        self._waiting[held[0].name] = None
            elif item.HasField("close"):
                self._sessions.pop(item.close.session_id, None)
                self._waiting.pop(item.close.session_id, None)
                ended = target_pb2.VerifyAnswer(session_id=item.close.session_id, epoch=item.close.epoch, closed=target_pb2.Closed())
                closed.append(ended)
        if closed:
            self.say(outlet, target_pb2.VerifyResponse(answers=closed).SerializeToString())
        self._go()

    def _step(self, outlet: Outlet, step: target_pb2.Step, at: float) -> None:
        held = self._sessions.get(step.session_id)
        if step.HasField("begin") and (held is None or held[0].epoch != step.epoch):
            path, committed = self.paths.of(step.tokens[: step.begin.prompt_length]), len(step.tokens) - step.num_proposed
            session = sim_target.Session(step.session_id, step.epoch, path, committed, step.begin.sampling.max_tokens)
            self._sessions[step.session_id] = session, outlet
        elif held is None:
            self.counts.broken += 1
            return
        else:
            session = held[0]
        if session.answered_at and not session.running:
            self.counts.added_s.append(at - max(session.answered_at, session.path.proposed_at))
            session.answered_at = 0.0
        session.ask(step)
        self.counts.broken += session.broken
        session.broken = 0
        if session.pending and not session.running:
            self._waiting[session.name] = None

    def _go(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        batch = [self._sessions[name][0] for name in self._waiting]
        self._waiting.clear()
        rows = prefill = 0
        for session in batch:
            session.running = True
            rows += 1 + len(session.block)
            prefill += session.prefill
        took_ms = self.paths.simulation.took_ms(rows, prefill)
        self.wheel.after(took_ms, self._stepped, batch, rows, took_ms)

    def _stepped(self, batch: list[sim_target.Session], rows: int, took_ms: float) -> None:
        answers: dict[Outlet, list[target_pb2.VerifyAnswer]] = defaultdict(list)
        counts, now = self.counts, clock() + self.rtt_ms / 2000
        counts.steps += 1
        for session in batch:
            held = self._sessions.get(session.name)
            if held is None or held[0] is not session:
                continue
            start, own = session.decided, session.own
            verified = len(session.block)
            answers[held[1]].append(session.decide())
            gained = session.decided - start
            counts.rounds += 1
            counts.decided += gained
            counts.own_rounds += own
            if verified:
                counts.spec_rounds += 1
                counts.accepted += gained - 1
            session.answered_at = 0.0 if session.pending or session.decided >= session.end else now
            session.path.told.append((session.decided, now))
            if session.pending:
                self._waiting[session.name] = None
        step = target_pb2.EngineStep(rows=rows, engine_us=int(1000 * took_ms))
        for outlet, told in answers.items():
            message = target_pb2.VerifyResponse(answers=told, step=step).SerializeToString()
            if self.rtt_ms:
                self.wheel.after(self.rtt_ms / 2, self.say, outlet, message)
            else:
                self.say(outlet, message)
        self._busy = False
        self._go()

    def lost(self, outlet: Outlet) -> None:
        for name in [name for name, (_, its) in self._sessions.items() if its is outlet]:
            del self._sessions[name]
            self._waiting.pop(name, None)


class Draft(_Server):
    service, method = "specdec.v1.DraftService", "Draft"

    def __init__(self, *what: Any, token_ms: float, hits: float) -> None:
        super().__init__(*what)
        self._token_ms, self._hits = token_ms, hits
        self._sessions: dict[str, tuple[sim_draft.Session, Outlet]] = {}
        self._work: dict[str, tuple[sim_draft.Session, sim_draft.Work, int, int]] = {}  # with the ids left to draft, and for which version
        self._busy = False

    def _info_message(self) -> Any:
        return draft_pb2.DraftServiceGetModelInfoResponse(info=wire.model_info_to_wire(self.info))

    def _beat_message(self) -> Any:
        return draft_pb2.DraftResponse(load=draft_pb2.Load(sessions=len(self._sessions), kv_total_tokens=KV_TOKENS))

    def heard(self, outlet: Outlet, raw: bytes, at: float) -> None:
        for command in draft_pb2.DraftRequest.FromString(raw).commands:
            kind = command.WhichOneof("command")
            said = getattr(command, kind)
            if kind == "open":
                path = self.paths.of(said.tokens[: said.prompt_length])
                session = sim_draft.Session(said, path, self.paths.simulation.acceptance, self._hits)
                self._sessions[said.session_id] = session, outlet
                self._do(session, session.begin())
                continue
            held = self._sessions.get(said.session_id)
            if held is None:
                continue
            if kind == "commit":
                self._do(held[0], held[0].commit(said))
            elif kind == "sent":
                self._do(held[0], held[0].sent(said))
            elif kind == "resume":
                self._do(held[0], held[0].begin())
            elif kind == "pause":
                held[0].pause()
            else:
                del self._sessions[said.session_id]

    def _do(self, session: sim_draft.Session, work: sim_draft.Work | None) -> None:
        if work is None or (work.chain <= 0 and not work.branch):
            self._work.pop(session.name, None)
            return
        self._work[session.name] = session, work, max(1, work.chain), session.version
        if not self._busy:
            self._busy = True
            self.wheel.after(self._token_ms, self._stepped)

    def _stepped(self) -> None:
        """An id for every session that wants one; who has all of its ids tells them."""
        ready: dict[Outlet, list[draft_pb2.DraftEvent]] = defaultdict(list)
        for name, (session, work, left, version) in list(self._work.items()):
            held = self._sessions.get(name)
            if session.version != version or held is None or held[0] is not session:
                del self._work[name]
            elif left > 1:
                self._work[name] = session, work, left - 1, version
            else:
                del self._work[name]
                ready[held[1]] += session.tell(work)
                if session.fresh:
                    session.fresh, session.path.proposed_at = False, clock() + self.rtt_ms / 2000
        for outlet, events in ready.items():
            for start in range(0, len(events), wire.MAX_ITEMS):
                message = draft_pb2.DraftResponse(events=events[start : start + wire.MAX_ITEMS]).SerializeToString()
                if self.rtt_ms:
                    self.wheel.after(self.rtt_ms / 2, self.say, outlet, message)
                else:
                    self.say(outlet, message)
        self._busy = bool(self._work)
        if self._busy:
            self.wheel.after(self._token_ms, self._stepped)

    def lost(self, outlet: Outlet) -> None:
        for name in [name for name, (_, its) in self._sessions.items() if its is outlet]:
            del self._sessions[name]


async def beats(servers: list[_Server], sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
    """Signs of life, until cancelled."""
    while True:
        await sleep(BEAT_S)
        for server in servers:
            server.beat()
