"""What the orchestrator's metrics say, from the commands and answers the driver sees. Decides nothing."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from orchestrator import events as ev
from orchestrator.breaker import State
from orchestrator.peers import Heard
from orchestrator.tally import WANTED
from orchestrator.tracing import UNTRACED, SessionTrace, session
from specdec import terms
from specdec.runtime.telemetry import Telemetry
from specdec.status import rpc_labels

if TYPE_CHECKING:
    from orchestrator.driver import Driver

RECORD_AFTER_S = 0.01
MAX_REPLICA_LABELS = 64  # replicas of a pool that a metric names
MAX_POSITIONS = 64  # slots of a block that a metric tells apart; ids that a grammar forces may be more


class Observer:
    def __init__(self, telemetry: Telemetry) -> None:
        self._telemetry = telemetry
        self._unrecorded: list[tuple[Callable[..., None], tuple[object, ...]]] = []  # of the last RECORD_AFTER_S
        self._alike: dict[tuple[str, int, int, int], int] = {}  # rounds of the same time by what is told of them: many went alike
        self._rounds = telemetry.counter("specdec.rounds")
        self._decided = telemetry.counter("specdec.decided.tokens")
        self._drafted_length = telemetry.histogram("specdec.draft.length")
        self._spec_rounds = telemetry.counter("specdec.draft.rounds")
        self._drafted = telemetry.counter("specdec.draft.tokens")
        self._accepted = telemetry.counter("specdec.accepted.tokens")
        self._per_position = telemetry.counter("specdec.accepted.tokens.per_position")
        self._length = telemetry.histogram("specdec.acceptance.length")
        self._lookahead = telemetry.counter("specdec.lookahead.rounds")
        self._draftless = telemetry.counter("specdec.draftless.rounds")
        self._stale = telemetry.counter("specdec.lookahead.stale")
        self._rejected = telemetry.counter("specdec.proposals.rejected")
        self._replaced = telemetry.counter("specdec.session.replacements")
        self._ejections = telemetry.counter("specdec.pool.ejections")
        self._placements = telemetry.counter("specdec.session.placements")
        self._handovers = telemetry.counter("specdec.session.handovers")
        self._duration = telemetry.histogram("specdec.round.duration")
        self._queued, self._wired, self._waited, self._computed = (
            self._duration.series(phase=phase) for phase in ("queue", "wire", "wait", "engine")
        )
        self._rows = telemetry.histogram("specdec.target.batch.size")
        self._calls = telemetry.histogram("rpc.client.call.duration")
        self._undiscovered = telemetry.counter("specdec.discovery.failures")
        for outcome in WANTED - {"no_draft"}:
            self._lookahead.add(0, outcome=outcome)
        for origin in terms.Origin:
            self._decided.add(0, origin=origin.name.lower())

    def session(self, answer: ev.Admitted) -> SessionTrace:
        """The answer's span, where anybody records it."""
        return session(self._telemetry, answer)

    def later(self, record: Callable[..., None], *what: object) -> None:
        """Records once this turn's messages have left: a metric must not stand between a result and the next block."""
        if not self._unrecorded:
            asyncio.get_running_loop().call_later(RECORD_AFTER_S, self._record)
        self._unrecorded.append((record, what))

    def later_round(self, told: ev.Observe, trace: SessionTrace) -> None:
        """The same for a round. Rounds that went alike are recorded in one piece."""
        alike = told.outcome, told.num_verified, told.num_accepted, told.num_decided
        self._alike[alike] = self._alike.get(alike, 0) + 1
        if trace is not UNTRACED:
            self.later(trace.round, told, time.time_ns())
        elif not self._unrecorded:
            self.later(trace.round, told)

    def flush(self) -> None:
        """Records what waits: the process ends."""
        self._record()

    def _record(self) -> None:
        waiting, self._unrecorded = self._unrecorded, []
        alike, self._alike = self._alike, {}
        for record, what in waiting:
            record(*what)
        for told, times in alike.items():
            self.round(ev.Observe(*told), times)

    def watch(self, driver: Driver) -> None:
        """Levels, read when they are scraped."""
        self._telemetry.gauge("specdec.requests.running", lambda: driver.running)
        self._telemetry.gauge("specdec.requests.waiting", lambda: driver.waiting)
        self._telemetry.gauge("specdec.spec_enabled", lambda: int(driver.pools.drafts.serves))
        self._telemetry.gauge("specdec.spec_wanted", lambda: int(bool(driver.settings.drafts)))
        driver.pools.on_call = self.called
        self._telemetry.aliases(lambda: driver.model.model if driver.model else "", lambda: _kv_usage(driver))
        self._telemetry.gauge("specdec.pool.endpoints", lambda: _endpoints(driver))
        self._telemetry.gauge("specdec.discovery.age", lambda: _discovery_ages(driver))
        self._telemetry.gauge("specdec.pool.sessions", lambda: _sessions(driver))

    def round(self, told: ev.Observe, times: int = 1) -> None:
        """A finished round, or several that went alike. Every round without a block has a reason; every round that wanted one has an
        outcome."""
        self._rounds.add(times)
        for origin, tokens in _origins(told):
            self._decided.add(times * tokens, origin=origin)
        if told.outcome in WANTED:
            self._lookahead.add(times, outcome="miss" if told.outcome == "no_draft" else told.outcome)
        if not told.num_verified:
            self._draftless.add(times, reason=told.outcome)
            return
        self._spec_rounds.add(times)
        self._drafted.add(times * told.num_verified)
        self._drafted_length.record(told.num_verified, times=times)
        self._length.record(told.num_accepted, times=times)
        if told.num_accepted:
            self._accepted.add(times * told.num_accepted)
            for position in range(told.num_accepted):
                self._per_position.add(times, position=min(position, MAX_POSITIONS - 1))

    def answered(self, answer: terms.Answer, took_s: float | None, heard: Heard, trace: SessionTrace) -> None:
        """A round as seen from here; `wire` is what the target does not account for. `took_s` None: the target began it by itself."""
        if isinstance(answer.outcome, terms.Result) and heard.engine_us:
            queue_s, engine_s = answer.queue_us / 1e6, heard.engine_us / 1e6
            self._queued(queue_s)
            wire_s = None if took_s is None else max(0.0, took_s - queue_s - engine_s)
            if wire_s is not None:
                self._wired(wire_s)
            if trace is not UNTRACED:
                trace.timed(queue_s, engine_s, wire_s)

    def stepped(self, rows: int, engine_us: int, rounds: int) -> None:
        """A target's step that had answers for us, with rows of whoever was in it. It ended so many rounds, each of which took as long."""
        self._rows.record(rows)
        if engine_us and rounds:
            self._computed(engine_us / 1e6, rounds)

    def waited(self, seconds: float) -> None:
        """Between an answer and the next Step: the turn here, and what a miss waits for the draft."""
        self._waited(seconds)

    def count(self, what: str, amount: int) -> None:
        if what == "stale":
            self._stale.add(1)
        elif what == "broken":
            self._rejected.add(amount, reason="malformed")
        elif what == "draft_lost":
            self._replaced.add(amount, reason="draft_lost", fingerprint="none")

    def discovery_failed(self, pool: str, kind: str) -> None:
        self._undiscovered.add(1, pool=pool, reason=kind)

    def called(self, method: str, seconds: float, code: str) -> None:
        """A call to a replica has ended."""
        self._calls.record(seconds, rpc_labels(method, code, served=False))

    def placed(self, pool: str, why: str) -> None:
        """A session was given a replica: the one that holds its request's prompt, its beginning, or the less busy one."""
        self._placements.add(1, pool=pool, reason=why)

    def handed_over(self, pool: str, reason: str) -> None:
        """A session leaves a replica that serves it still."""
        self._handovers.add(1, pool=pool, reason=reason)

    def ejected(self, pool: str, reason: str) -> None:
        self._ejections.add(1, pool=pool, reason=reason)

    def replaced(self, *, equal: bool, reason: str) -> None:
        """A session moved to a target; of equal numerics, or the text is the same within rounding only. `reason`: target_lost, no_room,
        draining, slow."""
        self._replaced.add(1, reason=reason, fingerprint="equal" if equal else "other")


