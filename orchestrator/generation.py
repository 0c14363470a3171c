"""One generation as a state machine: event in, commands out. No await, no clock, no socket, no torch.

Theory. The committed tokens are the only truth, and only a target's result extends them. Everything else may be lost, late,
repeated or wrong without changing them: a proposal is used where its named prefix fits and nowhere else; an answer counts only for
the epoch and round that are open; a target that vanishes is replaced under a higher epoch, from the committed tokens and the seed.

States
    WAITING     answer 0 of the same request computes the prompt; PrefixReady comes when it has, and at the latest when it is over
    PLACING     no target holds the session; the last PlaceTarget is unanswered, or RETRY will send it
    CHOOSING    a block was wanted and no source has one (sources.py): waiting, at most one grace, for the draft
    VERIFYING   one Step is outstanding (at most one ever is)
    BACKING_OFF the target had no room; the same Step goes out again when RETRY fires
    HELD        the client reads too slowly; the next round starts when it has caught up
    DONE        Finish, Fail or a cancel was told; every further event is ignored

Rules
1. A round opens when its Step is built and closes with its result. Repeating a Step (prefix_needed, no_room, expired) keeps the round.
2. `begin` travels until the epoch's first result: whoever holds a result of this epoch knows the session.
3. Draft and target are placed independently: losing one never re-opens the other.
4. Placements that decide nothing are few and ever further apart (patience.py). A result forgives all earlier ones, so a long answer
   may move as often as it has to.
5. The draft hears of every commit, then of the block that follows it; the client's copy goes out behind both.
6. Log-probabilities of the prompt are asked for until a result has brought them, and never again: they are told once.
"""

from __future__ import annotations

import enum
from dataclasses import replace

from orchestrator import events as ev
from orchestrator.checks import check_result
from orchestrator.drafting import DraftSide
from orchestrator.events import Admitted, Command, Count, StartTimer, StopTimer, Timer, ToTarget
from orchestrator.lookahead import EMPTY, Block
from orchestrator.pace import Pace
from orchestrator.patience import Patience
from orchestrator.sources import Sources
from orchestrator.tally import SOURCES, Tally, origins
from specdec import terms
from specdec.errors import DeadlineExceeded, InternalFault, ProtocolFault, SpecdecError, Unavailable, fault
from specdec.hashing import prefix_hash
from specdec.terms import FinishReason, RejectionMethod, Result, Step

MAX_RETRY_MS = 10_000  # longest a target's word keeps a session from asking again
MAX_EXPIRED = 3  # times one round may expire in the target's queue
OVERDUE_MARGIN_MS = 500.0  # what an answer may take past the deadline it was given


class State(enum.Enum):
    WAITING = "waiting"
    PLACING = "placing"
    CHOOSING = "choosing"
    VERIFYING = "verifying"
    BACKING_OFF = "backing_off"
    HELD = "held"
    DONE = "done"


