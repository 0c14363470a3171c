"""The draft's decisions: commands in, events out, one batched engine step at a time. Owned by the event loop; touches no engine, clock,
socket or tensor.

    apply(stream, command) -> events        at any time, also while a step runs
    plan() -> DraftPlan | None              None = nothing to do
    commit_step(plan, outcome) -> events    what the step gave, where it still fits

Rules
1. Sessions are keyed (stream, session id). A session that was refused or lost stays closed: further commands for it are ignored until
   it is opened again or closed by the other side. Every refusal is told once.
2. A command that names a prefix must name one of ours: of the committed tokens, or of the undecided ones that follow (a peer that is
   ahead). Late ones (an older prefix) are repeats and change nothing; anything else means the thread is lost: Resync.
3. What a plan holds is planner.py's to say.
4. Room for keys and values is booked when a session opens or grows, for all it may draft; without room the session is refused alone. A
   branch has room of its own: without it there is no branch, and where a session lacks room all branches go first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from draft_service.checks import Limits, bounds_of, check_commit, check_name, check_open, check_reach, check_sent
from draft_service.demand import Rounds
from draft_service.outbox import Told
from draft_service.outlook import Outlook
from draft_service.plan import Chooser, DraftPlan, DraftRow, PlanOutcome, RowOutcome, Silence
from draft_service.planner import draw_up
from draft_service.room import Room
from draft_service.session import MAX_BROKEN, Bounds, Session
from draft_service.tally import Tally
from draft_service.tree import Branch
from specdec.errors import InvalidRequest
from specdec.odds import Odds
from specdec.terms import (
    CloseDraft,
    Commit,
    DraftCommand,
    DraftEvent,
    DraftLoad,
    DraftMethod,
    Open,
    Pause,
    Refused,
    Resync,
    Sent,
)

MAX_GONE = 4096  # refused or lost sessions remembered until they are closed
RETRY_MS = 1000

BLOCK_TOKENS = 64  # room is booked in such blocks: a branch's own tokens may begin within one

Addressed = tuple[int, Told | DraftEvent]
"""Stream and event."""


@dataclass(slots=True)
class _State:
    sessions: dict[tuple[int, str], Session] = field(default_factory=dict)
    by_handle: dict[int, Session] = field(default_factory=dict)
    gone: OrderedDict[tuple[int, str], None] = field(default_factory=OrderedDict)
    release: list[int] = field(default_factory=list)
    touched: dict[int, Session] = field(default_factory=dict)  # may have something to tell
    handles: int = 0
    plans: int = 0


class Drafter:
    def __init__(self, limits: Limits, room: Room, make_chooser: Callable[[Open], Chooser]) -> None:
        self.limits, self.tally, self.rounds = limits, Tally(), Rounds()
        self._room, self._make_chooser = room, make_chooser
        self._outlook = {greedy: Outlook(limits.lookahead_floor) for greedy in (True, False)}
        self._odds = {(greedy, method): Odds() for greedy in (True, False) for method in DraftMethod}
        self._state = _State()

    # ------------------------------------------------------------------------------------------------ commands

    def apply(self, stream: int, command: DraftCommand) -> list[Addressed]:
        """Never raises for what a peer sent: what cannot be served is refused and its session closed, the others go on."""
        key = (stream, command.session_id)
        try:
            if isinstance(command, Open):
                return self._open(key, command) + self._tell()
            session = self._state.sessions.get(key)
            if session is None:
                return self._unknown(key, command)
            return self._command(session, command) + self._tell()
        except InvalidRequest as error:
            return self.reject(stream, command.session_id, command.epoch if isinstance(command, Open) else 0, str(error))

    def reject(self, stream: int, session_id: str, epoch: int, reason: str) -> list[Addressed]:
        """A command that could not be read. `epoch` 0 = the session's own."""
        key = (stream, session_id)
        if key in self._state.gone:
            return []
        return self._refuse(key, epoch or self._epoch(key), reason, 0)

    def close_stream(self, stream: int) -> None:
        """The stream ended: its sessions go."""
        for key in [k for k in self._state.sessions if k[0] == stream]:
            self._drop(key)
        for key in [k for k in self._state.gone if k[0] == stream]:
            del self._state.gone[key]

    def _open(self, key: tuple[int, str], command: Open) -> list[Addressed]:
        held = self._state.sessions.get(key)
        if held is not None and command.epoch <= held.epoch:
            event = Refused(command.session_id, command.epoch, f"epoch: {held.epoch} is open here, send a higher one", 0)
            return [(key[0], event)]
        self._drop(key)
        self._state.gone.pop(key, None)
        check_open(command, self.limits)
        bounds = bounds_of(command, self.limits)
        if len(command.tokens) >= bounds.limit:
            return self._beyond(key, command.epoch)
        if len(self._state.sessions) >= self.limits.max_sessions:
            return self._refuse(key, command.epoch, f"no room: {self.limits.max_sessions} sessions are open", RETRY_MS)
        handle = self._state.handles = self._state.handles + 1
        if not self._admitted(handle, len(command.tokens), bounds):
            never = len(command.tokens) + bounds.budget > self._room.total_tokens
            return self._refuse(key, command.epoch, "no room for keys and values", 0 if never else RETRY_MS)
        session = Session(*key, command.epoch, handle, command.tokens, bounds, self._make_chooser(command))
        self._state.sessions[key] = self._state.by_handle[handle] = session
        return []

    def _admitted(self, handle: int, length: int, bounds: Bounds) -> bool:
        """Books room for a new session. The first one may have all there is."""
        wanted = min(length + bounds.budget, bounds.limit)
        crowded = bool(self._state.sessions) and not self._room.can_admit(length, wanted - length)
        if crowded or not self._room.grow(handle, wanted):
            return self._made_room() and self._admitted(handle, length, bounds)
        return True

    def _grown(self, session: Session, tokens: int) -> bool:
        """Books room for `tokens` of it in all."""
        wanted = min(tokens, session.bounds.limit)
        return self._room.grow(session.handle, wanted) or (self._made_room() and self._room.grow(session.handle, wanted))

    def _made_room(self) -> bool:
        """All branches go. False: there were none."""
        booked = self._room.used_tokens
        for session in self._state.sessions.values():
            session.tree.clear()
            self._reap(session)
        return self._room.used_tokens < booked

    def _command(self, session: Session, command: DraftCommand) -> list[Addressed]:
        if isinstance(command, Sent):
            return self._sent(session, command)
        if isinstance(command, Commit):
            return self._commit(session, command)
        if isinstance(command, CloseDraft):
            self._drop((session.stream, session.session_id))
        else:
            session.paused = isinstance(command, Pause)
            self._state.touched[session.handle] = session
        return []

    def _unknown(self, key: tuple[int, str], command: DraftCommand) -> list[Addressed]:
        if isinstance(command, CloseDraft):
            self._state.gone.pop(key, None)
            return []
        if key in self._state.gone:
            return []
        check_name(command.session_id)
        self._bury(key)
        return [(key[0], Resync(command.session_id, 0, 0))]

    def _sent(self, session: Session, command: Sent) -> list[Addressed]:
        check_sent(command, self.limits)
        chain = session.chain
        if not chain.names(command.prefix_length, command.prefix_hash):
            return self._lost(session)
        if command.prefix_length < chain.committed:
            return []  # late: that block is decided
        check_reach(command, self.limits, chain.committed)
        dropped = session.sent(command.prefix_length, command.num_proposed, command.tokens)
        likely = self._outlook[session.bounds.greedy].worthwhile(session.product)
        session.ahead = command.num_proposed == 0 or likely
        if self.limits.fanout > 1:
            session.branch_out(self._odds_of(session), self.limits.fanout, self.limits.branch_floor)
        self.tally.wasted_tokens += dropped
        self._reap(session)
        if not self._grown(session, len(chain)):
            return self._refuse((session.stream, session.session_id), session.epoch, "no room for keys and values", RETRY_MS)
        self._state.touched[session.handle] = session
        return []

    def _commit(self, session: Session, command: Commit) -> list[Addressed]:
        check_commit(command, self.limits)
        chain, bounds = session.chain, session.bounds
        if not chain.names(command.prefix_length, command.prefix_hash):
            return self._lost(session)
        committed = chain.committed
        round_ = session.commit(command.prefix_length, command.tokens)
        if round_ is None:
            return self._lost(session)
        if chain.committed == committed:
            return []  # a repeat
        session.k = min(command.num_speculative_tokens or bounds.k, bounds.k)
        self.tally.round(round_)
        self.rounds.round(round_.wanted, round_.late, self.num_sessions)
        if round_.whole is not None:
            self._outlook[bounds.greedy].learn(round_.product, round_.whole)
        if round_.ending is not None:
            self._odds_of(session).learn(round_.ending)
        if round_.grown is not None:
            self.tally.grafted(round_.grown)
            self._room.release(round_.grown.handle)
        self._reap(session)
        if chain.committed >= bounds.limit:
            return self._beyond((session.stream, session.session_id), session.epoch)
        if not self._grown(session, chain.committed + bounds.budget):
            return self._refuse((session.stream, session.session_id), session.epoch, "no room for keys and values", RETRY_MS)
        self._state.touched[session.handle] = session
        return []

    # ------------------------------------------------------------------------------------------------ steps

    def plan(self) -> DraftPlan | None:
        """The next engine step, None when no session wants a token. Only one plan is out at a time."""
        state = self._state
        sessions = list(state.sessions.values())
        for session in sessions:
            if session.tree.seeds:
                self._sprout(session)
        state.plans += 1
        rows, steps, needed = draw_up(sessions, self.limits.step_rows, self.limits.chunk_rows, state.plans, self._wanted_of)
        release, state.release = tuple(state.release), []
        grafts = tuple((s.handle, s.tree.graft) for s in sessions if s.tree.graft is not None)
        for session in sessions:
            session.tree.graft = None
        return DraftPlan(rows, steps, release, grafts, needed) if rows or release or grafts else None

    def _sprout(self, session: Session) -> None:
        def admitted(base: int) -> int | None:
            handle = self._state.handles = self._state.handles + 1
            return handle if self._room.grow(handle, base % BLOCK_TOKENS + 1 + session.bounds.k) else None

        session.tree.sprout(self.limits.fanout - 1, admitted, session.is_end)

    def _wanted_of(self, session: Session, branch: Branch) -> int:
        return session.wanted_of(branch, self.limits.branch_floor)

    def _odds_of(self, session: Session) -> Odds:
        return self._odds[session.bounds.greedy, session.bounds.method]

    def commit_step(self, plan: DraftPlan, outcome: PlanOutcome) -> list[Addressed]:
        """Takes what a step gave. Sessions may have changed or gone since it was planned."""
        events: list[Addressed] = []
        self.tally.steps += outcome.steps
        for i, row in enumerate(plan.rows):
            session = self._state.by_handle.get(row.handle)
            if session is None:
                continue
            if outcome.fault:
                key = (session.stream, session.session_id)
                events += self._refuse(key, session.epoch, f"the engine failed: {outcome.fault}", RETRY_MS)
            else:
                events += self._took(session, row, outcome.rows[i])
        for row in plan.rows:
            session = self._state.by_handle.get(row.handle)
            if session is not None:
                session.stepping = session.void = False
                self._state.touched[session.handle] = session
        return events + self._tell()

    def _took(self, session: Session, row: DraftRow, outcome: RowOutcome) -> list[Addressed]:
        """What a row gave goes to whom it was drawn for: the chain, a branch, a branch that has become the chain, or nobody."""
        tree = session.tree
        self.tally.tokens += len(outcome.drafts)
        branch = tree.branches.get(row.branch)
        if branch is not None:
            branch.over = outcome.silence is Silence.OVER
            branch.absorb(outcome.drafts, self._odds_of(session).accepted)
            if outcome.silence is Silence.BROKEN:
                tree.kill(branch)
                self._reap(session)
            return []
        if row.branch != tree.grafted if row.branch else session.void:
            self.tally.waste(len(outcome.drafts), bool(row.branch))
            return []
        return self._absorb(session, row, outcome)

    def _absorb(self, session: Session, row: DraftRow, outcome: RowOutcome) -> list[Addressed]:
        drafts = outcome.drafts
        joined = session.chain.absorb(row.start, row.tokens, drafts)
        session.drafted += joined
        self.tally.waste(len(drafts) - joined, bool(row.branch))
        if outcome.silence is not Silence.BROKEN:
            if outcome.silence is Silence.OVER:
                session.over = session.chain.ends_with(row.start, [*row.tokens, *(d.token for d in drafts)])
            session.broken = 0 if drafts else session.broken
            return []
        session.tree.clear()
        self._reap(session)
        session.chain.kv = min(session.chain.kv, row.start)
        session.stalled = True
        session.broken += 1
        self.tally.broken += 1
        if session.broken < MAX_BROKEN:
            return []
        return self._refuse(
            (session.stream, session.session_id),
            session.epoch,
            "the draft has nothing to propose: logits that are not finite, or no allowed id",
            0,
        )

    def _tell(self) -> list[Addressed]:
        touched, self._state.touched = self._state.touched, {}
        return [(session.stream, told) for session in touched.values() for told in session.told()]

    @property
    def may_rest(self) -> bool:
        """Whether one session is alone, its block is in flight and something for the round behind it is there."""
        sessions = self._state.sessions
        if len(sessions) != 1 or self._state.release:
            return False
        session = next(iter(sessions.values()))
        return session.block_end is not None and (session.usable > 1 or any(b.told for b in session.tree.branches.values()))

    # ------------------------------------------------------------------------------------------------ bookkeeping

    @property
    def num_sessions(self) -> int:
        return len(self._state.sessions)

    def served_by(self, plan: DraftPlan) -> Iterator[str]:
        """Names of the sessions that a plan has rows for and that are still here, each once."""
        for handle in dict.fromkeys(row.handle for row in plan.rows):
            if (session := self._state.by_handle.get(handle)) is not None:
                yield session.session_id

    def session(self, stream: int, session_id: str) -> Session | None:
        return self._state.sessions.get((stream, session_id))

    def load(self) -> DraftLoad:
        tally, room = self.tally, self._room
        return DraftLoad(tally.needed_share, tally.late_share, self.num_sessions, room.used_tokens, room.total_tokens)

    @property
    def utilization(self) -> float:
        """Share of the K/V room that is booked."""
        return self._room.used_tokens / self._room.total_tokens

    def _epoch(self, key: tuple[int, str]) -> int:
        session = self._state.sessions.get(key)
        return session.epoch if session is not None else 0

    def _drop(self, key: tuple[int, str]) -> None:
        session = self._state.sessions.pop(key, None)
        if session is None:
            return
        session.tree.clear()
        self._reap(session)
        del self._state.by_handle[session.handle]
        self._state.touched.pop(session.handle, None)
        if session.tree.graft is not None:
            self._state.release.append(session.tree.graft)
        self._state.release.append(session.handle)
        self._room.release(session.handle)

    def _reap(self, session: Session) -> None:
        """Dead branches give back what they had."""
        for branch in session.tree.dead:
            self.tally.died(branch)
            self._room.release(branch.handle)
            if branch.planned:
                self._state.release.append(branch.handle)
        session.tree.dead.clear()

    def _bury(self, key: tuple[int, str]) -> None:
        self._drop(key)
        self._state.gone[key] = None
        if len(self._state.gone) > MAX_GONE:
            self._state.gone.popitem(last=False)

    def _refuse(self, key: tuple[int, str], epoch: int, reason: str, retry_after_ms: int) -> list[Addressed]:
        self._bury(key)
        return [(key[0], Refused(key[1], epoch, reason, retry_after_ms))]

    def _beyond(self, key: tuple[int, str], epoch: int) -> list[Addressed]:
        return self._refuse(key, epoch, f"beyond the draft's window of {self.limits.window} tokens or the request's end", 0)

    def _lost(self, session: Session) -> list[Addressed]:
        self._bury((session.stream, session.session_id))
        return [(session.stream, Resync(session.session_id, session.epoch, session.chain.committed))]
