"""What the target owes to whom: sessions, epochs, rounds, room and leases. Decides; touches no socket, clock or engine.

Rules (the words are those of target.proto):

- A session is (orchestrator_id, session_id). An epoch is one placement here; a higher one forgets the lower one and its KV.
- Rounds of an epoch count from 1 and rise by one after each result. The last result is stored, so the same round again gets the same
  answer. A round that waits or runs is answered once, however often it was asked: running, the newer block is ignored; waiting, it
  replaces the older one when it begins with it. Every other answer leaves the round open.
- "Running" is a Step whose block is in the engine. A Step between two pieces of its prefill still waits: it may expire and be closed.
- KV is given out by room.py: who has to wait, who is parked, who begins with a fork. A parked session keeps its state.
- A fork shares the KV of the tokens that both have; with or without it the session decides the same. Prompt rows that were shared give no
  logits, so a session that asks for the prompt's log-probabilities is never forked.
- The epoch's first result carries the prompt's log-probabilities. Pieces add theirs by position; parking and expiry keep them, other
  tokens cut them back to what agrees. A round that may decide nothing still waits for them.
- A grammar is compiled before the first row of its session, beside the engine: that may take longer than a step.
- A stream's end drops what waits; what runs finishes and is stored. Within the lease the same orchestrator takes its sessions over by
  speaking of them; after it they are gone.
- Close drops a waiting Step, lets a running one finish, and `closed` is the last answer of the epoch.
"""

from __future__ import annotations

from specdec.errors import InvalidRequest, ProtocolFault, Unsupported
from specdec.sampling import Constraint
from specdec.terms import (
    Ahead,
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
    VerifyItem,
)
from target_service.batching import StepCost, Wave, choose_rows
from target_service.checks import Limits, check_begin, check_distributions, check_step
from target_service.plan import Compile, Decided, Prefilled, Row, RowFault, RowOutcome, StepOutcome, StepPlan
from target_service.room import Budget, Room
from target_service.sessions import Key, Pending, Session, continues

INVALID_ARGUMENT, UNIMPLEMENTED, UNAVAILABLE = 3, 12, 14  # gRPC status code numbers
MAX_MESSAGE_CHARS = 1000