class Generation:
    def __init__(
        self,
        request: Admitted,
        pace: Pace,
        *,
        step_deadline_ms: int = 30_000,
        placement_wait_ms: float = 30_000.0,
        prompt_lookup_min: int = 0,
    ) -> None:
        self.request = request
        self.state = State.WAITING if request.fork_session_id else State.PLACING
        self.committed = list(request.tokens)
        self._pace, self._sources = pace, Sources(request, prompt_lookup_min, pace)
        self.lookahead = self._sources.lookahead
        self.tally = Tally(request.num_speculative_tokens)
        self._step_deadline_ms, self._placement_wait_ms = step_deadline_ms, placement_wait_ms
        self.target, self.epoch, self.round = "", 0, 0
        self._avoid = ""  # who held it last
        self._fork_session_id = request.fork_session_id
        self._prompt_told = request.sampling.prompt_logprobs is None
        self._begun = False  # a result of this epoch has arrived
        self._kv_length = 0  # leading committed tokens believed to be in its KV
        self._block, self._outcome = EMPTY, ""  # of the open round
        self._expired, self._patience = 0, Patience()
        self.drafting = DraftSide(request)
        self._reader_behind = False
        self._told: list[Command] = []

    # --- the door -----------------------------------------------------------------------------------------------------

    def begin(self) -> list[Command]:
        """The first commands. Called once."""
        if self.state is State.PLACING:
            self._start("")
        return self._take()

    def handle(self, event: ev.Event) -> list[Command]:
        """Applies one event. The commands must be carried out in order. Raises ProtocolFault for an event that cannot be."""
        if self.state is not State.DONE:
            self._apply(event)
        return self._take()

    def _apply(self, event: ev.Event) -> None:
        match event:
            case ev.PrefixReady(target):
                self._on_prefix_ready(target)
            case ev.Answered(answer):
                self._on_answered(answer)
            case ev.Drafted(said):
                self._on_drafted(said)
            case ev.TimerFired(timer):
                self._on_timer(timer)
            case ev.TargetPlaced(target):
                self._on_target_placed(target)
            case ev.TargetLost():
                self._on_target_lost()
            case ev.DraftPlaced():
                self._tell(*self.drafting.placed(event, self.committed, self.lookahead, self._in_flight()))
            case ev.DraftLost():
                self._on_draft_lost()
            case ev.Cancelled():
                self._end()
            case ev.ReaderBehind():
                self._reader_behind = True
            case ev.ReaderCaughtUp():
                self._on_reader_caught_up()

    @property
    def decided(self) -> int:
        """Output tokens, resumed ones included."""
        return len(self.committed) - self.request.prompt_length

    def _tell(self, *commands: Command) -> None:
        self._told += commands

    def _take(self) -> list[Command]:
        told, self._told = self._told, []
        return told

    # --- placement ----------------------------------------------------------------------------------------------------

    def _on_prefix_ready(self, target: str) -> None:
        if self.state is State.WAITING:
            if not target:
                self._fork_session_id = ""
            self._start(target)

    def _start(self, prefer: str) -> None:
        self._place_target("", prefer)
        self._tell(*self.drafting.want())

    def _place_target(self, avoid: str, prefer: str = "") -> None:
        self.state, self.target, self._avoid = State.PLACING, "", avoid
        if pause_ms := self._patience.pause_ms:
            self._tell(StartTimer(Timer.RETRY, pause_ms))
        else:
            self._tell(ev.PlaceTarget(avoid, prefer))
        self._tell(StartTimer(Timer.PLACEMENT, self._placement_wait_ms))

    def _on_target_placed(self, target: str) -> None:
        if self.state is not State.PLACING:
            raise ProtocolFault(f"a target was placed while {self.state.value}")
        self.target = target
        self._tell(StopTimer(Timer.PLACEMENT))
        self._new_epoch(self.epoch + 1)

    def _new_epoch(self, epoch: int) -> None:
        if not self._patience.epoch():
            return self._fail(InternalFault(f"the session had to be started {self._patience.fruitless} times without a result"))
        self.epoch, self.round, self._begun, self._kv_length = epoch, 0, False, 0
        self._open_round(self._sources.ready()[0], "prefill")

    def _on_target_lost(self) -> None:
        if not self.target:
            return
        self.tally.replacements += 1
        lost = self.target
        self._tell(StopTimer(Timer.STEP), StopTimer(Timer.RETRY), StopTimer(Timer.GRACE), Count("replaced"))
        if self._patience.used_up:
            self.target = ""
            epochs = self._patience.fruitless
            self._fail(Unavailable(f"{epochs} targets in a row were lost before they decided anything; {self._resume_hint}"))
            return
        self._place_target(lost)

    @property
    def _resume_hint(self) -> str:
        return f"{self.decided} tokens were decided: resume with output_token_ids"

    # --- the draft ----------------------------------------------------------------------------------------------------

    def _in_flight(self) -> Block | None:
        """The block of the open round."""
        return self._block if self.state in (State.VERIFYING, State.BACKING_OFF) else None

    def _on_draft_lost(self) -> None:
        self._tell(*self.drafting.lost())
        self._give_up_waiting()

    def _on_drafted(self, said: terms.DraftEvent) -> None:
        if said.epoch != self.drafting.epoch or not self.drafting.name:
            self._tell(Count("stale"))
        elif isinstance(said, terms.Proposal):
            self._on_proposal(said)
        elif isinstance(said, terms.Resync):
            self._tell(*self.drafting.resync(self.committed, self.lookahead, self._in_flight()))
            if self.drafting.over:
                self._give_up_waiting()
        else:
            self._tell(*self.drafting.refused(said))
            self._give_up_waiting()

    def _on_proposal(self, proposal: terms.Proposal) -> None:
        if self.lookahead.add(proposal):
            self.drafting.helped()
        else:
            self._tell(Count("stale", len(proposal.tokens)))
        if self.state is State.CHOOSING:
            block, _ = self._sources.ready()
            if block.tokens:
                self._tell(StopTimer(Timer.GRACE))
                self._open_round(block, "late")

    def _give_up_waiting(self) -> None:
        if self.state is State.CHOOSING:
            self._tell(StopTimer(Timer.GRACE))
            self._open_round(EMPTY, "no_draft")

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _next_round(self) -> None:
        if self._reader_behind:
            self.state = State.HELD
        elif choice := self._sources.choose():
            self._open_round(*choice)
        elif not self.drafting.name:
            self._open_round(EMPTY, "no_draft")
        elif wait_ms := self.drafting.grace_ms(self._pace.grace_ms()):
            self.state = State.CHOOSING
            self._tell(StartTimer(Timer.GRACE, wait_ms))
        else:
            self._open_round(EMPTY, "miss")

    def _open_round(self, block: Block, outcome: str) -> None:
        self.round += 1
        self._block, self._outcome, self._expired = block, outcome, 0
        self.tally.opened(outcome)
        self._send_step()
        if not block.own:
            self.lookahead.assume(block.tokens)
        self._tell(*self.drafting.sent(self.lookahead, block))

    def _begin(self) -> terms.Begin:
        r = self.request
        return terms.Begin(
            prompt_length=r.prompt_length,
            sampling=replace(r.sampling, prompt_logprobs=None) if self._prompt_told else r.sampling,
            seed=r.seed,
            rejection_method=r.rejection_method,
            draft_method=r.draft_method,
            traceparent=r.traceparent,
            priority=r.priority,
            fork_session_id=self._fork_session_id,
        )

    def _send_step(self) -> None:
        r, block = self.request, self._block
        base = self._kv_length
        base_hash = self.lookahead.hash_at(base)
        step = Step(
            session_id=r.session_id,
            epoch=self.epoch,
            round=self.round,
            base_length=base,
            base_hash=prefix_hash(self.committed[:base]) if base_hash is None else base_hash,
            tokens=(*self.committed[base:], *block.tokens),
            num_proposed=len(block.tokens),
            remaining_ms=self._step_deadline_ms,
            distributions=block.distributions if r.rejection_method is RejectionMethod.STANDARD else (),
            begin=None if self._begun else self._begin(),
        )
        self.state = State.VERIFYING
        self._tell(ToTarget(self.target, step), StartTimer(Timer.STEP, self._step_deadline_ms + OVERDUE_MARGIN_MS))

    # --- the target answers -------------------------------------------------------------------------------------------

    def _on_answered(self, answer: terms.Answer) -> None:
        if self.state is not State.VERIFYING or (answer.epoch, answer.round) != (self.epoch, self.round):
            return  # of a placement or round that is over
        outcome = answer.outcome
        if isinstance(outcome, Result):
            self._on_result(outcome)
        elif isinstance(outcome, terms.NoRoom):
            self.state = State.BACKING_OFF
            self._tell(StopTimer(Timer.STEP), StartTimer(Timer.RETRY, float(min(max(1, outcome.retry_after_ms), MAX_RETRY_MS))))
        elif isinstance(outcome, terms.PrefixNeeded):
            self._on_prefix_needed(outcome.have)
        elif isinstance(outcome, terms.Expired):
            self._on_expired()
        elif isinstance(outcome, terms.UnknownSession | terms.StaleRound):
            self._new_epoch(self.epoch + 1)
        elif isinstance(outcome, terms.StaleEpoch):
            self._new_epoch(max(self.epoch, outcome.current) + 1)
        elif isinstance(outcome, terms.Failed):
            self._on_failed(outcome)
        else:
            assert isinstance(outcome, terms.Closed)  # of a Close we never sent while VERIFYING: the placement is gone
            self._new_epoch(self.epoch + 1)

    def _on_prefix_needed(self, have: int) -> None:
        if have >= self._kv_length:  # it was sent more than that: without this the two would repeat themselves for ever
            return self._new_epoch(self.epoch + 1)
        self._kv_length = have
        self._send_step()

    def _on_expired(self) -> None:
        self._expired += 1
        if self._expired < MAX_EXPIRED:
            return self._send_step()
        self._fail(DeadlineExceeded(f"the target did not get to the session in {MAX_EXPIRED * self._step_deadline_ms} ms"))

    def _on_failed(self, failed: terms.Failed) -> None:
        error = fault(failed.code, failed.message)
        if not isinstance(error, Unavailable):
            self._fail(error)
        elif self._patience.refused():
            self._leave_target()
        else:
            self._fail(Unavailable(f"{error}; {self._resume_hint}"))

    def _on_result(self, result: Result) -> None:
        before, entries = self.lookahead.length, 0 if self._prompt_told else self.request.prompt_length - 1
        try:
            check_result(result, committed=before, block=len(self._block.tokens), prompt_entries=entries)
        except ProtocolFault as broken:
            return self._fail(broken)
        self._begun = self._prompt_told = True
        self._patience.decided()
        self._tell(StopTimer(Timer.STEP))
        self.tally.decided(result)
        if result.num_verified:
            self._pace.learn(SOURCES[self._outcome], self._block, result)
        news: list[Command] = [ev.Observe(self._outcome, result.num_verified, result.num_accepted, len(result.tokens))]
        if result.tokens or result.prompt_logprobs:
            news.insert(0, ev.Deliver(result.tokens, result.logprobs, origins(result), result.prompt_logprobs))
        if result.finish is not None:
            self._tell(*news)
            return self._finish(result.finish, result.stop_token_id)
        before_hash = self.lookahead.hash
        self.committed += result.tokens
        self._sources.commit(result.tokens, result.forced)
        self._kv_length = min(result.kv_length_after, len(self.committed) - 1)
        self._tell(*self.drafting.committed(before, before_hash, result.tokens, self.lookahead))
        self._next_round()
        self._tell(*news)

    # --- time and the client -------------------------------------------------------------------------------------------

    def _on_timer(self, timer: Timer) -> None:
        state = self.state
        if timer is Timer.GRACE and state is State.CHOOSING:
            self.drafting.stayed_silent()
            self._tell(Count("grace_expired"))
            self._open_round(EMPTY, "miss")
        elif timer is Timer.RETRY and state is State.BACKING_OFF:
            self._send_step()
        elif timer is Timer.RETRY and state is State.PLACING:
            self._tell(ev.PlaceTarget(self._avoid))
        elif timer is Timer.STEP and state is State.VERIFYING:
            self._leave_target()
        elif timer is Timer.PLACEMENT and state is State.PLACING:
            self._fail(Unavailable(f"no target took the session in {self._placement_wait_ms:.0f} ms; {self._resume_hint}"))
        elif timer is Timer.DRAFT:
            self._tell(*self.drafting.want())

    def _leave_target(self) -> None:
        """The target is there and of no use: it may keep nothing of the session."""
        self._tell(ToTarget(self.target, terms.Close(self.request.session_id, self.epoch)))
        self._on_target_lost()

    def _on_reader_caught_up(self) -> None:
        self._reader_behind = False
        if self.state is State.HELD:
            self._next_round()

    # --- the end ------------------------------------------------------------------------------------------------------

    def _finish(self, reason: FinishReason, stop_token_id: int | None) -> None:
        self._tell(ev.Finish(reason, stop_token_id, self.tally.stats()))
        self._end()

    def _fail(self, error: SpecdecError) -> None:
        self._tell(ev.Fail(error))
        self._end()

    def _end(self) -> None:
        if self.target:
            self._tell(ToTarget(self.target, terms.Close(self.request.session_id, self.epoch)))
        self._tell(*self.drafting.close())
        self.state = State.DONE
        self._tell(ev.Forget())
