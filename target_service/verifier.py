"""What the target owes to whom: sessions, epochs, rounds, room and leases. Decides; touches no socket, clock or engine.

Rules (the words are those of target.proto):

- A session is (orchestrator_id, session_id). An epoch is one placement here; a higher one forgets the lower one and its KV.
- Its rounds are those of rounds.py: which Step is answered how, and what the target goes on with by itself.
- KV is given out by room.py: who has to wait, who is parked, who begins with a fork. A parked session keeps its state.
- A fork shares the KV of the tokens that both have; with or without it the session decides the same. Prompt rows that were shared give no
  logits, so a session that asks for the prompt's log-probabilities is never forked.
- The epoch's first result carries the prompt's log-probabilities. Pieces add theirs by position; parking and expiry keep them, other
  tokens cut them back to what agrees. A round that may decide nothing still waits for them.
- A grammar is compiled before the first row of its session, beside the engine: that may take longer than a step.
- An Ahead is a hint: one for a session that is not known, is closing, has another epoch or is spoken for on another stream is passed over
  in silence; one that is no Ahead, or goes to a session that cannot take any, is answered `failed` under round 0 and harms nothing.
- A stream's end drops what waits, with all that the target might go on with by itself; what runs finishes and is stored. Within the lease
  the same orchestrator takes its sessions over by speaking of them; after it they are gone.
- A stream whose reader is behind gets nothing that it did not ask for: rounds of the target's own wait until it caught up.
- Close drops a waiting Step, lets a running one finish, and `closed` is the last answer of the epoch.
"""

from __future__ import annotations

import itertools
from collections.abc import Container

from specdec.errors import InvalidRequest, ProtocolFault
from specdec.sampling import Constraint
from specdec.terms import (
    Ahead,
    Answer,
    Begin,
    Close,
    Closed,
    Failed,
    NoRoom,
    StaleEpoch,
    Step,
    UnknownSession,
    VerifyItem,
)
from target_service.answers import Answers
from target_service.batching import RETURN_STEPS, StepCost, Wave, choose_rows, returning, waiting_rows
from target_service.checks import Limits, check_ahead, check_begin, check_distributions, check_step
from target_service.plan import Compile, Decided, Prefilled, Row, RowFault, RowOutcome, StepOutcome, StepPlan
from target_service.room import Budget, Room
from target_service.rounds import Rounds
from target_service.sessions import Key, Session
from target_service.turns import rank

INVALID_ARGUMENT, UNAVAILABLE = 3, 14  # gRPC status code numbers
MAX_MESSAGE_CHARS = 1000
TURNED_AWAY_MS = 1000.0  # how long a session that found no room says that this target is full