class Verifier:
    """`submit`, `attach`, `detach` and `tick` as things happen; `plan` → engine → `commit`; `take_grammars` → compiler → `compiled`;
    `take_answers` after any of them."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self.limits = limits
        self.budget = budget
        self.cost = StepCost()
        self.wave = Wave()
        self.draining = False  # no new sessions: their orchestrators place them elsewhere
        self._sessions: dict[Key, Session] = {}
        self._streams: dict[int, str] = {}
        self._answers: list[tuple[int, Answer]] = []
        self._room = Room(limits, budget, self._sessions)
        self._grammars: list[Compile] = []
        self._flying: list[tuple[Session, Row]] = []
        self._serial = 0  # names streams, admissions and arrivals

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

    def take_grammars(self) -> list[Compile]:
        """To be compiled since the last call; each is answered by `compiled`."""
        grammars, self._grammars = self._grammars, []
        return grammars

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

    def submit(self, stream: int, item: VerifyItem, now_ms: float) -> None:
        key = (self._streams[stream], item.session_id)
        if isinstance(item, Close):
            return self._close(stream, key, item)
        if isinstance(item, Ahead):
            unserved = Failed(UNIMPLEMENTED, str(Unsupported("ahead")), drop=False)
            return self._answers.append((stream, Answer(item.session_id, item.epoch, 0, unserved)))
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
        committed = step.tokens[: len(step.tokens) - step.num_proposed]
        donor = None if begin.sampling.prompt_logprobs is not None else self._sessions.get((key[0], begin.fork_session_id))
        shared = 0 if donor is None else donor.shareable(committed)
        if self.num_sessions >= self.limits.max_sessions or not self._room.house(session, len(committed), now_ms, donor, shared):
            return self._say(stream, step, NoRoom(self.limits.retry_after_ms))
        self._sessions[key] = session
        if begin.sampling.grammar is not None:
            session.compiling = True
            self._grammars.append(Compile(key, step.epoch, begin.sampling.grammar))
        self._enqueue(session, step, now_ms)

    def compiled(self, order: Compile, outcome: Constraint | Failed) -> None:
        """The grammar is ready; or it cannot be, and the session that waits for it fails alone."""
        session = self._sessions.get(order.key)
        if session is None or session.epoch != order.epoch:
            return
        if isinstance(outcome, Failed):
            return self._fail(session, outcome)
        session.compiling, session.constraint = False, outcome

    def _enqueue(self, session: Session, step: Step, now_ms: float) -> None:
        """A new round: take over the committed tokens, or say what stands in the way."""
        base, committed = step.base_length, step.tokens[: len(step.tokens) - step.num_proposed]
        if session.begin.prompt_length > base + len(committed):
            raise InvalidRequest("step.tokens", "the committed tokens must not be fewer than the prompt's")
        session.asked_ms = now_ms
        if session.resident is None and not self._room.house(session, base + len(committed), now_ms):
            return self._tell(session, step.round, NoRoom(self.limits.retry_after_ms))
        agrees = base <= len(session.tokens) and session.hash_at(base) == step.base_hash
        if base > 0 and (base > session.kv_length or not agrees):
            return self._tell(session, step.round, PrefixNeeded(session.kv_length if agrees else 0))
        session.rebase(base, committed)
        decides = self._left(session) > 0
        if not decides and not session.unscored:
            return self._conclude(session, step.round)
        self._serial += 1
        session.pending = Pending(step.round, (), (), now_ms, now_ms + step.remaining_ms, self._serial, decides=decides)
        self._set_block(session, session.pending, step)

    def _set_block(self, session: Session, pending: Pending, step: Step) -> None:
        """Proposals that can count: the target's own token comes after the last of them."""
        most = max(0, min(self._left(session), self.limits.max_step_rows) - 1)
        first = len(step.tokens) - step.num_proposed
        pending.block = step.tokens[first : first + most]
        pending.distributions = step.distributions[:most]

    def _left(self, session: Session) -> int:
        """Tokens that may still be decided: by the window, and by the request."""
        assert session.begin.sampling.max_tokens is not None
        output = len(session.tokens) - session.begin.prompt_length
        return min(self.limits.window - len(session.tokens), session.begin.sampling.max_tokens - output)

    def _conclude(self, session: Session, round_: int, queue_us: int = 0) -> None:
        """Nothing may be decided any more: the round ends without a decision of the engine."""
        prompt_logprobs = tuple(session.prompt_logprobs)
        result = Result(len(session.tokens), session.kv_length, 0, 0, (), finish=FinishReason.LENGTH, prompt_logprobs=prompt_logprobs)
        self._end_round(session, round_, result, queue_us)

    def _end_round(self, session: Session, round_: int, result: Result, queue_us: int) -> None:
        """The one place where a round ends: its result is stored, and told to whoever listens."""
        session.pending = None
        session.prompt_logprobs.clear()
        session.round, session.last = round_, Answer(session.key[1], session.epoch, round_, result, queue_us)
        if session.stream is not None:
            self._answers.append((session.stream, session.last))

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

    def _fail(self, session: Session, failed: Failed) -> None:
        """What ends a session by its own trouble."""
        if session.pending is not None:
            self._tell(session, session.pending.round, failed)
        self._forget(session)

    def _forget(self, session: Session) -> None:
        """The one place where a session ends."""
        del self._sessions[session.key]
        self.wave.gone(session.key)
        self._room.free(session)

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
        queued = [s for s in self.queued if not s.compiling]
        for session in sorted(queued, key=_age):
            if session.pending is not None:
                self._extend(session)
        self._flying = choose_rows([s for s in queued if s.pending is not None], self.limits)
        for session, row in self._flying:
            assert session.pending is not None
            session.flying, session.pending.scoring = True, row.score is not None
            if session.pending.started_ms is None:
                session.pending.started_ms = now_ms
        changes = self._room.take_changes()
        if not self._flying and not changes:
            return None
        return StepPlan(tuple(row for _, row in self._flying), changes)

    def _extend(self, session: Session) -> None:
        for parked in self._room.extend(session):
            if parked.pending is not None:
                self._tell(parked, parked.pending.round, NoRoom(self.limits.retry_after_ms))
                parked.pending = None
            self.wave.gone(parked.key)

    def commit(self, plan: StepPlan, outcome: StepOutcome, now_ms: float) -> None:
        """What the engine did becomes state and answers. A session that ended or moved on meanwhile is passed over."""
        flying, self._flying = self._flying, []
        if plan.rows:
            self.cost.seen(plan.size, outcome.engine_us / 1000)
        answered: list[Key] = []
        for (session, row), result in zip(flying, outcome.rows, strict=True):
            session.flying = False
            if self._sessions.get(session.key) is session and session.resident == row.resident:
                if isinstance(result, Decided) and result.finish is None:
                    answered.append(session.key)
                self._apply(session, row, result)
        if plan.rows:
            self.wave.begin(answered, now_ms + self.limits.wave_fraction * self.cost.predicted_ms(plan.size))

    def _apply(self, session: Session, row: Row, outcome: RowOutcome) -> None:
        # A Step that is not scored yet may have expired and come again with other tokens while this piece ran.
        if row.score is None and (session.kv_length != row.start or tuple(session.tokens[row.start : row.end]) != row.tokens):
            return
        pending, closing = session.pending, session.closing
        if isinstance(outcome, Prefilled):
            session.prefilled(row.end, row.prompt, outcome.prompt_logprobs)
            if pending is not None and not pending.decides and not session.unscored:
                self._conclude(session, pending.round, pending.queue_us())
        elif isinstance(outcome, RowFault):
            self._fail(session, Failed(outcome.code, outcome.message[:MAX_MESSAGE_CHARS], drop=True))
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
            prompt_logprobs=(*session.prompt_logprobs, *decided.prompt_logprobs),
        )
        session.tokens.extend(decided.tokens)
        session.kv_length = decided.kv_length
        self._end_round(session, pending.round, result, pending.queue_us())

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
