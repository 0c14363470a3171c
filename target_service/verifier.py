"""What the target owes to whom: sessions, epochs, rounds, room and leases. Decides; touches no socket, clock or engine.

Rules (the words are those of target.proto):

- A session is (orchestrator_id, session_id). An epoch is one placement here; a higher one forgets the lower one and its KV.
- Rounds of an epoch count from 1 and rise by one after each result. The last result is stored, so the same round again gets the same
  answer. A round that waits or runs is answered once, however often it was asked: running, the newer block is ignored; waiting, it
  replaces the older one when it begins with it. Every other answer leaves the round open.
- "Running" is a Step whose block is in the engine. A Step between two pieces of its prefill still waits: it may expire and be closed.
- KV: a new session must fit under the watermark with room to grow, and behind every parked one. When live sessions outgrow the pool the
  youngest is parked: its KV goes, its state stays. Parked sessions return in the order of their age, oldest first, so the oldest always
  makes progress and each end of a session lets at most as many return as its room allows: no livelock.
- A stream's end drops what waits; what runs finishes and is stored. Within the lease the same orchestrator takes its sessions over by
  speaking of them; after it they are gone.
- Close drops a waiting Step, lets a running one finish, and `closed` is the last answer of the epoch.
"""

from __future__ import annotations

from typing import Protocol

from specdec.errors import InvalidRequest, ProtocolFault, Unsupported
from specdec.terms import (
    Answer,
    Begin,
    Close,
    Closed,
    Expired,
    Failed,
    FinishReason,
    NoRoom,
    Outcome,
    PrefixNeeded,
    Result,
    StaleEpoch,
    StaleRound,
    Step,
    UnknownSession,
)
from target_service.batching import StepCost, Wave, choose_rows
from target_service.checks import Limits, check_begin, check_distributions, check_step
from target_service.plan import Decided, Prefilled, Row, RowFault, RowOutcome, StepOutcome, StepPlan
from target_service.sessions import Key, Pending, Session, continues

INVALID_ARGUMENT, UNIMPLEMENTED, UNAVAILABLE = 3, 12, 14  # gRPC status code numbers
MAX_MESSAGE_CHARS = 1000


class Budget(Protocol):
    """Accounting of KV room by resident: specdec.engine.KvBudget."""

    @property
    def used_tokens(self) -> int: ...
    @property
    def total_tokens(self) -> int: ...
    def can_admit(self, tokens: int, reserve_tokens: int) -> bool: ...
    def grow(self, session: int, tokens: int) -> bool: ...
    def release(self, session: int) -> None: ...