class Verifier:
    """`submit`, `attach`, `detach` and `tick` as things happen; `plan` → engine → `commit`; `take_grammars` → compiler → `compiled`;
    `take_answers` after any of them."""

    def __init__(self, limits: Limits, budget: Budget) -> None:
        self.limits = limits
        self.budget = budget
        self.cost = StepCost()
        self.wave = Wave()
        self.draining = False  # no new sessions: their orchestrators place them elsewhere
        self._turned_away_ms: float | None = None  # when a session last found no room
        self._sessions: dict[Key, Session] = {}
        self._streams: dict[int, str] = {}
        self._answers = Answers()
        self._room = Room(limits, budget, self._sessions)
        self._grammars: list[Compile] = []
        self._flying: list[tuple[Session, Row]] = []
        self._numbers = itertools.count(1)  # names streams, admissions and arrivals
        self._rounds = Rounds(limits, self._room, self._answers, self._numbers)

    # ------------------------------------------------------------ what an observer may ask

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def room(self) -> Room:
        return self._room

    @property
    def queued(self) -> list[Session]:
        """Sessions whose Step waits, in the order of their turns."""
        return sorted(self._waiting(), key=rank)

    def _waiting(self) -> list[Session]:
        return [s for s in self._sessions.values() if s.pending is not None and not s.pending.scoring]

    def hold_ms(self, now_ms: float) -> float:
        """How much longer to wait before the next step."""
        return self.wave.hold_ms(len(self.queued), now_ms)

    def predicted_ms(self) -> float:
        rows = sum(1 + len(s.pending.block) for s in self.queued if s.pending is not None)
        return self.cost.predicted_ms(min(max(rows, 1), self.limits.max_step_rows))

    def backlog_ms(self) -> float:
        """How much longer all Steps that wait or run take together than one of them alone: what they wait for each other."""
        waiting, scoring = self._waiting(), [row for s, row in self._flying if s.pending is not None and s.pending.scoring]
        steps, rows = len(waiting) + len(scoring), waiting_rows(waiting) + sum(len(row.tokens) for row in scoring)
        return self._takes_ms(rows) - self._takes_ms(rows // steps) if steps > 1 else 0.0

    def _takes_ms(self, rows: int) -> float:
        full, rest = divmod(rows, self.limits.max_step_rows)
        return full * self.cost.at(self.limits.max_step_rows) + (self.cost.at(rest) if rest else 0.0)

    def kv_demand(self, now_ms: float) -> float:
        """Share of the KV room that live sessions hold or, parked, wait for. While sessions are turned away at least 1: whatever keeps
        them out, no session more fits."""
        parked = sum(len(s.tokens) for s in self._sessions.values() if s.resident is None)
        share = (self.room.live_tokens + parked) / self.budget.total_tokens
        turns_away = self._turned_away_ms is not None and now_ms - self._turned_away_ms < TURNED_AWAY_MS
        return max(1.0, share) if turns_away else share

    def take_answers(self) -> list[tuple[int, Answer]]:
        """(stream, answer) since the last call, in order."""
        return self._answers.take()

    def take_grammars(self) -> list[Compile]:
        """To be compiled since the last call; each is answered by `compiled`."""
        grammars, self._grammars = self._grammars, []
        return grammars

    # ------------------------------------------------------------ streams

    def attach(self, orchestrator_id: str) -> int:
        """A stream began with its Hello. Returns its number."""
        stream = next(self._numbers)
        self._streams[stream] = orchestrator_id
        return stream

    def detach(self, stream: int, now_ms: float) -> None:
        """A stream ended: its sessions live on for a lease, its waiting Steps do not."""
        self._streams.pop(stream, None)
        for session in [s for s in self._sessions.values() if s.stream == stream]:
            session.stream, session.lease_until_ms = None, now_ms + self.limits.lease_ms
            self.wave.gone(session.key)
            self._rounds.silence(session)
            if session.closing:
                self._forget(session)

    # ------------------------------------------------------------ items

    def submit(self, stream: int, item: VerifyItem, now_ms: float) -> None:
        key = (self._streams[stream], item.session_id)
        if isinstance(item, Close):
            return self._close(stream, key, item)
        if isinstance(item, Ahead):
            return self._ahead(stream, key, item, now_ms)
        self.wave.returned(key, now_ms)
        try:
            self._step(stream, key, item, now_ms)
        except InvalidRequest as error:
            # A session that lives keeps its KV and its round; one that was never begun has nothing to drop.
            failed = Failed(INVALID_ARGUMENT, str(error)[:MAX_MESSAGE_CHARS], drop=key not in self._sessions)
            self._answers.say(stream, item, failed)

    def _step(self, stream: int, key: Key, step: Step, now_ms: float) -> None:
        session = self._sessions.get(key)
        if session is not None and step.epoch < session.epoch:
            return self._answers.say(stream, step, StaleEpoch(session.epoch))
        if session is None or step.epoch > session.epoch:
            if step.begin is None:
                return self._answers.say(stream, step, UnknownSession())
            check_step(step, self.limits)
            check_begin(step, step.begin, self.limits)
            check_distributions(step, step.begin, self.limits)
            if session is not None:
                self._supersede(session, step.epoch)
            if self.draining:
                return self._answers.say(stream, step, Failed(UNAVAILABLE, "this target is stopping", drop=True))
            return self._admit(stream, key, step, step.begin, now_ms)
        if session.closing:
            return self._answers.say(stream, step, UnknownSession())
        session.stream, session.lease_until_ms = stream, None
        return self._rounds.ask(session, stream, step, now_ms)

    def _admit(self, stream: int, key: Key, step: Step, begin: Begin, now_ms: float) -> None:
        session = Session(key, step.epoch, begin, next(self._numbers), stream)
        committed = step.tokens[: len(step.tokens) - step.num_proposed]
        named = self._sessions.get((key[0], begin.fork_session_id))
        if self.num_sessions >= self.limits.max_sessions or not self._room.admit(session, committed, now_ms, named):
            self._turned_away_ms = now_ms
            return self._answers.say(stream, step, NoRoom(self.limits.retry_after_ms))
        self._sessions[key] = session
        if begin.sampling.grammar is not None:
            order = Compile(key, step.epoch, begin.sampling.grammar, committed[begin.prompt_length :], begin.traceparent)
            session.compiling = order
            self._grammars.append(order)
        self._rounds.enqueue(session, step, now_ms, now_ms)

    def compiled(self, order: Compile, outcome: Constraint | Failed) -> None:
        """The grammar is ready; or it cannot be, and the session that waits for it fails alone."""
        if not self.awaits(order):
            return
        session = self._sessions[order.key]
        if isinstance(outcome, Failed):
            return self._fail(session, outcome)
        session.compiling, session.constraint = None, outcome

    def awaits(self, order: Compile) -> bool:
        """Whether a session waits for this very grammar. One that is gone may have come again under its name and epoch."""
        session = self._sessions.get(order.key)
        return session is not None and session.compiling is order

    def _ahead(self, stream: int, key: Key, ahead: Ahead, now_ms: float) -> None:
        session = self._sessions.get(key)
        try:
            check_ahead(ahead, self.limits)
            if session is None or session.closing or (session.epoch, session.stream) != (ahead.epoch, stream):
                return
            if self._rounds.ahead(session, ahead, now_ms):
                self.wave.returned(key, now_ms)
        except InvalidRequest as error:
            failed = Failed(INVALID_ARGUMENT, str(error)[:MAX_MESSAGE_CHARS], drop=False)
            self._answers.add(stream, Answer(ahead.session_id, ahead.epoch, 0, failed))

    def _close(self, stream: int, key: Key, close: Close) -> None:
        session = self._sessions.get(key)
        if session is not None and close.epoch == session.epoch:
            session.stream, session.lease_until_ms = stream, None
            if session.pending is not None and session.pending.scoring:
                session.closing, session.held = True, None  # `closed` follows its result, once, however often it was asked for
                return
        if session is not None and close.epoch > session.epoch:
            self._supersede(session, close.epoch)
        elif session is not None and close.epoch == session.epoch:
            self._forget(session)
        self._answers.add(stream, Answer(key[1], close.epoch, 0, Closed()))

    def _supersede(self, session: Session, epoch: int) -> None:
        """A newer placement is known; what is outstanding in the old one ends now, what runs will find nobody."""
        if (round_ := session.asked) is not None:
            self._answers.tell(session, round_, StaleEpoch(epoch))
        if session.closing:
            self._answers.tell(session, 0, Closed())
        self._forget(session)

    def _fail(self, session: Session, failed: Failed) -> None:
        """What ends a session by its own trouble."""
        if session.pending is not None:
            self._answers.tell(session, session.pending.round if session.asked is None else session.asked, failed)
        self._forget(session, sound=False)

    def _forget(self, session: Session, sound: bool = True) -> None:
        """The one place where a session ends."""
        del self._sessions[session.key]
        self.wave.gone(session.key)
        self._room.end(session, sound)

    # ------------------------------------------------------------ the engine's turn

    def tick(self, now_ms: float) -> None:
        """What time alone does: waiting Steps expire, leases end."""
        for session in list(self._sessions.values()):
            self._rounds.expire(session, now_ms)
            if session.lease_until_ms is not None and now_ms >= session.lease_until_ms:
                self._forget(session)

    def plan(self, now_ms: float, behind: Container[int] = ()) -> StepPlan | None:
        """The next engine step, or None. Everything queued takes part as far as rows and room allow, except for what nobody asked for on
        the streams whose readers are `behind`."""
        if self._flying:
            raise ProtocolFault("a step is planned while another one runs")
        self.tick(now_ms)
        queued = [s for s in self.queued if not s.compiling and not (s.stream in behind and s.asked is None)]
        self._park(self._room.for_short())
        for session in sorted(queued, key=_age):
            if session.pending is not None:
                self._extend(session)
        away = returning(self._sessions.values(), now_ms, RETURN_STEPS * self.cost.predicted_ms(self.limits.max_step_rows))
        self._flying = choose_rows([s for s in queued if s.pending is not None], self.limits, self.cost, away)
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
        self._park(self._room.extend(session))

    def _park(self, sessions: list[Session]) -> None:
        for parked in sessions:
            if parked.pending is not None:
                self._answers.tell(parked, parked.pending.round, NoRoom(self.limits.retry_after_ms))
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
                self._apply(session, row, result, now_ms)
                if isinstance(result, Decided) and session.awaited:
                    answered.append(session.key)
        if plan.rows:
            self._begin_wave(plan.size, answered, now_ms)

    def _begin_wave(self, rows: int, away: list[Key], now_ms: float) -> None:
        """`away`: who went out with the results of a step of so many rows."""
        step_ms, once_ms = self.cost.predicted_ms(rows), self.cost.once_ms(rows)
        back = [session.key for session in self._waiting() if session.asked is not None]
        own = sum(session.asked is None for session in self._waiting())
        self.wave.begin(away, back, own, step_ms, self.limits.wave_fraction * step_ms if once_ms is None else min(once_ms, step_ms), now_ms)

    def _apply(self, session: Session, row: Row, outcome: RowOutcome, now_ms: float) -> None:
        # A Step that is not scored yet may have expired and come again with other tokens while this piece ran.
        if row.score is None and (session.kv_length != row.start or tuple(session.tokens[row.start : row.end]) != row.tokens):
            return
        pending, closing = session.pending, session.closing
        if isinstance(outcome, Prefilled):
            session.prefilled(row.end, row.prompt, outcome.prompt_logprobs)
            if pending is not None and not pending.decides and not session.unscored:
                self._rounds.conclude(session, pending)
        elif isinstance(outcome, RowFault):
            self._fail(session, Failed(outcome.code, outcome.message[:MAX_MESSAGE_CHARS], drop=True))
        else:
            assert pending is not None
            self._rounds.decided(session, pending, outcome)
        if closing:
            self._answers.tell(session, 0, Closed())
            if isinstance(outcome, Decided):
                self._forget(session)
        elif isinstance(outcome, Decided):
            self._rounds.go_on(session, now_ms)


def _age(session: Session) -> int:
    return session.age