def _origins(told: ev.Observe) -> list[tuple[str, int]]:
    """By the glossary: kept proposals, then at most one token of the target's own; without a block all are plain."""
    own = told.num_decided - told.num_accepted
    word = "plain" if not told.num_verified else "bonus" if told.num_accepted == told.num_verified else "corrected"
    return [(origin, tokens) for origin, tokens in (("accepted", told.num_accepted), (word, own)) if tokens > 0]


def _kv_usage(driver: Driver) -> float:
    """Of all targets that are connected, by their last beats."""
    beats = [peer.beat for peer in driver.pools.targets.connected if isinstance(peer.beat, terms.TargetBeat)]
    return sum(beat.kv_used_tokens for beat in beats) / max(1, sum(beat.kv_total_tokens for beat in beats))


def _sessions(driver: Driver) -> list[tuple[float, dict[str, str]]]:
    """By replica, those that hold the most; the rest together."""
    readings = []
    for pool in driver.pools:
        held = sorted(pool.places.sessions.copy().items(), key=lambda entry: (-entry[1], entry[0]))
        alone, rest = held[:MAX_REPLICA_LABELS], held[MAX_REPLICA_LABELS:]
        readings += [(float(count), {"pool": pool.name, "replica": name}) for name, count in alone]
        readings += [(float(sum(count for _, count in rest)), {"pool": pool.name, "replica": "other"})] if rest else []
    return readings


def _discovery_ages(driver: Driver) -> list[tuple[float, dict[str, str]]]:
    return [(age, {"pool": pool}) for pool, age in driver.pools.discovery_ages().items()]


_STATE = {State.CLOSED: "up", State.OPEN: "ejected", State.HALF_OPEN: "probing"}


def _endpoints(driver: Driver) -> list[tuple[float, dict[str, str]]]:
    readings = []
    for pool in driver.pools:
        connected = pool.connected
        states = Counter({"up": 0, "ejected": 0, "probing": 0, "leaving": 0, "down": len(pool.peers) - len(connected)})
        states.update("leaving" if pool.leaves(peer.name) else _STATE[pool.ejection.state(peer.name)] for peer in connected)
        readings += [(float(count), {"pool": pool.name, "state": state}) for state, count in states.items()]
    return readings