class Verifier:
    """`submit`, `attach`, `detach` and `tick` as things happen; `plan` → engine → `commit`; `take_answers` after any of them."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self.limits = limits
        self.budget = budget
        self.cost = StepCost()
        self.wave = Wave()
        self.draining = False  # no new sessions: their orchestrators place them elsewhere
        self._sessions: dict[Key, Session] = {}
        self._streams: dict[int, str] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._drops: list[int] = []
        self._flying: list[tuple[Session, Row]] = []
        self._serial = 0  # names streams, admissions, arrivals and residents

    # ------------------------------------------------------------ what an observer may ask

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def queued(self) -> list[Session]:
        """Sessions whose Step waits, in order of priority and arrival."""
        waiting = [s for s in self._sessions.values() if s.pending is not None and not s.pending.scoring]
        return sorted(waiting, key=_order)

    def hold_ms(self, now_ms: float) -> float:
        """How much longer to wait before the next step."""
        return self.wave.hold_ms(len(self.queued), now_ms)

    def predicted_ms(self) -> float:
        rows = sum(1 + len(s.pending.block) for s in self.queued if s.pending is not None)
        return self.cost.predicted_ms(min(max(rows, 1), self.limits.max_step_rows))

    def take_answers(self) -> list[tuple[int, Answer]]:
        """(stream, answer) since the last call, in order."""
        answers, self._answers = self._answers, []
        return answers

    # ------------------------------------------------------------ streams

    def attach(self, orchestrator_id: str) -> int:
        """A stream began with its Hello. Returns its number."""
        self._serial += 1
        self._streams[self._serial] = orchestrator_id
        return self._serial

    def detach(self, stream: int, now_ms: float) -> None:
        """A stream ended: its sessions live on for a lease, its waiting Steps do not."""
        self._streams.pop(stream, None)
        for session in [s for s in self._sessions.values() if s.stream == stream]:
            session.stream, session.lease_until_ms = None, now_ms + self.limits.lease_ms
            self.wave.gone(session.key)
            if session.pending is not None and not session.pending.scoring:
                session.pending = None
            if session.closing:
                self._forget(session)

    # ------------------------------------------------------------ items

    def submit(self, stream: int, item: Step | Close, now_ms: float) -> None:
        key = (self._streams[stream], item.session_id)
        if isinstance(item, Close):
            return self._close(stream, key, item)
        self.wave.returned(key, now_ms)
        try:
            self._step(stream, key, item, now_ms)
        except (InvalidRequest, Unsupported) as error:
            # A session that lives keeps its KV and its round; one that was never begun has nothing to drop.
            code = INVALID_ARGUMENT if isinstance(error, InvalidRequest) else UNIMPLEMENTED
            self._say(stream, item, Failed(code, str(error)[:MAX_MESSAGE_CHARS], drop=key not in self._sessions))

    def _step(self, stream: int, key: Key, step: Step, now_ms: float) -> None:
        session = self._sessions.get(key)
        if session is not None and step.epoch < session.epoch:
            return self._say(stream, step, StaleEpoch(session.epoch))
        if session is None or step.epoch > session.epoch:
            if step.begin is None:
                return self._say(stream, step, UnknownSession())
            check_step(step, self.limits)
            check_begin(step, step.begin, self.limits)
            check_distributions(step, step.begin, self.limits)
            if session is not None:
                self._supersede(session, step.epoch)
            if self.draining:
                return self._say(stream, step, Failed(UNAVAILABLE, "this target is stopping", drop=True))
            return self._admit(stream, key, step, step.begin, now_ms)
        if session.closing:
            return self._say(stream, step, UnknownSession())
        session.stream, session.lease_until_ms = stream, None
        return self._round(session, stream, step, now_ms)

    def _round(self, session: Session, stream: int, step: Step, now_ms: float) -> None:
        """A Step of the session's present epoch."""
        if step.round == session.round and session.last is not None:
            self._answers.append((stream, session.last))
            return
        if step.round <= session.round:
            return self._say(stream, step, StaleRound(session.round))
        check_step(step, self.limits)
        if step.round > session.round + 1:
            raise InvalidRequest("step.round", f"the next round is {session.round + 1}, got {step.round}")
        if step.begin is not None and step.begin != session.begin:
            raise InvalidRequest("step.begin", "differs from that of the epoch's first Step; raise the epoch")
        check_distributions(step, session.begin, self.limits)
        pending = session.pending
        if pending is None:
            return self._enqueue(session, step, now_ms)
        pending.deadline_ms = max(pending.deadline_ms, now_ms + step.remaining_ms)
        if not pending.scoring and continues(step, pending):
            self._set_block(session, pending, step)

    def _admit(self, stream: int, key: Key, step: Step, begin: Begin, now_ms: float) -> None:
        self._serial += 1
        session = Session(key, step.epoch, begin, self._serial, stream)
        if self.num_sessions >= self.limits.max_sessions or not self._house(session, len(step.tokens) - step.num_proposed, now_ms):
            return self._say(stream, step, NoRoom(self.limits.retry_after_ms))
        self._sessions[key] = session
        self._enqueue(session, step, now_ms)

    def _enqueue(self, session: Session, step: Step, now_ms: float) -> None:
        """A new round: take over the committed tokens, or say what stands in the way."""
        base, committed = step.base_length, step.tokens[: len(step.tokens) - step.num_proposed]
        if session.begin.prompt_length > base + len(committed):
            raise InvalidRequest("step.tokens", "the committed tokens must not be fewer than the prompt's")
        session.asked_ms = now_ms
        if session.resident is None and not self._house(session, base + len(committed), now_ms):
            return self._tell(session, step.round, NoRoom(self.limits.retry_after_ms))
        agrees = base <= len(session.tokens) and session.hash_at(base) == step.base_hash
        if base > 0 and (base > session.kv_length or not agrees):
            return self._tell(session, step.round, PrefixNeeded(session.kv_length if agrees else 0))
        session.rebase(base, committed)
        if self._room(session) < 1:
            return self._conclude(session, step.round)
        self._serial += 1
        session.pending = Pending(step.round, (), (), now_ms, now_ms + step.remaining_ms, self._serial)
        self._set_block(session, session.pending, step)

    def _set_block(self, session: Session, pending: Pending, step: Step) -> None:
        """Proposals that can count: the target's own token comes after the last of them."""
        most = min(self._room(session), self.limits.max_step_rows) - 1
        first = len(step.tokens) - step.num_proposed
        pending.block = step.tokens[first : first + most]
        pending.distributions = step.distributions[:most]

    def _room(self, session: Session) -> int:
        """Tokens that may still be decided: by the window, and by the request."""
        assert session.begin.sampling.max_tokens is not None
        output = len(session.tokens) - session.begin.prompt_length
        return min(self.limits.window - len(session.tokens), session.begin.sampling.max_tokens - output)

    def _conclude(self, session: Session, round_: int) -> None:
        """Nothing may be decided any more: the round ends without the engine."""
        length = len(session.tokens)
        result = Result(length, session.kv_length, num_verified=0, num_accepted=0, tokens=(), finish=FinishReason.LENGTH)
        session.round, session.last = round_, Answer(session.key[1], session.epoch, round_, result)
        self._tell(session, round_, result)

    def _close(self, stream: int, key: Key, close: Close) -> None:
        session = self._sessions.get(key)
        if session is not None and close.epoch == session.epoch:
            session.stream, session.lease_until_ms = stream, None
            if session.pending is not None and session.pending.scoring:
                session.closing = True  # `closed` follows its result, once, however often it was asked for
                return
        if session is not None and close.epoch > session.epoch:
            self._supersede(session, close.epoch)
        elif session is not None and close.epoch == session.epoch:
            self._forget(session)
        self._answers.append((stream, Answer(key[1], close.epoch, 0, Closed())))

    def _supersede(self, session: Session, epoch: int) -> None:
        """A newer placement is known; what is outstanding in the old one ends now, what runs will find nobody."""
        if session.pending is not None:
            self._tell(session, session.pending.round, StaleEpoch(epoch))
        if session.closing:
            self._tell(session, 0, Closed())
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """The one place where a session ends."""
        del self._sessions[session.key]
        self.wave.gone(session.key)
        self._free(session)

    # ------------------------------------------------------------ room

    def _house(self, session: Session, tokens: int, now_ms: float) -> bool:
        """Give a new or parked session its KV room, if its turn has come."""
        since = now_ms - self.limits.lease_ms  # who did not ask for so long is not in the way
        parked = (s for s in self._sessions.values() if s.resident is None and s.stream is not None and s.asked_ms >= since)
        if any(other.age < session.age for other in parked):
            return False
        reserve = min(self.limits.reserve_tokens, self.limits.window - tokens)
        while self.budget.used_tokens and not self.budget.can_admit(tokens, reserve):
            orphans = [s for s in self._residents() if s.stream is None]
            if not orphans:
                return False
            self._free(max(orphans, key=_age))
        self._serial += 1
        if not self.budget.grow(self._serial, tokens):
            return False
        session.resident = self._serial
        return True

    def _make_room(self, session: Session) -> None:
        """Room for the session's next step, at the cost of those nobody speaks for, then of the youngest, which may be itself."""
        assert session.pending is not None
        need = len(session.tokens) + len(session.pending.block)
        while session.resident is not None and not self.budget.grow(session.resident, need):
            residents = self._residents()
            victim = max([s for s in residents if s.stream is None] or residents, key=_age)
            if victim.pending is not None:
                self._tell(victim, victim.pending.round, NoRoom(self.limits.retry_after_ms))
                victim.pending = None
            self.wave.gone(victim.key)
            self._free(victim)

    def _residents(self) -> list[Session]:
        """Sessions that hold KV and are not in the engine now."""
        flying = {id(session) for session, _ in self._flying}
        return [s for s in self._sessions.values() if s.resident is not None and id(s) not in flying]

    def _free(self, session: Session) -> None:
        """Release the session's KV. Once: who has none has nothing to release."""
        if session.resident is not None:
            self.budget.release(session.resident)
            self._drops.append(session.resident)
            session.drop_kv()

    # ------------------------------------------------------------ the engine's turn

    def tick(self, now_ms: float) -> None:
        """What time alone does: waiting Steps expire, leases end."""
        for session in list(self._sessions.values()):
            pending = session.pending
            if pending is not None and not pending.scoring and now_ms >= pending.deadline_ms:
                self._tell(session, pending.round, Expired(), pending.queue_us())
                session.pending = None
            if session.lease_until_ms is not None and now_ms >= session.lease_until_ms:
                self._forget(session)

    def plan(self, now_ms: float) -> StepPlan | None:
        """The next engine step, or None. Everything queued takes part as far as rows and room allow."""
        if self._flying:
            raise ProtocolFault("a step is planned while another one runs")
        self.tick(now_ms)
        queued = self.queued
        for session in sorted(queued, key=_age):
            if session.pending is not None:
                self._make_room(session)
        self._flying = choose_rows([s for s in queued if s.pending is not None], self.limits)
        for session, row in self._flying:
            assert session.pending is not None
            session.pending.scoring = row.score is not None
            if session.pending.started_ms is None:
                session.pending.started_ms = now_ms
        drops, self._drops = tuple(self._drops), []
        if not self._flying and not drops:
            return None
        return StepPlan(tuple(row for _, row in self._flying), drops)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now_ms: float) -> None:
        """What the engine did becomes state and answers. A session that ended or moved on meanwhile is passed over."""
        flying, self._flying = self._flying, []
        if plan.rows:
            self.cost.seen(plan.size, outcome.engine_us / 1000)
        answered: list[Key] = []
        for (session, row), result in zip(flying, outcome.rows, strict=True):
            if self._sessions.get(session.key) is session and session.resident == row.resident:
                if isinstance(result, Decided) and result.finish is None:
                    answered.append(session.key)
                self._apply(session, row, result)
        if plan.rows:
            self.wave.begin(answered, now_ms + self.limits.wave_fraction * self.cost.predicted_ms(plan.size))

    def _apply(self, session: Session, row: Row, outcome: RowOutcome) -> None:
        if isinstance(outcome, Prefilled):
            # The Step may have expired and come again with other tokens while this piece ran.
            if session.kv_length == row.start and tuple(session.tokens[row.start : row.end]) == row.tokens:
                session.kv_length = min(row.end, len(session.tokens) - 1)
            return
        pending, closing = session.pending, session.closing
        if isinstance(outcome, RowFault):
            if pending is not None:
                self._tell(session, pending.round, Failed(outcome.code, outcome.message[:MAX_MESSAGE_CHARS], drop=True))
            self._forget(session)
        else:
            assert pending is not None
            self._decided(session, pending, outcome)
        if closing:
            self._tell(session, 0, Closed())
            if isinstance(outcome, Decided):
                self._forget(session)

    def _decided(self, session: Session, pending: Pending, decided: Decided) -> None:
        result = Result(
            prefix_length=len(session.tokens),
            kv_length_after=decided.kv_length,
            num_verified=decided.num_verified,
            num_accepted=decided.num_accepted,
            tokens=decided.tokens,
            logprobs=decided.logprobs,
            forced=decided.forced,
            finish=decided.finish,
            stop_token_id=decided.stop_token_id,
        )
        session.tokens.extend(decided.tokens)
        session.kv_length = decided.kv_length
        session.pending = None
        session.round = pending.round
        session.last = Answer(session.key[1], session.epoch, pending.round, result, pending.queue_us())
        if session.stream is not None:
            self._answers.append((session.stream, session.last))

    # ------------------------------------------------------------ answers

    def _say(self, stream: int, step: Step, outcome: Outcome) -> None:
        self._answers.append((stream, Answer(step.session_id, step.epoch, step.round, outcome)))

    def _tell(self, session: Session, round_: int, outcome: Outcome, queue_us: int = 0) -> None:
        """To whoever speaks for the session now, if anyone."""
        if session.stream is not None:
            self._answers.append((session.stream, Answer(session.key[1], session.epoch, round_, outcome, queue_us)))


def _order(session: Session) -> tuple[int, int]:
    assert session.pending is not None
    return session.begin.priority, session.pending.serial


def _age(session: Session) -> int:
    return session.age
